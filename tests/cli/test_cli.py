"""The commands as a whole: what is listed, what is imported, and how they end."""

import inspect
import os
import shlex
import subprocess
import sys

import pytest
import typer

import snnk
from snnk.cli import commands, make_app
from snnk.cli._options import WORDS

# The test row of each command: the public functions that it calls, and options that only a command line has.
TWINS = {
    "compress": (["snnk.hf.compress", "snnk.finetune.merge"], set()),
    "export": (["snnk.hf.export", "snnk.finetune.merge"], set()),
    "demo": ([], {"out"}),
    "frontier": (["snnk.hf.frontier"], set()),
    "finetune": (["snnk.finetune.FinetuneConfig", "snnk.finetune.finetune"], set()),
    "fit": (["snnk.tabular.FitConfig", "snnk.tabular.fit"], {"context", "stats_only", "like", "start_only"}),
    "merge": (["snnk.tabular.merge", "snnk.tabular.Part.save_model"], set()),
    "predict": (["snnk.finetune.predict", "snnk.tabular.TableModel.write_predictions"], set()),
    "audit": (["snnk.hf.audit"], {"json"}),
    "doctor": ([], {"json"}),
    "estimate": (["snnk.experiments.lab.estimate.Config", "snnk.experiments.lab.estimate.estimate"], set()),
    "reproduce": (["snnk.experiments.lab.runs.reproduce"], {"everything", "show", "page"}),
}
# Arguments of these functions that no option has: they are objects of Python, or details of a measurement.
OBJECTS = {"self", "say", "progress", "track", "config", "folder"}
DETAILS = {"audit": {"rounds"}, "estimate": {"inputs", "outputs"}, "finetune": {"method", "shared"}}
FLAGS = {"everything": "--all", "show": "--list"}  # names that would hide a builtin, or that mean something in Python
OTHERS = {"joint": "--equal", "show_texts": "--hide-texts"}  # what the shell writes for False
# Every word of the command line has one meaning, and every meaning has one word.
MEANINGS = {
    "activation": "activation f of a layer",
    "base": "base model of an adapter",
    "bandwidth": "scale of random Fourier features",
    "batch_size": "rows per step",
    "bf16": "compute in bfloat16",
    "bias": "bias b of a layer",
    "block_dtype": "type of the sums of a block of rows",
    "blocks": "kinds of blocks of a transformer",
    "calibration": "unlabelled inputs to fit to",
    "checkpoint_seconds": "time between checkpoints",
    "classifier_start": "first weights of a classifier",
    "data": "rows of a table, or texts or images to predict for",
    "data_dir": "folder of data sets",
    "draws": "random maps per measurement",
    "drop": "columns that are left out",
    "dropout": "dropout while training",
    "epochs": "passes over the training rows",
    "everything": "all experiments",
    "feature_map": "what features are",
    "format": "how a compressed model is saved",
    "glue": "task of GLUE",
    "in_features": "dimension of inputs",
    "joint": "choose the sizes of all blocks together",
    "json": "print JSON",
    "keep": "part of the parameters of blocks that stays",
    "key": "columns that are copied into predictions",
    "label": "column of the labels of texts",
    "lam": "ridge penalty",
    "latency": "whether latency is measured",
    "layers": "layers that are changed",
    "learning_rate": "size of a training step",
    "like": "file of columns and features of another part",
    "limit_train": "rows to train on",
    "max_error": "largest error of a block",
    "max_length": "tokens per text that is read",
    "max_loss": "largest loss of an export or a merge",
    "max_steps": "training steps",
    "method": "fine-tuning method",
    "methods": "methods of an experiment",
    "missing": "what is done about missing values",
    "model": "model that is read",
    "name": "experiment",
    "num_features": "number of features",
    "original": "model to compare with",
    "out": "what is written",
    "page": "page of all claims",
    "parts": "sums of parts of a table",
    "patience": "epochs without a better score before training stops",
    "plan": "sizes of blocks, from a file",
    "pooling": "what a classifier reads",
    "probabilities": "whether probabilities are written",
    "quick": "small configuration of an experiment",
    "recover": "steps of distillation",
    "recover_minutes": "time of distillation",
    "refine": "steps that move atoms",
    "resume": "continue training from a checkpoint",
    "rivals": "other models to compare with",
    "save": "whether the models of a curve are kept",
    "schedule": "learning rate over time",
    "seed": "seed of everything random",
    "seeds": "number of runs with different seeds",
    "show": "list of experiments",
    "show_texts": "whether a report shows texts",
    "start_only": "write columns and features alone",
    "stats_only": "write sums alone",
    "target": "column of a table to predict",
    "target_latency": "time of the whole model",
    "target_size": "size of the whole model",
    "target_speedup": "speed of the whole model",
    "task": "regression or classification",
    "tasks": "tasks of an experiment",
    "test": "rows that are measured once",
    "text": "column of texts",
    "text_pair": "column of second texts",
    "threads": "threads while latency is measured",
    "to": "form that a model is exported to",
    "tokens": "inputs x tokens per text of a batch whose latency is measured",
    "train": "rows to train on, from a file",
    "validation": "rows that choose the epoch",
    "w_norm": "norm of weights",
    "weight_decay": "decay of weights while training",
    "widen": "mix general text in",
    "x_norm": "norm of inputs",
}
# The words of scikit-learn for the same things, and what `fit` and `score` of its estimators have in place of options.
SKLEARN = {"n_components": "num_features", "alpha": "lam", "random_state": "seed"}
SKLEARN_ALONE = {"class_weight", "discriminant", "standardize"}
HEAVY = "torch", "transformers", "peft", "sklearn", "matplotlib", "pyarrow", "numpy", "scipy"


def imported(*args, **environment):
    """Modules that a process has loaded after a command line, and what it printed."""
    code = (
        "import atexit, sys, snnk.cli\n"
        "atexit.register(lambda: sys.stderr.write('LOADED ' + ' '.join(sys.modules)))\n"
        "snnk.cli.main(sys.argv[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "120", **environment},
    )
    assert done.returncode == 0, done.stderr
    return set(done.stderr.partition("LOADED ")[2].split()), done.stdout


def test_every_command_has_a_test_row():
    assert set(commands()) == set(TWINS)


@pytest.mark.parametrize("name", TWINS)
def test_help_loads_neither_torch_nor_transformers(name):
    """A command's help ends with its two examples."""
    loaded, out = imported(name, "--help")
    assert not loaded & set(HEAVY)
    assert len(commands()[name].EXAMPLES) == 2 and all(example in out for example in commands()[name].EXAMPLES)


def test_the_list_of_commands_loads_neither_torch_nor_transformers():
    loaded, out = imported("--help")
    assert not loaded & set(HEAVY) and all(name in out for name in TWINS)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("snnk com", "compress"),
        ("snnk compress --ke", "--keep"),
        ("snnk compress model --to op", "openvino-int8 openvino"),
        ("snnk compress model --feature-map random", "random-relu random-fourier"),
        ("snnk frontier model --blocks f", "ffn"),
        ("snnk export model --to onnx-", "onnx-int8 onnx-int8-static"),
        ("snnk finetune model --method lo", "lora"),
        ("snnk finetune model --pooling p", "pairs"),
        ("snnk fit table.csv --feature-map random-r", "random-relu"),
        ("snnk estimate --activation gelu", "gelu gelu_tanh"),
        ("snnk reproduce p", "pointwise"),
    ],
)
def test_completion_loads_neither_torch_nor_transformers(words, found):
    environment = {"_SNNK_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    loaded, out = imported(**environment)
    assert not loaded & set(HEAVY) and out.split() == found.split()


def test_completed_words_are_those_of_the_tables():
    from snnk.finetune.config import TASKS
    from snnk.hf.compression.planning import BLOCKS, FEATURES
    from snnk.hf.serve.forms import FORMS
    from snnk.maps import ACTIVATIONS, RANDOM_MAPS
    from snnk.ridge.sums import BLOCK_DTYPES
    from snnk.tabular import scan

    assert set(WORDS["activation"]) <= set(ACTIVATIONS) and set(WORDS["block_dtype"]) == set(BLOCK_DTYPES)
    assert set(WORDS["features of tables"]) == {"learned", "learned-deep", *RANDOM_MAPS}
    assert WORDS["blocks"] == BLOCKS and set(WORDS["features of blocks"]) == set(FEATURES)
    assert WORDS["form"] == tuple(FORMS) and WORDS["task"] == TASKS == scan.TASKS


def test_the_last_words_of_torchrun_are_the_error(tmp_path):
    """Every worker names itself."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "-m", "snnk.cli"]
    command = [*torchrun, "fit", "missing.csv", "--target", "y", "--out", "model"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and "snnk: worker 0: no file or folder missing.csv;" in done.stderr
    last = done.stderr.strip().splitlines()[-2]  # a border is below it
    assert last.startswith("  traceback : snnk: worker ") and "no file or folder missing.csv;" in last
    assert "cli/__init__.py" not in done.stderr


@pytest.mark.parametrize("example", [example for module in commands().values() for example in module.EXAMPLES])
def test_examples_are_valid_command_lines(example):
    program, name, *args = shlex.split(example)
    assert program == "snnk"
    typer.main.get_command(make_app()).commands[name].make_context(name, args)


@pytest.mark.parametrize("name", TWINS)
def test_options_are_arguments_of_the_python_twin(name):
    """Every option is an argument of the function and the other way round, with the same default."""
    paths, alone = TWINS[name]
    options = inspect.signature(commands()[name].command).parameters
    first, *more = [inspect.signature(_resolve(path)).parameters for path in paths] or [{}]
    arguments = {**{key: value for other in more for key, value in other.items()}, **first}
    assert set(options) - set(arguments) == alone
    assert not set(arguments) - set(options) - OBJECTS - DETAILS.get(name, set())
    for option in set(options) - alone:
        default, twin = options[option].default, arguments[option].default
        if isinstance(twin, str | int | float | None) and option not in ("out", "name", "drop"):
            assert default == twin, option


@pytest.mark.parametrize("name", TWINS)
def test_an_option_is_the_name_of_its_argument_with_dashes(name):
    for parameter in typer.main.get_command(make_app()).commands[name].params:
        if parameter.param_type_name == "option" and parameter.name != "help":
            wanted = FLAGS.get(parameter.name, f"--{parameter.name.replace('_', '-')}")
            opposite = OTHERS.get(parameter.name, f"--no-{wanted[2:]}")
            assert parameter.opts == [wanted] and parameter.secondary_opts in ([], [opposite]), parameter.name


def test_one_word_has_one_meaning():
    """A new word needs a meaning that no other word has."""
    words = {word for module in commands().values() for word in inspect.signature(module.command).parameters}
    assert words - {"context"} == set(MEANINGS)
    assert len(set(MEANINGS.values())) == len(MEANINGS)


def test_the_estimators_have_the_words_of_the_command():
    config = inspect.signature(_resolve("snnk.tabular.FitConfig")).parameters
    for name in ("SNNKClassifier", "SNNKRegressor", "SNNKFeatures"):
        for word, argument in inspect.signature(_resolve(f"snnk.sklearn.{name}")).parameters.items():
            same = SKLEARN.get(word, word)
            assert same in config or word in SKLEARN_ALONE, (name, word)
            if same in config and same != "seed":
                assert argument.default == config[same].default, (name, word)


def _resolve(path):
    parts = path.split(".")
    for i in range(len(parts), 0, -1):
        try:
            found = __import__(".".join(parts[:i]), fromlist=["x"])
        except ImportError:
            continue
        for part in parts[i:]:
            found = getattr(found, part)
        return found
    raise ValueError(path)


def test_predict_loads_no_experiment_and_no_transformers(run, tmp_path):
    rows = "".join(f"{i % 7},{i % 3}\n" for i in range(60))
    (tmp_path / "t.csv").write_text(f"a,y\n{rows}")
    assert run("fit", tmp_path / "t.csv", "--target", "y", "--num-features", 8, "--out", tmp_path / "model")[0] == 0
    loaded, _ = imported("predict", tmp_path / "model", tmp_path / "t.csv", "--out", tmp_path / "p.csv")
    assert "torch" in loaded and not loaded & {"transformers", "peft", "matplotlib"}
    assert not {name for name in loaded if name.startswith("snnk.experiments.")}


def test_a_missing_package_names_the_extra(run, tmp_path, monkeypatch):
    monkeypatch.setattr("snnk.cli._options.find_spec", lambda name: None if name == "peft" else name)
    code, _, err = run("finetune", "model", "--out", tmp_path / "out")
    assert code == 2 and "this command needs peft; install it with: pip install 'snnk[cli,peft]'" in err


def test_version_and_help(run):
    assert run("--version")[:2] == (0, f"snnk {snnk.__version__}\n")
    for args in ([], ["--help"]):
        code, out, _ = run(*args)
        assert code == 0 and all(command in out for command in ("estimate", "reproduce", "demo"))
    assert "snnk estimate --activation gelu" in run("estimate", "--help")[1]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["estimate", "--bogus"], "--bogus"),
        (["estimate", "--in-features", "x"], "--in-features"),
        (["estimate", "--in-features", "0"], "in_features must be a positive integer"),
        (["estimate", "--activation", "gelo"], "did you mean 'gelu'"),
        (["estimate", "--num-features", "3"], "must be even"),
        (["estimate", "--num-features", "a,4"], "separated by commas"),
        (["estimate", "--x-norm", "-1"], "positive number"),
        (["nothing"], "nothing"),
        (["reproduce", "pointwize"], "did you mean 'pointwise'"),
        (["reproduce"], "name an experiment"),
    ],
)
def test_bad_arguments_end_in_one_line(run, args, message):
    code, out, err = run(*args)
    assert code == 2 and out == ""
    assert err.count("\n") == 1 and err.startswith("snnk: ") and message in err
