"""Parts of all experiments: data sets, result rows, training, fine-tuning, the models of --quick, runs and the page."""
