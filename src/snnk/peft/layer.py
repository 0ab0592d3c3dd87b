"""AdaptedLinear: a linear layer of a frozen model with the adapters behind it."""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from transformers.pytorch_utils import Conv1D

from snnk.nn.adapter import SNNKAdapter
from snnk.peft.config import ANEW

NOT_MERGEABLE = (
    "SNNK adapters are not linear and cannot be merged into a weight of the model: call unload() for the model without "
    "them, or snnk.peft.to_lora for the nearest LoRA adapter, which can be merged"
)


class AdaptedLinear(nn.Module, BaseTunerLayer):
    """y + sum of delta_a(y) over the active adapters a, with y the output of the base layer.

    Each adapter reads y itself, as it did when it was trained alone, so that their order does not matter. The name must
    contain "Linear": PEFT's "all-linear" finds the layers of a tuner by it.
    """

    adapter_layer_names = ("snnk_adapter",)

    def __init__(self, base_layer: nn.Module, adapter_name: str, adapter: SNNKAdapter) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.in_features, self.out_features = sizes(self.get_base_layer())
        self.cast_input_dtype_enabled = True  # peft.helpers sets it; `delta` casts in any case
        self.snnk_adapter = nn.ModuleDict()
        self._active_adapter = adapter_name
        self.unfilled: set[str] = set()  # adapters whose values come from a file that is not read yet
        # in eval mode nn.TransformerEncoderLayer reads the weights of layers without hooks and does not call them
        self.register_forward_pre_hook(_check_filled)
        self.update_layer(adapter_name, adapter)

    def update_layer(self, adapter_name: str, adapter: SNNKAdapter) -> None:
        """Add an adapter, with its trained values in the dtype of the base layer, as PEFT does."""
        dtype: Any = getattr(self.get_base_layer().weight, "dtype", torch.float32)
        if dtype.is_floating_point and dtype.itemsize > 1:  # float8 weights cannot be trained
            adapter.to(torch.promote_types(dtype, torch.float32))  # frozen projections are never rounded
            for parameter in adapter.parameters():
                parameter.data = parameter.data.to(dtype)
        self.snnk_adapter[adapter_name] = adapter
        self._move_adapter_to_device_of_base_layer(adapter_name)
        self.set_adapter(self.active_adapters)

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: Any = None) -> None:
        # PEFT's own method would also cast to the dtype of the base layer, and round projections and loaded weights
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
        """The sum that one adapter adds to outputs y of the base layer: (*, dim) -> (*, dim)."""
        adapter: Any = self.snnk_adapter[adapter_name]
        return adapter.delta(y.to(adapter.feature_map.projection.dtype))

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        raise ValueError(NOT_MERGEABLE)

    def unmerge(self) -> None:
        raise ValueError(NOT_MERGEABLE)


def sizes(layer: nn.Module) -> tuple[int, int]:
    """Sizes of the inputs and outputs of a linear layer; a TypeError for other modules."""
    if isinstance(layer, Conv1D):
        return int(layer.nx), int(layer.nf)
    if isinstance(layer, NonDynamicallyQuantizableLinear):
        raise TypeError(
            "nn.MultiheadAttention reads the weight of its out_proj and never calls it, so that an adapter behind it "
            "would have no effect; leave it out, with exclude_modules=['out_proj']"
        )
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    raise TypeError(f"adapters are placed behind nn.Linear and Conv1D; got {type(layer).__name__}")


def _check_filled(layer: AdaptedLinear, args: Any) -> None:
    """Before the first call: a ValueError if values that should come from a file are still NaN."""
    if not layer.unfilled or torch.compiler.is_compiling():
        return
    for adapter_name in layer.unfilled.intersection(layer.snnk_adapter):
        found = layer.snnk_adapter[adapter_name].state_dict()
        missing = [name for name, tensor in found.items() if tensor.isnan().any()]
        if missing:
            raise ValueError(
                f"adapter {adapter_name!r} has no values for {', '.join(missing)}: its file lacks them, or was not "
                f"loaded. Save it again, and load it into a new model; {ANEW}"
            )
    layer.unfilled.clear()
