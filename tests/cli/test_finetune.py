import os
import signal

import pytest
import typer
from transformers import BertModel

from snnk.cli.finetune import METHOD_NAMES, TASK_NAMES, finetune_command
from snnk.finetune import METHODS, load
from snnk.finetune.glue import GLUE

from helpers.tuning import make_rows, save, write


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    save(BertModel, folder / "bert")
    texts, labels = make_rows()
    write(folder / "train.tsv", texts, labels)
    return folder


def run(root, *options):
    app = typer.Typer()
    app.command()(finetune_command)
    args = [root / "bert", "--train", root / "train.tsv", "--pooling", "mean", "--batch-size", 32, *options]
    return typer.main.get_command(app).main([str(arg) for arg in args], standalone_mode=False)


def test_names_in_the_help_are_those_there_are():
    assert METHOD_NAMES.split(", ") == list(METHODS) and TASK_NAMES.split(", ") == list(GLUE)


def test_options_reach_the_run(root, tmp_path, capsys):
    options = ["--method", "lora", "--features", 2, "--max-steps", 2, "--learning-rate", 0.01, "--seed", 3, "--bf16"]
    run(root, "--out", tmp_path / "out", "--test", root / "train.tsv", *options, "--limit-train", 100)
    out = capsys.readouterr().out
    assert "2 classes" in out and "closed form" in out and "lora: " in out and "test" in out and "wrote" in out
    model, _ = load(tmp_path / "out")
    assert model.peft_config["default"].r == 2
    with pytest.raises(FileExistsError, match=r"the output .* exists already"):
        run(root, "--out", tmp_path / "out")


def test_decimal_labels_can_be_classes(root, tmp_path, capsys):
    texts, labels = make_rows()
    file = write(tmp_path / "train.tsv", texts, [f"{label}.0" for label in labels])
    for option, told in (([], "regression"), (["--classification"], "2 classes"), (["--regression"], "regression")):
        out = tmp_path / f"out{option}"
        run(root, "--out", out, "--train", file, "--method", "linear-probe", "--max-steps", 1, *option)
        assert told in capsys.readouterr().out
    assert load(tmp_path / "out['--classification']")[0].config.id2label == {0: "0.0", 1: "1.0"}


def test_the_help_shows_how_hub_names_are_written(root, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    run(root, "--help")
    assert "name[:config][@split]." in capsys.readouterr().out


def test_bad_options_end_before_work(root, tmp_path):
    for options, message in (
        (["--method", "lorra"], "did you mean 'lora'"),
        (["--label", "score"], "its columns are 'sentence', 'label'"),
        (["--task", "cola"], "give either train"),
        (["--regression", "--classification"], "exclude each other"),
        (["--learning-rate", -1], "learning_rate must be a positive number"),
    ):
        with pytest.raises(ValueError, match=message):
            run(root, "--out", tmp_path / "out", *options)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_run_says_how_to_go_on(root, tmp_path, capsys, monkeypatch):
    from snnk.finetune import trainer as loop

    step = loop._Run.step

    def interrupt(self, indices):
        os.kill(os.getpid(), signal.SIGINT)
        return step(self, indices)

    monkeypatch.setattr(loop._Run, "step", interrupt)
    assert run(root, "--out", tmp_path / "out", "--method", "linear-probe", "--epochs", 2) == 130
    assert "--resume" in capsys.readouterr().out
    monkeypatch.setattr(loop._Run, "step", step)
    run(root, "--out", tmp_path / "out", "--method", "linear-probe", "--epochs", 2, "--resume")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
