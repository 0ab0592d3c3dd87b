"""Counts of trained parameters."""

import pytest

from snnk.experiments import trainable_parameters
from snnk.experiments.lab.records import Results

from helpers.experiments import Rows


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    config = trainable_parameters.Config()
    results = Results(tmp_path_factory.mktemp("rows") / "rows.json", config)
    assert len(list(trainable_parameters.run(config, results))) == trainable_parameters.total(config)
    return results


def test_trainable_parameters(counted):
    rows = {(r["model"], r["method"]): r["trained"] for r in counted}
    bert, vit = ({method: n for (model, method), n in rows.items() if model == name} for name in ("BERT", "ViT"))
    assert trainable_parameters.total(trainable_parameters.QUICK) == len(rows) - len(vit)
    assert bert["SNNK adapters"] == vit["SNNK adapters"] == 24 * (768 * 16 + 768) == 313_344
    assert bert["Houlsby adapters"] == 24 * (2 * 768 * 48 + 48 + 768)
    assert bert["Pfeiffer adapters"] == bert["Houlsby adapters"] / 2
    assert bert["LoRA"] == vit["LoRA"] == 12 * 2 * 2 * 768 * 8
    assert bert["SNNK pooler and classifier, merged"] == 256 * 2 + 2
    assert vit["SNNK adapters, 32 features"] == 24 * (768 * 32 + 768)
    assert vit["attention tuning"] == 12 * 4 * (768 * 768 + 768) and vit["LayerNorm tuning"] == 25 * 2 * 768
    assert vit[trainable_parameters.CIFAR100] == 12 * (2 * 768 * 64 + 64 + 768) + 76_900
    toys = [(256 * 256 + 256) * n + 256 * 4 + 1 for n in (3, 1)]
    assert [rows["SIREN", f"SIREN, {n} hidden"] for n in (3, 1)] == toys
    assert [rows["SIREN", f"SNNK, {n} hidden"] for n in (3, 1)] == [n - 256 * 257 + 256 * 64 for n in toys]
    assert (rows["QPNN", "QPNN"], rows["QPNN", "SNNK"]) == (128 * 128 + 128 * 5 + 1, 128 * 32 + 128 * 4 + 1)


def test_claims_of_trainable_parameters(counted):
    table = {c["paper"]: c for c in trainable_parameters.claims(counted)}
    assert [paper for paper, c in table.items() if not c["holds"]] == [
        "BERT, pooler and classifier: 0.059 M",
        "ViT, LoRA: 0.22 M",
        "ViT, BitFit: 0.36 M",
        "ViT, LayerNorm tuning: 0.08 M",
        "ViT, attention tuning: 28.41 M",
        "an SNNK adapter trains (d + 1) x features = 12,304",
        "bundled final layers train about 1/30 of pooler and classifier",
    ]
    assert not any("unexplained" in c["ours"] for c in table.values())
    assert table["BERT, full: 110 M"]["tolerance"] == "1 M"
    assert table["BERT, BitFit: 0.1 M"]["tolerance"] == "rounded or cut off at 0.1 M"
    assert table["pooler and classifier are 18.92 Megabit"]["ours"] == "18.92 without biases, 18.95 with them"


@pytest.mark.parametrize(
    ("trained", "holds"),
    [(0, False), (49_999, False), (50_000, True), (100_000, True), (199_999, True), (200_000, False)],
)
def test_rounding_or_cutting_off_is_all_that_is_allowed(trained, holds):
    rows = [{"model": "BERT", "method": "BitFit", "trained": trained, "paper_M": 0.1}]
    assert [c["holds"] for c in trainable_parameters.claims(Rows(rows))] == [holds]
