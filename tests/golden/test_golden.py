"""Files of earlier versions load and give the same outputs as in their version."""

import json
import runpy
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from peft import PeftModel
from transformers import AutoModel, AutoModelForSequenceClassification

import snnk.finetune
import snnk.hf
import snnk.peft
from snnk.tabular import TableModel

HERE = Path(__file__).parent
VERSIONS = sorted(path.parent.name for path in HERE.glob("*/expected.json"))
MAKE = runpy.run_path(str(HERE / "make.py"))


def cases(part):
    """Parametrise by (folder, name, expected), for every version and every file of one part."""
    found = []
    for version in VERSIONS:
        expected = json.loads((HERE / version / "expected.json").read_text())[part]
        found += [
            pytest.param(HERE / version, name, values, id=f"{version}-{name}") for name, values in expected.items()
        ]
    return pytest.mark.parametrize(("folder", "name", "expected"), found)


def close(found, expected, tolerance):
    return torch.allclose(torch.tensor(found).double(), torch.tensor(expected).double(), atol=tolerance, rtol=tolerance)


def test_there_are_versions():
    assert "0.1.0" in VERSIONS


@cases("ridge")
def test_sums(folder, name, expected):
    stats = snnk.RidgeStats.load(folder / "ridge.safetensors")
    solution = stats.solve(0.5)
    values = {"weight": solution.weight.flatten(), "bias": solution.bias, "rows": stats.rows}
    assert stats.note == "golden" and close(values[name].tolist(), expected, 1e-10)


@cases("bundles")
def test_bundles(folder, name, expected):
    bundled = snnk.Bundled.load(folder / f"bundle-{name}.safetensors")
    assert close(bundled(MAKE["X"]).flatten().tolist(), expected, 1e-10)


@cases("tables")
def test_tables(folder, name, expected, tmp_path):
    pq.write_table(MAKE["table"](), tmp_path / "t.parquet")
    found = [
        v for values, _ in TableModel.load(folder / f"table-{name}").predict(tmp_path / "t.parquet") for v in values
    ]
    assert found == expected if isinstance(expected[0], str) else close(found, expected, 1e-5)


@cases("compressed")
def test_compressed_models(folder, name, expected):
    kind, start = (
        (AutoModelForSequenceClassification, "pooler") if name in ("layer", "head") else (AutoModel, "compressed")
    )
    assert close(MAKE["hidden"](kind.from_pretrained(folder / f"{start}-{name}")), expected, 1e-5)


@pytest.mark.parametrize("path", sorted(HERE.glob("*/plan-*.json")), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_plans(path):
    """Random features of a plan had other names before the rename."""
    stored, names = json.loads(path.read_text()), {"relu": "random-relu", "cos": "random-fourier"}
    blocks = tuple({**block, "kind": names.get(block["kind"], block["kind"])} for block in stored["blocks"])
    assert snnk.hf.Plan.load(path).to_dict() == {**stored, "blocks": blocks}


@cases("adapters")
def test_adapters(folder, name, expected):
    model = PeftModel.from_pretrained(MAKE["bert"](), folder / f"adapter-{name}")
    assert close(MAKE["hidden"](model), expected, 1e-5)


@cases("tuned")
def test_tuned_models(folder, name, expected):
    model, tokenizer = snnk.finetune.load(folder / f"tuned-{name}")
    assert close(MAKE["hidden"](model), expected, 1e-5)
    assert sorted(model.config.id2label.values()) == ["no", "yes"] and tokenizer("w1 w2")["input_ids"] == [3, 4]
