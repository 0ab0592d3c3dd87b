"""Fixtures that tests of several rooms use."""

import pytest

from snnk.cli import main


@pytest.fixture
def run(capsys):
    """Call `snnk` with arguments of any type; returns the exit code, stdout and stderr."""

    def call(*args):
        capsys.readouterr()  # saving a model in a fixture draws a bar
        with pytest.raises(SystemExit) as stop:
            main([str(arg) for arg in args])
        out, err = capsys.readouterr()
        return stop.value.code, out, err

    return call


@pytest.fixture
def quick(monkeypatch):
    """All commands measure latency as briefly as they can, and `snnk compress` takes few steps of distillation."""
    for name in ("compression.report", "serve.frontier", "serve.served"):
        monkeypatch.setattr(f"snnk.hf.{name}.SECONDS", 0.0)
    monkeypatch.setattr("snnk.hf.compression.stages.PASSES", 1)


@pytest.fixture
def bert(tmp_path):
    """The folder of a tiny model with its tokenizer."""
    from helpers.heads import make
    from helpers.texts import save

    return save(make("BertModel"), tmp_path / "bert")


@pytest.fixture
def shallow(tmp_path):
    """The folder of a tiny model with one layer, whose export takes half the time."""
    from helpers.heads import make
    from helpers.texts import save

    return save(make("BertModel", num_hidden_layers=1), tmp_path / "bert")


@pytest.fixture
def texts(tmp_path):
    """A file of lines for the tiny model; train.tsv beside it has the same lines with labels."""
    from helpers.texts import make_texts

    lines = make_texts(120)
    (tmp_path / "texts.txt").write_text("\n".join(lines))
    (tmp_path / "train.tsv").write_text("sentence\tlabel\n" + "".join(f"{line}\t{len(line) % 2}\n" for line in lines))
    return tmp_path / "texts.txt"
