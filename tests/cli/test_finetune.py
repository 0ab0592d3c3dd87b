import signal

import pytest
from transformers import BertModel

from snnk.finetune import load

from helpers.tuning import make_rows, save, write


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    save(BertModel, folder / "bert")
    texts, labels = make_rows()
    write(folder / "train.tsv", texts, labels)
    return folder


@pytest.fixture
def finetune(run, root):
    def call(*options):
        args = [root / "bert", "--train", root / "train.tsv", "--pooling", "mean", "--batch-size", 32, *options]
        return run("finetune", *args)

    return call


def test_options_reach_the_run(finetune, root, tmp_path):
    options = [
        "--method",
        "lora",
        "--num-features",
        2,
        "--max-steps",
        2,
        "--learning-rate",
        0.01,
        "--seed",
        3,
        "--bf16",
    ]
    code, out, _ = finetune("--out", tmp_path / "out", "--test", root / "train.tsv", *options, "--limit-train", 100)
    assert code == 0
    assert "2 classes" in out and "closed form" in out and "lora: " in out and "test" in out and "wrote" in out
    model, _ = load(tmp_path / "out")
    assert model.peft_config["default"].r == 2
    code, _, err = finetune("--out", tmp_path / "out")
    assert code == 2 and f"the output {tmp_path / 'out'} exists already" in err


def test_decimal_labels_can_be_classes(finetune, tmp_path):
    texts, labels = make_rows()
    file = write(tmp_path / "train.tsv", texts, [f"{label}.0" for label in labels])
    for option, told in (
        ([], "regression"),
        (["--task", "classification"], "2 classes"),
        (["--task", "regression"], "regression"),
    ):
        out = tmp_path / "-".join(["out", *option[1:]])
        code, printed, _ = finetune(
            "--out", out, "--train", file, "--method", "linear-probe", "--max-steps", 1, *option
        )
        assert code == 0 and told in printed
    assert load(tmp_path / "out-classification")[0].config.id2label == {0: "0.0", 1: "1.0"}


def test_the_help_shows_how_hub_names_are_written(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert "name[:config][@split]." in run("finetune", "--help")[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--method", "lorra"], "did you mean 'lora'"),
        (["--label", "score"], "its columns are sentence, label"),
        (["--glue", "cola"], "give either train"),
        (["--task", "regresion"], "unknown task 'regresion'; did you mean 'regression'"),
        (["--learning-rate", -1], "learning_rate must be a positive number"),
    ],
)
def test_bad_options_end_before_work(finetune, tmp_path, options, message):
    code, _, err = finetune("--out", tmp_path / "out", *options)
    assert code == 2 and message in err and list(tmp_path.iterdir()) == []


def test_an_interrupted_run_says_how_to_go_on(finetune, tmp_path, monkeypatch):
    from snnk.finetune import trainer as loop

    step = loop._Run.step

    def interrupt(self, indices):
        signal.getsignal(signal.SIGINT)(signal.SIGINT, None)
        return step(self, indices)

    monkeypatch.setattr(loop._Run, "step", interrupt)
    code, out, err = finetune("--out", tmp_path / "out", "--method", "linear-probe", "--epochs", 2)
    assert code == 130 and "the same command with --resume continues" in out and "--resume" in err
    monkeypatch.setattr(loop._Run, "step", step)
    assert finetune("--out", tmp_path / "out", "--method", "linear-probe", "--epochs", 2, "--resume")[0] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    code, _, err = finetune("--out", tmp_path / "out", "--method", "linear-probe", "--epochs", 2, "--resume")
    assert code == 2 and "is complete, there is nothing to resume" in err
