"""Bundled as a module and as a file."""

import copy
import dataclasses
import json
import math
import sys

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from scipy import stats
from torch import nn

from snnk import URF, ArcCosine, PowerSeries, ProjectedURF
from snnk.maps.affine import Affine
from snnk.maps.projections import PROJECTIONS
from snnk.maps.sampled import Sampled
from snnk.maps.series import Series
from snnk.nn.bundling import Bundled, BundleReport, bundle

from helpers.bundles import EXACT, QUIET, mlp, seeded


def every_map():
    """A bundle with every class that a file may name, each number in it disturbed."""
    maps = [
        ArcCosine(6, 8, 2, augment=True, normalize="dim", projection="orthogonal_chi", seed=3),
        URF.paper(8, 10, "gelu", range=(-2, 3), spectrum="series", A="auto"),
        Affine(10, 7),
        PowerSeries(7, 12, coefficients=[0.1, 1.0, 0.0, -0.3]),
        ProjectedURF(12, 6, nn.LeakyReLU(), bandwidth=0.5, x_norm=2.0, on_error="warn"),
        URF.paper(6, 12, "tanh", block_size=4, seed=5),
    ]
    report = BundleReport(("0: x",), 5, 6, (0.1, None), None, "fitted", 0.5, 0.25, 3)
    bundled = Bundled(maps, torch.ones(2, 12), torch.ones(2), report=report)
    with torch.no_grad():
        for i, tensor in enumerate(t for t in bundled.state_dict().values() if t.is_floating_point()):
            tensor.add_(seeded(*tensor.shape, seed=i, scale=0.01))
    return bundled


def test_save_and_load(tmp_path):
    bundled, x = every_map(), seeded(5, 6).float()
    bundled.save(tmp_path / "a.safetensors")
    loaded = Bundled.load(str(tmp_path / "a.safetensors"))
    assert torch.equal(loaded(x), bundled(x)) and torch.equal(loaded.phi(x), bundled.phi(x))
    assert repr(loaded) == repr(bundled) and loaded.report == bundled.report
    assert [p.requires_grad for p in loaded.parameters()] == [True, True]
    assert loaded.maps[4].bandwidth == 0.5 and loaded.maps[4].norms == (2.0, 1.0) and loaded.maps[4].on_error == "warn"
    assert (loaded.maps[0].normalize, loaded.maps[0].seed, loaded.maps[0].kind.name) == ("dim", 3, "orthogonal_chi")
    weight = seeded(3, 8)
    assert torch.equal(loaded.maps[1].psi(weight), bundled.maps[1].psi(weight))
    assert loaded.maps[5].variant.spectrum == Sampled(block_size=4) and loaded.maps[5].limit == math.inf
    loaded.maps[5].reset_parameters()
    paper = URF.paper(6, 12, "tanh", block_size=4, seed=5)
    assert all(torch.equal(value, paper.get_buffer(key)) for key, value in loaded.maps[5].named_buffers())
    loaded.maps[0].reset_parameters()  # from the seed, by the projection of that name
    assert torch.equal(
        loaded.maps[0].projection, ArcCosine(6, 8, 2, augment=True, projection="orthogonal_chi", seed=3).projection
    )
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]
    bundled.double().save(tmp_path / "a.safetensors")
    loaded = Bundled.load(tmp_path / "a.safetensors")
    assert all(torch.equal(value, loaded.state_dict()[key]) for key, value in bundled.state_dict().items())
    x = 0.1 * x.double()  # at x itself features reach 1e17, and products of tensors in other places of memory differ
    assert torch.allclose(loaded(x), bundled(x), **EXACT)


def test_save_and_load_what_bundle_makes(tmp_path, trained):
    net, x = trained
    for feature_map in ("projected", "urf"):
        bundled = bundle(net, num_features=32, feature_map=feature_map, calibrate=x, **QUIET)
        bundled.save(tmp_path / "b")
        loaded = Bundled.load(tmp_path / "b")
        assert torch.equal(loaded(x), bundled(x)) and loaded.report == bundled.report
        assert loaded.summary() == bundled.summary()
    bundle(net, num_features=np.arange(32, 34)[0], **QUIET).save(tmp_path / "c")  # JSON takes no numpy integer
    assert Bundled.load(tmp_path / "c").num_features == 32
    Bundled([], torch.ones(2, 3)).save(tmp_path / "c")
    assert Bundled.load(tmp_path / "c").bias is None


def own_series():
    omega, alpha, counts = np.array([1.0]), np.array([0.5]), np.array([4])
    return Series(omega, alpha, alpha, counts)


def own_projection(m, d, generator):
    return torch.randn(m, d, generator=generator)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: URF(4, 8, lambda z: z**2, **QUIET), "activation <lambda> of URF"),
        (lambda: ProjectedURF(4, 8, nn.LeakyReLU(0.3), **QUIET), "activation leaky_relu of ProjectedURF"),
        (lambda: ArcCosine(4, 8, projection=own_projection), "projection of ArcCosine"),
        (lambda: URF.paper(4, 8, "tanh", proposal=stats.laplace(scale=0.2)), "proposal of URF"),
        (lambda: URF.paper(4, 8, "sin", spectrum=own_series()), "spectrum of URF"),
        (lambda: type("Own", (ArcCosine,), {})(4, 8), "class of Own"),
        (lambda: type("Own", (ArcCosine,), {"_config": ArcCosine._config})(4, 8), "class of Own"),
        (lambda: type("ArcCosine", (ArcCosine,), {"_config": ArcCosine._config})(4, 8), "class of ArcCosine"),
    ],
)
def test_what_a_file_cannot_name_is_refused_but_has_a_state_dict(tmp_path, make, named):
    bundled, other = Bundled([make()], torch.ones(2, 8)), Bundled([make()], torch.zeros(2, 8))
    with pytest.raises(TypeError, match=rf"a file cannot name the {named}; save the state_dict\(\)"):
        bundled.save(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []
    bundled.maps[0].projection.mul_(1.1)
    other.load_state_dict(bundled.state_dict(), strict=True)
    assert torch.equal(other(torch.ones(3, 4)), bundled(torch.ones(3, 4)))


def rewritten(path, change=lambda tensors, config: None, **metadata):
    """The same file with its tensors or configuration changed."""
    with safe_open(path, framework="pt") as file:
        meta = file.metadata()
    tensors, config = load_file(path), json.loads(meta["config"])
    change(tensors, config)
    save_file(tensors, path, metadata={**meta, "config": json.dumps(config), **metadata})


def first(config):
    return config["maps"][0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, c: t.pop("maps.1.center"), r'Missing key\(s\).*"maps.1.center"'),
        (lambda t, c: t.update(stray=torch.ones(1)), r'Unexpected key\(s\).*"stray"'),
        (lambda t, c: t.pop("weight"), "'weight'"),
        (lambda t, c: t.update(weight=torch.ones(2, 5)), r"weight and bias must be \(out, 12\)"),
        (lambda t, c: t.update({"maps.1.rho": torch.ones(9)}), "size mismatch for maps.1.rho"),
        (lambda t, c: first(c).update({"class": "os.system"}), "unknown feature map 'os.system'"),
        (lambda t, c: first(c).update(projection="evil"), "unknown projection 'evil'"),
        (lambda t, c: first(c).update(num_features=10**12), r"6 -> 1000000000000 .*projection of shape \(8, 7\)"),
        (lambda t, c: first(c).update(in_features=-1), "in_features must be a positive integer; got -1"),
        (lambda t, c: c["maps"][3].update(coefficients=[1.0] * 10**5), r"degree 99999 does not fit"),
        (lambda t, c: c["maps"][1].update(activation="__import__"), "unknown activation"),
        (lambda t, c: c["maps"][5].update(block_size=0), "block_size must be a positive integer; got 0"),
        (lambda t, c: c["maps"][1].update(spectrum={}), "unexpected keyword argument 'spectrum'"),
        (lambda t, c: first(c).update(surprise=1), "surprise"),
        (lambda t, c: c["report"].update(surprise=1), "surprise"),
        (lambda t, c: c.update(maps=[1]), "int"),
    ],
)
def test_a_tampered_file_is_refused_by_name(tmp_path, change, message):
    path = tmp_path / "a.safetensors"
    every_map().save(path)
    rewritten(path, change)
    with pytest.raises(ValueError, match=rf"(?s)cannot load a bundle from .*a.safetensors: .*{message}"):
        Bundled.load(path)


def test_an_empty_projection_cannot_stand_for_a_large_one(tmp_path):
    """Zero rows of a million columns take no bytes in a file; nothing may be allocated for them."""
    path = tmp_path / "a"
    Bundled([ArcCosine(4, 8)], torch.ones(2, 8)).save(path)

    def change(tensors, config):
        tensors["maps.0.projection"] = torch.empty(0, 10**9)
        first(config).update(in_features=10**9)

    rewritten(path, change)
    with pytest.raises(ValueError, match="does not fit its projection"):
        Bundled.load(path)


def test_a_large_block_of_frequencies_takes_no_memory(tmp_path):
    """np.repeat would make 10^15 numbers of one frequency; from as many as the rows on, all blocks are the same."""
    bundled, x = Bundled([URF.paper(4, 8, "tanh", block_size=8)], torch.ones(2, 8)), torch.ones(3, 4)
    fm = bundled.maps[0]
    fm.variant = dataclasses.replace(fm.variant, spectrum=Sampled(block_size=10**15))
    bundled.save(tmp_path / "a")
    assert torch.equal(Bundled.load(tmp_path / "a")(x), bundled(x))


def test_without_safetensors(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    for call in (every_map().save, Bundled.load):
        with pytest.raises(ImportError, match=r"save and load need safetensors: .*pip install 'snnk\[tables\]'"):
            call(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_loading_draws_no_d_by_d_matrix(tmp_path, monkeypatch):
    """orthogonal rows take d x d numbers for one row, more than the file that asks for it may hold."""

    def fail(m, d, generator):
        raise AssertionError("drawn")

    bundled = Bundled([ArcCosine(6, 2, projection="orthogonal_chi")], torch.ones(2, 2))
    monkeypatch.setitem(PROJECTIONS, "orthogonal_chi", dataclasses.replace(PROJECTIONS["orthogonal_chi"], draw=fail))
    bundled.maps[0].kind = PROJECTIONS["orthogonal_chi"]
    bundled.save(tmp_path / "a")
    loaded = Bundled.load(tmp_path / "a")
    assert loaded.maps[0].kind is PROJECTIONS["orthogonal_chi"]
    assert torch.equal(loaded.maps[0].projection, bundled.maps[0].projection)


def test_the_limit_of_long_inputs_comes_back(tmp_path):
    """It depends on whether a projection was asked for, which a file cannot tell."""
    for fm in (URF(3, 8, "tanh", **QUIET), URF(3, 8, "tanh", projection="orthogonal_chi", **QUIET)):
        bundled, x = Bundled([fm], torch.ones(2, 8)), 50 * torch.ones(3)
        bundled.save(tmp_path / "a")
        assert torch.equal(Bundled.load(tmp_path / "a")(x), bundled(x))


def test_files_that_are_none(tmp_path):
    path = tmp_path / "a.safetensors"
    with pytest.raises(FileNotFoundError, match=r"a\.safetensors"):
        Bundled.load(path)
    every_map().save(path)
    rewritten(path, format="pt")
    with pytest.raises(ValueError, match=r"its format is 'pt', not 'snnk\.Bundled/1'"):
        Bundled.load(path)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match="cannot load a bundle from"):
        Bundled.load(path)
    kept = path.read_bytes()
    with pytest.raises(FileNotFoundError):
        every_map().save(tmp_path / "none" / "a")
    assert path.read_bytes() == kept and len(list(tmp_path.iterdir())) == 1


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path, written = tmp_path / "a", []
    monkeypatch.setattr(
        "safetensors.torch.save_file", lambda t, n, metadata: written.append(n) or save_file(t, n, metadata)
    )
    every_map().save(path)
    kept = path.read_bytes()
    assert len(written) == 1 and written[0] != str(path)

    def fail(tensors, name, metadata):
        with open(name, "wb") as file:
            file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("safetensors.torch.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        every_map().save(path)
    assert path.read_bytes() == kept and list(tmp_path.iterdir()) == [path]


def test_state_dict_is_strict_and_carries_the_projections(trained):
    net, x = trained
    source, target = (bundle(net, num_features=32, calibrate=x, seed=s, **QUIET) for s in (0, 1))
    with torch.no_grad():
        source.maps[1].projection.mul_(1.01)
    assert not torch.allclose(source(x), target(x))
    target.load_state_dict(source.state_dict())
    assert torch.equal(source(x), target(x))
    state = source.state_dict()
    state.pop("maps.1.projection")
    with pytest.raises(RuntimeError, match=r"maps\.1\.projection"):
        target.load_state_dict(state)


def test_deepcopy_dtypes_compile_and_training(trained):
    net, x = trained
    bundled = bundle(net, num_features=32, calibrate=x, **QUIET)
    assert torch.equal(copy.deepcopy(bundled)(x), bundled(x))
    single = copy.deepcopy(bundled).float()
    assert torch.allclose(single(x.float()).double(), bundled(x), atol=1e-3)
    assert torch.isfinite(copy.deepcopy(bundled).bfloat16()(x[:9].bfloat16())).all()
    torch._dynamo.reset()
    compiled = torch.compile(single, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(x[:9].float()), single(x[:9].float()), atol=1e-5)
    assert torch.allclose(bundled(x[:6].reshape(2, 3, 8)), bundled(x[:6]).reshape(2, 3, 2))
    assert [name for name, _ in bundled.named_parameters()] == ["weight", "bias"]
    frozen = {key: value.clone() for key, value in bundled.named_buffers()}
    loss = (bundled(x) - 1).square().mean()
    loss.backward()
    torch.optim.SGD(bundled.parameters(), 1e-3).step()
    assert (bundled(x) - 1).square().mean() < loss
    assert all(torch.equal(value, frozen[key]) for key, value in bundled.named_buffers())


def test_follows_the_dtype_of_the_module():
    net, x = mlp(6, 5, 3).float(), seeded(100, 6)
    bundled = bundle(net, num_features=16, calibrate=x.reshape(4, 25, 6), **QUIET)
    assert {t.dtype for t in bundled.state_dict().values()} == {torch.float32}
    assert bundled.report.held_out_rows == 20
