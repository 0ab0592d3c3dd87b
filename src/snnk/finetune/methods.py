"""Ways to fine-tune, one row each: what is changed in the model, what is trained, and with which hyperparameters.

Those of snnk-relu, snnk-cos, houlsby, snnk-pooler, bundled and uptrain are the paper's (appendix "Hyperparameters")
where it gives any; uptraining's rate of 5e-5 is ours. Of other papers are: for lora its rank, alpha and rate for
RoBERTa-base (Hu et al. 2022); for ia3 its rate (Liu et al. 2022); for full its rate, batch, epochs and weight decay
(Devlin et al. 2019). All else, bitfit's included, is the defaults of `TrainingSettings`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers import AutoModel

from snnk import hf
from snnk.finetune.pooling import MeanPooler
from snnk.hf.architectures import kind_of
from snnk.peft.directions import fit_directions_

# query and value (and key) projections of attention, where PEFT has no row for the architecture
ATTENTION = (("query", "key", "value"), ("q_proj", "k_proj", "v_proj"), ("q_lin", "k_lin", "v_lin"), ("q", "k", "v"))


@dataclass(frozen=True)
class Setup:
    """What the steps of a method know beside the model."""

    features: int
    seed: int
    images: bool
    source: str  # of the model
    batches: Callable[..., Iterable[dict[str, Tensor]]]  # labelled training rows, so many if given, to go over once
    layers: str | None = None  # of `uptrain`
    report: Callable[[hf.HeadReport], None] = lambda found: None  # gets what a head of the paper stores
    drawn: tuple[str, ...] = ()  # modules inside the base model that its files do not have


def nothing(model: Any, setup: Setup) -> Any:
    return model


@dataclass(frozen=True)
class Method:
    """One way to fine-tune.

    Args:
        summary: one line for people.
        edit: changes the model before the classifier gets its start.
        wrap: chooses what is trained, after that; returns the model to train.
        finish: changes the trained model before it is saved.
        features: default of --features: features, adapter size or rank; None where there is none.
        settings: defaults of `TrainingSettings`.
        images, large: what is different for images and for large data sets.
        own_pooler: it replaces the pooler of the model, so that there must be one.
        closed_form: the classifier is all that is trained, so that its closed form takes more rows.
    """

    summary: str
    edit: Callable[[Any, Setup], Any] = nothing
    wrap: Callable[[Any, Setup], Any] = nothing
    finish: Callable[[Any, Setup], Any] = nothing
    features: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    images: dict[str, Any] = field(default_factory=dict)
    large: dict[str, Any] = field(default_factory=dict)
    own_pooler: bool = False
    closed_form: bool = False


def heads(model: Any) -> list[str]:
    """Names of the modules behind the base model: those that are new for a task, and always trained."""
    found = [
        name
        for name, child in model.named_children()
        if name != model.base_model_prefix and any(True for _ in child.parameters())
    ]
    if not found:
        raise ValueError(f"{type(model).__name__} has no classifier behind its base model; use one for classification")
    return found


def train_only(model: Any, wanted: Callable[[str, nn.Parameter], bool]) -> Any:
    """Let gradients reach the heads and the parameters that are wanted, no others."""
    names = tuple(f"{name}." for name in heads(model))
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith(names) or wanted(name, p))
    return model


def linear_probe(model: Any, setup: Setup) -> Any:
    return train_only(model, lambda name, p: False)


def bitfit(model: Any, setup: Setup) -> Any:
    return train_only(model, lambda name, p: name.rpartition(".")[2] == "bias")


def full(model: Any, setup: Setup) -> Any:
    return train_only(model, lambda name, p: True)


def _peft(model: Any, config: Any, setup: Setup) -> Any:
    from peft import get_peft_model

    drawn = [name for name, _ in model.named_modules() if name in setup.drawn]
    config.modules_to_save = [*heads(model), *drawn]  # a reader of the adapter would draw them anew
    # the empty weight in the place of the pooler: without the mean, transformers and PEFT then refuse the adapter
    stands = [name for name, m in model.named_modules() if isinstance(m, MeanPooler)]
    config.modules_to_save += [f"{name}.dense" for name in stands]
    config.task_type = None if setup.images else "SEQ_CLS"
    found = get_peft_model(model, config)
    for name in drawn:
        model.get_submodule(name).requires_grad_(False)
    config.modules_to_save = list(dict.fromkeys(config.modules_to_save))  # PEFT adds its own names to them
    return found


def targets(model: Any, known: dict[str, Any], key: bool) -> Any:
    """PEFT's own choice of modules, or query (or key) and value by the names that architectures use."""
    names = {name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    own = known.get(model.config.model_type)
    if own is not None and (isinstance(own, str) or all(name.rpartition(".")[2] in names for name in own)):
        return own
    # transformers 5 renamed modules, of ViT for one, that PEFT knows by their old names
    for q, k, v in ATTENTION:
        if {q, k, v} <= names:
            return [k if key else q, v]
    raise ValueError(
        f"the attention of a {model.config.model_type!r} model was not found among {', '.join(sorted(names))}; "
        "use another method"
    )


def lora(model: Any, setup: Setup) -> Any:
    from peft import LoraConfig
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as KNOWN

    fan = model.config.model_type == "gpt2"  # its weights are (in, out), which `targets` does not look for
    chosen = None if fan else targets(model, KNOWN, key=False)
    return _peft(
        model, LoraConfig(r=setup.features, lora_alpha=setup.features, target_modules=chosen, fan_in_fan_out=fan), setup
    )


def ia3(model: Any, setup: Setup) -> Any:
    from peft import IA3Config
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING as KNOWN

    if model.config.model_type in KNOWN:
        return _peft(model, IA3Config(), setup)
    down = sorted({".".join([ffn.name, ffn.row.down]) for ffn in hf.find_ffns(model)})
    full_names = [name for name, _ in model.named_modules() if name.endswith(tuple(down))]
    attention = targets(model, {}, key=True)
    return _peft(model, IA3Config(target_modules=[*attention, *full_names], feedforward_modules=full_names), setup)


def snnk_adapter(*, fit: bool = False, **options: Any) -> Callable[[Any, Setup], Any]:
    """Adapters of `snnk.peft`; `fit` points their projections along directions of the training data."""

    def wrap(model: Any, setup: Setup) -> Any:
        from snnk.peft import SNNKConfig

        kind = kind_of(model.config)
        if kind not in hf.ARCHITECTURES:
            known = ", ".join(hf.ARCHITECTURES)
            raise ValueError(f"adapters have places in {known}; got a {kind!r} model: use lora, bitfit or full there")
        found = _peft(model, SNNKConfig(num_features=setup.features, seed=setup.seed, **options), setup)
        return fit_directions_(found, setup.batches()) if fit else found

    return wrap


def _own_pooler(model: Any, setup: Setup) -> dict[str, Any]:
    """What a new pooler starts from: the files may have one even where the classifier reads the token itself."""
    if hf.find_pooler(model).site.form != "insert":
        return {"init": "pretrained"}
    dense = stored_pooler(setup.source)
    return {"init": "random"} if dense is None else {"init": "pretrained", "pooler": dense}


def stored_pooler(source: str) -> Any:
    """The linear layer of the pooler in a model's files, of a folder or of the hub; None if they have none."""
    base, info = AutoModel.from_pretrained(
        source, use_safetensors=True, output_loading_info=True, trust_remote_code=False
    )
    missing = any(key.startswith("pooler.") for key in info["missing_keys"])
    return None if missing else getattr(getattr(base, "pooler", None), "dense", None)


def snnk_pooler(model: Any, setup: Setup) -> Any:
    hf.replace_pooler_(model, setup.features, "cos", seed=setup.seed, **_own_pooler(model, setup))
    return model


def bundled(model: Any, setup: Setup) -> Any:
    setup.report(hf.bundled_head_(model, setup.features, "cos", seed=setup.seed, **_own_pooler(model, setup)))
    return model


def pooler_and_classifier(model: Any, setup: Setup) -> Any:
    hf.freeze_but_head_(model)
    return model


def uptrain(model: Any, setup: Setup) -> Any:
    layers = setup.layers or f"top-{(len(hf.find_ffns(model)) + 1) // 2}"
    hf.replace_ffn_(model, layers, num_features=setup.features, seed=setup.seed)
    return model


def merge_pooler(model: Any, setup: Setup) -> Any:
    setup.report(hf.merge_pooler_(model))
    return model


def bundle_blocks(model: Any, setup: Setup) -> Any:
    hf.bundle_(model)
    return model


CLIP = {"clip": 1.0}
METHODS: dict[str, Method] = {
    "snnk": Method(
        "SNNK adapters along principal directions of the model's own activations",
        # without a gate A starts at zero, and a 17th feature costs what the gate did
        wrap=snnk_adapter(fit=True, feature_map="gelu", directions="pca", gate=False),
        features=17,
        settings={"learning_rate": 3e-3},
        images=CLIP,
    ),
    "snnk-tuned": Method(
        "the same with directions that are trained too: bottleneck adapters that start from the data",
        wrap=snnk_adapter(fit=True, feature_map="gelu", directions="pca", gate=False, train_directions=True),
        features=8,
        settings={"learning_rate": 3e-3},
        images=CLIP,
    ),
    "snnk-relu": Method(
        "the paper's adapters with random ReLU features",
        wrap=snnk_adapter(feature_map="relu", projection="iid"),
        features=16,
        images=CLIP,
    ),
    "snnk-cos": Method(
        "the paper's adapters with random cosine features, on orthogonal rows and inputs of unit length",
        # the paper does not say; at the norms of a transformer's activations features overflow on Gaussian rows, and on
        # any rows they are large and as good as random
        wrap=snnk_adapter(feature_map="cos", normalize="unit"),
        features=16,
        images=CLIP,
    ),
    "snnk-pooler": Method(
        "a cosine SNNK layer for the pooler, trained with the classifier, then merged with it",
        edit=snnk_pooler,
        wrap=pooler_and_classifier,
        finish=merge_pooler,
        features=512,
        settings={"weight_decay": 1e-4, "warmup": 0.0},
        images={"warmup": 0.01},
        own_pooler=True,
    ),
    "bundled": Method(
        "pooler and classifier as one matrix on frozen features",
        edit=bundled,
        wrap=pooler_and_classifier,
        features=1024,
        settings={"optimizer": "adam", "warmup": 0.0},
        own_pooler=True,
        closed_form=True,
    ),
    "uptrain": Method(
        "the upper half of the feed-forward blocks as SNNK layers, everything trained, then bundled",
        edit=uptrain,
        wrap=full,
        finish=bundle_blocks,
        features=8,
        settings={"learning_rate": 5e-5, "schedule": "linear", "weight_decay": 0.1, **CLIP},
        images={"weight_decay": 1e-3, "clip": None},
        large={"weight_decay": 1e-4, "clip": None},
    ),
    "lora": Method("low-rank updates of query and value", wrap=lora, features=8, settings={"learning_rate": 5e-4}),
    "houlsby": Method(
        "bottleneck adapters after attention and feed-forward block",
        wrap=snnk_adapter(feature_map="relu", directions="pca", train_directions=True, gate=False, use_bias=True),
        features=48,
        images=CLIP,
    ),
    "bitfit": Method("biases only", wrap=bitfit),
    "ia3": Method("scales of keys, values and feed-forward blocks", wrap=ia3, settings={"learning_rate": 3e-3}),
    "linear-probe": Method("the classifier only", wrap=linear_probe),
    "full": Method(
        "all parameters",
        wrap=full,
        settings={"learning_rate": 2e-5, "batch_size": 32, "epochs": 4, "schedule": "linear", "weight_decay": 0.01},
    ),
}
