"""SNNKAdapter: Y = v * (phi(X) A^T) + X."""

import copy

import pytest
import torch

from snnk import FEATURE_MAPS, ArcCosine, SNNKAdapter
from snnk.maps import Directions

X = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def adapter(feature_map="relu", num_features=6, trained=True, **options):
    return SNNKAdapter(8, num_features, feature_map, init_weights=not trained, dtype=torch.float64, **options)


@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
@pytest.mark.parametrize("gate", [True, False])
def test_starts_as_the_identity(feature_map, gate):
    a = adapter(feature_map, trained=False, gate=gate, bias=True)
    assert torch.equal(a(X), X)
    a.delta(X).sum().backward()
    assert (a.gate if gate else a.weight).grad.abs().sum() > 0  # and leaves it at the first step


@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_oracle(gate, bias):
    a = adapter(gate=gate, bias=bias)
    v = a.gate if gate else torch.ones(8)
    b = a.bias if bias else torch.zeros(8)
    for i in range(3):
        for j in range(5):
            x = X[i, j]
            phi = torch.relu(a.feature_map.projection @ x)
            assert torch.allclose(a(X)[i, j], v * (a.weight @ phi) + b + x, atol=1e-10)
    assert torch.allclose(a.delta(X), a(X) - X, atol=1e-10)
    assert not torch.allclose(a(X), X)


def test_parameter_counts():
    def count(a):
        return sum(p.numel() for p in a.parameters())

    assert count(SNNKAdapter(768, 16)) == 13_056
    assert count(adapter(gate=False)) == 8 * 6 and count(adapter(bias=True)) == 8 * 6 + 16
    assert count(adapter(train_directions=True)) == 8 * 6 + 8 + 6 * 8
    assert "dim=8, num_features=6, trainable=56" in repr(adapter())


def test_the_projection_is_trained_only_if_asked():
    frozen, trained = adapter(), adapter(train_directions=True)
    assert torch.equal(frozen.feature_map.projection, trained.feature_map.projection)
    trained.load_state_dict(frozen.state_dict())
    assert torch.equal(frozen(X), trained(X))
    assert "feature_map.projection" in dict(frozen.named_buffers())
    assert frozen.state_dict().keys() == trained.state_dict().keys()
    trained(X).square().sum().backward()
    assert trained.feature_map.projection.grad.abs().sum() > 0


def test_bottleneck():
    """With Directions, trained, a bias and no gate: two linear layers with an activation between them."""
    a = SNNKAdapter(8, 4, Directions(8, 4, "gelu"), gate=False, bias=True, train_directions=True, init_weights=False)
    down, up = torch.nn.Linear(8, 4), torch.nn.Linear(4, 8)
    with torch.no_grad():
        down.weight.copy_(a.feature_map.projection[:, :-1])
        down.bias.copy_(a.feature_map.projection[:, -1])
        up.weight.copy_(a.weight)
        up.bias.copy_(a.bias)
    x = X.float()
    assert torch.allclose(a(x), x + up(torch.nn.functional.gelu(down(x))), atol=1e-6)
    assert sum(p.numel() for p in a.parameters()) == sum(p.numel() for m in (down, up) for p in m.parameters())


def test_seeds_and_the_global_state():
    state = torch.random.get_rng_state()
    same, other = adapter(seed=3, trained=False), adapter(seed=4, trained=False)
    assert torch.equal(state, torch.random.get_rng_state())
    assert torch.equal(same.weight, adapter(seed=3, trained=False).weight)
    assert not torch.equal(same.weight, other.weight)
    assert not torch.equal(same.feature_map.projection, other.feature_map.projection)
    before = copy.deepcopy(same.state_dict())
    with torch.no_grad():
        for tensor in same.state_dict().values():
            tensor.add_(1)
    same.reset_parameters()
    assert all(torch.equal(t, before[n]) for n, t in same.state_dict().items())


def test_what_is_drawn_for_a():
    """Independent entries of variance 1/m, from a stream that is not the projection's."""
    m = 64
    a = SNNKAdapter(256, m, seed=3)
    squares = m * a.weight.detach().square()  # mean 1, variance 2
    assert abs(float(squares.mean()) - 1) <= 5 * (2 / squares.numel()) ** 0.5
    # of one stream, entries of A and of independent rows would be the same numbers here
    small = SNNKAdapter(8, 6, "relu", projection="iid", seed=3)
    pair = torch.stack([small.weight.detach()[:6].flatten(), small.feature_map.projection[:, :6].flatten()])
    assert abs(float(torch.corrcoef(pair)[0, 1])) <= 5 / 36**0.5


def test_a_bias_alone_is_not_the_identity():
    a = adapter(trained=False, bias=True)
    assert a.starts_as_identity
    torch.nn.init.ones_(a.bias)
    assert not a.starts_as_identity


def test_random_weights_are_drawn_from_the_global_state():
    """Two adapters of one seed have one feature map, and differ in all that is trained."""
    one, two = adapter(seed=3, bias=True), adapter(seed=3, bias=True)
    assert torch.equal(one.feature_map.projection, two.feature_map.projection)
    assert not any(torch.equal(p, q) for p, q in zip(one.parameters(), two.parameters(), strict=True))
    torch.manual_seed(0)
    again = adapter(seed=4, bias=True)
    torch.manual_seed(0)
    assert all(map(torch.equal, again.parameters(), adapter(seed=3, bias=True).parameters()))


def test_state_dict_with_a_perturbed_projection():
    one, two = adapter(seed=0), adapter(seed=1)
    one.feature_map.projection.add_(0.1)
    two.load_state_dict(one.state_dict())
    assert torch.equal(one(X), two(X))
    with pytest.raises(RuntimeError, match="gate"):
        adapter(gate=False).load_state_dict(one.state_dict())


def test_dtypes_devices_and_shapes():
    a = adapter()
    assert torch.allclose(a(X.flatten(0, 1)).unflatten(0, (3, 5)), a(X))
    assert a(X[0, 0]).shape == (8,)
    narrow = copy.deepcopy(a).float()
    narrow.weight.data, narrow.gate.data = narrow.weight.data.bfloat16(), narrow.gate.data.bfloat16()
    y = narrow.delta(X.float())  # features in float32, what is trained in bfloat16
    assert y.dtype == torch.bfloat16 and torch.allclose(y.double(), a.delta(X), rtol=0.1, atol=0.1)
    half = adapter().bfloat16()
    assert torch.isfinite(half(X.bfloat16())).all()
    meta = SNNKAdapter(8, 4, device="meta")
    assert all(t.is_meta for t in meta.state_dict().values())
    assert torch.autograd.gradcheck(a, X[0].clone().requires_grad_())


def test_given_feature_maps_and_options():
    fm = ArcCosine(8, 4, order=2)
    assert SNNKAdapter(8, 4, fm).feature_map is fm
    assert SNNKAdapter(8, 4, "relu", normalize="unit").feature_map.normalize == "unit"


@pytest.mark.once
def test_bad_input():
    with pytest.raises(ValueError, match="dim must be a positive integer; got 0"):
        SNNKAdapter(0)
    with pytest.raises(ValueError, match="num_features must be a positive integer"):
        SNNKAdapter(8, 0)
    with pytest.raises(ValueError, match="did you mean 'relu'"):
        SNNKAdapter(8, 4, "reluu")
    with pytest.raises(ValueError, match="even"):
        SNNKAdapter(8, 5, "cos")
    with pytest.raises(ValueError, match="8 -> 4; the layer needs 8 -> 6"):
        SNNKAdapter(8, 6, ArcCosine(8, 4))
    with pytest.raises(ValueError, match="must end in dimension 8"):
        adapter()(torch.ones(2, 7, dtype=torch.float64))


def test_random_weights_are_independent_of_the_map():
    """There are as many numbers as in the map, in the same places: from one stream they would be the map's own."""
    drawn = SNNKAdapter(34, 32, ArcCosine(34, 32, projection="iid", seed=3), seed=3)
    a, g = drawn.weight.detach()[:32].flatten(), drawn.feature_map.projection[:, :32].flatten()
    assert abs(float(torch.corrcoef(torch.stack([a, g]))[0, 1])) <= 5 / 1024**0.5
