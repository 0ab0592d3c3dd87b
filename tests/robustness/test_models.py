"""Hostile models: each row damages one file of a good folder, and demands an error that describes the damage.

A damaged folder that loads would be a model with random weights or other outputs, or would never finish loading.
"""

import json
import math
import shutil

import pytest
import torch
import transformers as hf
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from snnk import URF
from snnk._checkpoint import write_checkpoint
from snnk.experiments.lab.page import write_page
from snnk.experiments.lab.records import Results
from snnk.finetune import finetune, load
from snnk.finetune.trainer import read_run
from snnk.hf import Plan, plan
from snnk.hf.auditing import audit
from snnk.hf.compression import opening
from snnk.nn.bundling import Bundled

from helpers.architectures import replaced
from helpers.texts import make_texts, save
from helpers.tuning import TINY, make_config, make_rows, write

FACTS = {"key": "k", "history": [{"loss": 1.0}], "best": 0, "steps": 3, "seconds": 1.0, "step_seconds": 1.0}
FACTS |= {"stopped_early": False, "loss_sum": 0.5}
WEIGHTS, ADAPTER = "model.safetensors", "adapter_model.safetensors"


def tiny_bert(kind=hf.BertForSequenceClassification, **options):
    torch.manual_seed(0)
    return kind(hf.BertConfig(**{**TINY, "num_labels": 2, **options})).eval()


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """One good folder per kind of file; tests damage copies of them."""
    root = tmp_path_factory.mktemp("good")
    hf.utils.logging.disable_progress_bar()
    for name in ("original", "compressed", "bert"):
        model = tiny_bert(hf.BertModel if name == "bert" else hf.BertForSequenceClassification)
        if name == "compressed":
            for layer, kind in enumerate(("atoms", "relu")):
                replaced(model, kind, [layer])
        save(model, root / name)
    texts, labels = make_rows(40)
    for name in ("train", "test"):
        write(root / f"{name}.tsv", texts, ["yes" if label else "no" for label in labels])
    for name, method in {"tuned": "linear-probe", "adapter": "snnk", "lora": "lora"}.items():
        features = None if name == "tuned" else 2
        finetune(make_config(root, root / name, method=method, num_features=features, max_steps=0, epochs=None))
    root.joinpath("bundle").mkdir()
    Bundled([URF(4, 8)], torch.ones(2, 8), torch.ones(2)).save(root / "bundle" / "bundle.safetensors")
    root.joinpath("plan").mkdir()
    plan(tiny_bert(), 0.5, blocks="ffn").save(root / "plan" / "plan.json")
    root.joinpath("checkpoint").mkdir()
    parts = {"now": {"w": torch.ones(2)}, "best": {"w": torch.ones(2)}, "exp_avg": {"w": torch.ones(2)}}
    write_checkpoint(root / "checkpoint" / "x.checkpoint", parts, FACTS)
    from snnk.experiments import uci

    results = Results(root / "results" / "uci.json", uci.QUICK)
    results.add({"set": "made", "features": 8})
    return root


def read_plan(folder):
    Plan.load(folder / "plan.json").check(tiny_bert())


def read_results(folder):
    write_page(folder)


LOADERS = {
    "compressed": hf.AutoModelForSequenceClassification.from_pretrained,
    "tuned": load,
    "adapter": load,
    "lora": load,
    "original": lambda folder: opening.load(folder, lambda text: None),
    "audit": audit,
    "bundle": lambda folder: Bundled.load(folder / "bundle.safetensors"),
    "plan": read_plan,
    "checkpoint": lambda folder: read_run(folder / "x.checkpoint", "k"),
    "results": read_results,
}


def without(*endings):
    """Damage: remove the tensors with these endings."""

    def change(tensors):
        gone = [key for key in tensors if key.endswith(endings)]
        assert gone
        for key in gone:
            del tensors[key]

    return change


def put(*path, to):
    """Damage: replace the value at a path in JSON."""

    def change(found):
        for key in path[:-1]:
            found = found[key]
        found[path[-1]] = to

    return change


def drop(*path):
    def change(found):
        for key in path[:-1]:
            found = found[key]
        del found[path[-1]]

    return change


def nan(ending):
    def change(tensors):
        next(tensor for key, tensor in tensors.items() if key.endswith(ending)).view(-1)[0] = math.nan

    return change


def extra(key, *shape):
    return lambda tensors: tensors.update({key: torch.ones(*shape)})


def damage(path, change):
    """Cut a file at a byte, replace its bytes, remove it (None), or change its JSON or tensors by a function."""
    if isinstance(change, int):
        path.write_bytes(path.read_bytes()[:change])
    elif isinstance(change, bytes):
        path.write_bytes(change)
    elif change is None:
        path.unlink()
    elif path.suffix == ".json":
        found = json.loads(path.read_text())
        change(found)
        path.write_text(json.dumps(found))
    else:
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, metadata)


def metadata(key, change):
    """Damage: change JSON in the header of a safetensors file."""

    def damaged(path):
        with safe_open(path, "pt") as file:
            held = file.metadata()
        found = json.loads(held[key])
        change(found)
        save_file(load_file(path), path, {**held, key: json.dumps(found)})

    return damaged


DEEP = b"[" * 100_000
BLOCKS = ("quantization_config", "blocks")
FIRST, SECOND = "encoder.layer.0", "encoder.layer.1"
SLOW = "(a+)+b"
ROWS = [
    # compressed folders, by plain transformers with snnk imported
    ("compressed", WEIGHTS, without("classifier.weight"), r"lacks classifier\.weight"),
    ("compressed", WEIGHTS, without("word_embeddings.weight"), "lacks bert.embeddings.word_embeddings.weight"),
    ("compressed", WEIGHTS, without("layer.1.attention.self.query.bias"), "has no encoder.layer.1.attention"),
    ("compressed", WEIGHTS, without("pooler.dense.weight"), "lacks bert.pooler.dense.weight"),
    ("compressed", WEIGHTS, without("layer.1.intermediate.dense.map.projection"), "has no .*map.projection"),
    ("compressed", WEIGHTS, without("layer.0.output.dense.bias"), "has no encoder.layer.0"),
    ("compressed", WEIGHTS, extra("bert.encoder.layer.2.output.dense.bias", 16), "has bert.encoder.layer.2"),
    ("compressed", WEIGHTS, extra("bert.embeddings.more.weight", 2), "has bert.embeddings.more.weight"),
    ("compressed", WEIGHTS, nan("query.weight"), "NaN or infinite values in bert.encoder.layer.0.attention"),
    ("compressed", "config.json", put("num_hidden_layers", to=3), "lacks bert.encoder.layer.2"),
    ("compressed", "config.json", put("num_hidden_layers", to=10**7), "has num_hidden_layers 10000000, and"),
    ("compressed", WEIGHTS, 5000, "is not a whole safetensors file"),
    ("compressed", "config.json", put("hidden_size", to=10**9), "config.json makes .* more than there is"),
    ("compressed", "config.json", put("vocab_size", to=10**9), "config.json makes .* more than there is"),
    ("compressed", "config.json", put("vocab_size", to=50), "instead of"),
    ("compressed", "config.json", put(*BLOCKS, FIRST, "num_features", to=10**12), "has 32 neurons"),
    ("compressed", "config.json", put(*BLOCKS, FIRST, "kind", to=["atoms"]), "kind of encoder.layer.0 must be one of"),
    ("compressed", "config.json", put(*BLOCKS, SECOND, "map", "seed", to="x"), "cannot make the feature map"),
    ("compressed", "config.json", put(*BLOCKS, to=[]), "quant_method 'snnk' and blocks"),
    ("compressed", "config.json", put("architectures", to=5), "compressed/config.json has architectures 5; a list"),
    # originals, as compress loads them
    ("original", WEIGHTS, without("classifier.bias"), "lacks classifier.bias"),
    ("original", WEIGHTS, without("LayerNorm.weight"), "lacks bert.embeddings.LayerNorm.weight"),
    ("original", WEIGHTS, without("pooler.dense.bias"), "lacks bert.pooler.dense.bias"),
    ("original", WEIGHTS, nan("word_embeddings.weight"), "NaN or infinite values in bert.embeddings"),
    ("original", WEIGHTS, 5000, "is not a whole safetensors file"),
    ("original", WEIGHTS, b"", "is not a whole safetensors file"),
    ("original", WEIGHTS, None, "has no model.safetensors"),
    ("original", "config.json", put("num_hidden_layers", to=1), "has bert.encoder.layer.1"),
    ("original", "config.json", put("num_hidden_layers", to=10**7), "has num_hidden_layers 10000000, and"),
    ("original", "config.json", put("num_hidden_layers", to="two"), "has num_hidden_layers two"),
    ("original", "config.json", put("architectures", to=5), "original/config.json has architectures 5; a list of"),
    ("original", "config.json", put("architectures", to="BertModel"), "has architectures BertModel; a list of names"),
    ("original", "config.json", put("architectures", to=[3]), r"has architectures \[3\]; a list of names"),
    ("original", "config.json", DEEP, "is not the configuration of a model"),
    ("original", "config.json", b"[]", "it is no object"),
    ("original", "config.json", b"\xff\xfe", "is not the configuration of a model"),
    # the same files, as audit reads them
    ("audit", "config.json", put("num_hidden_layers", to=10**7), "has num_hidden_layers"),
    ("audit", "config.json", put("hidden_size", to=10**9), "config.json makes"),
    ("audit", "config.json", put("hidden_size", to="wide"), "has no config.json that can be read|cannot be loaded"),
    ("audit", "config.json", put("architectures", to=5), "audit/config.json has architectures 5; a list of names"),
    ("audit", "config.json", put("architectures", to=["os.system"]), "which transformers does not have"),
    ("audit", "config.json", put(*BLOCKS, FIRST, "num_features", to=-1), "must be a positive integer"),
    ("audit", WEIGHTS, 100, "is not a whole safetensors file"),
    ("audit", "model.safetensors.index.json", b'{"weight_map": 3}', "it has no weight_map|not the index"),
    # tuned folders
    ("tuned", WEIGHTS, without("classifier.weight"), "lacks classifier.weight"),
    ("tuned", WEIGHTS, without("word_embeddings.weight"), "lacks bert.embeddings.word_embeddings.weight"),
    ("tuned", WEIGHTS, without("pooler.dense.weight"), "lacks bert.pooler.dense.weight"),
    ("tuned", WEIGHTS, nan("classifier.weight"), "NaN or infinite"),
    ("tuned", WEIGHTS, -200, "is not a whole safetensors file"),
    ("tuned", "config.json", put("num_hidden_layers", to=3), "lacks bert.encoder.layer.2"),
    ("tuned", "config.json", put("num_hidden_layers", to=1), "has bert.encoder.layer.1"),
    ("tuned", "config.json", None, "there is no file .*config.json"),
    ("tuned", "metrics.json", b"", "is not a file of snnk finetune"),
    ("tuned", "metrics.json", DEEP, "is not a file of snnk finetune"),
    ("tuned", "metrics.json", b"[1]", "is not a file of snnk finetune"),
    ("tuned", "metrics.json", drop("config", "pooling"), "it lacks 'pooling'"),
    ("tuned", "metrics.json", put("adapter", to="yes"), "was changed: adapter 'yes'"),
    ("tuned", "metrics.json", put("labels", to=[1, 2]), "labels null or a list of names"),
    ("tuned", "metrics.json", put("labels", to=["a", "b", "c"]), "cannot be loaded"),
    ("tuned", "metrics.json", put("config", "pooling", to="model"), "cannot be loaded|lacks"),
    ("tuned", "tokenizer.json", 50, "has no tokenizer that can be loaded"),
    # adapters
    ("adapter", ADAPTER, without("classifier.weight"), "lacks base_model.model.classifier.weight"),
    ("adapter", ADAPTER, without("layer.0.output.dense.snnk_adapter.weight"), "it lacks bert.encoder.layer.0.output"),
    ("adapter", ADAPTER, nan("snnk_adapter.weight"), "NaN or infinite"),
    ("adapter", ADAPTER, 1000, "is not a whole safetensors file"),
    ("adapter", ADAPTER, None, "there is no file .*adapter_model.safetensors"),
    ("adapter", "adapter_config.json", put("num_features", to=2**20), "is .* in the file and .* in the model"),
    ("adapter", "adapter_config.json", put("target_modules", to=SLOW), "may take hours to match"),
    ("adapter", "adapter_config.json", put("exclude_modules", to=SLOW), "may take hours to match"),
    ("adapter", "adapter_config.json", put("feature_pattern", to={SLOW: 2}), "snnk has this setting no more"),
    ("adapter", "adapter_config.json", put("modules_to_save", to=[SLOW]), "may take hours to match"),
    ("adapter", "adapter_config.json", put("peft_type", to="NONE"), "cannot be loaded"),
    ("adapter", "adapter_config.json", drop("base_model_name_or_path"), "does not name its base model"),
    ("adapter", "adapter_config.json", b"{", "is not the configuration of an adapter"),
    ("lora", ADAPTER, without("layer.1.attention.self.query.lora_A.weight"), "lacks .*lora_A"),
    ("lora", ADAPTER, without("classifier.bias"), "lacks base_model.model.classifier.bias"),
    ("lora", ADAPTER, extra("base_model.model.bert.other.lora_A.weight", 2, 2), "has base_model.model.bert.other"),
    ("lora", "adapter_config.json", put("r", to=3), "cannot be loaded"),
    ("lora", "adapter_config.json", put("target_modules", to=SLOW), "may take hours to match"),
    ("lora", "adapter_config.json", put("rank_pattern", to={SLOW: 2}), "may take hours to match"),
    ("lora", "adapter_config.json", put("rank_pattern", to=7), "must be an object of names and numbers"),
    # bundles
    ("bundle", "bundle.safetensors", without("bias"), "lacks its bias"),
    ("bundle", "bundle.safetensors", without("maps.0.projection"), "cannot load a bundle"),
    ("bundle", "bundle.safetensors", extra("more", 2), "cannot load a bundle"),
    ("bundle", "bundle.safetensors", nan("weight"), "weight has 1 NaN or infinite values"),
    ("bundle", "bundle.safetensors", 60, "is not a whole safetensors file"),
    ("bundle", "bundle.safetensors", metadata("config", put("maps", 0, "num_features", to=10**9)), "does not fit"),
    ("bundle", "bundle.safetensors", metadata("config", put("maps", 0, "class", to="os.system")), "unknown feature"),
    ("bundle", "bundle.safetensors", metadata("config", put("maps", to=5)), "cannot load a bundle"),
    ("bundle", "bundle.safetensors", metadata("config", put("report", to=[])), "cannot load a bundle"),
    # plans
    ("plan", "plan.json", b"", "is not a plan of snnk"),
    ("plan", "plan.json", DEEP, "is not a plan of snnk"),
    ("plan", "plan.json", put("blocks", 0, "num_features", to=10**15), "has room for 32 atoms"),
    ("plan", "plan.json", put("blocks", 0, "width", to=10**15), "the plan is for"),
    ("plan", "plan.json", put("blocks", 0, "kind", to=None), "kind of .* must be one of"),
    ("plan", "plan.json", put("blocks", to="all"), "a list of blocks"),
    ("plan", "plan.json", put("blocks", 0, "predicted_error", to="small"), "is no plan of snnk"),
    # checkpoints of finetune
    ("checkpoint", "x.checkpoint", 40, "is no checkpoint: .*delete it to start again"),
    ("checkpoint", "x.checkpoint", b"", "is no checkpoint: .*delete it to start again"),
    ("checkpoint", "x.checkpoint", without("exp_avg.w"), "it has 2 tensors instead of 3"),
    ("checkpoint", "x.checkpoint", nan("now.w"), "now.w has 1 NaN"),
    ("checkpoint", "x.checkpoint", metadata("facts", put("steps", to="3")), "its steps is 3"),
    ("checkpoint", "x.checkpoint", metadata("facts", put("history", to=[1])), "its history is"),
    ("checkpoint", "x.checkpoint", metadata("facts", put("best", to=7)), "its best epoch is 7"),
    ("checkpoint", "x.checkpoint", metadata("facts", put("key", to="other")), "other options or data"),
    # results
    ("results", "uci.json", b"", "is not a result file of snnk"),
    ("results", "uci.json", DEEP, "is not a result file of snnk"),
    ("results", "uci.json", put("rows", to=[3]), "is not a result file of snnk"),
    ("results", "uci.json", put("rows", to={}), "is not a result file of snnk"),
    ("results", "uci.json", put("environment", to=[]), "is not a result file of snnk"),
    ("results", "uci.json", put("rows", 0, "environment", to="gone"), "is not a result file of snnk"),
    ("results", "uci.json", put("rows", 0, "commit", to=[1]), "rows that are not this experiment's"),
    ("results", "uci.json", put("config", "features", to=0), "rows that are not this experiment's"),
]


@pytest.mark.parametrize(
    ("kind", "file", "change", "message"), ROWS, ids=[f"{i}-{row[0]}-{row[1]}" for i, row in enumerate(ROWS)]
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_damaged_model_is_refused_in_words(good, tmp_path, kind, file, change, message):
    folder = tmp_path / kind
    shutil.copytree(good / ("compressed" if kind == "audit" else kind), folder)
    if callable(change) and change.__name__ == "damaged":
        change(folder / file)
    else:
        damage(folder / file, change)
    with pytest.raises((ValueError, TypeError, OSError), match=message):
        LOADERS[kind](folder)


@pytest.mark.parametrize("kind", LOADERS)
def test_the_good_ones_load(good, tmp_path, kind):
    shutil.copytree(good / ("compressed" if kind == "audit" else kind), tmp_path / kind)
    LOADERS[kind](tmp_path / kind)


def test_another_head_is_no_damage(good):
    """A class other than the saved one has a head of its own, and may have no pooler."""
    for kind in (hf.AutoModel, hf.AutoModelForMaskedLM, hf.AutoModelForTokenClassification):
        kind.from_pretrained(good / "compressed")


def test_originals_may_have_parts_that_a_class_does_without(tmp_path):
    """The files of bert-base-uncased have a pooler and a head for the next sentence beside a masked language model."""
    model = tiny_bert(hf.BertForPreTraining)
    save(model, tmp_path)
    damage(tmp_path / "config.json", put("architectures", to=["BertForMaskedLM"]))
    said = []
    assert type(opening.load(tmp_path, said.append)[0]).__name__ == "BertForMaskedLM"
    assert len(said) == 1 and "does without bert.pooler.dense.bias" in said[0]


def test_a_pooler_that_sentence_transformers_never_reads(tmp_path):
    model = tiny_bert(hf.BertModel)
    model.pooler = None
    save(model, tmp_path)
    with pytest.raises(ValueError, match=r"lacks pooler\.dense\.bias, pooler\.dense\.weight"):
        opening.load(tmp_path, lambda text: None)
    said = []
    loaded, _ = opening.load(tmp_path, said.append, sentences=True)
    assert len(said) == 1 and "these are zeros" in said[0] and not loaded.pooler.dense.weight.any()


@pytest.mark.parametrize(
    ("kind", "file", "change", "args"),
    [
        ("compressed", "config.json", DEEP, ["audit", "FOLDER"]),
        ("original", WEIGHTS, without("classifier.weight"), ["compress", "FOLDER", "--calibration", "TEXTS"]),
        ("plan", "plan.json", 30, ["compress", "ORIGINAL", "--calibration", "TEXTS", "--plan", "FOLDER/plan.json"]),
        (
            "checkpoint",
            "x.checkpoint",
            40,
            ["finetune", "ORIGINAL", "--train", "TRAIN", "--method", "linear-probe", "--resume"],
        ),
        ("results", "uci.json", put("rows", 0, "commit", to=[1]), ["reproduce", "--page"]),
        ("results", "uci.json", 10, ["reproduce", "uci", "--quick"]),
    ],
)
def test_commands_end_in_one_line(good, tmp_path, run, kind, file, change, args):
    folder, out = tmp_path / kind, tmp_path / "x"
    shutil.copytree(good / kind, folder)
    damage(folder / file, change)
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(make_texts(40)))
    if kind == "checkpoint":
        shutil.copy(folder / file, tmp_path / file)
    names = {"FOLDER": folder, "TEXTS": texts, "ORIGINAL": good / "original", "TRAIN": good / "train.tsv"}
    for name, path in names.items():
        args = [arg.replace(name, str(path)) for arg in args]
    if kind != "compressed":
        args += ["--out", str(folder if kind == "results" else out)]
    before = sorted(tmp_path.rglob("*"))
    code, _, told = run(*args)
    assert code == 2 and told.startswith("snnk: ") and told.count("\n") == 1
    assert file in told or str(folder) in told
    assert sorted(tmp_path.rglob("*")) == before
