"""AdaptedLinear: a linear layer of a frozen model, and the adapters behind it."""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from snnk.adapters import SNNKAdapter

NOT_MERGEABLE = (
    "SNNK adapters are not linear, so that no weight of the model can hold them: call unload() for the model without "
    "them, or snnk.peft.to_lora for the nearest LoRA adapter, which can be merged"
)


class AdaptedLinear(nn.Module, BaseTunerLayer):
    """y + sum of delta_a(y) over the active adapters a, with y the output of the layer that it stands for.

    Each adapter reads y itself, as it did when it was trained alone, so that their order does not matter. PEFT's
    "all-linear" knows the layers of a tuner by the word Linear in their class's name.
    """

    adapter_layer_names = ("snnk_adapter",)

    def __init__(self, base_layer: nn.Module, adapter_name: str, adapter: SNNKAdapter) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.out_features = out_features(self.get_base_layer())
        self.cast_input_dtype_enabled = True  # peft.helpers sets it; `delta` casts all the same
        self.snnk_adapter = nn.ModuleDict()
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, adapter)

    def update_layer(self, adapter_name: str, adapter: SNNKAdapter, inference_mode: bool = False) -> None:
        """Add an adapter, its trained values in the dtype of the base layer, as PEFT has it."""
        dtype: Any = getattr(self.get_base_layer().weight, "dtype", torch.float32)
        if dtype.is_floating_point and dtype.itemsize > 1:  # nothing trains in float8
            adapter.to(torch.promote_types(dtype, torch.float32))  # projections are never rounded
            for parameter in (adapter.weight, adapter.gate, adapter.bias):
                if parameter is not None:
                    parameter.data = parameter.data.to(dtype)
        self.snnk_adapter[adapter_name] = adapter
        self._move_adapter_to_device_of_base_layer(adapter_name)
        self.set_adapter(self.active_adapters, inference_mode=inference_mode)

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: Any = None) -> None:
        # PEFT's own would also cast to the dtype of the base layer, and so round projections and loaded weights
        weight = getattr(self.get_base_layer(), "weight", None)
        device = device if device is not None or weight is None else weight.device
        if device is None or adapter_name not in self.snnk_adapter:
            return
        adapter = self.snnk_adapter[adapter_name]
        if not any(p.is_meta for p in adapter.parameters()):
            adapter.to(device)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        y: Tensor = self.base_layer(x, *args, **kwargs)
        if self.disable_adapters:
            return y
        total = y
        for name in self.active_adapters:
            if name in self.snnk_adapter:
                total = total + self.delta(name, y)
        return total.to(y.dtype)

    def delta(self, adapter_name: str, y: Tensor) -> Tensor:
        """What one adapter adds to outputs y of the base layer: (*, dim) -> (*, dim)."""
        adapter: Any = self.snnk_adapter[adapter_name]
        return adapter.delta(y.to(adapter.feature_map.projection.dtype))

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        raise ValueError(NOT_MERGEABLE)

    def unmerge(self) -> None:
        raise ValueError(NOT_MERGEABLE)


def out_features(layer: Any) -> int:
    """Size of a linear layer's outputs; a TypeError for another module."""
    if isinstance(layer, Conv1D):
        return int(layer.nf)
    if isinstance(layer, nn.Linear):
        return layer.out_features
    raise TypeError(f"an adapter stands behind an nn.Linear or Conv1D; got {type(layer).__name__}")
