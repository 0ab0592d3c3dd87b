"""The contract of every feature map and layer; a new one adds a row to MAPS or LAYERS and inherits the suite."""

import copy
import json
import math
import pickle

import pytest
import torch
from torch._inductor.utils import fresh_inductor_cache

from snnk import FEATURE_MAPS, URF, ArcCosine, PowerSeries, ProjectedURF, SNNKLinear
from snnk.maps import Directions, feature_map_from_config

D = 6
QUIET = {"on_error": "ignore"}
MAPS = {
    "urf-sin-range": lambda m=16, **k: URF(D, m, "sin", range=(-1.5, 1.5), **QUIET, **k),
    "urf-sin": lambda m=16, **k: URF(D, m, "sin", **QUIET, **k),
    "urf-cos-chi": lambda m=16, **k: URF(D, m, "cos", projection="orthogonal_chi", **QUIET, **k),
    "urf-gelu": lambda m=16, **k: URF(D, m, "gelu", **QUIET, **k),
    "urf-relu-unit": lambda m=16, **k: URF(D, m, "relu", normalize="unit", **QUIET, **k),
    "urf-callable": lambda m=16, **k: URF(D, m, lambda z: z**2, range=(-1, 1), **QUIET, **k),
    "urf-cos-A": lambda m=16, **k: URF.paper(D, m, "cos", spectrum="series", rho="balanced", A="auto", **k),
    "paper-sin": lambda m=16, **k: URF.paper(D, m, "sin", **k),
    "paper-cos-A": lambda m=16, **k: URF.paper(D, m, "cos", A=-0.05, **k),
    "paper-tanh": lambda m=16, **k: URF.paper(D, m, "tanh", rho="balanced", x_norm=0.7, w_norm=0.7, **k),
    "paper-erf-block": lambda m=16, **k: URF.paper(D, m, "erf", rho="balanced", block_size=2, **k),
    "paper-sigmoid-antithetic": lambda m=16, **k: URF.paper(
        D, m, "sigmoid", antithetic=True, rho="balanced", projection="orthogonal_chi", **k
    ),
    "directions": lambda m=16, **k: Directions(D, m, "tanh", **k),
    "directions-unit": lambda m=16, **k: Directions(D, m, "gelu", normalize="unit", **k),
    "arccos0": lambda m=16, **k: ArcCosine(D, m, 0, **k),
    "arccos1": lambda m=16, **k: ArcCosine(D, m, 1, **k),
    "arccos1-iid": lambda m=16, **k: ArcCosine(D, m, 1, projection="iid", **k),
    "arccos2": lambda m=16, **k: ArcCosine(D, m, 2, **k),
    "arccos1-augment": lambda m=16, **k: ArcCosine(D, m, 1, augment=True, **k),
    "arccos1-dim": lambda m=16, **k: ArcCosine(D, m, 1, normalize="dim", **k),
    "power-tanh": lambda m=16, **k: PowerSeries(D, m, "tanh", **k),
    "power-own": lambda m=16, **k: PowerSeries(D, m, coefficients=[0.3, 1.0, 0.0, 0.5], **k),
    "projected-gelu": lambda m=16, **k: ProjectedURF(D, m, "gelu", **QUIET, **k),
    "random-relu": lambda m=16, **k: FEATURE_MAPS["random-relu"](D, m, **k),
    "random-fourier": lambda m=16, **k: FEATURE_MAPS["random-fourier"](D, m, **k),
    "projected-tanh-iid": lambda m=16, **k: ProjectedURF(D, m, "tanh", projection="iid", **QUIET, **k),
}
LAYERS = {
    f"layer-{name}": lambda m=16, name=name, **k: SNNKLinear(D, 5, m, MAPS[name](m, **k), **k)
    for name in ("urf-gelu", "arccos1", "power-tanh", "projected-gelu")
}
UNNAMED = ("urf-callable",)  # a file cannot name the user's own function
MODULES = {**MAPS, **LAYERS}
every_map = pytest.mark.parametrize("make", MAPS.values(), ids=MAPS)
WITH_PSI = {name: make for name, make in MAPS.items() if make().has_psi}
every_estimator = pytest.mark.parametrize("make", WITH_PSI.values(), ids=WITH_PSI)
every_module = pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)


@pytest.fixture
def pairs():
    """x (7, D), w (5, D), b (5,), of norms 0.5 to 1, in float64."""
    g = torch.Generator().manual_seed(11)
    x, w = (torch.randn(n, D, generator=g, dtype=torch.float64) for n in (7, 5))
    x = x / x.norm(dim=1, keepdim=True) * torch.linspace(0.5, 0.9, 7)[:, None]
    w = w / w.norm(dim=1, keepdim=True) * torch.linspace(0.6, 0.8, 5)[:, None]
    return x, w, torch.linspace(-0.4, 0.4, 5, dtype=torch.float64)


@every_module
def test_any_leading_shape(make, pairs):
    module = make(dtype=torch.float64)
    x = pairs[0]
    full = module(x)
    assert full.shape[0] == 7 and full.dtype == torch.float64
    assert torch.allclose(module(x[0]), full[0])
    assert torch.allclose(module(x[:6].reshape(2, 3, D)), full[:6].reshape(2, 3, -1))
    assert module(x[:0]).shape == (0, full.shape[1])


def test_who_has_a_psi(pairs):
    x, w, b = pairs
    assert set(MAPS) - set(WITH_PSI) == {"directions", "directions-unit"}
    for name in set(MAPS) - set(WITH_PSI):
        fm = MAPS[name](dtype=torch.float64)
        for call in (lambda fm=fm: fm.psi(w, b), lambda fm=fm: fm.exact(x, w, b)):
            with pytest.raises(TypeError, match="Directions has no psi: train the matrix"):
                call()


@every_estimator
def test_psi_shape_and_estimate(make, pairs):
    x, w, b = pairs
    fm = make(dtype=torch.float64)
    assert fm.phi(x).shape == (7, 16) and fm.psi(w, b).shape == (5, 16)
    assert fm.exact(x, w, b).shape == (7, 5)
    assert torch.allclose(fm.psi(w), fm.psi(w, torch.zeros(5)))


@pytest.mark.parametrize("name", [n for n in MODULES if n != "arccos0"])
def test_gradients(name, pairs):
    module = MODULES[name](dtype=torch.float64)
    x = pairs[0][:2].clone().requires_grad_()
    assert torch.autograd.gradcheck(module, (x,), atol=1e-6)


@every_map
def test_nothing_trains_in_a_map(make):
    assert not list(make().parameters())


@every_module
def test_state_dict_carries_the_projection(make, pairs):
    """A perturbed projection must come back from the file, not from the seed."""
    source, target = make(seed=1), make(seed=2)
    x = pairs[0].float()
    with torch.no_grad():
        for tensor in source.state_dict().values():
            if tensor.is_floating_point():
                tensor.mul_(1.01)
    assert not torch.allclose(source(x), target(x))
    target.load_state_dict(source.state_dict(), strict=True)
    assert torch.equal(source(x), target(x))
    state = source.state_dict()
    state.pop(next(key for key in state if key.endswith("projection")))
    with pytest.raises(RuntimeError, match="projection"):
        target.load_state_dict(state)


@every_map
def test_jacobian(make, pairs):
    fm, x = make(dtype=torch.float64), pairs[0]
    left = torch.randn(7, 4, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = left @ torch.func.vmap(torch.func.jacrev(fm))(x)
    assert torch.allclose(fm.times_jacobian(left, x), expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("name", [n for n in MAPS if n not in UNNAMED])
def test_configurations_are_json_and_come_back(name, pairs):
    fm, x = MAPS[name](seed=3), pairs[0].float()
    config = json.loads(json.dumps(fm.to_config()))
    other = feature_map_from_config(config, tuple(fm.projection.shape))
    assert type(other) is type(fm) and other.to_config() == fm.to_config()
    assert not any(buffer.any() for buffer in other.buffers())
    other.load_state_dict(fm.state_dict())
    assert torch.equal(other(x), fm(x)) and repr(other) == repr(fm)
    other.reset_parameters()  # from the seed, as at first
    assert all(torch.equal(value, fm.state_dict()[key]) for key, value in other.state_dict().items())


@every_module
def test_seeds_and_global_state(make):
    before = torch.random.get_rng_state()
    a, b, c = make(seed=5), make(seed=5), make(seed=6)
    assert torch.equal(before, torch.random.get_rng_state())
    for key, value in a.state_dict().items():
        assert torch.equal(value, b.state_dict()[key])
    assert any(not torch.equal(value, c.state_dict()[key]) for key, value in a.state_dict().items())


@every_module
def test_dtype_moves(make, pairs):
    x = pairs[0]
    reference = make(dtype=torch.float64)(x)
    assert torch.allclose(make()(x.float()).double(), reference, atol=1e-4, rtol=1e-4)
    assert torch.allclose(make().double()(x), reference, atol=1e-4, rtol=1e-4)
    for low in (make().bfloat16()(x.bfloat16()), make(dtype=torch.bfloat16)(x.bfloat16())):
        assert low.dtype == torch.bfloat16 and torch.isfinite(low).all()


@every_module
def test_autocast(make, pairs):
    module, x = make(), pairs[0].float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = module(x)
    assert torch.isfinite(y).all()
    error = (y.double() - module(x).double()).abs()
    assert error.median() <= 0.05 * module(x).abs().max()


@every_module
def test_deepcopy_pickle_and_meta_device(make, pairs, request):
    x, module = pairs[0].float(), make(seed=3)
    assert torch.equal(copy.deepcopy(module)(x), module(x))
    if "callable" not in request.node.name:  # a lambda of the user's
        assert torch.equal(pickle.loads(pickle.dumps(module))(x), module(x))
    meta = make(seed=3, device="meta")
    assert all(t.is_meta for t in meta.state_dict().values())
    meta.to_empty(device="cpu").reset_parameters()
    assert torch.equal(meta(x), module(x))
    with torch.device("meta"):  # how transformers builds models
        assert all(t.is_meta for t in make(seed=3).state_dict().values())


@every_module
def test_compiles_without_graph_breaks(make, pairs):
    module, x = make(), pairs[0].float()
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(x), module(x), atol=1e-5)


@pytest.mark.once
def test_compiles_with_inductor(pairs):
    """In a cache of its own: torch's does not tell code for one ATEN_CPU_CAPABILITY from code for another."""
    torch._dynamo.reset()
    layer, x = SNNKLinear(D, 5, 16, "gelu"), pairs[0].float()
    with fresh_inductor_cache():
        assert torch.allclose(torch.compile(layer, fullgraph=True)(x), layer(x), atol=1e-5)


UNBIASED = [name for name in MAPS if MAPS[name]().unbiased]


@pytest.mark.once
def test_who_claims_to_be_unbiased():
    """The default trades a little bias for variance; the paper's, chi, arc-cosine and power maps do not."""
    assert set(WITH_PSI) - set(UNBIASED) == {
        "urf-sin-range",
        "urf-sin",  # rows of length sqrt(d)
        "urf-gelu",  # fitted series
        "urf-relu-unit",
        "urf-callable",
        "projected-gelu",
        "projected-tanh-iid",
        "random-fourier",
    }


@pytest.mark.parametrize("name", UNBIASED)
@pytest.mark.once
def test_unbiased_within_five_standard_errors(name, pairs):
    x, w, b = pairs
    draws = 600  # of 20 projections, in blocks of 6
    estimates = []
    for seed in range(draws):
        fm = MAPS[name](40, seed=seed, dtype=torch.float64)
        estimates.append(fm.phi(x) @ fm.psi(w, b).T)
    values = torch.stack(estimates)
    error = values.std(0) / math.sqrt(draws)
    exact = fm.exact(x, w, b)
    assert ((values.mean(0) - exact).abs() <= 5 * error).all()
    assert error.max() < 0.2 * exact.abs().max() + 0.1  # large error bars would prove nothing


@pytest.mark.parametrize("name", ["urf-sin", "urf-cos-chi", "paper-sin", "arccos1", "arccos0", "power-tanh"])
@pytest.mark.once
def test_error_falls_like_one_over_sqrt_m(name, pairs):
    """Sixteen times the features: a quarter of the error."""
    x, w, b = pairs

    def error(m):
        fms = [MAPS[name](m, seed=s, dtype=torch.float64) for s in range(120)]
        return (
            torch.stack([(fm.phi(x) @ fm.psi(w, b).T - fm.exact(x, w, b)).square().mean() for fm in fms]).mean().sqrt()
        )

    small, large = 24, 24 * 16
    slope = math.log(error(large) / error(small)) / math.log(large / small)
    assert -0.65 < slope < -0.35


@every_module
@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (torch.ones(3, D + 1), ValueError, rf"must end in dimension {D}; got shape \(3, {D + 1}\)"),
        (torch.ones(3, D, dtype=torch.int64), TypeError, r"floating tensor; got torch.int64.*\.float\(\)"),
        (torch.tensor(1.0), ValueError, "must end in dimension"),
        ([1.0] * D, TypeError, "must be a torch.Tensor; got list"),
    ],
)
@pytest.mark.once
def test_bad_inputs(make, x, error, message):
    with pytest.raises(error, match=message):
        make()(x)


@every_estimator
@pytest.mark.once
def test_bad_weights(make):
    fm = make()
    bad = torch.ones(3, D)
    bad[1, 2] = math.nan
    with pytest.raises(ValueError, match="weight has 1 NaN or infinite values of 18"):
        fm.psi(bad)
    with pytest.raises(ValueError, match="weight must end in dimension"):
        fm.psi(torch.ones(3, D + 1))
    with pytest.raises(ValueError, match=r"weight must be \(out_features"):
        fm.psi(torch.ones(D))
    with pytest.raises(ValueError, match="bias must end in dimension 3"):
        fm.psi(torch.ones(3, D), torch.ones(4))


@pytest.mark.parametrize(
    "name", [n for n in MAPS if not n.startswith(("arccos", "power-own", "random-relu", "directions"))]
)
@pytest.mark.parametrize(("m", "message"), [(0, "positive integer; got 0"), (7, "must be even.*got 7. Use 6 or 8")])
@pytest.mark.once
def test_bad_feature_counts(name, m, message):
    with pytest.raises(ValueError, match=message):
        MAPS[name](m)
