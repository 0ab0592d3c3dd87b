"""Saving and loading compressed models by transformers' own save_pretrained and from_pretrained.

transformers rebuilds modules before it loads weights for models with a `quantization_config`; that is where replaced
blocks come back, for every head, dtype and device map. Nothing here is quantised: after loading, the model is a plain
one again, that trains, casts and saves.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from typing import Any

from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer

from snnk.hf.architectures import FFN, find_ffns
from snnk.hf.blocks import METHOD, SNNKQuantizationConfig, rebuild_


class SNNKQuantizer(HfQuantizer):
    """Rebuilds replaced blocks inside from_pretrained, and sees to it that every tensor of theirs was in the file."""

    requires_calibration = True  # transformers then refuses to quantise while loading: compress_ does that

    def __init__(self, quantization_config: Any, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.shapes: dict[str, tuple[int, ...]] = {}

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        config: Any = self.quantization_config
        blocks = config.blocks
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config  # written again as the blocks are replaced
        ffns = {ffn.name: ffn for ffn in find_ffns(model)}
        unknown = sorted(set(blocks) - set(ffns))
        if unknown:
            raise ValueError(f"quantization_config names {', '.join(unknown)}; the model has {', '.join(ffns)}")
        files = kwargs.get("checkpoint_files") or []
        room = sum(os.path.getsize(file) for file in files) if files else 2**40
        for name, entry in blocks.items():
            rebuild_(ffns[name], entry, room)
        self.shapes = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
        _check_keys(files, self.shapes)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        self._check(model)
        # transformers would refuse .half(), training, and saving as if these were integers
        del model.hf_quantizer, model.quantization_method
        model.is_quantized = False  # type: ignore[assignment]
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                module.config._is_quantized = False
        return model

    def _check(self, model: PreTrainedModel) -> None:
        """transformers checks no shapes when there is a quantizer, and only logs what is missing."""
        tensors = model.state_dict(keep_vars=True)
        wrong = [
            f"{key} {tuple(tensors[key].shape)} instead of {shape}"
            for key, shape in self.shapes.items()
            if key in tensors and tuple(tensors[key].shape) != shape
        ]
        if wrong:
            raise ValueError(f"the file does not fit the model: {', '.join(wrong)}")
        missing = []
        for ffn in _replaced(model):
            for key, tensor in ffn.block.state_dict(keep_vars=True).items():
                # offloaded weights are on the meta device and are read when they are needed
                if not tensor.is_meta and not getattr(tensor, "_is_hf_initialized", False):
                    missing.append(f"{ffn.name}.{key}")
        if missing:
            raise ValueError(f"the file has no {', '.join(missing)}")

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


def _check_keys(files: list[str], wanted: Iterable[str]) -> None:
    """No feature map in the files that the configuration does not know of.

    transformers only logs unexpected keys, and may rename keys (ViT), but not what follows `map`, our only new name.
    """
    if not all(str(file).endswith(".safetensors") for file in files):
        raise ValueError(f"compressed models are saved as safetensors only; got {', '.join(map(str, files))}")
    found: Counter[str] = Counter()
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            found.update(key.rpartition(".map.")[2] for key in tensors.keys() if ".map." in key)  # noqa: SIM118
    extra = found - Counter(key.rpartition(".map.")[2] for key in wanted if ".map." in key)
    if files and extra:
        raise ValueError(f"the file has feature maps that quantization_config does not name: {dict(extra)}")


def _replaced(model: PreTrainedModel) -> list[FFN]:
    return [ffn for ffn in find_ffns(model) if ffn.kind != "dense"]


def register() -> None:
    """Tell transformers how to load compressed models; `import snnk.hf` does it."""
    if METHOD not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        register_quantization_config(METHOD)(SNNKQuantizationConfig)
    if METHOD not in AUTO_QUANTIZER_MAPPING:
        register_quantizer(METHOD)(SNNKQuantizer)
