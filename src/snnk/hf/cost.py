"""The cost of a model: multiply-adds of a forward pass, and tensors that are stored, shared or left out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode, addmm_flop, conv_flop


def multiply_adds(model: nn.Module, inputs: dict[str, Tensor], *, biases: bool = False) -> int:
    """Multiply-adds of one forward pass: all matrix products, those of attention included, and convolutions.

    Nothing is computed, as weights and inputs are shapes on the meta device. With `biases`, each sum with a bias counts
    as one.

    Example:
        >>> multiply_adds(nn.Linear(3, 5), {"input": torch.ones(2, 3)})
        30
        >>> multiply_adds(nn.Linear(3, 5), {"input": torch.ones(2, 3)}, biases=True)
        40
    """
    return count_forward(model, inputs, biases)[0]


def stored(model: nn.Module) -> dict[str, Tensor]:
    """The state dict with each tensor once, under its first name; works on the meta device, too.

    Example:
        >>> layer = nn.Linear(2, 3)
        >>> list(stored(nn.Sequential(layer, nn.ReLU(), layer)))
        ['0.weight', '0.bias']
    """
    return {names[0]: tensor for names, tensor in by_storage(model)}


def bytes_of(model: nn.Module) -> int:
    """Bytes of the tensors that a model stores, each once."""
    return sum(tensor.nbytes for tensor in stored(model).values())


@contextmanager
def counting_mode(model: nn.Module) -> Iterator[None]:
    """Run without gradients, dropout and cache of keys and values; afterwards everything is as before."""
    changed: list[tuple[Any, str]] = [(module, "training") for module in model.modules() if module.training]
    configs = {id(c): c for c in (getattr(module, "config", None) for module in model.modules())}  # T5 has several
    changed += [(config, "use_cache") for config in configs.values() if getattr(config, "use_cache", False)]
    try:
        for owner, name in changed:
            setattr(owner, name, False)
        with torch.no_grad():
            yield
    finally:
        for owner, name in changed:
            setattr(owner, name, True)


def count_forward(model: nn.Module, inputs: dict[str, Tensor], biases: bool = False) -> tuple[int, tuple[int, ...]]:
    """Multiply-adds and the shape of the first output, on the meta device."""
    mapping: Any = {torch.ops.aten.addmm: _biased_product, torch.ops.aten.convolution: _biased_convolution}
    # transformers reads values of plain meta tensors, such as whether there is padding, but not of fake tensors
    fake = FakeTensorMode(allow_non_fake_inputs=True)  # Falcon keeps tensors that are no buffers

    def shapes(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        return {name: fake.from_tensor(tensor.detach().to("meta")) for name, tensor in tensors}

    weights, kwargs = shapes((*model.named_parameters(), *model.named_buffers())), shapes(inputs.items())
    counter = FlopCounterMode(display=False, custom_mapping=mapping if biases else {})
    with counting_mode(model), fake, counter:
        out = functional_call(model, weights, kwargs=kwargs)
    return counter.get_total_flops() // 2, tuple((out if isinstance(out, Tensor) else out[0]).shape)


def _biased_product(bias: Any, a: Any, b: Any, out_shape: Any = None, **_: Any) -> int:
    return addmm_flop(bias, a, b, out_val=out_shape) + 2 * torch.Size(out_shape).numel()


def _biased_convolution(x: Any, w: Any, bias: Any, *args: Any, out_shape: Any = None, **_: Any) -> int:
    return conv_flop(x, w, bias, *args, out_val=out_shape) + (2 * torch.Size(out_shape).numel() if bias else 0)


def by_storage(model: nn.Module) -> list[tuple[list[str], Tensor]]:
    """The tensors of the state dict, each with all its names."""
    found: dict[Any, tuple[list[str], Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):
            place = tensor.untyped_storage()._cdata, tensor.storage_offset()
            found.setdefault(place, ([], tensor))[0].append(name)
    return list(found.values())


def tied_names(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Groups of names of one module, then of one tensor, unless the modules explain it."""
    modules = dict(model.named_modules(remove_duplicate=False))
    shared: dict[int, list[str]] = {}
    for name, module in modules.items():
        if any(True for _ in (*module.parameters(), *module.buffers())):
            shared.setdefault(id(module), []).append(name)

    def explained(names: list[str]) -> bool:
        parents = {name.rpartition(".")[0] for name in names}
        return len(parents) == len(names) and len({id(modules[parent]) for parent in parents}) == 1

    groups = [*shared.values(), *(names for names, _ in by_storage(model))]
    return tuple(tuple(names) for names in groups if len(names) > 1 and not explained(names))


def outside_state_dict(model: nn.Module) -> dict[str, int]:
    """Bytes of buffers that are not persistent, and of tensors that are plain attributes."""
    found = {}
    for path, module in model.named_modules():
        loose = {name: value for name, value in vars(module).items() if isinstance(value, Tensor)}
        for name, tensor in {**{n: module._buffers[n] for n in module._non_persistent_buffers_set}, **loose}.items():
            if tensor is not None:
                found[f"{path}.{name}".lstrip(".")] = tensor.nbytes
    return found
