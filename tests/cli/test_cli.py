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

# The test row of each command: the function that it calls, and options without a namesake among its arguments.
TWINS = {
    "compress": ("snnk.hf.compress", {"base"}),
    "export": ("snnk.hf.export", {"base"}),
    "demo": (None, {"out"}),
    "frontier": ("snnk.hf.frontier", set()),
    "finetune": ("snnk.finetune.FinetuneConfig", {"features", "classification", "resume"}),
    "fit": (
        "snnk.tabular.FitConfig",
        {"context", "data", "out", "features", "double", "checkpoint_seconds", "stats_only", "like", "start_only"},
    ),
    "merge": ("snnk.tabular.merge", {"out"}),
    "predict": ("snnk.finetune.predict", {"missing", "probabilities"}),
    "audit": ("snnk.hf.audit", {"json"}),
    "doctor": (None, {"json"}),
    "estimate": ("snnk.experiments.lab.estimate.Config", {"out"}),
    "reproduce": ("snnk.experiments.lab.runs.reproduce", {"everything", "show", "page"}),
}
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
        ("snnk compress model --for op", "openvino-int8 openvino"),
        ("snnk compress model --kind random", "random-relu random-fourier"),
        ("snnk frontier model --blocks f", "ffn"),
        ("snnk export model --to on", "onnx"),
        ("snnk finetune model --method lo", "lora"),
        ("snnk finetune model --pooling p", "pairs"),
        ("snnk fit table.csv --map random-r", "random-relu"),
        ("snnk estimate --activation gelu", "gelu gelu_tanh"),
        ("snnk reproduce p", "pointwise"),
    ],
)
def test_completion_loads_neither_torch_nor_transformers(words, found):
    environment = {"_SNNK_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    loaded, out = imported(**environment)
    assert not loaded & set(HEAVY) and out.split() == found.split()


def test_completed_words_are_those_of_the_tables():
    from snnk.hf.compression.planning import BLOCKS, FEATURES
    from snnk.hf.serve.forms import FORMS
    from snnk.maps import ACTIVATIONS, RANDOM_MAPS

    assert set(WORDS["activation"]) <= set(ACTIVATIONS) and set(WORDS["map"]) == {
        "learned",
        "learned-deep",
        *RANDOM_MAPS,
    }
    assert WORDS["blocks"] == BLOCKS and set(WORDS["kind"]) == set(FEATURES) and WORDS["form"] == tuple(FORMS)


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
    """With the same defaults."""
    path, others = TWINS[name]
    options = inspect.signature(commands()[name].command).parameters
    arguments = {} if path is None else inspect.signature(_resolve(path)).parameters
    assert set(options) - set(arguments) == others
    for option in set(options) - others:
        default, twin = options[option].default, arguments[option].default
        if isinstance(twin, str | int | float | None) and option not in ("out", "name", "regression", "drop"):
            assert default == twin, option


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
    assert run("fit", tmp_path / "t.csv", "--target", "y", "--features", 8, "--out", tmp_path / "model")[0] == 0
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
        (["estimate", "--dim", "x"], "--dim"),
        (["estimate", "--dim", "0"], "dim must be a positive integer"),
        (["estimate", "--activation", "gelo"], "did you mean 'gelu'"),
        (["estimate", "--features", "3"], "must be even"),
        (["estimate", "--features", "a,4"], "separated by commas"),
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
