r"""The blocks of a model, feed-forward and attention, with their weights in one form for all architectures.

A feed-forward block computes y = W2 f(W1 x + b1) + b2, or, if gated, y = W2 (f(Wg x + bg) * (W1 x + b1)) + b2. An
attention block computes y = Wo c + bo, where c has the values of all heads, mixed over tokens by their queries and
keys. A block reads its modules by the names of its architecture's row whenever it is asked, so that it follows what
replaced them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.pytorch_utils import Conv1D

from snnk.hf.architectures import UNSEEN, Architecture, AttentionNames, row_of

KEPT = "dense"  # the kind of a block that stays, or stayed, as it is


class Cost(NamedTuple):
    """Numbers that modules store, buffers of a feature map included, and multiply-adds of their matrices per token."""

    parameters: int
    multiply_adds: int


def cost_of(modules: Iterable[nn.Module | None]) -> Cost:
    """The cost of linear layers and feature maps."""
    tensors = [item for m in modules if m is not None for item in m.state_dict(keep_vars=True).items()]
    matrices = (t.numel() for name, t in tensors if name.rpartition(".")[2] in ("weight", "projection") and t.ndim > 1)
    return Cost(sum(t.numel() for _, t in tensors), sum(matrices))


class Chain(nn.Sequential):
    """The new modules of a gated block, in place of the module that multiplied by the gate."""

    def forward(self, x: Tensor) -> Tensor:
        down: Any = self[-1]
        return down(self.hidden(x).to(down.bias.dtype))  # as T5 does, whose second layers stay in float32

    def hidden(self, x: Tensor) -> Tensor:
        """The input of the last module."""
        for module in list(self)[:-1]:
            x = module(x)
        return x


@dataclass(eq=False)
class ModelBlock(ABC):
    """A part of one layer that adds to the residual stream. Its properties follow the modules that stand there now."""

    layer_name: str  # relative to the base model
    index: int  # number of the layer; in a model of several towers all layers are counted, tower by tower
    row: Architecture
    layer: nn.Module = field(repr=False)
    config: PretrainedConfig = field(repr=False)  # that of the tower, or of the base model
    configs: tuple[PretrainedConfig, ...] = field(repr=False)  # those of base model and head, mostly one object

    @property
    @abstractmethod
    def names(self) -> Architecture | AttentionNames:
        """The names of the block's modules in the layer."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The name by which plans, reports and files call the block, relative to the base model."""

    @property
    @abstractmethod
    def linears(self) -> tuple[Any, ...]:
        """The linear layers, or what replaced them, from the first to the last; None for one that is not there."""

    @property
    def out_features(self) -> int:
        return _sizes(self.linears[-1])[1]

    def slot(self, which: str) -> Any:
        """The module, function or tensor at a name of the row, such as "up" or "scale"; None if there is none."""
        path = getattr(self.names, which)
        return None if path is None else part_at(self.layer, path)

    @property
    def kind(self) -> str:
        """The kind of module that replaced the block, or KEPT."""
        blocks = getattr(getattr(self.configs[0], "quantization_config", None), "blocks", {})
        return str(blocks.get(self.name, {}).get("kind", KEPT))

    @property
    def found(self) -> dict[str, Any] | None:
        """The row, if files must name it, as the table has none for the type."""
        if row_of(self.config) is not None:
            return None
        row = asdict(self.row)
        for key in UNSEEN:
            row.pop(key, None)
            (row["attention"] or {}).pop(key, None)
        return row

    @property
    def reader(self) -> nn.Module | None:
        """The module that reads the residual sum; None if the sum is the output of the layer."""
        return self.slot("sum") if self.names.sum else None

    @property
    def norm(self) -> nn.Module | None:
        """The norm through which all later layers see the residual sum (post-norm), or None."""
        return self.reader if self.row.sum else None

    @property
    def scale(self) -> Tensor | None:
        """Factor of the block's output in the residual sum, (out,), or None for 1."""
        return self.slot("scale")

    @property
    def cost(self) -> Cost:
        return cost_of({id(m): m for m in self.linears}.values())

    @property
    def num_parameters(self) -> int:
        """Numbers stored, buffers of a feature map included."""
        return self.cost.parameters

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds of the matrices per token."""
        return self.cost.multiply_adds

    def _linear(self, which: str) -> Any:
        layer = self.slot(which)
        if not isinstance(layer, nn.Linear | Conv1D):
            raise ValueError(f"{self.name} was replaced before ({self.kind}): {which} is no linear layer any more")
        return layer


@dataclass(eq=False)
class FFN(ModelBlock):
    """The feed-forward block of one layer, called by the name of the layer."""

    @property
    def names(self) -> Architecture:
        return self.row

    @property
    def name(self) -> str:
        return self.layer_name

    @property
    def linears(self) -> tuple[Any, ...]:
        return tuple(self.chain or map(self.slot, ("up", "gate", "down")))

    @property
    def in_features(self) -> int:
        return _sizes(self.slot("up"))[0]

    @property
    def width(self) -> int:
        """Number of hidden features, the columns of the second layer's weight."""
        return _sizes(self.slot("down"))[0]

    @property
    def chain(self) -> Chain | None:
        """The new modules of a gated block that was replaced by other features than its own neurons."""
        parent = part_at(self.layer, self.row.up.rpartition(".")[0])
        return parent if isinstance(parent, Chain) else None

    @property
    def gated(self) -> bool:
        return self.row.gate is not None and self.chain is None

    @property
    def fused(self) -> bool:
        """Whether gate and first layer are one layer."""
        return self.gated and self.row.gate == self.row.up

    @property
    def activation(self) -> Callable[[Tensor], Tensor]:
        return self.slot("activation") or nn.Identity()

    def up_weight(self) -> Tensor:
        """(width, in)."""
        return self._half("up", weight_of(self._linear("up")))

    def up_bias(self) -> Tensor | None:
        return self._half("up", self._linear("up").bias)

    def gate_weight(self) -> Tensor | None:
        """(width, in), or None if the block has no gate."""
        return self._half("gate", weight_of(self._linear("gate"))) if self.gated else None

    def gate_bias(self) -> Tensor | None:
        return self._half("gate", self._linear("gate").bias) if self.gated else None

    def down_weight(self) -> Tensor:
        """(out, width)."""
        return weight_of(self._linear("down"))

    def down_bias(self) -> Tensor | None:
        return self._linear("down").bias

    def hidden(self, x: Tensor) -> Tensor:
        """The input of the second layer: (*, in) -> (*, width)."""
        if self.chain is not None:
            return self.chain.hidden(x)
        up = self.slot("up")(x)
        if not self.gated:
            return self.activation(up)
        gate, up = up.chunk(2, -1) if self.fused else (self.slot("gate")(x), up)
        return self.activation(gate) * up

    def forward(self, x: Tensor) -> Tensor:
        """The block without dropout and residual: (*, in) -> (*, out)."""
        return self.slot("down")(self.hidden(x))

    def _half(self, which: str, tensor: Any) -> Any:
        """The rows of "up" or "gate" in a tensor of its layer."""
        if tensor is None or not self.fused:
            return tensor
        half = len(tensor) // 2
        return tensor[half:] if which == "up" else tensor[:half]


@dataclass(eq=False)
class Attention(ModelBlock):
    """The self-attention of one layer, called by the name of its module."""

    @property
    def names(self) -> AttentionNames:
        if self.row.attention is None:
            raise ValueError(f"the row of {self.row.layer} names no attention")
        return self.row.attention

    @property
    def name(self) -> str:
        return f"{self.layer_name}.{self.names.module}"

    @property
    def linears(self) -> tuple[Any, ...]:
        return tuple(map(self.slot, ("query", "key", "value", "out")))

    @property
    def fused(self) -> bool:
        """Whether one layer computes queries, keys and values."""
        return self.names.query == self.names.value

    @property
    def heads(self) -> tuple[int, int]:
        """Number of heads of queries, and of keys and values."""
        heads = int(self.config.num_attention_heads)
        if getattr(self.config, "multi_query", False) and self.fused:  # Falcon
            return heads, 1
        return heads, int(getattr(self.config, "num_key_value_heads", None) or heads)

    @property
    def head_size(self) -> int:
        """Dimensions per head in the original."""
        value = self.slot("value")
        heads, groups = self.heads
        full = getattr(value, "full_size", None)
        return full or _sizes(value)[1] // (heads + 2 * groups if self.fused else groups)

    @property
    def in_features(self) -> int:
        return _sizes(self.slot("query"))[0]

    def places(self, which: str) -> Tensor:
        """Where the outputs of "query", "key" or "value" are among those of its layer, (heads * head size,)."""
        size, (heads, groups) = self.head_size, self.heads
        count = heads if which == "query" else groups
        places = torch.arange(count * size)
        if not self.fused:
            return places
        part = ("query", "key", "value").index(which)
        if self.names.interleaved:
            return (places.view(count, size) + size * (2 * torch.arange(count)[:, None] + part)).flatten()
        return places + size * (0, heads, heads + groups)[part]

    def weight(self, which: str) -> Tensor:
        """(heads * head size, in), of "query", "key" or "value"; (out, heads * head size), of "out"."""
        weight = weight_of(self._linear(which))
        return weight if which == "out" else weight[self.places(which).to(weight.device)]

    def bias(self, which: str) -> Tensor | None:
        bias = self._linear(which).bias
        return bias if bias is None or which == "out" else bias[self.places(which).to(bias.device)]


def weight_of(layer: nn.Module) -> Tensor:
    """The weight (out, in) of a linear layer or of a Conv1D, which keeps it as (in, out)."""
    weight: Any = layer.weight
    return weight.T if isinstance(layer, Conv1D) else weight


def part_at(module: Any, path: str) -> Any:
    """The attribute at a dotted name below a module, or None."""
    for name in path.split(".") if path else ():
        module = getattr(module, name, None)
    return module


def _sizes(layer: Any) -> tuple[int, int]:
    """(in, out) of a linear layer, a Conv1D, or a module with in_features and out_features."""
    if hasattr(layer, "get_base_layer"):
        raise ValueError(
            f"the block has adapters of PEFT ({type(layer).__name__}): call merge_and_unload() to put LoRA into the "
            "weights, or unload() to remove other adapters"
        )
    if isinstance(layer, Conv1D):
        return layer.weight.shape[0], layer.weight.shape[1]
    return layer.in_features, layer.out_features
