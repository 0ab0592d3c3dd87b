"""Write one small file or folder of every format that snnk reads, and what it must give, into a new folder.

    python tests/golden/make.py tests/golden/0.1.0-2

test_golden.py loads every such folder with the present version and demands the outputs of the version that wrote it.
Run this script after a change of a format, and never change a folder that it has written. It uses no helpers of other
tests, because the inputs must stay as they were. Folder 0.1.0 is older than three fields: the precision of features,
the bias of bundles, and the package that adapters need.
"""

import json
import os
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from peft import get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForSequenceClassification, BertModel, PreTrainedTokenizerFast

import snnk
import snnk.finetune
import snnk.hf
import snnk.peft
from snnk.tabular import FitConfig, TableModel, fit

SIZES = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 43}
SIZES["max_position_embeddings"] = 32
IDS = (torch.arange(60) * 7 % 43).reshape(5, 12)
X = torch.sin(torch.arange(40, dtype=torch.float64)).reshape(10, 4)


def table():
    """Return 64 rows with numbers, a category, and two targets: a class and a number."""
    x = np.sin(np.arange(128)).reshape(64, 2)
    colour = np.array(["red", "green", "blue"])[np.arange(64) % 3]
    return pa.table({"a": x[:, 0], "b": x[:, 1] * 100 + 3, "colour": colour, "y": x[:, 0] * x[:, 1], "k": x[:, 0] > 0})


def bert(kind=BertModel, **options):
    torch.manual_seed(0)
    return kind(BertConfig(**SIZES, **options)).eval()


def batches():
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(43, (8, 12), generator=generator)} for _ in range(10)]


def tokenizer():
    words = {word: i for i, word in enumerate(["[PAD]", "[UNK]", *(f"w{i}" for i in range(41))])}
    plain = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="[PAD]", unk_token="[UNK]")


@torch.no_grad()
def hidden(model):
    found = model.eval()(input_ids=IDS)
    return (found.logits if hasattr(found, "logits") else found.last_hidden_state).flatten().tolist()


def make_ridge(out):
    phi = torch.cat([X, X.square()], 1)
    stats = snnk.RidgeStats(8, 2, folds=2).update(phi, X[:, :2].cos(), X[:, 3].abs())
    stats.note = "golden"
    stats.save(out / "ridge.safetensors")
    solution = stats.solve(0.5)
    return {"weight": solution.weight.flatten().tolist(), "bias": solution.bias.tolist(), "rows": stats.rows.tolist()}


def make_bundles(out):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3)).double()
    found = {}
    for name, options in {
        "projected": {},
        "urf": {"feature_map": "urf", "on_error": "ignore"},
        "relu": {"feature_map": "relu", "calibrate": X.repeat(5, 1) + 0.1 * torch.randn(50, 4).double()},
    }.items():
        bundled = snnk.bundle(net, num_features=12, **options)
        bundled.save(out / f"bundle-{name}.safetensors")
        found[name] = bundled(X).flatten().tolist()
    return found


def make_tables(out):
    found = {}
    with tempfile.TemporaryDirectory() as name:
        data = Path(name, "t.parquet")
        for target, feature_map in (("y", "random-fourier"), ("k", "random-relu")):
            pq.write_table(table().drop(["y" if target == "k" else "k"]), data)
            folder = out / f"table-{target}"
            fit(data, folder, FitConfig(target=target, num_features=16, feature_map=feature_map, lam=0.1))
            model = TableModel.load(folder)
            found[target] = [value for values, _ in model.predict(data) for value in values]
    return found


def make_compressed(out):
    found = {}
    for kind in ("atoms", "random-relu", "random-fourier", "linear", "drop"):
        model = bert()
        counted = kind not in ("linear", "drop")
        plan = snnk.hf.plan(model, keep=0.5, feature_map=kind if counted else "atoms")
        if not counted:
            blocks = tuple(replace(block, kind=kind, num_features=None) for block in plan.blocks)
            plan = replace(plan, blocks=blocks)
        plan.save(out / f"plan-{kind}.json")
        snnk.hf.compress_(model, plan, batches(), refine=0)
        model.save_pretrained(out / f"compressed-{kind}")
        found[kind] = hidden(model)
    for kind in ("layer", "head"):
        model = bert(BertForSequenceClassification)
        snnk.hf.replace_pooler_(model, 12)
        if kind == "head":
            snnk.hf.merge_pooler_(model)
        model.save_pretrained(out / f"pooler-{kind}")
        found[kind] = hidden(model)
    return found


def make_adapters(out):
    found = {}
    for name, options in {
        "stored": {},
        "seeded": {"save_directions": False},
        "gelu": {"feature_map": "gelu", "use_bias": True, "gate": False},
    }.items():
        model = get_peft_model(bert(), snnk.peft.SNNKConfig(num_features=6, init_weights=False, **options))
        model.save_pretrained(out / f"adapter-{name}")
        found[name] = hidden(model)
    return found


def make_tuned(out):
    """Fine-tune in a temporary folder, so that files name no folder of this machine."""
    found = {}
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        bert().save_pretrained("base")
        tokenizer().save_pretrained("base")
        rows = [f"w{i % 41} w{i * 5 % 41} w{i * 11 % 41}\t{'yes' if i % 2 else 'no'}" for i in range(48)]
        Path("train.tsv").write_text("sentence\tlabel\n" + "\n".join(rows) + "\n")
        for method, pooling in (("full", "mean"), ("linear-probe", "model"), ("snnk-pooler", "model")):
            folder, features = out / f"tuned-{method}", 6 if method == "snnk-pooler" else None
            options = {"max_steps": 2, "batch_size": 8, "num_features": features, "pooling": pooling}
            config = snnk.finetune.FinetuneConfig(
                model="base", train="train.tsv", method=method, out=f"tuned-{method}", **options
            )
            snnk.finetune.finetune(config)
            shutil.move(f"tuned-{method}", folder)
            found[method] = hidden(snnk.finetune.load(folder)[0])
    return found


def main(folder):
    out = Path(folder).absolute()
    out.mkdir(parents=True)
    expected = {"version": snnk.__version__, "torch": torch.__version__}
    for make in (make_ridge, make_bundles, make_tables, make_compressed, make_adapters, make_tuned):
        expected[make.__name__.removeprefix("make_")] = make(out)
    (out / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    for left in out.rglob(".*"):
        shutil.rmtree(left) if left.is_dir() else left.unlink()


if __name__ == "__main__":
    main(sys.argv[1])
