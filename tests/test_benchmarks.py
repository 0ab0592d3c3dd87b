"""The benchmarks run; what they measure is not asserted here, machines are noisy."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"
BENCHMARKS = sorted(path for path in FOLDER.glob("*.py") if "--quick" in path.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda p: p.stem)
def test_quick(path, tmp_path):
    out = tmp_path / "rows.json"
    done = subprocess.run([sys.executable, str(path), "--quick", "--out", str(out)], capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    assert json.loads(out.read_text())["rows"]


def test_serving_reads_its_texts(bert, texts, tmp_path, monkeypatch):
    """The command as a whole needs a real model; this is the part in front of its measurements."""
    monkeypatch.syspath_prepend(str(FOLDER))
    serving = importlib.import_module("serving")
    found = list(serving.contenders("tiny", 1.0, Path(bert), Path(texts), tmp_path, 1, [serving.TORCH_INT8, "onnx"]))
    assert [(c.runtime, c.precision) for c in found] == [("torch", "float32"), ("torch", "int8"), ("onnx", "float32")]


def test_targets_of_serving_are_of_one_model_at_both_batches(monkeypatch):
    """Made-up rows: the first is fast at one batch alone, the second loses too much, the third does both."""
    monkeypatch.syspath_prepend(str(FOLDER))
    serving = importlib.import_module("serving")

    def row(model, short, long, spearman):
        return {
            "model": model,
            "runtime": "openvino",
            "precision": "int8",
            "ms_1x16": short,
            "ms_32x32": long,
            "spearman": spearman,
        }

    rows = [row("original", 4.0, 80.0, 86.5), row("a", 1.0, 60.0, 86.5), row("b", 1.0, 20.0, 85.0)]
    assert [reached for _, reached in serving.targets(rows)] == [False, False]
    rows.append(row("c", 1.9, 39.0, 86.3))
    assert [reached for _, reached in serving.targets(rows)] == [True, False]
    rows.append(row("d", 1.5, 31.0, 85.8))
    assert [reached for _, reached in serving.targets(rows)] == [True, True]
    assert list(serving.targets(rows[1:])) == [("there is no row of original, openvino, int8 to compare with", False)]
