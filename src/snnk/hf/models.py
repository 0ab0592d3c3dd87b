"""Models from files, strictly, and what every use of one needs: eval mode, device, token limit, batches.

transformers draws a tensor that the files lack at random and ignores one that they have too many; both are a line in a
log. Here they are errors, with two exceptions. A class other than the one that was saved may bring a head of its own,
and with it a pooler, which some classes leave out. And files may have whole parts that a class does without, such as
the head for masked words in the files of a BERT.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_TEXT_ENCODING_MAPPING,
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTextEncoding,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
)

from snnk import _checks
from snnk.hf.data import pad_id
from snnk.hf.folders import check_folder, some
from snnk.hf.model_blocks import ModelBlock

Batch = Mapping[str, Tensor]  # keyword arguments of a model: input_ids, attention_mask, pixel_values, labels, ...
# models of these types count positions from the padding token's number on
POSITIONS_FROM_PADDING = {
    *("camembert", "data2vec-text", "esm", "ibert", "lilt", "longformer", "luke", "mpnet", "roberta"),
    *("roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"),
}
PAIR_LABELS = {"entailment", "not_entailment", "contradiction", "equivalent", "not_equivalent", "duplicate"}
SMALL = 0.1  # a tokenizer with less than this part of a model's vocabulary is not the model's


@dataclass(frozen=True)
class Loaded:
    """A model in eval mode, and the names of tensors in which its files and its class differ."""

    model: Any  # a PreTrainedModel; callers use the members of its class
    missing: frozenset[str]  # not in the files, drawn at random
    mismatched: frozenset[str]  # another shape in the files, drawn at random
    unexpected: frozenset[str]  # in the files only


def load_model(
    source: str | Path, kind: Any = None, *, new_head: bool = False, zero_pooler: bool = False, **options: Any
) -> Loaded:
    """Load a model from safetensors, in eval mode; a ValueError names every tensor that has no counterpart.

    Args:
        source: folder of the model, or its name on the hub.
        kind: class with `from_pretrained`. Default: the class that config.json names, or AutoModel if it names none.
        new_head: the model gets another head, and pooler, than the files have: these tensors may be missing, or have
            other shapes, and are drawn at random.
        zero_pooler: a base model without a head may lack its pooler, which is then zeros. sentence-transformers
            averages or picks tokens itself and never reads it.
        **options: of `from_pretrained`, such as dtype, device_map and num_labels.
    """
    if Path(source).is_dir():
        check_folder(Path(source))
    kind = kind or class_of(read_config(source)) or AutoModel
    if new_head:
        options["ignore_mismatched_sizes"] = True
    try:
        model, info = kind.from_pretrained(
            source, use_safetensors=True, output_loading_info=True, trust_remote_code=False, **options
        )
    except Exception as error:  # the files are the user's and the loader is not ours: anything may be wrong
        raise ValueError(f"{source} cannot be loaded as {kind.__name__}: {error}") from error
    missing, unexpected = frozenset(info["missing_keys"]), frozenset(info["unexpected_keys"])
    mismatched = frozenset(key for key, *_ in info["mismatched_keys"])
    wrong = sorted(key for key in mismatched if not in_head(model, key))
    if wrong:
        raise ValueError(f"{source} does not fit its own configuration: {some(wrong)} have other shapes")
    unread = {key for key in missing if zero_pooler and model.base_model is model and in_head(model, key)}
    refuse_keys(model, missing - unread, unexpected, source, None, new_head=new_head)
    refuse_nan(model, source)
    for key in unread:
        model.get_parameter(key).data.zero_()
    return Loaded(model.eval(), missing, mismatched, unexpected)


def read_config(source: str | Path) -> PretrainedConfig:
    """The configuration of a model; a ValueError if there is none that transformers can read."""
    try:
        return AutoConfig.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # the file is the user's: anything may be wrong
        raise ValueError(f"{source} has no config.json that can be read: {error}") from error


def class_of(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """The class that a model was saved from, of transformers or with the means of `snnk finetune`; None for others."""
    names: Any = config.architectures  # of a folder a list of strings, which check_folder demands; of the hub anything
    name = names[0] if names and isinstance(names, list) else None
    pooling = getattr(config, "snnk_pooling", None)
    if pooling is not None and isinstance(name, str):
        from snnk.hf.classify.means import POOLED, mean_pooled  # late: it needs the layers of snnk.hf.replace

        if pooling not in POOLED:
            return None
        inner = getattr(transformers, name.removeprefix(POOLED[pooling].__name__), None)
        known = AutoModelForSequenceClassification._model_mapping.values()
        return mean_pooled(inner, pooling) if inner in known else None
    found = getattr(transformers, name, None) if isinstance(name, str) else None
    return found if isinstance(found, type) and issubclass(found, PreTrainedModel) else None


def headless_class(config: PretrainedConfig) -> Any:
    """The class that sentence-transformers loads for vectors of texts: without a head, and of a T5 the encoder alone.

    Example:
        >>> from transformers import Qwen2Config, T5Config
        >>> headless_class(Qwen2Config(architectures=["Qwen2ForCausalLM"])).__name__
        'AutoModel'
        >>> headless_class(T5Config(architectures=["T5Model"])).__name__
        'AutoModelForTextEncoding'
    """
    named = class_of(config)
    if named is not None and named.__name__.endswith("EncoderModel"):
        return named
    return AutoModelForTextEncoding if type(config) in MODEL_FOR_TEXT_ENCODING_MAPPING else AutoModel


def reads_pairs(config: PretrainedConfig) -> bool:
    """Whether the configuration of a model with a head for classes shows that it reads pairs of texts.

    The marks of a cross-encoder of sentence-transformers and of `snnk finetune` show it, and so do the labels of tasks
    of pairs. A model
    without either may still be made for pairs.

    Example:
        >>> from transformers import BertConfig
        >>> reads_pairs(BertConfig(id2label={0: "entailment", 1: "neutral", 2: "contradiction"}))
        True
        >>> reads_pairs(BertConfig())
        False
    """
    marks: Any = getattr(config, "sentence_transformers", None)
    marked = hasattr(config, "sbert_ce_default_activation_function") or getattr(config, "snnk_pairs", None) is True
    marked = marked or (isinstance(marks, Mapping) and "activation_fn" in marks)
    labels = {str(label).lower() for label in (config.id2label or {}).values()}
    return marked or bool(labels & PAIR_LABELS)


def load_processor(source: str | Path, images: bool, *, vocab_size: int = 0) -> Any:
    """The tokenizer of a model, or its image processor.

    Args:
        source: folder of the model, or its name on the hub.
        images: whether the model reads images.
        vocab_size: of the model; a tokenizer with less than a tenth of it is refused, as transformers makes an empty
            one where files are missing.
    """
    what = "image processor" if images else "tokenizer"
    try:
        processor = (AutoImageProcessor if images else AutoTokenizer).from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises plain ones
        raise ValueError(f"{source} has no {what} that can be loaded: {error}") from error
    most = getattr(processor, "model_max_length", 1)  # the value in tokenizer_config.json, of any type
    if not _checks.is_number(most) or not most >= 1:
        raise ValueError(f"{source}: tokenizer_config.json has the model_max_length {most!r}; a number is expected")
    if not images and len(processor) < SMALL * vocab_size:
        raise ValueError(
            f"the tokenizer in {source} has {len(processor):,} tokens and the model {vocab_size:,}; "
            "copy the tokenizer's files (tokenizer.json, tokenizer_config.json) into the folder"
        )
    return processor


def without_place(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration without the folder that it was loaded from.

    Example:
        >>> without_place({"_name_or_path": "here", "text_config": {"_name_or_path": "here", "hidden_size": 8}})
        {'text_config': {'hidden_size': 8}}
    """
    found = {key: value for key, value in config.items() if key != "_name_or_path"}
    return {key: without_place(value) if isinstance(value, Mapping) else value for key, value in found.items()}


def token_limit(config: PretrainedConfig) -> int | None:
    """The length of the longest text, in tokens, that a model has positions for; None if there is no limit.

    Example:
        >>> from transformers import RobertaConfig
        >>> token_limit(RobertaConfig(max_position_embeddings=514, pad_token_id=1))
        512
    """
    count = getattr(config, "max_position_embeddings", None)
    if not isinstance(count, int) or count <= 0:  # XLNet's is -1
        return None
    if config.model_type not in POSITIONS_FROM_PADDING:
        return count
    padding = getattr(config, "pad_token_id", None)
    return count - 1 - (1 if padding is None or config.model_type == "mpnet" else padding)  # MPNet's is always 1


def set_padding(model: PreTrainedModel, processor: Any) -> None:
    """Set the padding token of a model to that of its batches: a decoder classifies the last token before padding."""
    config = model.config.get_text_config()
    if config.model_type not in POSITIONS_FROM_PADDING:  # these count positions from the token of their pretraining
        config.pad_token_id = pad_id(processor)


def example_inputs(model: PreTrainedModel, tokens: tuple[int, int]) -> dict[str, Tensor]:
    """Inputs with the sizes of the configuration: texts of so many tokens, images, sounds, or texts and images.

    Args:
        model: on any device.
        tokens: number of texts, images or sounds, and tokens per text.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> model = BertModel(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=9))
        >>> example_inputs(model, (2, 3))
        {'input_ids': tensor([[0, 1, 2],
                [3, 4, 5]])}
    """
    config: Any = model.config
    batch, length = tokens
    text, vision = (getattr(config, part, config) for part in ("text_config", "vision_config"))
    names = inspect.signature(model.forward).parameters
    length = min(length, token_limit(text) or length)
    ids = torch.arange(batch * length).reshape(batch, -1) % getattr(text, "vocab_size", 1)
    if type(model).__name__.endswith("ForMultipleChoice"):
        ids = ids[:, None]  # one choice per text
    decoded = {"decoder_input_ids": ids} if "decoder_input_ids" in names else {}
    if model.main_input_name == "input_features":
        shape = (batch, config.num_mel_bins, 2 * config.max_source_positions)  # Whisper's convolution halves the length
        return {"input_features": torch.zeros(shape, dtype=model.dtype), **decoded}
    both = all(hasattr(model.base_model, part) for part in ("text_model", "vision_model"))
    images = {}
    if both or model.main_input_name == "pixel_values":
        height, width = (vision.image_size,) * 2 if isinstance(vision.image_size, int) else vision.image_size
        images["pixel_values"] = torch.zeros(batch, vision.num_channels, height, width, dtype=model.dtype)
    return images if images and not both else {"input_ids": ids, **images, **decoded}


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the log and the progress bars of transformers."""
    log = transformers.utils.logging
    level, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if bars:
            log.enable_progress_bar()


def refuse_keys(
    model: PreTrainedModel,
    missing: Iterable[str],
    unexpected: Iterable[str],
    source: object,
    saved_class: str | None,
    *,
    new_head: bool = False,
) -> None:
    """Raise a ValueError that names tensors that the files lack, or for which the model has no place.

    Args:
        model: the loaded model.
        missing, unexpected: `missing_keys` and `unexpected_keys` of transformers' loading info.
        source: the files, for the error.
        saved_class: name of the class that the files were saved from; with None every tensor must be there.
        new_head: the model gets another head than the files have, whatever its class.
    """
    every = not new_head and saved_class in (None, type(model).__name__)
    lacking = sorted(key for key in missing if every or not in_head(model, key))
    if lacking:
        raise ValueError(
            f"{source} lacks {some(lacking)}, which a {type(model).__name__} of its config.json has: the file is "
            "damaged or config.json was changed; copy or save both again"
        )
    extra = sorted(k for k in unexpected if not (new_head and in_head(model, k)) and not _left_out(model, k))
    if extra:
        raise ValueError(
            f"{source} has {some(extra)}, for which a {type(model).__name__} of its config.json has no place: the "
            "file is of another model or config.json was changed; copy or save both again"
        )


def in_head(model: PreTrainedModel, key: str) -> bool:
    """Whether a tensor belongs to a head, or to a pooler, which not every class has."""
    base, path = _place(model, key)
    return base is not model.base_model or path.startswith("pooler")


def _place(model: PreTrainedModel, key: str) -> tuple[nn.Module, str]:
    """The owner of a tensor, the base model or the whole model, and its name there; files may leave out the prefix."""
    base, prefix = model.base_model, f"{model.base_model_prefix}."
    if base is not model and not key.startswith(prefix) and key.partition(".")[0] in model._modules:
        return model, key
    return base, key.removeprefix(prefix)


def _left_out(model: PreTrainedModel, key: str) -> bool:
    """Whether a tensor belongs to a part, of the base model or of a head, that the class does not have at all.

    A further layer of a list is no such part, and neither is a tensor beside parameters of a module of the class.
    """
    owner, path = _place(model, key)
    head, inside = owner is not model.base_model, False
    for name in path.split("."):
        child = owner._modules.get(name)
        if child is None:
            break
        owner, inside = child, True
    if not head:
        return not inside
    return not isinstance(owner, nn.ModuleList) and not any(True for _ in owner.parameters(recurse=False))


def refuse_nan(model: nn.Module, source: object) -> None:
    """Raise a ValueError if a parameter in memory is not finite."""
    wrong = [name for name, p in model.named_parameters() if not p.is_meta and not torch.isfinite(p).all()]
    if wrong:
        raise ValueError(
            f"{source} has NaN or infinite values in {some(wrong)}: copy the file again, or train again with a lower "
            "learning rate"
        )


def refuse_sizes(model: nn.Module, files: Iterable[str | os.PathLike[str]]) -> None:
    """Raise a ValueError if a tensor of a model on the meta device is larger than the files that are to fill it."""
    files = list(files)
    room = sum(os.path.getsize(file) for file in files)
    for name, p in model.named_parameters() if files else ():
        if p.numel() > room:  # a number takes at least one byte
            raise ValueError(
                f"config.json makes {name} {tuple(p.shape)}, more than there is in {some(map(str, files))} "
                f"({room:,} bytes): config.json was changed; copy or save it again"
            )


def check_batches(batches: Iterable[Batch]) -> Iterator[Batch]:
    """The batches, each a dict with tensors; an error names what came instead."""
    if isinstance(batches, Mapping | Tensor | str) or not isinstance(batches, Iterable):
        raise TypeError(f"batches must be a list of dicts of the model's inputs; got {type(batches).__name__}")
    for batch in batches:
        if not isinstance(batch, Mapping):
            raise TypeError(f"a batch must be a dict of the model's inputs; got {type(batch).__name__}")
        if not any(isinstance(value, Tensor) for value in batch.values()):
            raise ValueError(f"a batch must hold the model's inputs as tensors; got a dict with keys {list(batch)}")
        yield batch


def plain_(model: PreTrainedModel) -> None:
    """Remove the marks of a quantizer from a model of plain weights.

    For a model with these marks transformers refuses .half(), training and saving, as for a model of integers.
    """
    for name in ("hf_quantizer", "quantization_method"):
        vars(model).pop(name, None)
    model.is_quantized = False  # type: ignore[assignment]
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.config._is_quantized = False


def without_gguf_(model: PreTrainedModel) -> Callable[[], None]:
    """Remove the marks of a GGUF file from a model if its weights are plain; the result puts them back.

    transformers unpacks such a file unless it has kernels for its integers, and marks the model as quantized even so.
    """
    owners: dict[int, Any] = {id(m.config): m.config for m in model.modules() if isinstance(m, PreTrainedModel)}
    marked = [c for c in owners.values() if quant_method(c) == "gguf"]
    if not marked or not all(p.is_floating_point() for p in model.parameters()):
        return lambda: None
    before = [(vars(owner), dict(vars(owner))) for owner in (model, *owners.values())]
    for config in marked:
        del config.quantization_config
    plain_(model)
    names = ("quantization_config", "hf_quantizer", "quantization_method", "is_quantized", "_is_quantized")

    def put_back() -> None:
        for now, old in before:
            now.update({name: old[name] for name in names if name in old})

    return put_back


def quant_method(config: PretrainedConfig) -> str | None:
    """The method by which a model is quantized, according to its configuration."""
    found = getattr(config, "quantization_config", None)
    method = None if found is None else dict(found).get("quant_method")
    return None if method is None else str(getattr(method, "value", method))


def in_memory(blocks: list[ModelBlock]) -> list[ModelBlock]:
    """The blocks; a ValueError if weights are offloaded, which can neither be fitted nor replaced."""
    away = [block.name for block in blocks if any(p.is_meta for p in block.layer.parameters())]
    if away:
        raise ValueError(
            f"weights of {len(away)} blocks, {away[0]} the first, are offloaded or on the meta device, not in memory; "
            "load the whole model into memory, with from_pretrained(..., device_map='cpu')"
        )
    return blocks


def place(batch: Batch, model: nn.Module) -> dict[str, Any]:
    """The batch on the device of the model's first parameter."""
    device = next(model.parameters()).device
    return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}


def has_bfloat16(device: str) -> bool:
    """Whether the device has instructions for products in bfloat16; without them they are slower than in float32."""
    if device == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device != "cpu" or torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "NO AVX", "AVX2"):
        return False  # ATEN_CPU_CAPABILITY may name fewer instructions than the processor has
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, bool)() for name in names)


@contextmanager
def eager_attention(model: Any) -> Iterator[None]:
    """Attention as products of matrices and a softmax; afterwards every part of the model has its own again."""
    owners = [m.config for m in model.modules() if isinstance(m, PreTrainedModel)]
    parts = [getattr(config, name, None) for config in owners for name in config.sub_configs]
    configs = {id(config): config for config in (*owners, *parts) if config is not None}.values()
    before = [(config, config._attn_implementation_internal) for config in configs]
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        for config, name in before:
            config._attn_implementation_internal = name


def fast_attention(model: Any, bf16: bool) -> AbstractContextManager[None]:
    """Attention for training: on a processor, the backward pass of fused attention in bfloat16 is slow."""
    slow = bf16 and next(model.parameters()).device.type == "cpu" and hasattr(model, "set_attn_implementation")
    return eager_attention(model) if slow else nullcontext()


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """A model, or a part of one, in float32; afterwards in its own dtype.

    In float16 the sums of Adam underflow, and gradients may. Tensors that are not trained come back bit for bit.
    """
    short = (torch.float16, torch.bfloat16)
    tensors = [(t, t.dtype) for t in (*model.parameters(), *model.buffers()) if t.dtype in short]
    try:
        for t, _ in tensors:
            t.data = t.data.float()
        yield
    finally:
        for t, dtype in tensors:
            t.grad = None  # it has the other dtype
            t.data = t.data.to(dtype)


class evaluating:
    """`with evaluating(model)`: eval mode inside; afterwards each module has its own mode, a new one its parent's."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.modes = model, {module: module.training for module in model.modules()}

    def __enter__(self) -> None:
        self.model.eval()

    def __exit__(self, *error: Any) -> None:
        for module, mode in self.modes.items():
            module.training = mode
        for parent in self.model.modules():  # parents come before their children
            for child in parent.children():
                if child not in self.modes:
                    child.training = parent.training
