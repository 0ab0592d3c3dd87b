"""Ways to fine-tune, one row of METHODS each: what changes in the model, what is trained, with which hyperparameters.

To add a method, write its steps as functions of the model and a `Setup`, add a row to METHODS, and one to ROWS
in tests/finetune/test_methods.py. Importing this module loads no torch: steps import what they need.

The hyperparameters of snnk-relu, snnk-cos, houlsby, snnk-pooler, bundled and uptrain are the paper's (appendix
"Hyperparameters") where it gives any; the rate of uptrain, 5e-5, is ours. Rank, alpha and rate of lora are those of
Hu et al. (2022) for RoBERTa-base, the rate of ia3 is that of Liu et al. (2022), and rate, batch size, epochs and weight
decay of full are those of Devlin et al. (2019). Everything else has the defaults of `TrainingSettings`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peft import IA3Config, LoraConfig
    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from snnk.hf.classify.poolers import HeadReport
    from snnk.peft import SNNKConfig

POOLER_ROWS = 4000  # to which an SNNK pooler is fitted
# query, key and value projections of attention, by the names that architectures use
ATTENTION = (("query", "key", "value"), ("q_proj", "k_proj", "v_proj"), ("q_lin", "k_lin", "v_lin"), ("q", "k", "v"))


@dataclass(frozen=True)
class Setup:
    """The arguments of the steps of a method, besides the model.

    Args:
        features: number of features, adapter size or rank.
        seed: of everything random.
        images: whether the data are images, and not texts.
        source: folder or hub name of the model.
        batches: called with a number of rows or nothing, gives batches of labelled training rows, to be read once.
        layers: the layers that get adapters, by default all, or those whose blocks `uptrain` replaces, by default the
            upper half.
        report: takes a report of the numbers that a head of the paper stores.
        drawn: names of modules inside the base model that its files do not have and that were drawn at random.
    """

    features: int
    seed: int
    images: bool
    source: str
    batches: Callable[..., Iterable[dict[str, Tensor]]]
    layers: str | None = None
    report: Callable[[HeadReport], None] = lambda found: None
    drawn: tuple[str, ...] = ()


def nothing(model: Any, setup: Setup) -> Any:
    """The step that changes nothing."""
    return model


@dataclass(frozen=True)
class Method:
    """One way to fine-tune.

    Args:
        summary: one line for help texts and model cards.
        edit: changes the model before the classifier gets its start.
        wrap: chooses what is trained, after that; returns the model to train.
        finish: changes the trained model before it is saved.
        features: default number of features, adapter size or rank; None if the method has none.
        settings: what differs from the defaults of `TrainingSettings`.
        images, large: what differs further for images and for large data sets.
        pooling: of texts, see FinetuneConfig.
        own_pooler: whether the method replaces the model's pooler, which must then be in use.
        head_only: whether everything that is trained is behind the base model, or its pooler. The base model is then
            run once.
        replaces_blocks: whether the method replaces feed-forward blocks, whose neurons are then gone.
        layered: whether `layers` chooses some layers of the model.
        closed_form: whether the start of the classifier is fitted to all rows that closed forms may use, instead of
            the smaller number that is enough for a start. For heads on many features.
    """

    summary: str
    edit: Callable[[PreTrainedModel, Setup], PreTrainedModel] = nothing
    wrap: Callable[[PreTrainedModel, Setup], nn.Module] = nothing
    finish: Callable[[Any, Setup], PreTrainedModel] = nothing
    features: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    images: dict[str, Any] = field(default_factory=dict)
    large: dict[str, Any] = field(default_factory=dict)
    pooling: str = "model"
    own_pooler: bool = False
    head_only: bool = False
    replaces_blocks: bool = False
    layered: bool = False
    closed_form: bool = False


def heads(model: PreTrainedModel) -> list[str]:
    """Names of the modules behind the base model; they are new for a task and always trained."""
    found = [
        name
        for name, child in model.named_children()
        if name != model.base_model_prefix and any(True for _ in child.parameters())
    ]
    if not found:
        raise ValueError(f"{type(model).__name__} has no classifier behind its base model; use one for classification")
    return found


def train_only(model: PreTrainedModel, chosen: Callable[[str], bool]) -> PreTrainedModel:
    """Let gradients reach the heads and the parameters whose names are chosen, no others."""
    names = tuple(f"{name}." for name in heads(model))
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith(names) or chosen(name))
    return model


def linear_probe(model: PreTrainedModel, setup: Setup) -> PreTrainedModel:
    return train_only(model, lambda name: False)


def bitfit(model: PreTrainedModel, setup: Setup) -> PreTrainedModel:
    return train_only(model, lambda name: name.rpartition(".")[2] == "bias")


def full(model: PreTrainedModel, setup: Setup) -> PreTrainedModel:
    return train_only(model, lambda name: True)


def _peft(model: PreTrainedModel, config: LoraConfig | IA3Config | SNNKConfig, setup: Setup) -> nn.Module:
    from peft import get_peft_model

    from snnk.hf.classify.means import MeanPooler

    drawn = [name for name, _ in model.named_modules() if name in setup.drawn]
    saved = [*heads(model), *drawn]  # a reader of the adapter would draw them anew
    # the empty weight in the place of the pooler, so that transformers and PEFT refuse the adapter without the mean
    saved += [f"{name}.dense" for name, module in model.named_modules() if isinstance(module, MeanPooler)]
    config.modules_to_save = saved
    config.task_type = None if setup.images else "SEQ_CLS"
    found = get_peft_model(model, config)
    for name in drawn:
        model.get_submodule(name).requires_grad_(False)
    config.modules_to_save = list(dict.fromkeys(config.modules_to_save))  # PEFT adds its own names
    return found


def targets(model: PreTrainedModel, known: Mapping[str, Any], key: bool) -> Any:
    """PEFT's own choice of modules, or query (or key) and value by the names that architectures use."""
    from torch import nn

    names = {name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    own = known.get(model.config.model_type)
    if own is not None and (isinstance(own, str) or all(name.rpartition(".")[2] in names for name in own)):
        return own
    # transformers 5 renamed modules, for example of ViT, and PEFT lists their old names
    for q, k, v in ATTENTION:
        if {q, k, v} <= names:
            return [k if key else q, v]
    raise ValueError(
        f"the attention of a {model.config.model_type!r} model was not found among {', '.join(sorted(names))}; "
        "use another method"
    )


def _chosen(model: PreTrainedModel, setup: Setup) -> list[int] | None:
    """Indices of the layers that get adapters; None means all."""
    from snnk.hf.finding import choose_layers, find_ffns

    return None if setup.layers is None else [ffn.index for ffn in choose_layers(find_ffns(model), setup.layers)]


def lora(model: PreTrainedModel, setup: Setup) -> nn.Module:
    from peft import LoraConfig
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as KNOWN

    fan = model.config.model_type == "gpt2"  # its weights are (in, out), and its layers no nn.Linear
    chosen = None if fan else targets(model, KNOWN, key=False)
    config = LoraConfig(
        r=setup.features,
        lora_alpha=setup.features,
        target_modules=chosen,
        fan_in_fan_out=fan,
        layers_to_transform=_chosen(model, setup),
    )
    return _peft(model, config, setup)


def ia3(model: PreTrainedModel, setup: Setup) -> nn.Module:
    from peft import IA3Config
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING as KNOWN

    from snnk.hf import find_ffns

    if model.config.model_type in KNOWN:
        return _peft(model, IA3Config(), setup)
    down = sorted({".".join([ffn.name, ffn.row.down]) for ffn in find_ffns(model)})
    full_names = [name for name, _ in model.named_modules() if name.endswith(tuple(down))]
    attention = targets(model, {}, key=True)
    return _peft(model, IA3Config(target_modules=[*attention, *full_names], feedforward_modules=full_names), setup)


def snnk_adapter(*, fit: bool = False, **options: Any) -> Callable[[PreTrainedModel, Setup], nn.Module]:
    """The step that adds adapters of `snnk.peft`; `fit` computes their directions from the training data."""

    def wrap(model: PreTrainedModel, setup: Setup) -> nn.Module:
        from snnk.hf.architectures import ARCHITECTURES, kind_of
        from snnk.peft import SNNKConfig, fit_directions_

        kind = kind_of(model.config)
        if kind not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise ValueError(f"adapters have places in {known}; got a {kind!r} model: use lora, bitfit or full there")
        some: Any = {"num_features": setup.features, "seed": setup.seed, "layers_to_transform": _chosen(model, setup)}
        found = _peft(model, SNNKConfig(**some, **options), setup)
        return fit_directions_(found, setup.batches()) if fit else found

    return wrap


def _own_pooler(model: PreTrainedModel, setup: Setup) -> dict[str, Any]:
    """Where a new pooler starts: the files may have a pooler even if the classifier reads the token itself."""
    from snnk.hf.classify.sites import find_pooler

    if find_pooler(model).site.form != "insert":
        return {"init": "pretrained"}
    dense = stored_pooler(setup.source)
    return {"init": "random"} if dense is None else {"init": "pretrained", "pooler": dense}


def stored_pooler(source: str) -> nn.Linear | None:
    """The linear layer of the pooler in a model's files, of a folder or of the hub; None if they have none."""
    from transformers import AutoModel

    from snnk.hf.models import load_model

    loaded = load_model(source, AutoModel, new_head=True)
    missing = any(key.startswith("pooler.") for key in loaded.missing)
    return None if missing else getattr(getattr(loaded.model, "pooler", None), "dense", None)


def snnk_pooler(model: PreTrainedModel, setup: Setup) -> PreTrainedModel:
    """A pooler that starts as the least-squares fit to the model's own, if it has one.

    psi of the pooler's weights is a poor estimate at the norms of a transformer, and a classifier on its outputs has
    such large weights that training fails at every learning rate.
    """
    from snnk.hf import replace_pooler_

    own = _own_pooler(model, setup)
    if own["init"] == "pretrained":
        batches = ({k: v for k, v in batch.items() if k != "labels"} for batch in setup.batches(POOLER_ROWS))
        own |= {"init": "fitted", "batches": batches}
    replace_pooler_(model, setup.features, "cos", seed=setup.seed, **own)
    return model


def bundled(model: PreTrainedModel, setup: Setup) -> PreTrainedModel:
    from snnk.hf import bundled_head_

    setup.report(bundled_head_(model, setup.features, "cos", seed=setup.seed, **_own_pooler(model, setup)))
    return model


def pooler_and_classifier(model: PreTrainedModel, setup: Setup) -> PreTrainedModel:
    from snnk.hf.classify.poolers import freeze_but_head_

    freeze_but_head_(model)
    return model


def uptrain(model: PreTrainedModel, setup: Setup) -> PreTrainedModel:
    from snnk.hf import find_ffns, replace_ffn_

    layers = setup.layers or f"top-{(len(find_ffns(model)) + 1) // 2}"
    replace_ffn_(model, layers, num_features=setup.features, seed=setup.seed)
    return model


def merge_pooler(model: PreTrainedModel, setup: Setup) -> PreTrainedModel:
    from snnk.hf import merge_pooler_

    setup.report(merge_pooler_(model))
    return model


def bundle_blocks(model: PreTrainedModel, setup: Setup) -> PreTrainedModel:
    from snnk.hf import bundle_

    bundle_(model)
    return model


CLIP = {"clip": 1.0}
METHODS: dict[str, Method] = {
    "snnk": Method(
        "SNNK adapters along principal directions of the model's own activations",
        # without a gate A starts at zero; a 17th feature has as many parameters as the gate
        wrap=snnk_adapter(fit=True, feature_map="gelu", directions="pca", gate=False),
        features=17,
        settings={"learning_rate": 3e-3},
        images=CLIP,
        layered=True,
    ),
    "snnk-tuned": Method(
        "SNNK adapters whose directions are trained too: bottleneck adapters that start from the data",
        wrap=snnk_adapter(fit=True, feature_map="gelu", directions="pca", gate=False, train_directions=True),
        features=8,
        settings={"learning_rate": 3e-3},
        images=CLIP,
        layered=True,
    ),
    "snnk-relu": Method(
        "the paper's adapters with random ReLU features",
        wrap=snnk_adapter(feature_map="relu", projection="iid"),
        features=16,
        images=CLIP,
        layered=True,
    ),
    "snnk-cos": Method(
        "the paper's adapters with random cosine features, on orthogonal rows and inputs of unit length",
        # The paper gives neither. At the norms of a transformer's activations, features overflow on Gaussian rows; on
        # any rows they are large and carry no information unless inputs are normalised.
        wrap=snnk_adapter(feature_map="cos", normalize="unit"),
        features=16,
        images=CLIP,
        layered=True,
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
        head_only=True,
    ),
    "bundled": Method(
        "pooler and classifier as one matrix on frozen features",
        edit=bundled,
        wrap=pooler_and_classifier,
        features=1024,
        settings={"optimizer": "adam", "warmup": 0.0},
        own_pooler=True,
        head_only=True,
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
        replaces_blocks=True,
        layered=True,
        large={"weight_decay": 1e-4, "clip": None},
    ),
    "lora": Method(
        "low-rank updates of query and value", wrap=lora, features=8, settings={"learning_rate": 5e-4}, layered=True
    ),
    "houlsby": Method(
        "bottleneck adapters after attention and feed-forward block",
        wrap=snnk_adapter(feature_map="relu", directions="pca", train_directions=True, gate=False, use_bias=True),
        features=48,
        images=CLIP,
        layered=True,
    ),
    "bitfit": Method("biases only", wrap=bitfit),
    "ia3": Method("scales of keys, values and feed-forward blocks", wrap=ia3, settings={"learning_rate": 3e-3}),
    "closed-form": Method(
        "the classifier alone, solved in one pass without backpropagation",
        wrap=linear_probe,
        settings={"max_steps": 0},
        pooling="neurons",
        head_only=True,
        closed_form=True,
    ),
    "linear-probe": Method("the classifier only", wrap=linear_probe, head_only=True),
    "full": Method(
        "all parameters",
        wrap=full,
        settings={"learning_rate": 2e-5, "batch_size": 32, "epochs": 4, "schedule": "linear", "weight_decay": 0.01},
    ),
}
