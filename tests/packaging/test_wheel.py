"""The wheel and the source distribution: what is in them, and that each extra is enough for what it is for."""

import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import snnk
from snnk.cli import commands

from helpers.environments import Installed
from helpers.packages import need

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src" / "snnk"
MODEL = """
from pathlib import Path
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast
words = Tokenizer(models.WordLevel({"[UNK]": 0, "[PAD]": 1, "one": 2, "two": 3}, unk_token="[UNK]"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", model_max_length=8).save_pretrained("model")
sizes = dict(hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
BertForSequenceClassification(BertConfig(vocab_size=4, **sizes)).save_pretrained("model")
lines = ["one two one two", "two one", "one one two", "two two two one"] * 30
Path("texts.txt").write_text("\\n".join(lines))
Path("rows.tsv").write_text("sentence\\tlabel\\n" + "".join(f"{x}\\t{x.count('o') % 2}\\n" for x in lines))
"""
# Commands in one process, and their exit codes.
ONE_BY_ONE = """
import sys
from snnk.cli import main
for line in sys.argv[1:]:
    try:
        main(line.split())
    except SystemExit as stop:
        print("\\nCODE", stop.code, flush=True)
"""
# What each extra is for, in an environment that has it and nothing else. Latencies are measured briefly.
JOBS = {
    "": """
import torch, snnk
layer = snnk.SNNKLinear.from_linear(torch.nn.Linear(4, 3), "gelu", num_features=64)
assert layer(torch.randn(2, 4)).shape == (2, 3) and snnk.RidgeStats and snnk.bundle and snnk.error_bound
""",
    "tables": """
from pathlib import Path
from snnk.tabular import FitConfig, TableModel, fit
Path("t.csv").write_text("a,y\\n" + "".join(f"{i % 7},{i % 3}\\n" for i in range(60)))
fit("t.csv", "table", FitConfig(target="y", num_features=8))
TableModel.load("table").predict({"a": [1.0, 2.0]})
""",
    "sklearn": """
import numpy as np
from snnk.sklearn import SNNKClassifier, SNNKFeatures, SNNKRegressor
x = np.random.default_rng(0).standard_normal((50, 3))
SNNKRegressor(16).fit(x, x[:, 0]).predict(x), SNNKClassifier(16).fit(x, x[:, 0] > 0).predict(x)
assert SNNKFeatures(16).fit_transform(x).shape == (50, 16)
""",
    "hf": MODEL
    + """
from snnk.hf.compression import report
report.SECONDS = 0
from snnk.hf import audit, compress
compress("model", "texts.txt", out="small", keep=0.5, recover=0)
audit("small")
""",
    "peft": MODEL
    + """
from snnk.finetune import FinetuneConfig, finetune, load
finetune(FinetuneConfig("model", "tuned", train="rows.tsv", num_features=4, max_steps=2))
load("tuned")
""",
    "serve": MODEL
    + """
from snnk.hf.serve import served
served.SECONDS = 0
from snnk.hf import export
assert export("model", "texts.txt", to="onnx-int8", out="served", max_loss=1)["file"]
assert export("model", "texts.txt", to="openvino-int8", out="served-2", max_loss=1)["file"]
""",
}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The two files, built from the checkout; the wheel is built from the source distribution."""
    need("build", "hatchling")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(folder.glob("*.whl")), next(folder.glob("*.tar.gz"))


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    return Installed(built[0], tmp_path_factory.mktemp("empty") / "venv")


def test_the_wheel_has_all_files_of_the_package_and_no_others(built):
    with zipfile.ZipFile(built[0]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    tracked = {path for path in SOURCES.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert names == {str(path.relative_to(SOURCES.parent)) for path in tracked}
    assert {"snnk/py.typed", "snnk/hf/general.txt", "snnk/cli/sentences.txt"} <= names


def test_the_source_distribution_has_what_its_tests_need(built, tmp_path):
    """A part of them runs from it; `make test` runs all of them there."""
    with tarfile.open(built[1]) as archive:
        archive.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    for path in [*ROOT.glob("tests/**/*.py"), *ROOT.glob("docs/**/*.*"), *ROOT.glob("examples/*.*")]:
        if "__pycache__" not in path.parts:
            assert (folder / path.relative_to(ROOT)).is_file(), path
    part = ["tests/test_lock.py", "tests/nn/test_adapter.py", "tests/maps/test_projections.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *part]
    environment = {"PYTHONPATH": str(folder / "src"), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "100%" in done.stdout, done.stdout + done.stderr


def test_without_extras(installed):
    done = installed.run("", "python", "-c", "import snnk; print(snnk.__version__, snnk.__file__)")
    version, place = done.stdout.split()
    assert version == snnk.__version__ and Path(place).is_relative_to(installed.site)
    done = installed.run("", "snnk", "--help")
    assert done.returncode == 1 and done.stderr == (
        "snnk: the command line needs rich; install it with: pip install 'snnk[cli]'\n"
    )


@pytest.mark.parametrize("extra", JOBS)
def test_each_extra_is_enough_for_its_job(installed, extra):
    done = installed.run(extra, "python", "-W", "error::ImportWarning", "-c", JOBS[extra])
    assert done.returncode == 0, done.stderr


def test_the_extra_of_the_command_line_is_enough_for_it(installed):
    """Commands that need another extra name it."""
    done = installed.run("cli", "snnk", "--help")
    assert done.returncode == 0 and all(name in done.stdout for name in commands())
    found = json.loads(installed.run("cli", "snnk", "doctor", "--json").stdout)
    assert found["problems"] == [] and found["extras"]["cli"]["missing"] == found["extras"]["tables"]["missing"] == []
    assert {"transformers", "accelerate"} <= set(found["extras"]["hf"]["missing"])
    (installed.folder / "c.csv").write_text("a,y\n" + "".join(f"{i % 7},{i % 3}\n" for i in range(60)))
    lines = (
        "fit c.csv --target y --num-features 8 --out m",
        "predict m c.csv --out p.csv",
        "estimate --num-features 8 --in-features 4",
    )
    needed = {"compress m --out c": "hf", "finetune m --out f": "peft"}
    done = installed.run("cli", "python", "-c", ONE_BY_ONE, *lines, *needed)
    codes = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("CODE ")]
    assert done.returncode == 0 and codes == [0] * len(lines) + [2] * len(needed), done.stderr
    for extra in needed.values():
        assert f"pip install 'snnk[cli,{extra}]'" in done.stderr


def test_the_extra_of_the_experiments_is_enough_for_all_of_them(installed):
    """Also to import the packages that some of them use only later."""
    late = "import datasets, matplotlib, peft, PIL, skimage.data"
    code = f"{late}\nfrom snnk.experiments import load, names\nfor name in names(): load(name)"
    done = installed.run("experiments", "python", "-c", code)
    assert done.returncode == 0, done.stderr
