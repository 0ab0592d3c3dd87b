import pytest
import torch
from torch import nn

from snnk import URF, ArcCosine, PowerSeries, SNNKLinear
from snnk.maps.series import fit_series


@pytest.fixture
def linear():
    layer = nn.Linear(16, 12)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(12, 16, generator=generator) / 8)
        layer.bias.copy_(torch.randn(12, generator=generator) / 4)
    return layer


def inputs(n=200):
    x = torch.randn(n, 16, generator=torch.Generator().manual_seed(9))
    return 1 + x / x.norm(dim=1, keepdim=True)


def test_from_linear_needs_an_activation_or_a_map(linear):
    with pytest.raises(TypeError, match="needs an activation or a feature_map; got neither"):
        SNNKLinear.from_linear(linear, None, 64)
    assert SNNKLinear.from_linear(linear, None, 64, feature_map="relu").weight.shape == (12, 64)


@pytest.mark.parametrize("feature_map", [None, "gelu"])
def test_from_linear_fits_the_series_once(linear, feature_map, monkeypatch):
    fitted = []

    def count(*args):
        fitted.append(args)
        return fit_series(*args)

    monkeypatch.setattr("snnk.maps.activations.fit_series", count)
    SNNKLinear.from_linear(linear, "gelu", 64, feature_map=feature_map, inputs=inputs(), on_error="ignore")
    assert len(fitted) == 1


@pytest.mark.parametrize("activation", ["sin", "tanh", nn.GELU(), torch.sigmoid, lambda z: z**2])
def test_from_linear_estimates_the_layer(linear, activation):
    f = getattr(torch, activation) if isinstance(activation, str) else activation
    layer = SNNKLinear.from_linear(linear, activation, 512, inputs=inputs())
    exact = f(linear(inputs()))
    error = (layer(inputs()) - exact).square().mean() / exact.var()
    assert error < 0.05


def test_weight_is_psi_of_the_pretrained_weights(linear):
    layer = SNNKLinear.from_linear(linear, "cos", 32, x_norm=0.5, on_error="ignore")
    assert torch.equal(layer.weight, layer.feature_map.psi(linear.weight, linear.bias))
    assert layer.feature_map.x_norm == 0.5
    assert layer.feature_map.w_norm == pytest.approx(linear.weight.square().sum(1).mean().sqrt().item())


def test_from_linear_leaves_the_layer_alone_and_follows_its_dtype(linear):
    before = {k: v.clone() for k, v in linear.state_dict().items()}
    layer = SNNKLinear.from_linear(linear.double(), "sin", 32)
    assert layer.weight.dtype == layer.feature_map.projection.dtype == torch.float64
    assert all(torch.equal(v.double(), linear.state_dict()[k]) for k, v in before.items())
    assert linear.weight.requires_grad and not layer.weight.grad_fn


def test_from_linear_with_another_map(linear):
    layer = SNNKLinear.from_linear(linear, None, 32, feature_map="relu")
    assert isinstance(layer.feature_map, ArcCosine)
    assert torch.allclose(layer.weight, layer.feature_map.psi(linear.weight))
    layer = SNNKLinear.from_linear(linear, None, 8, feature_map=ArcCosine(16, 8, order=2))
    assert layer.feature_map.order == 2


def test_a_map_given_to_from_linear_keeps_its_calibration(linear):
    x = inputs() + 3
    fm = URF(16, 256, "gelu").calibrate(x, linear.weight, linear.bias)
    before = {k: v.clone() for k, v in fm.state_dict().items()}
    layer = SNNKLinear.from_linear(linear, "gelu", 256, feature_map=fm)
    assert layer.feature_map is fm and all(torch.equal(v, before[k]) for k, v in fm.state_dict().items())
    again = SNNKLinear.from_linear(linear, "gelu", 256, feature_map=fm, inputs=x - 3)
    assert again.feature_map is not fm and all(torch.equal(v, before[k]) for k, v in fm.state_dict().items())


def test_trains_a_only():
    layer = SNNKLinear(16, 12, 8, "cos", normalize="unit")
    assert [name for name, _ in layer.named_parameters()] == ["weight"]
    frozen = {k: v.clone() for k, v in layer.named_buffers()}
    x, target = inputs(64), torch.randn(64, 12, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    losses = []
    for _ in range(30):
        loss = (layer(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(torch.equal(v, frozen[k]) for k, v in layer.named_buffers())


def test_random_start_is_psi_of_weights_drawn_like_a_linear_layers():
    """The law of nn.Linear: uniform on +-1/sqrt(d), seen through a map that is linear in the weights."""
    straight = PowerSeries(64, 2, coefficients=[0.0, 1.0])
    drawn = SNNKLinear(64, 4000, 2, straight, seed=4).weight.double()
    error = drawn.std(0) / 4000**0.5
    assert (drawn.mean(0).abs() <= 5 * error).all()
    variance = (65 / 64 / 3) * straight.scale.square().flatten().double()  # 64 weights and a bias, each 1 / (3 d)
    assert torch.allclose(drawn.var(0), variance, rtol=0.1)
    layer = SNNKLinear(64, 500, 32, "sin", seed=4)
    assert not torch.allclose(layer.weight, SNNKLinear(64, 500, 32, "sin", seed=5).weight)
    no_bias = SNNKLinear(64, 500, 32, "sin", bias=False, seed=4)
    assert not torch.allclose(layer.weight, no_bias.weight)


def test_repr_says_what_it_is():
    text = repr(SNNKLinear(16, 12, 8, "cos"))
    assert "trainable=96 of the dense layer's 204" in text and "activation=cos" in text


def test_errors(linear):
    with pytest.raises(TypeError, match=r"linear must be an nn.Linear; got Conv1d"):
        SNNKLinear.from_linear(nn.Conv1d(1, 1, 1), "sin", 8)
    with pytest.raises(ValueError, match="meta device"):
        SNNKLinear.from_linear(nn.Linear(4, 4, device="meta"), "sin", 8)
    with pytest.raises(TypeError, match="PReLU has parameters of its own"):
        SNNKLinear.from_linear(linear, nn.PReLU(), 8)
    with pytest.raises(ValueError, match="did you mean 'gelu'"):
        SNNKLinear.from_linear(linear, "gleu", 8)
    with pytest.raises(ValueError, match="unknown feature map 'cosine'"):
        SNNKLinear(16, 12, 8, "cosine")
    with pytest.raises(ValueError, match="out_features must be a positive integer"):
        SNNKLinear(16, 0, 8)
    with pytest.raises(ValueError, match="the layer needs 16 -> 8"):
        SNNKLinear(16, 12, 8, URF(16, 10, "sin"))
    with torch.no_grad():
        linear.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="weight has 1 NaN"):
        SNNKLinear.from_linear(linear, "sin", 8)


def test_random_weights_are_independent_of_the_map():
    """w_i . g_i of rows that were drawn apart is positive as often as not; of one stream it would be negative."""
    layer = SNNKLinear(63, 400, 400, ArcCosine(63, 400, projection="iid", augment=True, seed=3), seed=3)
    positive = (layer.weight.diagonal() > 0).double().mean()  # A = relu(W G')
    assert abs(float(positive) - 0.5) <= 5 * 0.5 / 400**0.5
