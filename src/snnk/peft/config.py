"""SNNKConfig: which adapters, where, and how they travel."""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import torch
from peft.config import PeftConfig
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME, PeftType
from peft.utils.other import get_pattern_key
from torch import Tensor

from snnk import _checks
from snnk.maps import FEATURE_MAPS, Directions, FeatureMap
from snnk.maps.activations import ACTIVATIONS
from snnk.maps.projections import PROJECTIONS
from snnk.nn.adapter import SNNKAdapter
from snnk.peft.patterns import check_patterns

# peft_type in a file: PEFT answers an unknown one with a KeyError of this text. Files of version 0.1 have "SNNK"
PEFT_TYPE = "SNNK: run 'import snnk.peft' before (pip install snnk[peft])"
PLACEMENTS = ("houlsby", "pfeiffer")
PROJECTED = ("random", "pca", "gradient")
PROBES, SKETCH, TOLERANCE = 4, 4, 1e-3
FLOATS = ("F64", "F32", "F16", "BF16")  # dtypes of adapters in files
ANEW = (
    "for a new adapter with the settings of an old one's file, take dataclasses.replace(config, inference_mode=False)"
)


@dataclass
class SNNKConfig(PeftConfig):
    """Configuration of SNNK adapters, for `peft.get_peft_model`.

    Args:
        num_features: number m of features of an adapter; it trains dim * m + dim numbers.
        feature_map: a name in FEATURE_MAPS; with "pca" and "gradient" the name of an activation. Random features of
            activations other than relu are sines and cosines whatever the name, as A is trained and not made from f.
        projection: "random"; or "pca" or "gradient", directions that `snnk.peft.fit_directions_` fills from data
            and that are random until then.
        rows: of random projections, a name in PROJECTIONS; "iid", the paper's, for the relu and arccos maps. With
            cos and other spectral ones, Gaussian rows let features grow like exp(|x|^2), past any float at |x| = 28.
        placement: "houlsby", behind attention and behind the feed-forward block, or "pfeiffer", behind the latter.
            Where neither this nor `target_modules` is given, "houlsby".
        target_modules: names, endings of names or one regular expression of linear layers, or "all-linear", instead
            of `placement`.
        exclude_modules: the same, of layers to leave out.
        layers_to_transform: numbers of the layers that get adapters; all without it, and none outside with it.
        layers_pattern: name of the list of layers that the numbers are of, where a model has several.
        feature_pattern: {ending or regular expression of a name: num_features of those layers}.
        modules_to_save: modules to train and save beside the adapters, such as a new head.
        init_weights: start as the identity. False draws what is trained from torch's global generator, so that no two
            such adapters are equal; it is there for tests.
        gate, use_bias: train v; train a bias.
        train_projection: train the projection too; with "pca", a bias and no gate it is the bottleneck adapter.
        normalize: of the feature map's inputs, see FeatureMap.
        save_projection: False writes what was trained and the seed; the rest is drawn again on loading.
        projection_seed: every layer draws from a stream of its own, made of this and its name.
        projection_checksums: written with a file without projections, and verified before it is loaded.

    Example:
        >>> from peft import get_peft_model
        >>> from transformers import BertConfig, BertModel
        >>> model = BertModel(BertConfig(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, vocab_size=9))
        >>> get_peft_model(model, SNNKConfig(num_features=16)).get_nb_trainable_parameters()[0]  # 4 * (8 * 16 + 8)
        544
    """

    num_features: int = 16
    feature_map: str = "relu"
    projection: str = "random"
    rows: str = "orthogonal"
    placement: str | None = None
    target_modules: Any = None
    exclude_modules: Any = None
    layers_to_transform: Any = None
    layers_pattern: Any = None
    feature_pattern: dict[str, int] = field(default_factory=dict)
    modules_to_save: list[str] | None = None
    init_weights: bool = True
    gate: bool = True
    use_bias: bool = False
    train_projection: bool = False
    normalize: str | None = None
    save_projection: bool = True
    projection_seed: int = 0
    projection_checksums: dict[str, list[float]] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        # a plain string where it comes from JSON or a dict; such are settings too, without what saving leaves in them
        self.was_read = type(self.peft_type) is str
        self.from_file = self.was_read and (self.inference_mode or self.projection_checksums is not None)
        self.peft_type = PeftType("SNNK")
        if self.was_read:
            check_patterns(vars(self))
        self.num_features = _checks.positive_int(self.num_features, "num_features")
        _checks.choose(self.projection, PROJECTED, "projection")
        known: Iterable[str] = FEATURE_MAPS if self.projection == "random" else ACTIVATIONS
        _checks.choose(self.feature_map, known, "feature map" if self.projection == "random" else "activation")
        _checks.choose(self.rows, PROJECTIONS, "rows")
        if self.rows != "orthogonal" and (self.projection != "random" or self.feature_map == "tanh_power"):
            what = self.feature_map if self.projection == "random" else f"projection={self.projection!r}"
            raise ValueError(f"{what} draws no rows of a kind to choose; got rows={self.rows!r}, leave it out")
        if self.placement is not None:
            _checks.choose(self.placement, PLACEMENTS, "placement")
        self.feature_pattern = {
            name: _checks.positive_int(count, f"feature_pattern[{name!r}]")
            for name, count in (self.feature_pattern or {}).items()
        }
        for pattern in self.feature_pattern:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"feature_pattern {pattern!r} is no regular expression: {error}") from None
        for name in ("target_modules", "exclude_modules"):
            if isinstance(getattr(self, name), list | tuple):
                setattr(self, name, set(getattr(self, name)))
        if self.layers_pattern and self.layers_to_transform is None:
            raise ValueError(
                f"layers_pattern={self.layers_pattern!r} says where the numbers of layers_to_transform count; "
                "give both, or neither"
            )
        if self.train_projection and self.feature_map == "arccos0":
            raise ValueError("features of arccos0 are steps, which no gradient moves: leave train_projection out")
        if isinstance(self.projection_seed, bool) or not isinstance(self.projection_seed, int):
            raise TypeError(f"projection_seed must be an integer; got {self.projection_seed!r}")
        if not self.save_projection and (self.projection != "random" or self.train_projection):
            reason = "trained" if self.train_projection else f"fitted to data (projection={self.projection!r})"
            raise ValueError(f"projections that are {reason} cannot be drawn again: use save_projection=True")

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, subfolder: str | None = None, **kwargs: Any) -> Any:
        """Read the configuration, and of a local folder the header of its weights: a bad file then changes nothing."""
        try:
            config = super().from_pretrained(pretrained_model_name_or_path, subfolder, **kwargs)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            file = Path(pretrained_model_name_or_path, subfolder or "", CONFIG_NAME)
            raise ValueError(f"{file} is not the configuration of an SNNK adapter: {error}") from error
        config.file_shapes = read_header(Path(pretrained_model_name_or_path, subfolder or ""))
        return config

    def to_dict(self) -> dict[str, Any]:
        """For a file, whose `peft_type` tells a reader without snnk what to import."""
        return {**super().to_dict(), "peft_type": PEFT_TYPE}

    def features_at(self, site: str) -> int:
        """num_features of the adapter behind the layer of that name."""
        return self.feature_pattern.get(get_pattern_key(list(self.feature_pattern), site), self.num_features)

    def make_adapter(self, site: str, dim: int) -> SNNKAdapter:
        """The adapter behind the layer of that name, whose outputs have `dim` values; on the CPU in float32."""
        seed = _seed(self.projection_seed, site)
        return SNNKAdapter(
            dim,
            self.features_at(site),
            self.make_feature_map(site, dim),
            gate=self.gate,
            bias=self.use_bias,
            train_projection=self.train_projection,
            init_weights=self.init_weights,
            seed=seed,
            device="cpu",
            dtype=torch.float32,
        )

    def make_feature_map(self, site: str, dim: int) -> FeatureMap:
        """The feature map of that layer's adapter, drawn from its own stream."""
        count = self.features_at(site)
        options: Any = {
            "normalize": self.normalize,
            "seed": _seed(self.projection_seed, site),
            "device": "cpu",
            "dtype": torch.float32,
        }
        try:
            if self.projection == "random":
                if self.rows != "orthogonal":  # else each map's own choice, which is that but in very few dimensions
                    options["projection"] = self.rows
                return FEATURE_MAPS[self.feature_map](dim, count, **options)
            if count > dim and not self.train_projection:  # trained ones may start from random directions
                raise ValueError(f"{self.projection} has at most {dim} directions there; got num_features={count}")
            return Directions(dim, count, self.feature_map, **options)
        except ValueError as error:
            raise ValueError(f"adapter behind {site}: {error}") from None


def _seed(seed: int, site: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{site}".encode()).digest()[:6], "big")


def read_header(folder: str | os.PathLike[str]) -> dict[str, tuple[int, ...]] | None:
    """Shapes of the tensors in a local folder's weights; None where it has none."""
    path = Path(folder, SAFETENSORS_WEIGHTS_NAME)
    if not path.exists():
        if Path(folder, WEIGHTS_NAME).exists():
            raise ValueError(f"{folder} has {WEIGHTS_NAME}, a pickle, which can run code: save it as safetensors")
        return None
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118, no mapping
            found = {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
    except (safetensors.SafetensorError, OSError) as error:
        raise ValueError(f"{path} is no whole safetensors file: {error}. Copy or save it again") from None
    for name, (dtype, _) in found.items():  # PEFT would take bits of another kind for numbers
        if ".snnk_adapter." in name and dtype not in FLOATS and not name.endswith(".degrees"):
            raise ValueError(f"{path} has {name} as {dtype}, not as {', '.join(FLOATS)}. Copy or save it again")
    return {name: shape for name, (_, shape) in found.items()}


@torch.no_grad()
def checksum(feature_map: FeatureMap) -> list[float]:
    """A few numbers that tell one draw from another, and bear the last bits that differ between processors.

    They are sums, with fixed weights, of the features of fixed inputs, over their root mean square. A hash of rounded
    values would not do: among 10^4 of them one is next to a boundary. Two draws agree to 1e-3 in all four by chance
    about once in 10^12; another processor or dtype moves them by 1e-6.
    """
    with torch.device("cpu"):
        d = feature_map.in_features
        half = _waves(PROBES // 2, d) * math.sqrt(2 / d)
        phi = feature_map(torch.cat([half, -half]).to(feature_map.projection)).double().flatten()
        sums = _waves(SKETCH, len(phi)) @ phi
        return [round(float(s), 6) for s in sums / phi.norm().clamp_min(1e-30)]


def _waves(count: int, size: int) -> Tensor:
    """(count, size), cosines of incommensurable frequencies: the same numbers everywhere, without a generator."""
    frequency = torch.arange(1, count + 1, dtype=torch.float64).sqrt() * (1 + math.sqrt(5)) / 2
    return torch.cos(frequency[:, None] * torch.arange(1, size + 1, dtype=torch.float64))


def check_sums(config: SNNKConfig, site: str, feature_map: FeatureMap) -> None:
    """Compare a draw with the checksum that a configuration from a file has of it, and must have."""
    if not config.from_file:  # saving leaves those of one model in a configuration that another may use
        return
    if config.projection_checksums is None:
        raise ValueError(
            f"the file has no projections (save_projection=False) and no projection_checksums to verify those "
            f"that projection_seed={config.projection_seed} draws: its configuration was edited. Save it again; "
            f"{ANEW}"
        )
    stored = config.projection_checksums.get(site) if isinstance(config.projection_checksums, dict) else None
    compare_sums(site, stored, checksum(feature_map))


def compare_sums(site: str, stored: Any, found: list[float], rounding: float = 0.0) -> None:
    """Demand that the stored checksum is that of what was drawn, but for `rounding` of it."""
    try:
        same = all(abs(a - b) <= TOLERANCE + rounding * abs(b) for a, b in zip(stored or [], found, strict=True))
    except (TypeError, ValueError):  # no numbers, or not as many
        same = False
    if not same:
        raise ValueError(
            f"projection drawn for {site} has checksum {found}, the file's is {stored}: another model, a changed "
            "configuration, or a random generator that draws differently. Save with save_projection=True instead; "
            f"{ANEW}"
        )
