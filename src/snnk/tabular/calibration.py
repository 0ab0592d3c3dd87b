r"""Probabilities from the scores of a classifier, and measures of how good probabilities are.

    P(class c | scores s) = exp(a s_c + b_c) / sum_j exp(a s_j + b_j),    a >= 0

One scale a and one offset b_c per class maximise the likelihood of rows that did not determine the scores (Platt
scaling for several classes). The problem is convex, so that Newton's method finds its only optimum in a few steps. A
small penalty keeps all parameters finite where the scores separate the classes, or where a class has no row.

Scores of least squares are estimates of probabilities, some of them below 0. They are cut off smoothly near a floor f,
r = (score + sqrt(score^2 + 4 f^2)) / 2, and s_c and b_c stand for

    s_c = log(r_c / mean of r_c),    b_c = log(frequency of class c) + d_c

With a = 1 and d = 0 the scores are right, and with a = 0 and d = 0 they tell nothing and give the frequencies of the
classes. A penalty pulls the parameters towards scores that are right: a few dozen rows, with one error among them or
none, determine neither how sure the scores are nor whether they prefer a class. Of some floors, the best is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from snnk import _checks
from snnk.tabular.scaling import LARGEST

F64 = torch.float64
PENALTY = 1e-2  # times half the squared parameters, in rows of weight 1 and scores of mean square 1
PRIOR = 4.0  # the penalty for scores that are estimates of probabilities: parameters have a deviation of a half
STEPS = 100  # Newton needs about ten; damping on separable classes takes a few more
BOUNDS = -1.0, 2.0  # of least-squares scores: where features fit almost every row, a few of other rows are huge
FLOORS = (0.003, 0.01, 0.03, 0.1)  # that are tried for least-squares scores
PRECISION = 1e-12  # of the log-likelihood per row, at which the steps end


@dataclass(frozen=True)
class PlattScaling:
    """softmax(scale * scores + offset), which turns scores of classes into probabilities.

    Args:
        scale: a number >= 0 that all scores are multiplied by.
        offset: one number per class.
        floor: that of scores that are estimates of probabilities; 0 for scores that are used as they are.

    Example:
        >>> scores = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
        >>> calibration = PlattScaling.fit(scores, torch.tensor([0, 1, 0, 1, 1]))
        >>> [round(p, 2) for p in calibration.probabilities(scores[0:1])[0].tolist()]
        [0.67, 0.33]
    """

    scale: float
    offset: tuple[float, ...]
    floor: float = 0.0

    @classmethod
    def fit(
        cls, scores: Tensor, labels: Tensor, weight: Tensor | None = None, floors: Sequence[float] = (0.0,)
    ) -> PlattScaling:
        """The calibration of least penalised loss, over the floors too.

        Args:
            scores: (n, k), from a model that has not seen these rows.
            labels: (n,) indices of classes below k, or (n, k) probabilities of the classes.
            weight: (n,) >= 0, scaled to a mean of 1 over the rows that have one. Default: every row counts once.
            floors: those to try, `FLOORS` for scores of least squares.
        """
        scores = _matrix(scores, "scores")
        n, k = scores.shape
        target = _targets(labels, n, k)
        weight = _weights(weight, n, scores)
        seen = weight > 0
        scores, target, weight = scores[seen], target[seen], weight[seen] * (float(seen.sum()) / n)
        return min((cls._fit(scores, target, weight, floor) for floor in floors), key=lambda pair: pair[0])[1]

    @classmethod
    def _fit(cls, scores: Tensor, target: Tensor, weight: Tensor, floor: float) -> tuple[float, PlattScaling]:
        """The calibration with one floor, and its loss."""
        n, k = scores.shape
        logs = _soft_log(scores, floor)
        z, base, mean, unit = _differences(logs), scores.new_zeros(k), scores.new_zeros(k), 1.0
        if floor:
            base, mean = ((weight @ target + 1) / (n + k)).log(), (weight @ logs.exp() / n).log()
            z = z - mean
        else:
            top = z.abs().max()
            # The largest value goes first, so that squares neither overflow nor vanish.
            z = z / top if top > 0 else z
            spread = float((weight @ z.square()).mean() / n) ** 0.5 or 1.0
            z, unit = z / spread, spread * float(top) or 1.0
        centre, penalty = (1.0, PRIOR) if floor else (0.0, PENALTY)
        loss, found = _newton(z, base, target, weight, centre, penalty, scaled=True)
        if found[0] < 0:  # a convex function whose optimum is at a < 0 has its least value for a >= 0 at a = 0
            loss, found = _newton(z, base, target, weight, centre, penalty, scaled=False)
        offset = found[1:] + base - found[0] * mean
        return loss, cls(min(float(found[0]) / unit, LARGEST), tuple(offset.tolist()), floor)

    def probabilities(self, scores: Tensor) -> Tensor:
        """Probabilities (n, k), float64, of scores (n, k)."""
        return torch.softmax(self.logits(scores), 1)

    def logits(self, scores: Tensor) -> Tensor:
        """Logarithms of the probabilities of scores (n, k), but for one number per row."""
        scores = _matrix(scores, "scores")
        if scores.shape[1] != len(self.offset):
            raise ValueError(f"scores must have one column for each of {len(self.offset)} classes; got {scores.shape}")
        scaled = (_differences(_soft_log(scores, self.floor)) * self.scale).clamp_min(-LARGEST)
        return scaled + scores.new_tensor(self.offset)

    def to_dict(self) -> dict[str, Any]:
        """The calibration as JSON holds it."""
        stored = asdict(self)
        if not self.floor:
            del stored["floor"]
        return {**stored, "offset": list(self.offset)}

    @classmethod
    def from_dict(cls, stored: Any) -> PlattScaling:
        """A calibration from a file; every key and every type is checked."""
        if not isinstance(stored, dict) or set(stored) | {"floor"} != {"scale", "offset", "floor"}:
            raise ValueError(f"a calibration must have scale and offset, and may have a floor; got {_short(stored)}")
        scale, offset, floor = stored["scale"], stored["offset"], stored.get("floor", 0.0)
        if not _checks.is_number(floor) or not 0 <= floor <= 1:
            raise ValueError(f"the floor of a calibration must be a number from 0 to 1; got {_short(floor)}")
        if not _checks.is_number(scale) or not 0 <= scale <= LARGEST:
            raise ValueError(f"the scale of a calibration must be a finite number >= 0; got {_short(scale)}")
        numbers = isinstance(offset, list) and all(_checks.is_number(b) and abs(b) <= LARGEST for b in offset)
        if not numbers or len(offset) < 2:
            raise ValueError(
                f"the offset of a calibration must be a list of a finite number per class; got {_short(offset)}"
            )
        return cls(float(scale), tuple(map(float, offset)), float(floor))


def log_loss(probabilities: Tensor, labels: Tensor, weight: Tensor | None = None) -> float:
    """Mean of -log of the probabilities (n, k) of the true classes (n,); a probability of 0 counts as 2e-16.

    Example:
        >>> round(log_loss(torch.tensor([[0.5, 0.5], [0.25, 0.75]]), torch.tensor([0, 1])), 4)
        0.4904
    """
    p = _matrix(probabilities, "probabilities")
    index, weight = _indices(labels, *p.shape), _weights(weight, len(p), p)
    found = p.gather(1, index[:, None])[:, 0].clamp(torch.finfo(F64).eps, 1.0)
    return -float(weight @ found.log()) / len(p)


def roc_auc(probabilities: Tensor, labels: Tensor) -> float | None:
    """Area under the ROC curve of probabilities (n, k) for the true classes (n,); None if only one class is present.

    Two classes have one curve, that of the second class. More classes have one curve each, against all others; the
    result is the mean over the classes that are present.

    Example:
        >>> roc_auc(torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.7, 0.3]]), torch.tensor([0, 1, 1]))
        1.0
    """
    p = _matrix(probabilities, "probabilities")
    index = _indices(labels, *p.shape)
    present = index.unique().tolist()
    if len(present) < 2:
        return None
    areas = [_area(p[:, c], index == c) for c in (present if p.shape[1] > 2 else [1])]
    return sum(areas) / len(areas)


def _area(values: Tensor, positive: Tensor) -> float:
    """The share of pairs of a positive and a negative row that `values` (n,) has in order; a tie counts half."""
    _, inverse, counts = values.unique(return_inverse=True, return_counts=True)
    counts = counts.to(F64)
    ranks = (counts.cumsum(0) - (counts - 1) / 2)[inverse]
    up, down = int(positive.sum()), int((~positive).sum())
    return (float(ranks[positive].sum()) - up * (up + 1) / 2) / (up * down)


def expected_calibration_error(probabilities: Tensor, labels: Tensor, bins: int = 10) -> float:
    """Mean distance between the largest probability of a row and how often that class is the true one.

    Args:
        probabilities: (n, k).
        labels: (n,) indices of the true classes.
        bins: number of intervals of equal width from 0 to 1. Rows whose largest probability is in one interval are
            taken together, and intervals count by their rows.

    Example:
        >>> round(expected_calibration_error(torch.tensor([[0.8, 0.2]] * 4), torch.tensor([0, 0, 0, 1])), 4)
        0.05
    """
    p = _matrix(probabilities, "probabilities")
    bins = _checks.positive_int(bins, "bins")
    confidence, best = p.max(1)
    right = (best == _indices(labels, *p.shape)).to(F64)
    bin_of = (confidence * bins).ceil().long().clamp(1, bins) - 1
    gaps = torch.zeros(bins, dtype=F64, device=p.device).index_add_(0, bin_of, confidence - right)
    return float(gaps.abs().sum()) / len(p)


def _newton(
    z: Tensor, base: Tensor, target: Tensor, weight: Tensor, centre: float, penalty: float, *, scaled: bool
) -> tuple[float, Tensor]:
    """Scale and offsets (1 + k,) of least loss for logits scale z + base + offset; the scale is 0 unless `scaled`.

    The penalty pulls the scale towards `centre`, and the offsets towards 0.
    """
    k = z.shape[1]
    prior = z.new_tensor([centre, *([0.0] * k)])
    theta = prior * scaled
    total = target.sum(1) * weight

    def loss(theta: Tensor) -> Tensor:
        logits = theta[0] * z + base + theta[1:]
        fit = total @ logits.logsumexp(1) - weight @ (target * logits).sum(1)
        return fit + penalty / 2 * (theta - prior).square().sum()

    value = loss(theta)
    for _ in range(STEPS):
        p = torch.softmax(theta[0] * z + base + theta[1:], 1)
        missed = p * total[:, None] - target * weight[:, None]
        gradient = torch.cat([(missed * z).sum()[None], missed.sum(0)]) + penalty * (theta - prior)
        centred = z - (p * z).sum(1, keepdim=True)
        weighted = p * total[:, None]
        cross = (weighted * centred).sum(0)
        hessian = penalty * torch.eye(1 + k, dtype=F64, device=z.device)
        hessian[0, 0] += (weighted * centred.square()).sum()
        hessian[0, 1:] += cross
        hessian[1:, 0] += cross
        hessian[1:, 1:] += torch.diag(weighted.sum(0)) - weighted.T @ p
        if not scaled:
            gradient[0], hessian[0, 1:], hessian[1:, 0] = 0.0, 0.0, 0.0
        step = torch.linalg.solve(hessian, gradient)
        decrease, length = float(gradient @ step), 1.0
        if decrease <= PRECISION * len(z):
            break
        while (new := loss(theta - length * step)) > value - length * decrease / 4 and length > 1e-10:
            length /= 2
        theta, value = theta - length * step, new
    return float(value), theta


def _differences(scores: Tensor) -> Tensor:
    """Scores (n, k) minus the largest of their row: softmax has the same value, and nothing overflows."""
    return (scores - scores.max(1, keepdim=True).values).clamp_min(-LARGEST)


def _soft_log(scores: Tensor, floor: float) -> Tensor:
    """Logarithms of scores that are cut off smoothly near a floor; the scores themselves for a floor of 0."""
    if not floor:
        return scores
    root = (scores.square() + 4 * floor**2).sqrt()
    # (s + root) / 2 = 2 floor^2 / (root - s), which cancels nothing where s is below 0
    return torch.where(scores > 0, (scores + root) / 2, 2 * floor**2 / (root - scores)).log()


def _matrix(x: Tensor, name: str) -> Tensor:
    """A finite matrix (n, k) in float64, of at least one row and two columns."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"{name} must be a floating tensor; got {x.dtype if isinstance(x, Tensor) else type(x)}")
    if x.ndim != 2 or not len(x) or x.shape[1] < 2:
        raise ValueError(f"{name} must be (n, k), with a row and two classes at least; got {tuple(x.shape)}")
    return _checks.finite(x.detach(), name).to(F64)


def _indices(labels: Tensor, n: int, k: int) -> Tensor:
    """Indices of classes (n,), int64 and below k."""
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dtype == torch.bool:
        kind = labels.dtype if isinstance(labels, Tensor) else type(labels)
        raise TypeError(f"labels must be a tensor of indices of classes; got {kind}. Convert it with .long()")
    if labels.shape != (n,) or int(labels.min()) < 0 or int(labels.max()) >= k:
        found = f"shape {tuple(labels.shape)}" if labels.shape != (n,) else f"{int(labels.min())} to {labels.max()}"
        raise ValueError(f"labels must be ({n},) indices from 0 to {k - 1}; got {found}")
    return labels.long()


def _targets(labels: Tensor, n: int, k: int) -> Tensor:
    """Probabilities of the classes (n, k), float64, from indices (n,) or from themselves."""
    if not isinstance(labels, Tensor) or labels.ndim != 2:
        return torch.nn.functional.one_hot(_indices(labels, n, k), k).to(F64)
    target = _matrix(labels, "labels")
    if target.shape != (n, k) or bool((target < 0).any()):
        raise ValueError(f"labels must be ({n},) indices or ({n}, {k}) probabilities; got {tuple(labels.shape)}")
    return target


def _weights(weight: Tensor | None, n: int, like: Tensor) -> Tensor:
    """Weights (n,) in float64 with the sum n."""
    if weight is None:
        return torch.ones(n, dtype=F64, device=like.device)
    if not isinstance(weight, Tensor) or weight.shape != (n,):
        raise ValueError(f"weight must be a tensor ({n},); got {getattr(weight, 'shape', type(weight))}")
    weight = _checks.finite(weight.detach(), "weight").to(like)
    if bool((weight < 0).any()) or not bool((weight > 0).any()):
        raise ValueError(f"weight must be >= 0, and above 0 for some row; got {float(weight.min()):g} at least")
    weight = weight / weight.max()
    return weight * (n / weight.sum())


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
