"""fit_directions_ against numpy: principal directions of the inputs, and of the gradients behind them."""

import copy

import numpy as np
import pytest
import torch

from snnk import SNNKAdapter
from snnk.maps import Directions
from snnk.maps.base import NORMALIZERS
from snnk.peft.directions import fit_directions_


class Two(torch.nn.Module):
    """Two frozen linear layers with an adapter behind each, and a loss."""

    def __init__(self, normalize=None, **options):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.weights = [torch.randn(8, 8, generator=generator, dtype=torch.float64) for _ in range(2)]
        maps = [Directions(8, 3, lambda z: z, normalize=normalize, dtype=torch.float64) for _ in range(2)]
        adapters = [SNNKAdapter(8, 3, fm, dtype=torch.float64, **options) for fm in maps]
        self.adapters = torch.nn.ModuleList(adapters)
        self.seen, self.reading = [], False

    def forward(self, x, attention_mask=None, labels=None):
        self.seen = []
        for weight, adapter in zip(self.weights, self.adapters, strict=True):
            x = torch.tanh(x @ weight)
            if x.requires_grad or (labels is not None and self.reading):
                x.requires_grad_()
                x.retain_grad()
            self.seen.append(x)
            x = adapter(x)
        loss = None if labels is None else ((x**2 - labels[:, None]) ** 2 * torch.arange(1, 9)).sum()
        return type("Output", (), {"loss": loss})()


@pytest.fixture
def batches():
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(4, 6, 10, 8, generator=generator, dtype=torch.float64)
    mask = torch.ones(4, 6, 10, dtype=torch.long)
    mask[:, ::2, 7:] = 0
    return [{"x": a, "attention_mask": b} for a, b in zip(x, mask, strict=True)]


def read(net, batches, labels=None):
    """The inputs of both adapters at real tokens, and the gradient behind them: lists of (n, 8)."""
    net.reading, x, g = True, [[], []], [[], []]
    for batch in batches:
        out = net(**batch, labels=labels)
        if labels is not None:
            out.loss.backward()
        keep = batch["attention_mask"].bool()
        for i, seen in enumerate(net.seen):
            x[i].append(seen.detach()[keep])
            g[i].append(seen.grad[keep] if labels is not None else None)
    return [torch.cat(a) for a in x], [torch.cat(a) if labels is not None else None for a in g]


@pytest.mark.parametrize("normalize", NORMALIZERS)
def test_principal_directions_of_real_tokens(batches, normalize):
    """Features are centred, uncorrelated, of variance one, and span what numpy's eigenvectors span."""
    net = Two(normalize).train()
    net.adapters[1].eval()
    fit_directions_(net, iter(batches))
    assert net.training and net.adapters[0].training and not net.adapters[1].training  # each as it was
    assert not any("delta" in vars(a) for a in net.adapters)
    for adapter, x in zip(net.adapters, read(net, batches)[0], strict=True):
        phi = adapter.feature_map(x)
        assert torch.allclose(phi.mean(0), torch.zeros(3, dtype=torch.float64), atol=1e-10)
        assert torch.allclose(phi.T @ phi / len(phi), torch.eye(3, dtype=torch.float64), atol=1e-9)
        top = np.linalg.eigh(np.cov(NORMALIZERS[normalize](x).numpy().T))[1][:, -3:]
        rows = adapter.feature_map.projection[:, :-1].numpy()
        assert np.allclose(rows @ top @ top.T, rows)


def test_directions_of_the_gradient(batches):
    """They span the right singular vectors of the covariance of gradient and input, the most telling first."""
    net, labels = Two(), torch.linspace(-1, 1, 10, dtype=torch.float64)
    net.adapters[0].gate.grad = torch.ones(8, dtype=torch.float64)
    with torch.no_grad():
        fit_directions_(net, [{**b, "labels": labels} for b in batches], directions="gradient")
    grads = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    assert list(grads) == ["adapters.0.gate"] and bool((grads["adapters.0.gate"] == 1).all())  # the caller's
    for adapter, x, g in zip(net.adapters, *read(Two(), batches, labels), strict=True):
        cross = np.cov(g.numpy().T, x.numpy().T)[:8, 8:]
        rows = adapter.feature_map.projection[:, :-1].numpy()
        rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        assert np.allclose(np.abs(np.diag(rows @ np.linalg.svd(cross)[2][:3].T)), 1, atol=1e-6)


def test_no_batch_is_asked_for_that_is_not_used(batches):
    def made():
        yield from batches
        raise RuntimeError("one batch too many")

    fit_directions_(Two(), made(), max_batches=len(batches))
    some, two = Two(), Two()
    fit_directions_(some, batches, max_batches=2)
    fit_directions_(two, batches[:2])
    assert torch.equal(some.adapters[0].feature_map.projection, two.adapters[0].feature_map.projection)


def test_one_token_more_than_features_is_enough(batches):
    tokens = batches[0]["x"][0]
    with pytest.raises(ValueError, match=r"more tokens than features are needed; got adapters\.0 \(3\)"):
        fit_directions_(Two(), [{"x": tokens[:3]}])
    fit_directions_(Two(), [{"x": tokens[:4]}])


def test_a_trained_projection_can_start_from_directions(batches):
    net = Two(train_directions=True, gate=False)
    before = net.adapters[0].feature_map.projection.clone()
    fit_directions_(net, batches)
    assert not torch.allclose(net.adapters[0].feature_map.projection, before)
    assert net.adapters[0].feature_map.projection.requires_grad


def test_bad_calibration(batches):
    with pytest.raises(ValueError, match="no adapter of the model has features along directions"):
        fit_directions_(SNNKAdapter(8, 6), batches)
    with pytest.raises(ValueError, match="did you mean 'pca'"):
        fit_directions_(Two(), batches, directions="pcaa")
    with pytest.raises(ValueError, match="are there batches"):
        fit_directions_(Two(), [])
    with pytest.raises(ValueError, match=r"more tokens than features are needed; got adapters\.0 \(2\)"):
        fit_directions_(Two(), [{"x": batches[0]["x"][0, :2]}])
    trained = Two(init_weights=False)
    with pytest.raises(ValueError, match=r"wrong for the trained matrix of adapters\.0, adapters\.1"):
        fit_directions_(trained, batches)
    with pytest.raises(ValueError, match="more features than directions"):
        fit_directions_(SNNKAdapter(4, 6, Directions(4, 6)), batches)
    with pytest.raises(TypeError, match="batches must be a list of dicts of the model's inputs; got dict"):
        fit_directions_(Two(), batches[0])
    with pytest.raises(TypeError, match="a batch must be a dict of the model's inputs; got tuple"):
        fit_directions_(Two(), [(batches[0]["x"],)])
    with pytest.raises(ValueError, match="need a loss; the batches have x, attention_mask: put labels"):
        fit_directions_(Two(), batches, directions="gradient")
    with pytest.raises(ValueError, match=r"gradients of adapters\.0 are not all finite"):
        fit_directions_(Two(), [{"x": batches[0]["x"] * float("nan")}])
    frozen = Two().requires_grad_(False)
    before = copy.deepcopy(frozen.state_dict())
    with pytest.raises(ValueError, match="this one is frozen"):
        fit_directions_(frozen, [{**batches[0], "labels": torch.zeros(10)}], directions="gradient")
    assert all(torch.equal(v, before[k]) for k, v in frozen.state_dict().items())
