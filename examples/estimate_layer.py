"""Estimate a layer f(Wx + b) by phi(x) . psi(W, b), replace it in a network, and bundle the network into one matrix.

python examples/estimate_layer.py
"""

import torch
from torch import nn

import snnk

torch.manual_seed(0)
x = torch.randn(4000, 64) / 8  # inputs of norm about 1
net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))

layer = snnk.SNNKLinear.from_linear(net[0], net[1], num_features=128, inputs=x[:2000])
error = (layer(x[2000:]) - torch.nn.functional.gelu(net[0](x[2000:]))).square().mean()
predicted = layer.feature_map.predicted_error(net[0].weight, net[0].bias).mean()
print(f"hidden layer with 128 features: mean squared error {error:.1e}, predicted {predicted:.1e}")

bundled = snnk.bundle(net, num_features=256, calibrate=x[:2000])
before, after = (sum(p.numel() for p in m.parameters()) for m in (net, bundled))
relative = (bundled(x[2000:]) - net(x[2000:])).square().mean() / net(x[2000:]).var()
print(f"bundled: {before:,} parameters became {after:,}; the error is {relative:.1e} of the variance of the outputs")
