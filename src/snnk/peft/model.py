"""SNNKModel: the PEFT tuner that puts adapters into a model.

`_prepare_model` makes and checks all adapters before the first layer is replaced, so that a configuration that is
refused leaves the model as it was. The same holds for a local file that PEFT's PeftModel.from_pretrained or
load_adapter reads. The load_adapter of transformers reads the file after the layers are in place, and only logs missing
and unexpected tensors. Values of adapters are therefore NaN until the file fills them, and a model that is called while
one of them is NaN raises an error.
"""

from __future__ import annotations

import difflib
import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from peft.tuners.tuners_utils import (
    BaseTuner,
    BaseTunerLayer,
    _maybe_include_all_linear_layers,
    check_target_module_exists,
)
from peft.utils import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from snnk.hf.architectures import ARCHITECTURES, Architecture, kind_of
from snnk.hf.finding import rows_of
from snnk.nn.adapter import SNNKAdapter
from snnk.peft.config import ANEW, check_sums, checksum, compare_sums
from snnk.peft.layer import NOT_MERGEABLE, AdaptedLinear, sizes

PLACEMENTS = ("houlsby", "pfeiffer")  # values of target_modules with a meaning per architecture
Shapes = dict[str, tuple[int, ...]]
# Most values that the adapters of one configuration may have, 1 GiB, unless the model itself has more. The second limit
# holds if the sizes come from a file.
MOST_VALUES, MOST_READ = 2**28, 2**20
DEPTH = {"tanh_power": 11}  # vectors that one feature draws, if more than one
# parts of the names of tensors in a file, which an adapter's name must not be
RESERVED = {"weight", "gate", "bias", "checksum", "feature_map", "projection", "snnk_adapter"}


class SNNKModel(BaseTuner):
    """The PEFT tuner; made by `get_peft_model`, `PeftModel.from_pretrained` or a model's `add_adapter`."""

    prefix = "snnk_"
    tuner_layer_cls = AdaptedLinear
    target_module_mapping: dict[str, list[str]] = {}  # noqa: RUF012, PEFT's own name; PLACEMENTS replace it

    def _check_new_adapter_config(self, config: Any) -> None:
        super()._check_new_adapter_config(config)
        name = next(name for name, other in self.peft_config.items() if other is config)
        if name in RESERVED or "." in name:
            raise ValueError(
                f"an adapter cannot be named {name!r}, which is part of the names in its file; use another name"
            )
        # PEFT leaves tensors out of a file whose names contain the name of another adapter
        wrapped = (BaseTunerLayer, AuxiliaryTrainingWrapper)
        inside = tuple(f"{key}." for key, module in self.model.named_modules() if isinstance(module, wrapped))
        parts = {part for key, _ in self.model.named_modules() if not key.startswith(inside) for part in key.split(".")}
        if len(self.peft_config) > 1 and parts & set(self.peft_config):
            raise ValueError(
                f"adapters {sorted(parts & set(self.peft_config))} have names of modules of the model, so that the "
                "files of other adapters would lack those modules; use another name"
            )

    def _prepare_adapter_config(self, peft_config: Any, model_config: Any) -> Any:
        target = peft_config.target_modules
        if isinstance(target, str) and not peft_config.was_read:
            target = _PLACED.get(target, target)  # an earlier use of the configuration has put a pattern there
        placement = "houlsby" if target is None else target
        if not isinstance(placement, str) or placement not in PLACEMENTS:
            return peft_config
        rows = rows_of(self.model) if isinstance(self.model, PreTrainedModel) else {}
        if not rows or any(row.attention is None for row in rows.values()):
            kind = kind_of(getattr(self.model, "config", None))
            raise ValueError(
                f"target_modules={placement!r} is known for {', '.join(ARCHITECTURES)}; got a "
                f"{kind or type(self.model).__name__} model. Give target_modules as names of its linear layers"
            )
        peft_config.target_modules = _placed(rows.values(), placement)
        return peft_config

    @staticmethod
    def _check_target_module_exists(peft_config: Any, key: str) -> Any:
        found = check_target_module_exists(peft_config, key)
        wanted = peft_config.layers_to_transform
        names = peft_config.target_modules
        if not found or wanted is None or not (isinstance(names, str) or key in names):
            return found
        match = re.match(r"(?:^|.*?\.)[^.]*\.(\d+)(?:\.|$)", key)  # PEFT counts layers for endings of names only
        return match is not None and int(match[1]) in ([wanted] if isinstance(wanted, int) else wanted)

    def _prepare_model(self, peft_config: Any, model: nn.Module) -> None:
        """Make all adapters and check them, before the model is changed."""
        peft_config = _maybe_include_all_linear_layers(peft_config, model)
        shapes = getattr(peft_config, "file_shapes", None)
        sites = self._sites(peft_config, model)
        if shapes is not None:  # nothing is drawn before the sizes agree with the file
            shapes = {name.removeprefix("base_model.model."): shape for name, shape in shapes.items()}
            ending = ".snnk_adapter.weight"
            weights: Shapes = {site + ending: (dim, peft_config.num_features) for site, dim in sites.items()}
            _compare(weights, {name: shape for name, shape in shapes.items() if name.endswith(ending)})
        depth = DEPTH.get(peft_config.feature_map, 1) if peft_config.directions == "random" else 1
        values = depth * peft_config.num_features * sum(sites.values())
        # transformers' load_adapter reads no header of the file, so that only this limit holds
        most = max(MOST_READ if peft_config.was_read else MOST_VALUES, sum(p.numel() for p in model.parameters()))
        if values > most:
            raise ValueError(
                f"{len(sites)} adapters of {peft_config.num_features} features have {values:.3g} values or more, "
                f"{4 * values / 2**30:.3g} GiB; at most {most:.3g} are made. Use fewer features"
            )
        made = {site: peft_config.make_adapter(site, dim) for site, dim in sites.items()}
        for site, adapter in made.items():
            if not peft_config.save_directions:
                check_sums(peft_config, site, adapter.feature_map)
                _not_saved(adapter)
        if shapes is not None:
            ours: Shapes = {f"{s}.snnk_adapter.{n}": tuple(t.shape) for s, a in made.items() for n, t in _stored(a)}
            saved = _shapes_of(model, peft_config.modules_to_save or [])
            _compare(ours | saved, _without_embeddings(model, shapes))
        self._made = made
        self._unfilled = peft_config.from_file or (peft_config.was_read and peft_config.inference_mode)
        for adapter in made.values() if self._unfilled else ():  # transformers only logs tensors that a file lacks
            for _, tensor in _stored(adapter):
                if tensor.is_floating_point():
                    tensor.data.fill_(torch.nan)

    def _sites(self, peft_config: Any, model: nn.Module) -> dict[str, int]:
        """{name of a layer to adapt: size of its outputs}; a ValueError if no layer matches."""
        found, linear, inside = {}, [], tuple[str, ...]()
        for name, module in model.named_modules():
            if name.startswith(inside):
                continue
            if isinstance(module, BaseTunerLayer):
                inside += (f"{name}.",)
                module = module.get_base_layer()
            if isinstance(module, nn.Linear | Conv1D):
                linear.append(name)
            if name and self._check_target_module_exists(peft_config, name):
                try:
                    found[name] = sizes(module)[1]
                except TypeError as error:
                    raise TypeError(f"target module {name}: {error}") from None
        if not found:
            target = peft_config.target_modules
            where = "" if peft_config.layers_to_transform is None else f" in layers {peft_config.layers_to_transform}"
            wanted = target if isinstance(target, str) else sorted(target)
            if peft_config.exclude_modules:
                raise ValueError(
                    f"target_modules={wanted}{where} fits no layer but those of "
                    f"exclude_modules={peft_config.exclude_modules}; the linear layers are {_some(linear, 8)}"
                )
            message = f"target_modules={wanted}{where} fits no layer; {_near(wanted, linear)}"
            raise ValueError(f"{message}; {ANEW}" if peft_config.was_read else message)
        return found

    def _create_and_replace(
        self,
        peft_config: Any,
        adapter_name: str,
        target: Any,
        target_name: str,
        parent: nn.Module,
        current_key: str,
        parameter_name: str | None = None,
    ) -> None:
        adapter = self._made.pop(current_key, None)
        if adapter is None:  # a layer that only the state dict contains, see BaseTuner.inject_adapter
            base = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
            adapter = peft_config.make_adapter(current_key, sizes(base)[1])
            if not peft_config.save_directions:
                _not_saved(adapter)
        # with low_cpu_mem_usage PEFT moves every parameter that is registered here to the meta device
        for module in adapter.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                module.register_parameter(name, parameter)
        if isinstance(target, AdaptedLinear):
            layer = target
            layer.update_layer(adapter_name, adapter)
        else:
            layer = AdaptedLinear(target, adapter_name, adapter)
            self._replace_module(parent, target_name, layer, target)
        if self._unfilled:
            layer.unfilled.add(adapter_name)

    @contextmanager
    def _enable_peft_forward_hooks(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        # PEFT would ignore the argument and run all rows through the active adapter
        if kwargs.get("adapter_names") is not None:
            raise ValueError(
                "SNNK adapters do not support adapter_names (one adapter per row of a batch): call set_adapter and run "
                "one batch per adapter"
            )
        yield

    def _check_merge_allowed(self) -> None:
        raise ValueError(NOT_MERGEABLE)

    def add_weighted_adapter(self, *args: Any, **kwargs: Any) -> None:
        """Not supported: a weighted sum of adapters is not an adapter of this kind."""
        raise ValueError(
            "a weighted sum of SNNK adapters is not an SNNK adapter, as each has features of its own: activate several "
            "with base_model.set_adapter([...]), which adds their outputs, or convert them to LoRA with "
            "snnk.peft.to_lora"
        )

    @classmethod
    def _remove_adapter_name_from_key(cls, key: str, adapter_name: str) -> str:
        return key.replace(f".snnk_adapter.{adapter_name}.", ".snnk_adapter.")

    @classmethod
    def _get_adapter_state_dict(
        cls, model: Any, config: Any, adapter_name: str, state_dict: dict[str, Tensor], unwanted_adapter_names: Any
    ) -> dict[str, Tensor]:
        found: dict[str, Tensor] = super()._get_adapter_state_dict(
            model, config, adapter_name, state_dict, unwanted_adapter_names
        )
        if config.directions != "random" and not config.train_directions:
            _warn_if_never_fitted(model, config, adapter_name)
        if config.save_directions:
            return found
        sums = {}
        for site, layer in layers_of(model, adapter_name):
            adapter: Any = layer.snnk_adapter[adapter_name]
            drawn = config.make_feature_map(site, adapter.dim)  # in float32, even if the model was cast
            if not _same_buffers(adapter.feature_map, drawn):
                raise ValueError(
                    f"the directions of {site} are not those that seed={config.seed} draws: they were changed. Use "
                    "save_directions=True"
                )
            sums[site] = checksum(drawn)
        config.checksums = sums
        ending = f".snnk_adapter.{adapter_name}.checksum"  # the model's own may be rounded to half precision
        own = {name: torch.tensor(sums[_site(name, ending)], device="cpu") for name in found if name.endswith(ending)}
        return found | own

    @classmethod
    def _remap_adapter_state_dict_for_load(
        cls, model: Any, config: Any, adapter_name: str, state_dict: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        found: dict[str, Tensor] = super()._remap_adapter_state_dict_for_load(model, config, adapter_name, state_dict)
        expected = {
            name: tuple(tensor.shape)
            for name, tensor in model.state_dict().items()
            if f".snnk_adapter.{adapter_name}." in name or f".modules_to_save.{adapter_name}." in name
        }
        _compare(expected, _without_embeddings(model, {name: tuple(t.shape) for name, t in found.items()}))
        if not config.save_directions:  # PEFT reads no configuration for an existing adapter
            ending = f".snnk_adapter.{adapter_name}.checksum"
            stored = {_site(name, ending): tensor for name, tensor in found.items() if name.endswith(ending)}
            for site, layer in layers_of(model, adapter_name):
                adapter: Any = layer.snnk_adapter[adapter_name]
                drawn = config.make_feature_map(site, adapter.dim)
                compare_sums(site, stored[site].tolist(), checksum(drawn), torch.finfo(stored[site].dtype).eps)
        for _, layer in layers_of(model, adapter_name):
            layer.unfilled.discard(adapter_name)
        return found


def _placed(rows: Iterable[Architecture], placement: str) -> str:
    """The regular expression of the layers that get an adapter."""
    patterns = set()
    for row in rows:
        names = [row.down] if placement == "pfeiffer" or row.attention is None else [row.attention.out, row.down]
        layer = re.escape(row.layer).replace(r"\{\}", r"\d+")
        patterns.add(rf"{layer}\.({'|'.join(map(re.escape, names))})")
    found = "|".join(sorted(patterns))  # the towers of CLIP have the same
    return rf"(.*\.)?{found}" if len(patterns) == 1 else rf"(.*\.)?({found})"


_PLACED = {_placed([row], placement): placement for row in ARCHITECTURES.values() for placement in PLACEMENTS}


def layers_of(model: Any, adapter_name: str) -> list[tuple[str, AdaptedLinear]]:
    """The layers of a model, wrapped by PEFT or not, that have the adapter, with their names in the bare model."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    found = ((name, layer) for name, layer in base.named_modules() if isinstance(layer, AdaptedLinear))
    return [(plain_name(name), layer) for name, layer in found if adapter_name in layer.snnk_adapter]


def _site(name: str, ending: str) -> str:
    """The layer that a tensor of a PEFT model's state dict belongs to."""
    return plain_name(name.removesuffix(ending).removeprefix("base_model.model."))


def plain_name(name: str) -> str:
    """A module's name without the parts that FSDP and torch.compile add."""
    return name.replace("_fsdp_wrapped_module.", "").replace("_orig_mod.", "")


def _warn_if_never_fitted(model: Any, config: Any, adapter_name: str) -> None:
    layers = layers_of(model, adapter_name)
    for site, layer in layers:
        adapter: Any = layer.snnk_adapter[adapter_name]
        if not _same_buffers(adapter.feature_map, config.make_feature_map(site, adapter.dim)):
            return
    if layers:
        warnings.warn(
            f"directions={config.directions!r} was never fitted: adapter {adapter_name!r} has random directions; "
            "call snnk.peft.fit_directions_ before training, or use directions='random'",
            stacklevel=2,
        )


def _stored(adapter: SNNKAdapter) -> Iterator[tuple[str, Tensor]]:
    yield from adapter.state_dict(keep_vars=True).items()


def _not_saved(adapter: SNNKAdapter) -> None:
    """Replace the feature map in the state dict by a checksum."""
    adapter.register_buffer("checksum", torch.tensor(checksum(adapter.feature_map), device="cpu"))
    for name, buffer in list(adapter.feature_map.named_buffers()):
        adapter.feature_map.register_buffer(name, buffer, persistent=False)


def _same_buffers(ours: nn.Module, drawn: nn.Module) -> bool:
    """Whether buffers are equal up to the rounding of a cast to half precision."""
    pairs = zip(ours.buffers(), drawn.buffers(), strict=True)
    return all(a.is_meta or torch.allclose(a.cpu().double(), b.double(), 1e-2, 1e-3) for a, b in pairs)


def _shapes_of(model: nn.Module, endings: list[str]) -> Shapes:
    """Shapes of the tensors of modules whose names have one of the endings; PEFT finds modules_to_save like this."""
    found, inside = Shapes(), tuple[str, ...]()
    for name, module in model.named_modules(remove_duplicate=False):
        if name.endswith(tuple(endings)) and not name.startswith(inside):
            inside += (f"{name}.",)
            module = getattr(module, "original_module", module)
            found |= {f"{name}.{n}": tuple(t.shape) for n, t in module.state_dict().items()}
    return found


def _without_embeddings(model: Any, shapes: Shapes) -> Shapes:
    """The shapes without those of embeddings, which PEFT saves with an adapter if the vocabulary was resized."""
    layers: list[Any] = []
    for name in ("get_input_embeddings", "get_output_embeddings"):
        with suppress(NotImplementedError):
            layers.append(getattr(model, name, lambda: None)())
    inside = tuple(f"{name}." for name, module in model.named_modules() if any(module is layer for layer in layers))
    return {name: shape for name, shape in shapes.items() if not name.startswith(inside)}


def _compare(expected: Shapes, found: Shapes) -> None:
    """Raise a ValueError unless both have the same tensors of the same shapes."""
    missing, unknown = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    if missing or unknown:
        raise ValueError(
            f"the file belongs to another model or configuration: it lacks {_some(missing)} and has "
            f"{_some(unknown)} in addition; {ANEW}"
        )
    for name, shape in expected.items():
        if found[name] != shape:
            raise ValueError(
                f"{name} is {found[name]} in the file and {shape} in the model: the adapter belongs to a model "
                f"of another size, or its configuration was changed; {ANEW}"
            )


def _some(names: Any, most: int = 3) -> str:
    names = list(names)
    return (", ".join(names[:most]) or "nothing") + (f" and {len(names) - most} more" if len(names) > most else "")


def _near(wanted: Any, linear: list[str]) -> str:
    """A list of linear layers with names similar to the targets, or of all linear layers."""
    near: list[str] = []
    for target in [] if isinstance(wanted, str) else wanted:
        depth = target.count(".") + 1
        endings = {".".join(name.split(".")[-depth:]) for name in linear}
        near += difflib.get_close_matches(target, sorted(endings), n=3, cutoff=0.4)
    if near:
        return f"did you mean {', '.join(dict.fromkeys(near))}?"
    return f"the linear layers are {_some(linear, 8)}"
