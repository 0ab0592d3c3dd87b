"""Runs that were stopped and go on from a checkpoint."""

import signal
from dataclasses import replace

import pytest
import torch

from snnk.finetune import METHODS, FinetuneConfig, finetune
from snnk.finetune.data import Data, Labels
from snnk.finetune.inputs import Inputs
from snnk.finetune.loading import bits
from snnk.finetune.run import _key
from snnk.finetune.settings import TrainingSettings
from snnk.finetune.trainer import train
from snnk.hf.data import find_images

from helpers.texts import make_images
from helpers.tuning import Stop, make_config, make_model, make_rows, same, weights, write

LONG = TrainingSettings(epochs=4, batch_size=32, learning_rate=3e-3, schedule="linear", clip=1.0, patience=None)


@pytest.fixture(scope="module")
def whole(data):
    """A run of four epochs of four steps without a stop."""
    model = make_model()  # with dropout, which must be the same too
    return model, train(model, *data.split(0.2, 0), LONG)


@pytest.mark.parametrize(
    ("how", "stops", "first"),
    [
        pytest.param("killed", (6,), 5, marks=pytest.mark.once),
        ("interrupted", (6,), 7),
        ("interrupted", (6, 11), 12),
        ("interrupted", (8, 16), 17),
    ],
)
def test_a_run_that_is_resumed_ends_with_the_same_weights(data, whole, tmp_path, how, stops, first):
    """A stop at an epoch's last step does not cost its evaluation; after one at the run's last step nothing is left."""
    train_rows, held = data.split(0.2, 0)
    file = tmp_path / "run.checkpoint"

    def stop_at(steps):
        def progress(step, total, loss, scores):
            if step == steps and how == "killed":
                raise Stop
            if step == steps:  # a real signal ends a process in which OpenVINO has compiled a model
                signal.getsignal(signal.SIGINT)(signal.SIGINT, None)

        return progress

    for steps in stops:
        with pytest.raises(Stop if how == "killed" else KeyboardInterrupt):
            train(make_model(), train_rows, held, LONG, checkpoint=file, resume=True, progress=stop_at(steps))
        assert [path.name for path in tmp_path.iterdir()] == ["run.checkpoint"]
    seen = []
    model = make_model()
    with torch.no_grad():
        model.classifier.weight.zero_()  # the checkpoint has what is trained
    done = train(
        model,
        train_rows,
        held,
        LONG,
        checkpoint=file,
        resume=True,
        progress=lambda step, *rest: seen.append(step),
    )
    assert seen == list(range(first, 17)) and 0 < done.step_seconds < done.seconds
    assert same(weights(model), weights(whole[0]))
    for a, b in zip(done.history, whole[1].history, strict=True):
        assert a == pytest.approx(b, rel=1e-6, nan_ok=True)


def test_checkpoints_that_do_not_fit_are_refused(data, tmp_path):
    file = tmp_path / "c"
    train(make_model(), data, None, TrainingSettings(max_steps=1), checkpoint=file, key="a")
    with pytest.raises(ValueError, match="other options or data"):
        train(make_model(), data, None, TrainingSettings(max_steps=1), checkpoint=file, key="b", resume=True)
    for options in ({"hidden_size": 8}, {"num_labels": 3}, {"num_hidden_layers": 1}):
        model = make_model(**options)
        before = weights(model)
        with pytest.raises(ValueError, match="does not fit the model"):
            train(model, data, None, TrainingSettings(max_steps=1, bf16=True), checkpoint=file, key="a", resume=True)
        assert same(weights(model), before) and "_original_forward" not in vars(model)  # that of bfloat16 is gone
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(ValueError, match="is no checkpoint"):
        train(make_model(), data, None, TrainingSettings(max_steps=1), checkpoint=file, key="a", resume=True)


def test_a_checkpoint_that_cannot_be_written_leaves_nothing(data, tmp_path, monkeypatch):
    def half(tensors, file, metadata):
        file.write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr("safetensors.torch.save_file", half)
    with pytest.raises(OSError, match="no space left"):
        train(make_model(), data, None, TrainingSettings(max_steps=1), checkpoint=tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


def test_the_run_resumes_from_files(root, tmp_path):
    config = make_config(root, tmp_path / "out", method="snnk-relu", epochs=3, seed=5)
    whole = finetune(replace(config, out=str(tmp_path / "whole")))

    def stop(step, total, loss, scores):
        if step == 7:
            raise Stop

    with pytest.raises(Stop):
        finetune(config, progress=stop)
    assert (tmp_path / "out.checkpoint").exists() and not (tmp_path / "out").exists()
    with pytest.raises(FileExistsError, match="continue with resume, or delete it"):
        finetune(config)
    with pytest.raises(ValueError, match="other options or data"):
        finetune(replace(config, learning_rate=0.5), resume=True)
    done = finetune(config, resume=True)
    assert same(weights(done.model), weights(whole.model)) and not (tmp_path / "out.checkpoint").exists()
    a, b = (r.metrics["training"]["epochs"] for r in (done, whole))
    assert a == b


def test_other_data_are_refused_on_resume(root, tmp_path):
    """Also where texts have equal lengths and labels equal counts."""
    texts, labels = make_rows()
    file = write(tmp_path / "train.tsv", texts, labels)
    config = make_config(root, tmp_path / "out", train=file, test=None, epochs=2)

    def stop(step, total, loss, scores):
        if step == 6:  # the first epoch's checkpoint is there
            raise Stop

    with pytest.raises(Stop):
        finetune(config, progress=stop)
    first = texts[0].split()
    other_text = " ".join(["w39" if first[0] != "w39" else "w38", *first[1:]])
    swap = next(i for i, label in enumerate(labels) if label != labels[0])
    other_labels = [labels[swap], *labels[1:swap], labels[0], *labels[swap + 1 :]]
    for changed in (([other_text, *texts[1:]], labels), (texts, other_labels)):
        write(tmp_path / "train.tsv", *changed)
        with pytest.raises(ValueError, match="other options or data"):
            finetune(config, resume=True)
    write(tmp_path / "train.tsv", texts, labels)
    assert finetune(config, resume=True).metrics["training"]["steps"] == 10


def test_the_key_of_a_run_has_its_rows_and_labels(tmp_path):
    """The key depends on the contents of images and on the weights of the model."""
    for name in ("cat", "dog"):
        make_images(tmp_path / name, 8)
    files = find_images(tmp_path)
    config = FinetuneConfig("", "", "linear-probe", train=str(tmp_path))

    def key(chosen, first=0, model=None):
        labels = torch.tensor([first, 1 - first] * (len(chosen) // 2))
        data = Data(chosen, labels, lambda part: {}, [1] * len(chosen))
        return _key(
            config,
            METHODS["linear-probe"],
            TrainingSettings(),
            Inputs(data, data, None, Labels(("a", "b")), (), {}),
            [total for p in (model or linear).parameters() for total in bits(p)],
        )

    linear = torch.nn.Linear(2, 2)
    before = key(files)
    assert key(list(files)) == before != key([*files[:-2], files[-1], files[-2]])
    assert key(files, first=1) != before
    assert key(files, model=torch.nn.Linear(2, 2)) != before
    data = bytearray(files[0].read_bytes())
    data[-1] ^= 1  # of the same size
    files[0].write_bytes(data)
    assert key(files) != before


def test_a_checkpoint_beside_a_complete_folder_is_removed(root, tmp_path):
    config = make_config(root, tmp_path / "out", max_steps=0, epochs=None)
    finetune(config)
    left = tmp_path / "out.checkpoint"
    left.write_text("of a run that was killed after it had written the folder")
    with pytest.raises(FileExistsError, match="exists already"):
        finetune(config)
    assert not left.exists()
