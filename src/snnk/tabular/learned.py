r"""Features that learn from the data: cosines of binned inputs, trained on a sample, in front of a closed form.

    e = (x, bins(x)),    h = cos(W e + b),    o = link(H h + L e + c),    phi(x) = (h, o)

bins(x) is the piecewise linear code of the numbers among the inputs: entry j of a column is how much of its j-th
quantile interval lies below the value, from 0 to 1, less 1/2, so that steps can be learnt. W, b, H, L and c are trained
by Adam for a few epochs on a sample of the rows, with the logistic loss for classes (link is the softmax) and the
squared error for numbers (link is the identity). Then they are frozen, and the matrix behind phi is the ridge solution
of all rows: the outputs o of the small network are features among others, so that the closed form starts from what was
learnt and corrects it with every row of the table.

The part of W bins(x) that comes from one column is a piecewise linear function of one number. phi therefore looks its
values at both ends of an interval up in a table, and interpolates: two rows of the table per column, instead of a
product with all bins.

A second layer of cosines, h = cos(V cos(W e + b) + v), is trained and used in the same way if it is asked for.

With few rows, trained features may know the rows by heart. Therefore rows that take no part in the training choose
among several strengths of training and random Fourier features of several bandwidths, each with the closed form behind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from snnk import _checks
from snnk.maps import FEATURE_MAPS, FeatureMap
from snnk.maps.base import named_in_files
from snnk.ridge.sums import RidgeStats
from snnk.tabular.config import check_deep

BINS, MOST_BINS = 32, 1024  # per column, and for all columns together
FEW_VALUES = 3  # a column with fewer different values has no bins
REACH = 8.0  # in standard deviations; inputs beyond it count as this far away
BATCH, LEAST_BATCH = 1024, 64
STEPS_PER_EPOCH = 32  # at least, with few rows
VISITS, EPOCHS = 800_000, (2, 20)  # rows that a training sees, and the bounds of the number of epochs
FEWEST = 20  # with fewer rows, features are drawn, not learnt
FEW_ROWS = 50_000  # with fewer rows, validation rows choose among several ways
VALIDATION, MOST_VALIDATION = 0.1, 20_000  # share and number of rows that choose
MORE_VALIDATION, ENOUGH = 0.25, 500  # the share if a tenth is fewer than these rows
WARMUP, BETAS = 0.15, (0.9, 0.98)
# (learning rate, weight decay): the first is for many rows, the others are gentler
STRENGTHS = ((1e-2, 0.0), (3e-3, 0.1), (1e-3, 1.0))
DEEP_RATE = 0.5  # of the learning rate, with a second layer
BANDWIDTHS = (1 / 16, 0.25, 0.5, 1.0, 2.0, 4.0)  # features of the first are almost linear
BANDWIDTH_ROWS = 20_000  # of which the bandwidth of random features is chosen

Progress = Callable[[int, int], None]  # steps done, steps in all


@named_in_files
class LearnedFeatures(FeatureMap):
    """Cosines of binned inputs and the outputs of a small network on them, made by `learn`.

    Args:
        in_features, num_features: sizes d and m; m counts the outputs.
        binned: number of inputs that have bins.
        bins: number of bins of each of them.
        outputs: number of outputs among the features: that of the targets, or 0 for none.
        classes: whether outputs are probabilities.
        deep: whether the features are a second layer of cosines, behind as many of the first.
        device: of the buffers.

    Example:
        >>> x = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
        >>> learn(x, x[:, :1].sign(), 16, classes=False).phi(x).shape
        torch.Size([200, 16])
    """

    source: Tensor  # (binned,) the inputs that have bins
    edges: Tensor  # (binned, bins + 1) their ends, in ascending order; a bin of no width has a constant code
    phase: Tensor  # (h,) b
    deep_projection: Tensor  # (h, h) V, and
    deep_phase: Tensor  # (h,) v of the second layer, if there is one
    head: Tensor  # (outputs, h) H
    skip: Tensor  # (outputs, d + binned bins) L
    offset: Tensor  # (outputs,) c

    def __init__(
        self,
        in_features: int,
        num_features: int,
        *,
        binned: int = 0,
        bins: int = 0,
        outputs: int = 0,
        classes: bool = False,
        deep: bool = False,
        normalize: str | None = None,
        seed: int = 0,
        device: Any = None,
    ) -> None:
        super().__init__(in_features, num_features, normalize=normalize, seed=seed)
        for name, value in (("binned", binned), ("bins", bins), ("outputs", outputs)):
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 24:
                raise ValueError(f"{name} must be an integer >= 0; got {value!r}")
        if outputs >= num_features:
            raise ValueError(f"{num_features} features leave none beside {outputs} outputs; use more features")
        self.binned, self.bins, self.outputs, self.classes, self.deep = binned, bins, outputs, bool(classes), bool(deep)
        width, h = in_features + binned * bins, num_features - outputs
        shapes = {"edges": (binned, bins + 1), "projection": (h, width), "phase": (h,)}
        shapes |= {"head": (outputs, h), "skip": (outputs, width), "offset": (outputs,)}
        if deep:
            check_deep(h)
            shapes |= {"deep_projection": (h, h), "deep_phase": (h,)}
        self.register_buffer("source", torch.zeros(binned, dtype=torch.int64, device=device))
        for name, shape in shapes.items():
            self.register_buffer(name, torch.zeros(shape, device=device))
        self.reset_parameters()

    def _reset(self) -> None:
        self._fill(
            projection=torch.randn(self.projection.shape, generator=(g := self._generator()))
            / math.sqrt(self.projection.shape[1]),
            phase=2 * math.pi * torch.rand(self.phase.shape, generator=g),
        )
        if self.deep:  # cosines have mean square 1/2, and angles get mean square 1
            self._fill(
                deep_projection=torch.randn(self.deep_projection.shape, generator=g) / math.sqrt(len(self.phase) / 2),
                deep_phase=2 * math.pi * torch.rand(self.phase.shape, generator=g),
            )

    def _config(self) -> dict[str, Any]:
        found = {"binned": self.binned, "bins": self.bins, "outputs": self.outputs, "classes": self.classes}
        return found | ({"deep": True} if self.deep else {})

    def encode(self, x: Tensor) -> Tensor:
        """Inputs and their bins: (*, d) -> (*, d + binned bins)."""
        x = x.clamp(-REACH, REACH)
        codes = ((x[..., self.source, None] - self.edges[:, :-1]) * self._inverse()).clamp(0.0, 1.0) - 0.5
        return torch.cat([x, codes.flatten(-2)], -1)

    def _inverse(self) -> Tensor:
        """One over the widths of all bins, (binned, bins); 0 for a bin of no width."""
        widths = self.edges.diff(dim=-1)
        return torch.where(widths > 0, 1 / widths, 0.0)

    def _linear(self, x: Tensor) -> Tensor:
        """(W; L) e + (b; c) for inputs (n, d), from tables of the values at the ends of bins."""
        d, (c, k) = self.in_features, (self.binned, self.bins)
        weight = torch.cat([self.projection, self.skip]).T  # (d + c k, h + outputs)
        bias = torch.cat([self.phase, self.offset])
        x = x.clamp(-REACH, REACH)
        if not c * k:
            return torch.addmm(bias, x, weight)
        inverse = self._inverse()
        steps = weight[d:].reshape(c, k, -1)
        rises = torch.where((inverse > 0)[..., None], steps, 0.0)
        table = torch.cat([rises.new_zeros(c, 1, rises.shape[2]), rises.cumsum(1)], 1).flatten(0, 1)
        values = x[:, self.source]
        bin_of = torch.searchsorted(self.edges[:, 1:-1].contiguous(), values.T.contiguous(), right=True).T  # (n, c)
        columns = torch.arange(c, device=x.device)
        inside = ((values - self.edges[columns, bin_of]) * inverse[columns, bin_of]).clamp(0.0, 1.0)
        place = columns * (k + 1) + bin_of
        rows, weights = torch.cat([place, place + 1], 1), torch.cat([1 - inside, inside], 1)
        found = F.embedding_bag(rows, table, mode="sum", per_sample_weights=weights)
        return found.addmm_(x, weight[:d]).add_(bias - steps.sum((0, 1)) / 2)

    def _phi(self, x: Tensor) -> Tensor:
        flat = x.to(self.projection.dtype).reshape(-1, self.in_features)
        hidden, outputs = self._linear(flat).split([len(self.phase), self.outputs], 1)
        hidden = self._second(hidden.cos())
        outputs = F.linear(hidden, self.head) + outputs
        found = torch.cat([hidden, outputs.softmax(-1) if self.classes else outputs], 1)
        return found.reshape(*x.shape[:-1], self.num_features)

    def _second(self, hidden: Tensor) -> Tensor:
        """The features behind the cosines (n, h) of the first layer."""
        return F.linear(hidden, self.deep_projection, self.deep_phase).cos() if self.deep else hidden

    def logits(self, x: Tensor) -> Tensor:
        """The outputs before the softmax, (n, outputs), without tables: gradients reach all parameters."""
        code = self.encode(x)
        hidden = self._second(F.linear(code, self.projection, self.phase).cos())
        return F.linear(hidden, self.head, self.offset) + F.linear(code, self.skip)

    def trained(self) -> list[Tensor]:
        """What a training changes."""
        second = [self.deep_projection, self.deep_phase] if self.deep else []
        return [self.projection, self.phase, *second, self.head, self.skip, self.offset]


def find_bins(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantile intervals of the numbers among inputs (n, d): the inputs (c,) that have them, and their ends (c, k + 1).

    All columns share `MOST_BINS` bins; where they get fewer than two each, there are none. A column with equal
    quantiles has bins of no width at its end.
    """
    ordered = x.clamp(-REACH, REACH).sort(0).values
    several = [j for j in range(x.shape[1]) if len(ordered[:, j].unique_consecutive()) >= FEW_VALUES]
    count = min(BINS, MOST_BINS // max(len(several), 1))
    if count < 2 or not several:
        return torch.zeros(0, dtype=torch.int64), x.new_zeros(0, 1)
    places = torch.linspace(0, len(x) - 1, count + 1).round().long()
    edges = ordered[places][:, several].T.clone()
    for row in edges:
        different = row.unique_consecutive()
        row[: len(different)], row[len(different) :] = different, different[-1].item()
    return torch.tensor(several), edges


def learn(
    x: Tensor,
    y: Tensor,
    num_features: int,
    *,
    classes: bool,
    weight: Tensor | None = None,
    deep: bool = False,
    seed: int = 0,
    progress: Progress = lambda done, total: None,
) -> FeatureMap:
    """The feature map that suits rows x (n, d) with targets y (n, t) best: learnt, or random Fourier features.

    Nothing is fitted to the last tenth of the rows (a quarter of few), which chooses; give rows in random order.

    Args:
        x: standardised inputs, float32.
        y: targets; one-hot rows, or probabilities, for classes.
        num_features: number m of features.
        classes: whether the targets are classes.
        weight: weights of the rows, (n,).
        deep: whether learnt features are a second layer of cosines.
        seed: of the start and of the order of the rows.
        progress: a function that is called with (steps done, steps in all).
    """
    n, t = len(x), y.shape[1]
    if deep:
        check_deep(num_features)  # with or without outputs among them
    if len(y) != n:
        raise ValueError(f"features are learnt from as many targets as inputs; got {n} inputs and {len(y)} targets")
    constant = not bool((x != x[:1]).any())
    if _checks.positive_int(num_features, "num_features") <= 2 * t or n < FEWEST or constant:
        return _random(x.shape[1], num_features, 1.0, seed)
    x, y = x.float(), (y if classes else (y - y.mean(0)) / y.std(0).clamp_min(1e-30)).float()
    weight = torch.ones(n) if weight is None else (weight / weight.mean()).float()
    held = min(max(round(VALIDATION * n), min(round(MORE_VALIDATION * n), ENOUGH)), MOST_VALIDATION)
    rows = _Rows(x[:-held], y[:-held], weight[:-held])
    left = _Rows(x[-held:], y[-held:], weight[-held:])
    few = len(rows.x) < FEW_ROWS
    strengths = STRENGTHS if few else STRENGTHS[:1]
    steps = len(strengths) * rows.steps()
    found: list[tuple[float, FeatureMap]] = []
    bins = find_bins(rows.x)
    for index, (rate, decay) in enumerate(strengths):

        def show(done: int, before: int = index * rows.steps()) -> None:
            progress(before + done, steps)

        trained = _train(rows, left, num_features, bins, classes, deep, rate, decay, seed, show)
        if not few:
            return trained
        ways: list[FeatureMap] = [trained, _without_outputs(trained, rows, num_features, bins, seed)]
        found += ((_error(fm, rows, left), fm) for fm in ways)
    blind = (_random(x.shape[1], num_features, b, seed) for b in BANDWIDTHS)
    found += ((_error(fm, rows, left), fm) for fm in blind)
    return min(found, key=lambda pair: pair[0])[1]


def choose_bandwidth(x: Tensor, y: Tensor, num_features: int, seed: int = 0, x_norm: float | None = None) -> float:
    """The bandwidth of random Fourier features with the least score of GCV on rows x (n, d), y (n, t).

    `x_norm` is the typical length of rows for which the features will be drawn; by default the root of d.
    """
    x, y = x[:BANDWIDTH_ROWS].float(), y[:BANDWIDTH_ROWS]

    def score(bandwidth: float) -> float:
        fm = _random(x.shape[1], num_features, bandwidth, seed, x_norm)
        stats = RidgeStats(fm.num_features, y.shape[1], block_dtype=torch.float32)
        return float(_add(stats, fm, x, y).solve("gcv").score or 0.0)

    return min(BANDWIDTHS, key=score)


@dataclass(frozen=True)
class _Rows:
    """Rows in random order."""

    x: Tensor  # (n, d)
    y: Tensor  # (n, t)
    weight: Tensor  # (n,)

    @property
    def batch(self) -> int:
        return min(max(len(self.x) // STEPS_PER_EPOCH, LEAST_BATCH), BATCH, len(self.x))

    @property
    def epochs(self) -> int:
        visits = VISITS if len(self.x) >= FEW_ROWS else VISITS // len(STRENGTHS)
        return min(max(-(-visits // len(self.x)), EPOCHS[0]), EPOCHS[1])

    def steps(self) -> int:
        """Number of steps of a training."""
        return self.epochs * (len(self.x) // self.batch)

    def batches(self, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """One epoch in a new random order; the last rows that fill no batch are left out."""
        order = torch.randperm(len(self.x), generator=generator)
        for part in order.split(self.batch)[: len(self.x) // self.batch]:
            yield self.x[part], self.y[part], self.weight[part]


def _train(
    rows: _Rows,
    left: _Rows,
    num_features: int,
    bins: tuple[Tensor, Tensor],
    classes: bool,
    deep: bool,
    rate: float,
    decay: float,
    seed: int,
    show: Callable[[int], None],
) -> LearnedFeatures:
    """A map after the epoch with the least loss of `left`, with a learning rate that rises and falls once."""
    d, t = rows.x.shape[1], rows.y.shape[1]
    fm = _with_bins(d, num_features, bins, outputs=t, classes=classes, deep=deep, seed=seed)
    parameters, rate = [p.requires_grad_() for p in fm.trained()], rate * (DEEP_RATE if deep else 1)
    with torch.no_grad():
        mean = rows.y.mean(0)
        fm.offset.copy_((mean + 1e-3).log() if classes else mean)
    optimizer = torch.optim.AdamW(parameters, lr=rate, betas=BETAS, weight_decay=decay, fused=True)
    steps = rows.steps()
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps + 1, pct_start=WARMUP)
    generator, done = torch.Generator().manual_seed(seed), 0
    best, kept = math.inf, {name: buffer.clone() for name, buffer in fm.state_dict().items()}
    for _ in range(rows.epochs):
        for x, y, weight in rows.batches(generator):
            optimizer.zero_grad()
            _loss(fm, x, y, weight).backward()
            optimizer.step()
            schedule.step()
            done += 1
            show(done)
        with torch.no_grad():
            parts = zip(*(part.split(BATCH) for part in (left.x, left.y, left.weight)), strict=True)
            found = sum(float(_loss(fm, *part)) * len(part[0]) for part in parts) / len(left.x)
        if found < best:
            best, kept = found, {name: buffer.detach().clone() for name, buffer in fm.state_dict().items()}
    for parameter in parameters:
        parameter.requires_grad_(False)
    fm.load_state_dict(kept)
    return fm


def _loss(fm: LearnedFeatures, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    outputs = fm.logits(x)
    losses = -(y * outputs.log_softmax(1)).sum(1) if fm.classes else (outputs - y).square().mean(1)
    return (weight * losses).mean()


def _without_outputs(
    fm: LearnedFeatures, rows: _Rows, num_features: int, bins: tuple[Tensor, Tensor], seed: int
) -> LearnedFeatures:
    """The same features without the outputs, which may know the training rows by heart."""
    hidden = fm.phase.numel()
    found = _with_bins(rows.x.shape[1], num_features, bins, deep=fm.deep, seed=seed)  # more features, drawn
    found.projection[:hidden], found.phase[:hidden] = fm.projection, fm.phase
    if fm.deep:
        found.deep_projection[:hidden, :hidden], found.deep_phase[:hidden] = fm.deep_projection, fm.deep_phase
        found.deep_projection[:hidden, hidden:] = 0.0
    return found


def _with_bins(in_features: int, num_features: int, bins: tuple[Tensor, Tensor], **options: Any) -> LearnedFeatures:
    """A map with the bins that `find_bins` found."""
    source, edges = bins
    fm = LearnedFeatures(in_features, num_features, binned=len(source), bins=edges.shape[1] - 1, **options)
    fm.source.copy_(source)
    fm.edges.copy_(edges)
    return fm


def _random(
    in_features: int, num_features: int, bandwidth: float, seed: int, x_norm: float | None = None
) -> FeatureMap:
    options = {"bandwidth": bandwidth, "x_norm": x_norm or math.sqrt(in_features), "seed": seed}
    return FEATURE_MAPS["random-fourier"](in_features, num_features + num_features % 2, **options)


def _error(fm: FeatureMap, rows: _Rows, left: _Rows) -> float:
    """The mean squared error on `left` of the closed form of the other rows."""
    stats = RidgeStats(fm.num_features, rows.y.shape[1], block_dtype=torch.float32)
    solution = _add(stats, fm, rows.x, rows.y, rows.weight).solve("gcv")
    with torch.no_grad():
        parts = zip(*(part.split(BATCH) for part in (left.x, left.y, left.weight)), strict=True)
        return sum(float((w[:, None] * (solution.predict(fm.phi(x).double()) - y).square()).sum()) for x, y, w in parts)


@torch.no_grad()
def _add(stats: RidgeStats, fm: FeatureMap, x: Tensor, y: Tensor, weight: Tensor | None = None) -> RidgeStats:
    """Add rows to sums, with the features of some rows in memory at once."""
    for start in range(0, len(x), 2 * BATCH):
        part = slice(start, start + 2 * BATCH)
        stats.update(fm.phi(x[part]), y[part], None if weight is None else weight[part])
    return stats
