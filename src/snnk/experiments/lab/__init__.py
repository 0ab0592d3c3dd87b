"""What experiments share: data sets, result rows, training, fine-tuning, the models of --quick, runs and the page."""
