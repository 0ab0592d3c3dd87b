"""Claims of the pointwise figure."""

from snnk.experiments import pointwise

from helpers.experiments import Rows


def test_claims_of_pointwise():
    def row(layer, p, mean, std):
        return {"layer": layer, "estimator": "paper", "projections": p, "mean": mean, "std": std, "draws": 9}

    rows = [row("sine", 2, 0.7, 0.5), row("sine", 64, 0.19, 1e-9), row("sine", 128, 0.1, 1e-9)]
    rows += [row("arc-cosine", 64, 0.21, 1e-8), row("arc-cosine", 128, 0.1, 1e-9)]
    table = pointwise.claims(Rows(rows, dim=2000))
    assert [c["holds"] for c in table] == [True, False, False, True]
    assert "arc-cosine" in table[2]["paper"] and table[2]["ours"].endswith("0.210; below 0.2 from p = 128")
    assert table[1]["ours"].startswith("spread over 9 draws 0.5 at p = 2") and table[1]["tolerance"] == "below 1e-06"
    assert pointwise.claims(Rows([], dim=2000)) == []
