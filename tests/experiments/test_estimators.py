"""Estimators at equal size."""

from dataclasses import replace

import pytest
import torch

from snnk import URF, ProjectedURF
from snnk.experiments import estimators
from snnk.experiments.lab.records import Results

from helpers.experiments import Rows


def test_claims_of_estimators(tmp_path):
    def row(name, squared, relative=0.1, setting="d = 64, positive", m=128):
        sizes = {"setting": setting, "estimator": name, "num_features": m}
        return {**sizes, "squared_error": squared, "relative_error": relative}

    def holds(*rows):
        return [claim["holds"] for claim in estimators.claims(Rows(rows))]

    paper, ours, calibrated = row("paper", 2.0), row("URF", 0.0399), row("ProjectedURF", 0.0002)
    bound, below = estimators.claims(Rows([paper, ours, calibrated]))
    assert bound["holds"] and bound["ours"] == "0.02: 0.04 against 2" and "at most 0.02 of the" in bound["paper"]
    assert below["holds"] and below["ours"] == "ProjectedURF 0.005 of its squared error"
    assert holds(paper, row("URF", 0.0401)) == [False]  # 0.02 of 2 is 0.04
    assert holds(paper, ours, calibrated, row("URF calibrated", 0.0400)) == [True, False]
    assert holds(paper, row("URF", 0.01, m=256)) == [False]  # with more features
    assert holds(paper, row("URF", None)) == holds(paper) == holds(ours) == []
    assert holds(row("paper", 1.0, setting="of old"), row("URF", 0.5, setting="of old")) == []
    far = estimators.POINTWISE
    for relative, true in ((0.0549, True), (0.0551, False)):
        assert holds(row("paper", 1.0, 0.13, far), row("URF", 0.9, relative, far)) == [true]
    assert set(estimators.BOUNDS) | {far} == {setting[0] for setting in estimators.Config().settings}
    figure = estimators.plot(Rows([paper, ours, calibrated, row("paper", 1.0, setting="d = 64, norms 1 and 1")]))
    figure.savefig(tmp_path / "estimators.png")
    heights = {line.get_label(): list(line.get_ydata()) for line in figure.axes[0].lines}
    assert heights == {"paper": [1.0, 1.0], "URF": [0.0399 / 2], "URF calibrated": [], "ProjectedURF": [1e-4]}


def test_estimators_measure_what_the_maps_do(tmp_path, monkeypatch):
    settings = tuple(s for s in estimators.Config().settings if s[0] in ("d = 64, positive", "d = 64, norms 2 and 0.5"))
    config = replace(estimators.QUICK, settings=settings, draws=2, pairs=4, seen=64, bias=0.3, seed=3)
    seen = []
    for kind in (URF, ProjectedURF):

        def watched(self, x, w, b, own=kind.calibrate):
            seen.append((x, w, b))
            return own(self, x, w, b)

        monkeypatch.setattr(kind, "calibrate", watched)
    rows = list(estimators.run(config, Results(tmp_path / "rows.json", config)))
    assert len(rows) == estimators.total(config) == 8 and {row["num_features"] for row in rows} == {128}
    for at, norms in ((0, (0.0, 0.0)), (4, (2.0, 0.5))):
        generator, off, exact = torch.Generator().manual_seed(3), [], []

        def draw(n, norm, generator=generator):
            if not norm:
                return torch.rand(n, 64, generator=generator) / 8
            return norm * torch.nn.functional.normalize(torch.randn(n, 64, generator=generator), dim=1)

        for seed in (4, 5):
            (x, w), others = [draw(4, norm) for norm in norms], [draw(64, norm) for norm in norms]
            # what maps were calibrated on: other points, drawn the same way, and the same for both kinds of map
            own = [found for found in seen if torch.allclose(found[0], others[0])]
            assert len(own) == 2 and all(
                torch.allclose(found[1], others[1]) and (found[2] == 0.3).all() for found in own
            )
            fm = URF.paper(64, 128, "sin", seed=seed)
            exact.append(torch.sin(x @ w.T + 0.3))
            off.append(fm.phi(x) @ fm.psi(w, torch.full((4,), 0.3)).T - exact[-1])
        squared = torch.stack(off).double().square().mean((1, 2))
        assert rows[at]["squared_error"] == pytest.approx(float(squared.mean()), rel=1e-3)
        assert rows[at]["standard_error"] == pytest.approx(float(squared.std()) / 2**0.5, rel=1e-3)
        relative = float((torch.stack(off) / torch.stack(exact)).abs().mean())
        assert rows[at]["relative_error"] == pytest.approx(relative, rel=1e-3)
        assert all(row["squared_error"] < rows[at]["squared_error"] for row in rows[at + 1 : at + 4])
