"""Saving and loading compressed models with transformers' own save_pretrained and from_pretrained.

For a model with a `quantization_config`, transformers rebuilds modules before it loads weights. There, replaced blocks
are put back, for every head, dtype and device map. Nothing is quantised: after loading, the model is a plain one again,
which can be trained, cast and saved.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer

from snnk import _io
from snnk.hf.classify.sites import Pooler, rebuild_pooler_
from snnk.hf.discovery import use_row
from snnk.hf.finding import find_blocks, rows_of
from snnk.hf.folders import check_folder, some
from snnk.hf.low_rank import rebuild_block_
from snnk.hf.model_blocks import KEPT
from snnk.hf.models import plain_, refuse_keys, refuse_nan, refuse_sizes
from snnk.hf.replace import METHOD, SNNKQuantizationConfig, note_


class SNNKQuantizer(HfQuantizer):
    """Rebuilds replaced blocks inside from_pretrained, and checks that every tensor was in the file."""

    requires_calibration = True  # transformers then refuses to quantise while loading, which is the work of compress_

    def __init__(self, quantization_config: Any, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.pooler: Pooler | None = None
        self.source = "the file"
        self.saved_class: str | None = None  # name of the class that the file was saved from
        self.info: Any = None  # transformers' lists of missing and unexpected keys

    def update_attn_implementation(self, config: PretrainedConfig) -> PretrainedConfig:
        """Check the sizes of a local folder: no other step gets the configuration before the model is made."""
        folder = Path(config.name_or_path or "")
        if any((folder / name).is_file() for name in ("model.safetensors", "model.safetensors.index.json")):
            check_folder(folder)
        return config

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        config: Any = self.quantization_config
        blocks, pooler = config.blocks, config.pooler
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config  # written again as the blocks are replaced
        if config.row is not None and not rows_of(model):
            use_row(model, config.row)
        known = {block.name: block for block in find_blocks(model)} if blocks else {}
        unknown = sorted(set(blocks) - set(known))
        if unknown:
            raise ValueError(f"quantization_config names {', '.join(unknown)}; the model has {', '.join(known)}")
        files = [str(file) for file in kwargs.get("checkpoint_files") or []]
        self.source = some(files) or self.source
        self.saved_class = next(iter(model.config.architectures or []), None)
        refuse_sizes(model, files)
        room = sum(os.path.getsize(file) for file in files) if files else 2**40
        for name, entry in blocks.items():
            rebuild_block_(known[name], entry, room)
        if pooler is not None:
            self.pooler = rebuild_pooler_(model, pooler, room)
        self.shapes = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
        elsewhere = "" if self.pooler is None or self.pooler.fits else self.pooler.site.new[0]
        _check_keys(files, self.shapes, elsewhere)
        self._listen(model)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        self._check(model)
        if self.pooler is not None and not self.pooler.fits:
            note_(self.pooler.configs, None, None)  # the file's head is not part of this model
        plain_(model)
        return model

    def _listen(self, model: PreTrainedModel) -> None:
        """Keep the lists of keys that from_pretrained makes, and returns only on request."""
        adjust: Any = model._adjust_missing_and_unexpected_keys

        def listen(info: Any) -> None:
            adjust(info)
            self.info = info

        model._adjust_missing_and_unexpected_keys = listen  # type: ignore[assignment, method-assign]

    def _check(self, model: PreTrainedModel) -> None:
        """Check shapes and keys: with a quantizer, transformers checks no shapes, and it only logs missing keys."""
        del model._adjust_missing_and_unexpected_keys
        tensors = model.state_dict(keep_vars=True)
        wrong = [
            f"{key} {tuple(tensors[key].shape)} instead of {shape}"
            for key, shape in self.shapes.items()
            if key in tensors and tuple(tensors[key].shape) != shape
        ]
        if wrong:
            raise ValueError(f"{self.source} does not fit the model: {', '.join(wrong)}")
        config: Any = self.quantization_config
        parts: dict[str, Any] = {}
        for block in find_blocks(model) if config.blocks else []:
            if block.kind != KEPT:
                parts[block.layer_name] = block.layer
        if self.pooler is not None and self.pooler.fits:
            parts[self.pooler.site.new[0]] = self.pooler.dense
            if self.pooler.kind == "head" and self.pooler.classifier is not None:
                parts[self.pooler.site.new[1]] = self.pooler.classifier
        missing = [
            f"{name}.{key}"
            for name, part in parts.items()
            for key, tensor in part.state_dict(keep_vars=True).items()
            # offloaded weights are on the meta device until they are needed
            if not tensor.is_meta and not getattr(tensor, "_is_hf_initialized", False)
        ]
        if missing:
            raise ValueError(f"{self.source} has no {', '.join(missing)}")
        if self.info is None:
            raise ValueError("this version of transformers does not list missing keys; install another version")
        refuse_keys(model, self.info.missing_keys, self.info.unexpected_keys, self.source, self.saved_class)
        refuse_nan(model, self.source)

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_qat_trainable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return True


def _check_keys(files: list[str], wanted: Iterable[str], elsewhere: str) -> None:
    """Refuse feature maps in the files that the configuration does not name, unless they are part of a head left out.

    transformers only logs unexpected keys. It may rename keys (ViT), but never the part behind the name of a map.
    """
    if not all(str(file).endswith(".safetensors") for file in files):
        raise ValueError(f"compressed models are saved as safetensors only; got {', '.join(map(str, files))}")
    found: Counter[str] = Counter()
    for file in files:
        with _io.open_tensors(file) as tensors:
            found.update(_map_tensors(k for k in tensors.keys() if not elsewhere or f"{elsewhere}." not in k))  # noqa: SIM118
    extra = found - Counter(_map_tensors(wanted))
    if files and extra:
        raise ValueError(f"{some(files)} has feature maps that quantization_config does not name: {dict(extra)}")


def _map_tensors(keys: Iterable[str]) -> Iterator[str]:
    """The part of each key behind the name of a feature map, which is `map` in blocks, `feature_map` in SNNK layers."""
    for key in keys:
        before, _, name = key.replace(".feature_map.", ".map.").rpartition(".map.")
        if before:
            yield name


def register() -> None:
    """Register the quantizer with transformers, so that it loads compressed models; `import snnk.hf` does this."""
    if METHOD not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        register_quantization_config(METHOD)(SNNKQuantizationConfig)
    if METHOD not in AUTO_QUANTIZER_MAPPING:
        register_quantizer(METHOD)(SNNKQuantizer)
