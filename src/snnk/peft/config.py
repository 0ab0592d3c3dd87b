"""SNNKConfig: which adapters a model gets, behind which layers, and what their files hold."""

from __future__ import annotations

import functools
import hashlib
import math
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft.config import PeftConfig
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME, PeftType
from torch import Tensor

from snnk import _checks, _io
from snnk.maps import FEATURE_MAPS, Directions, FeatureMap
from snnk.maps.activations import ACTIVATIONS
from snnk.maps.projections import PROJECTIONS
from snnk.nn.adapter import SNNKAdapter
from snnk.peft.directions import FITS
from snnk.peft.patterns import check_patterns

# peft_type in a file. PEFT answers an unknown one with a KeyError of this text. Earlier files have "SNNK".
PEFT_TYPE = "SNNK: run 'import snnk.peft' before (pip install snnk[peft])"
DIRECTIONS = ("random", *FITS)
PROBES, SKETCH, TOLERANCE = 4, 4, 1e-3
FLOATS = ("F64", "F32", "F16", "BF16")  # dtypes of adapters in files
ANEW = "for a new adapter with the settings of this file, use dataclasses.replace(config, inference_mode=False)"
# words of adapter_config.json before the rename, and what they are called now
OLD_WORDS = {
    "projection": "directions",
    "rows": "projection",
    "train_projection": "train_directions",
    "save_projection": "save_directions",
    "projection_seed": "seed",
    "projection_checksums": "checksums",
}
REMOVED = ("feature_pattern", "layers_pattern")


def renewed(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of an adapter_config.json in today's words, also if they were written before the rename.

    Example:
        >>> renewed({"projection": "pca", "rows": "iid", "placement": "pfeiffer"})
        {'directions': 'pca', 'projection': 'iid', 'target_modules': 'pfeiffer'}
    """
    old = settings.get("projection") in DIRECTIONS or bool(settings.keys() & (OLD_WORDS.keys() - {"projection"}))
    found = {OLD_WORDS.get(name, name) if old else name: value for name, value in settings.items()}
    for name in REMOVED:
        if found.pop(name, None):
            raise ValueError(
                f"{name} is set to {str(settings[name])[:200]}; snnk has this setting no more: train without it"
            )
    placement = found.pop("placement", None)
    if placement is not None and found.get("target_modules") is None:
        found["target_modules"] = placement
    return found


def _reads_files(cls: type[SNNKConfig]) -> type[SNNKConfig]:
    """PEFT passes what a file holds straight to the constructor, with a plain string as `peft_type`."""
    start = cls.__init__

    @functools.wraps(start)
    def init(self: SNNKConfig, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **(renewed(kwargs) if type(kwargs.get("peft_type")) is str else kwargs))

    setattr(cls, "__init__", init)  # noqa: B010, mypy allows no assignment to it
    return cls


@_reads_files
@dataclass
class SNNKConfig(PeftConfig):
    """Configuration of SNNK adapters, for `peft.get_peft_model`.

    Args:
        num_features: number m of features per adapter, which trains dim * m + dim numbers.
        feature_map: a name in FEATURE_MAPS; with directions "pca" and "gradient", the name of an activation. The matrix
            of an adapter is trained and not computed from the activation, so that with random directions "cos", "sin"
            and "gelu" all give sines and cosines.
        directions: where the directions of the features come from: "random", or "pca" or "gradient", which
            `snnk.peft.fit_directions_` computes from data. Until it is called they are random.
        projection: the law of random directions, a name in PROJECTIONS. The paper's relu adapters have "iid". Do not
            use it with "cos" and other spectral maps: their features grow like exp(|x|^2) on Gaussian rows and overflow
            at |x| = 28.
        target_modules: which linear layers get an adapter behind them: "houlsby", behind attention and behind the
            feed-forward block (the default); "pfeiffer", behind the feed-forward block only; "all-linear"; a list of
            names or endings of names; or one regular expression.
        exclude_modules: names, endings of names or one regular expression of layers that get none.
        layers_to_transform: indices of the transformer layers that get adapters; None means all.
        modules_to_save: modules to train and save in addition to the adapters, such as a new head.
        init_weights: start as the identity. False draws the trained values from torch's global generator, so that two
            adapters always differ; PEFT's tests need this.
        gate: train the gate v.
        use_bias: train a bias.
        train_directions: train the directions too. With "pca", a bias and no gate this is the bottleneck adapter.
        normalize: how the feature map normalises its inputs, see FeatureMap.
        save_directions: False leaves the directions out of the file and draws them again from `seed` on loading.
        seed: the feature map of each layer is drawn from a stream of its own, made of this and the layer's name.
        checksums: set when a file without directions is saved, and compared when it is loaded.

    Example:
        >>> from peft import get_peft_model
        >>> from transformers import BertConfig, BertModel
        >>> model = BertModel(BertConfig(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, vocab_size=9))
        >>> get_peft_model(model, SNNKConfig(num_features=16)).get_nb_trainable_parameters()[0]  # 4 * (8 * 16 + 8)
        544
    """

    num_features: int = 16
    feature_map: str = "relu"
    directions: str = "random"
    projection: str = "orthogonal"
    target_modules: str | Collection[str] | None = None
    exclude_modules: str | Collection[str] | None = None
    layers_to_transform: int | Sequence[int] | None = None
    modules_to_save: list[str] | None = None
    init_weights: bool = True
    gate: bool = True
    use_bias: bool = False
    train_directions: bool = False
    normalize: str | None = None
    save_directions: bool = True
    seed: int = 0
    checksums: dict[str, list[float]] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.was_read = type(self.peft_type) is str  # from JSON or a dict
        # the file of an adapter, in contrast to a file of settings for new ones
        self.from_file = self.was_read and (self.inference_mode or self.checksums is not None)
        self.file_shapes: dict[str, tuple[int, ...]] | None = None
        self.peft_type = PeftType("SNNK")
        if self.was_read:
            check_patterns(vars(self))
        self.num_features = _checks.positive_int(self.num_features, "num_features")
        _checks.choose(self.directions, DIRECTIONS, "directions")
        random = self.directions == "random"
        _checks.choose(
            self.feature_map, list(FEATURE_MAPS if random else ACTIVATIONS), "feature map" if random else "activation"
        )
        _checks.choose(self.projection, PROJECTIONS, "projection")
        if self.projection != "orthogonal" and (not random or self.feature_map == "tanh_power"):
            what = self.feature_map if random else f"directions={self.directions!r}"
            raise ValueError(f"{what} has no projection to choose; got {self.projection!r}, leave it out")
        for name in ("target_modules", "exclude_modules"):
            if isinstance(getattr(self, name), list | tuple):
                setattr(self, name, set(getattr(self, name)))
        if self.train_directions and self.feature_map == "arccos0":
            raise ValueError("features of arccos0 are steps and have no gradient: leave train_directions out")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise TypeError(f"seed must be an integer; got {self.seed!r}")
        if not self.save_directions and not (random and not self.train_directions):
            reason = "trained" if self.train_directions else f"fitted to data (directions={self.directions!r})"
            raise ValueError(f"directions that are {reason} cannot be drawn again: use save_directions=True")

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike[str], subfolder: str | None = None, **kwargs: Any
    ) -> Any:
        """Read the configuration and, in a local folder, the header of the weights: a bad file then changes nothing."""
        try:
            config = super().from_pretrained(os.fspath(pretrained_model_name_or_path), subfolder, **kwargs)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            file = Path(pretrained_model_name_or_path, subfolder or "", CONFIG_NAME)
            raise ValueError(f"{file} is not the configuration of an SNNK adapter: {error}") from error
        config.file_shapes = read_header(Path(pretrained_model_name_or_path, subfolder or ""))
        return config

    def to_dict(self) -> dict[str, Any]:
        """The content of a file; its `peft_type` names the package to import where snnk is not imported."""
        return {**super().to_dict(), "peft_type": PEFT_TYPE}

    def make_adapter(self, site: str, dim: int) -> SNNKAdapter:
        """The adapter behind the layer of that name, whose outputs have `dim` values; on the CPU in float32."""
        return SNNKAdapter(
            dim,
            self.num_features,
            self.make_feature_map(site, dim),
            gate=self.gate,
            bias=self.use_bias,
            train_directions=self.train_directions,
            init_weights=self.init_weights,
            seed=_seed(self.seed, site),
            device="cpu",
            dtype=torch.float32,
        )

    def make_feature_map(self, site: str, dim: int) -> FeatureMap:
        """The feature map of that layer's adapter, drawn from its own stream."""
        options: Any = {"normalize": self.normalize, "seed": _seed(self.seed, site), "device": "cpu"}
        options["dtype"] = torch.float32
        try:
            if self.directions == "random":
                if self.projection != "orthogonal":  # the default of every map, except in very few dimensions
                    options["projection"] = self.projection
                return FEATURE_MAPS[self.feature_map](dim, self.num_features, **options)
            if self.num_features > dim and not self.train_directions:  # trained ones may start from random directions
                raise ValueError(
                    f"{self.directions} gives at most {dim} directions there; got num_features={self.num_features}"
                )
            return Directions(dim, self.num_features, self.feature_map, **options)
        except ValueError as error:
            raise ValueError(f"adapter behind {site}: {error}") from None


def _seed(seed: int, site: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{site}".encode()).digest()[:6], "big")


def read_header(folder: str | os.PathLike[str]) -> dict[str, tuple[int, ...]] | None:
    """Shapes of the tensors in the weights of a local folder; None if the folder has no weights."""
    path = Path(folder, SAFETENSORS_WEIGHTS_NAME)
    if not path.exists():
        if Path(folder, WEIGHTS_NAME).exists():
            raise ValueError(f"{folder} has {WEIGHTS_NAME}, a pickle, which can run code: save it as safetensors")
        return None
    with _io.open_tensors(path) as file:
        found = _io.tensor_header(file)
    for name, (dtype, _) in found.items():  # PEFT would read other bits as numbers
        if ".snnk_adapter." in name and dtype not in FLOATS and not name.endswith(".degrees"):
            raise ValueError(f"{path} has {name} as {dtype}, not as {', '.join(FLOATS)}. Copy or save it again")
    return {name: shape for name, (_, shape) in found.items()}


@torch.no_grad()
def checksum(feature_map: FeatureMap) -> list[float]:
    """Four numbers that distinguish one draw from another, and do not depend on the last bits of a processor.

    They are sums, with fixed weights, of the features of fixed inputs, divided by the norm of these features. A hash of
    rounded values would not work: one of 10^4 values is always next to a boundary of rounding. Two draws agree to 1e-3
    in all four numbers by chance about once in 10^12; another processor or dtype changes them by 1e-6.
    """
    with torch.device("cpu"):
        d = feature_map.in_features
        half = _waves(PROBES // 2, d) * math.sqrt(2 / d)
        phi = feature_map(torch.cat([half, -half]).to(feature_map.projection)).double().flatten()
        sums = _waves(SKETCH, len(phi)) @ phi
        return [round(float(s), 6) for s in sums / phi.norm().clamp_min(1e-30)]


def _waves(count: int, size: int) -> Tensor:
    """(count, size), cosines of incommensurable frequencies: the same numbers everywhere, with no generator."""
    frequency = torch.arange(1, count + 1, dtype=torch.float64).sqrt() * (1 + math.sqrt(5)) / 2
    return torch.cos(frequency[:, None] * torch.arange(1, size + 1, dtype=torch.float64))


def check_sums(config: SNNKConfig, site: str, feature_map: FeatureMap) -> None:
    """Compare a draw with its checksum in a configuration from a file; a missing checksum is an error."""
    if not config.from_file:  # a configuration that was saved with one model may be used for another
        return
    if config.checksums is None:
        raise ValueError(
            f"the file has no directions (save_directions=False) and no checksums to verify those that "
            f"seed={config.seed} draws: its configuration was edited. Save it again; {ANEW}"
        )
    stored = config.checksums.get(site) if isinstance(config.checksums, dict) else None
    compare_sums(site, stored, checksum(feature_map))


def compare_sums(site: str, stored: Any, found: list[float], rounding: float = 0.0) -> None:
    """Raise a ValueError unless the stored checksum is that of the draw, within `rounding` of it."""
    try:
        same = all(abs(a - b) <= TOLERANCE + rounding * abs(b) for a, b in zip(stored or [], found, strict=True))
    except (TypeError, ValueError):  # no numbers, or not as many
        same = False
    if not same:
        raise ValueError(
            f"the directions drawn for {site} have the checksum {found}, and the file has {stored}: the model is "
            "another, the configuration was changed, or the random generator draws differently. Save with "
            f"save_directions=True instead; {ANEW}"
        )
