"""What a run reads, what it is told apart by, and with which settings it starts."""

from dataclasses import replace

import pytest
import torch
import transformers

from snnk.finetune import METHODS, FinetuneConfig, finetune
from snnk.finetune.data import Data, Labels, image_files
from snnk.finetune.inputs import Inputs, read
from snnk.finetune.run import _bits, _key
from snnk.finetune.trainer import _tell_no_checkpoint
from snnk.hf.models import token_limit

from helpers.texts import make_images, make_tokenizer
from helpers.tuning import Stop, make_config, make_rows, save, write


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    save(transformers.BertModel, folder / "bert")
    return folder


@pytest.mark.parametrize("kind", [transformers.BertModel, transformers.RobertaModel, transformers.MPNetModel])
def test_texts_are_cut_to_the_positions_of_the_model(tmp_path, kind):
    folder, offset = save(kind, tmp_path / "model"), 0 if kind is transformers.BertModel else 2
    tokenizer = make_tokenizer()
    tokenizer.model_max_length = 10**30  # as of a tokenizer that was saved without a limit
    file = write(tmp_path / "long.tsv", ["w1 w2 " * 50, "w3 " * 70] * 20, ["a", "b"] * 20)
    config = FinetuneConfig(folder, "", train=file, max_length=1000)
    data = read(config, tokenizer, images=False).train
    assert set(data.lengths) == {64 - offset}
    with torch.no_grad():
        kind.from_pretrained(folder)(input_ids=data.batch([0, 1])["input_ids"])  # a torch error at one token more
    assert read(replace(config, max_length=9), tokenizer, images=False).train.lengths[0] == 9


def test_models_without_positions_have_no_limit():
    assert token_limit(transformers.T5Config()) is None and token_limit(transformers.GPT2Config()) == 1024
    assert token_limit(transformers.RobertaConfig(max_position_embeddings=514, pad_token_id=1)) == 512


def test_limit_train_draws_its_rows(root, tmp_path):
    """A file that is sorted by class would else give one class."""
    texts, labels = make_rows()
    order = sorted(range(len(labels)), key=labels.__getitem__)
    file = write(tmp_path / "sorted.tsv", [texts[i] for i in order], [labels[i] for i in order])
    config = make_config(root, tmp_path / "out", train=file, test=None, limit_train=40)
    inputs = read(config, make_tokenizer(), images=False)
    found = [*inputs.train.labels.tolist(), *inputs.validation.labels.tolist()]
    assert len(found) == 40 and 10 < sum(found) < 30
    assert read(config, make_tokenizer(), images=False).train.rows == inputs.train.rows
    assert read(replace(config, seed=1), make_tokenizer(), images=False).train.rows != inputs.train.rows


# appendix "Hyperparameters" of the paper: features, settings, and what is different for images and large data sets
ADAPTER = {"learning_rate": 1e-3, "batch_size": 64, "optimizer": "adamw", "schedule": "constant", "warmup": 0.06}
UPTRAIN = {"optimizer": "adamw", "schedule": "linear", "warmup": 0.06, "weight_decay": 0.1, "clip": 1.0}
PAPER = [
    *((name, 48 if name == "houlsby" else 16, False, False, ADAPTER) for name in ("snnk-relu", "snnk-cos", "houlsby")),
    *((name, None, True, False, ADAPTER | {"clip": 1.0}) for name in ("snnk-relu", "snnk-cos", "houlsby")),
    ("snnk-pooler", 512, False, False, ADAPTER | {"weight_decay": 1e-4, "warmup": 0.0}),
    ("snnk-pooler", 512, True, False, ADAPTER | {"weight_decay": 1e-4, "warmup": 0.01}),
    ("bundled", 1024, False, False, {"batch_size": 64, "optimizer": "adam", "weight_decay": 0.0, "clip": None}),
    ("uptrain", 8, False, False, UPTRAIN),
    ("uptrain", 8, True, False, UPTRAIN | {"weight_decay": 1e-3, "clip": None}),
    ("uptrain", 8, False, True, UPTRAIN | {"weight_decay": 1e-4, "clip": None}),
    ("uptrain", 8, True, True, UPTRAIN | {"weight_decay": 1e-3, "clip": None}),
]


@pytest.mark.parametrize(("method", "features", "images", "large", "wanted"), PAPER)
def test_hyperparameters_of_the_paper(method, features, images, large, wanted):
    found = FinetuneConfig("", "", method, train="x").settings(images=images, large=large)
    assert {name: getattr(found, name) for name in wanted} == wanted
    assert features is None or METHODS[method].features == features


def test_fsdp_says_that_it_has_no_checkpoint(tmp_path):
    with pytest.raises(ValueError, match="resume does not work under FSDP"):
        _tell_no_checkpoint(tmp_path / "c", True, True)
    with pytest.warns(UserWarning, match="no checkpoint is written under FSDP"):
        _tell_no_checkpoint(tmp_path / "c", False, True)
    _tell_no_checkpoint(tmp_path / "c", False, False)  # once, by one process
    _tell_no_checkpoint(None, False, True)


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
    """Images are told by their contents, and the model by its weights."""
    for name in ("cat", "dog"):
        make_images(tmp_path / name, 8)
    files, _ = image_files(tmp_path)
    config = FinetuneConfig("", "", "linear-probe", train=str(tmp_path))

    def key(chosen, first=0, model=None):
        labels = torch.tensor([first, 1 - first] * (len(chosen) // 2))
        data = Data(chosen, labels, lambda part: {}, [1] * len(chosen))
        return _key(
            config,
            METHODS["linear-probe"],
            Inputs(data, data, None, Labels(("a", "b")), (), {}),
            _bits(model or linear),
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
