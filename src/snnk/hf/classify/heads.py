r"""The closed form of a classifier: ridge regression on its frozen inputs h, in one pass.

    W, b = argmin sum_i |y_i - W h_i - b|^2 + lam |W|^2,    y one-hot for classes

For regression this is the classifier. For classes, z = W h + b is close to a probability and not a logit. The
classifier becomes t (z - mean) + c, with the t and c_1..c_k of least cross-entropy on leave-one-out predictions. They
are exact from the same sums: z_i - (y_i - z_i) v_i / (1 - v_i), with v_i the leverage of row i. A temperature from the
fitted values themselves would be overconfident for few rows.

A StandardisedLinear mostly has more inputs than there are rows, and sums grow with their square. Its fit takes the rows
themselves instead, WIDE_ROWS of them at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from snnk import _checks
from snnk.hf.classify.standardised import StandardisedLinear
from snnk.hf.models import Batch, evaluating, place
from snnk.hf.record import recording
from snnk.ridge.rows import factor_rows
from snnk.ridge.solutions import RidgeFactor, RidgeSolution
from snnk.ridge.sums import RidgeStats

KEPT_ROWS = 20_000  # t, c and leave-one-out figures use this many rows, or up to twice as many; the sums use all
WIDE_ROWS, WIDE_NUMBERS = 8192, 2**28  # most rows of a fit to rows themselves, and most numbers in them
PENALTY = 1e-4  # on mean squared logits, which would be infinite for separable classes
IGNORED = -100  # the label that transformers leaves out of a loss
TASKS = ("regression", "single_label_classification", "multi_label_classification")


@dataclass(frozen=True)
class ClassifierFit:
    """The result of `fit_classifier_`; errors, loss and accuracy are leave-one-out figures."""

    task: str
    rows: int
    solution: RidgeSolution  # of the ridge regression: lam, score, condition, ...
    error: float  # squared error of the ridge regression over the variance of the targets
    loss: float | None = None  # cross-entropy; None for regression
    accuracy: float | None = None  # for rows with one class each
    temperature: float | None = None  # t; at 0 the weight stays, and the bias has the frequencies of the classes
    left_out: tuple[Tensor, Tensor] | None = None  # logits (n, k) of the leave-one-out predictions, and classes (n,)

    def __str__(self) -> str:
        parts = [
            f"{self.rows:,} rows, lam {self.solution.lam:.3g}",
            f"leave-one-out error {self.error:.4f} of variance",
        ]
        parts += [f"cross-entropy {self.loss:.4f}"] if self.loss is not None else []
        parts += [f"accuracy {self.accuracy:.4f}"] if self.accuracy is not None else []
        return f"{self.task}: " + ", ".join(parts)


def fit_classifier_(
    model: PreTrainedModel, batches: Iterable[Batch], *, lam: float | str = "auto", classifier: str | None = None
) -> ClassifierFit:
    """Set the last linear layer of a model to its closed form on labelled data; nothing else changes.

    This is a good start for any fine-tuning that does not change the inputs of the layer before the first step: LoRA,
    adapters, or all parameters.

    Args:
        model: a transformers model with a head for classification or regression.
        batches: inputs of the model with "labels": classes, or numbers for regression. Labels of -100 are left out.
        lam: a penalty, "gcv", "loo" (the least squared error of leave-one-out predictions), or "auto": "loo" for fewer
            than two rows per feature, where GCV chooses too small a penalty, else "gcv".
        classifier: name of the layer, if several layers outside the base model have num_labels outputs.

    Example:
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=9)
        >>> model = BertForSequenceClassification(BertConfig(**sizes))
        >>> ids = torch.randint(9, (200, 5))
        >>> fit = fit_classifier_(model, [{"input_ids": ids, "labels": (ids[:, 0] > 4).long()}])
        >>> fit.rows, fit.accuracy > 0.8
        (200, True)
    """
    if isinstance(lam, str):
        _checks.choose(lam, ["auto", "gcv", "loo"], "lam")
    layer = find_classifier(model, classifier)
    data = _collect(model, layer, batches)
    if lam == "auto":
        lam = "loo" if data.count < 2 * layer.in_features else "gcv"
    if data.stats is None:
        narrow = factor_rows(data.h, data.y - data.shift, intercept=data.intercept)
        factor, along = narrow.factor, narrow.coordinates
    else:
        narrow, factor = None, data.stats.factor(intercept=data.intercept)
        along = (data.h - factor.mean[: layer.in_features]) @ factor.vectors
    left_out = _left_out(data, factor, along)
    if isinstance(lam, str):
        solution = factor.search((lambda lams: _errors(data, left_out, lams)) if lam == "loo" else None)
    else:
        solution = factor.solve(lam)
    if narrow is not None:
        weight = narrow.weight(solution.weight)
        solution = replace(solution, weight=weight, bias=solution.bias - weight @ narrow.mean)
    z, y = left_out(solution.lam), data.y
    spread = float((y - y.mean(0)).square().mean())
    facts: dict[str, Any] = {"error": float((y - data.shift - z).square().mean()) / spread if spread else 0.0}
    weight, bias = solution.weight, solution.bias
    if data.task != TASKS[0]:
        t, c, facts["loss"] = _logits(z, y, data.task, offsets=layer.bias is not None)
        weight, bias, facts["temperature"] = t * weight, t * bias + c, t
        if data.task == TASKS[1]:
            facts["left_out"] = (t * z + c, y.argmax(1))
            facts["accuracy"] = float((facts["left_out"][0].argmax(1) == y.argmax(1)).double().mean())
    with torch.no_grad():
        if facts.get("temperature") != 0:  # a weight of zeros would pass no gradient to the layers below
            layer.weight.copy_(weight)
        if layer.bias is not None:
            layer.bias.copy_(bias)
    return ClassifierFit(data.task, data.count, solution, **facts)


@dataclass(frozen=True)
class _Data:
    """Sums over all rows; and features h (n, d) and targets y (n, k), in float64, of some rows, evenly spread.

    For a StandardisedLinear there are no sums, and h is in float32 and standardised. A layer without bias needs a fit
    without intercept. Targets of classes are then taken relative to `shift`, which changes neither a softmax nor the
    threshold of a sigmoid.
    """

    task: str
    stats: RidgeStats | None
    h: Tensor
    y: Tensor
    count: int
    intercept: bool
    shift: float


def _collect(model: PreTrainedModel, layer: nn.Linear, batches: Iterable[Batch]) -> _Data:
    d, k, count, task, shift, every = layer.in_features, layer.out_features, 0, "", 0.0, 1
    wide, intercept = isinstance(layer, StandardisedLinear), layer.bias is not None
    stats, most = None if wide else RidgeStats(d, k), wide_rows(d) if wide else KEPT_ROWS
    kept: list[Tensor] = []
    for h, labels in _rows(model, layer, batches):
        task = task or _task(model.config, labels, k)
        if not intercept:
            shift = {TASKS[1]: 1 / k, TASKS[2]: 0.5}.get(task, 0.0)
        y = _targets(labels, task, k)
        if stats is not None:
            stats.update(h, y - shift)
        kept.append(torch.cat([h, y], 1)[-count % every :: every].clone())
        count += len(h)
        if sum(map(len, kept)) > 2 * most:  # every second row, as the first half may have one class
            kept, every = [torch.cat(kept)[::2].clone()], 2 * every
    if count < 2:
        raise ValueError(f"a closed form needs at least 2 labelled rows; the batches have {count}")
    found = torch.cat(kept)
    kept.clear()
    if isinstance(layer, StandardisedLinear):
        found = found[torch.linspace(0, len(found) - 1, min(most, len(found))).round().long()]
        rows, targets = found.float().split([d, k], 1)
        layer.standardise_(rows)
        return _Data(task, None, layer.standardised(rows), targets.double(), len(rows), intercept, shift)
    rows, targets = found.double().split([d, k], 1)
    return _Data(task, stats, rows, targets, count, intercept, shift)


def wide_rows(features: int) -> int:
    """The largest number of rows to which a StandardisedLinear of that many inputs is fitted."""
    return min(WIDE_ROWS, WIDE_NUMBERS // features)


def find_classifier(model: PreTrainedModel, name: str | None = None) -> nn.Linear:
    """The one linear layer outside the base model with num_labels outputs, or the one of that name."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a transformers PreTrainedModel; got {type(model).__name__}; unwrap it first")
    k: Any = model.config.num_labels
    if name is not None:
        layer = dict(model.named_modules()).get(name)
        if not isinstance(layer, nn.Linear):
            raise ValueError(f"classifier {name!r} of {type(model).__name__} must be an nn.Linear; got {layer}")
        return layer
    inside = set(model.base_model.modules())
    found = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and m.out_features == k}
    found = {n: m for n, m in found.items() if m not in inside}
    if len(found) != 1:
        raise ValueError(
            f"{type(model).__name__} must have one linear layer with num_labels = {k} outputs outside its base model; "
            f"found {', '.join(found) or 'none'}. Give its name as classifier="
        )
    return next(iter(found.values()))


def inputs_of(
    model: PreTrainedModel, layer: nn.Module, batches: Iterable[Batch]
) -> Iterator[tuple[Batch, Tensor, Any]]:
    """For each batch: the batch, the inputs (*, d) of the layer, and the outputs of the model.

    The classifier of a decoder runs on all tokens, and the model picks one token per text afterwards. To find out
    which, outputs (batch, tokens, k) of the layer are replaced by the indices of the tokens.
    """
    seen: list[Tensor] = []

    def note(_: str, x: Tensor, out: Tensor) -> Tensor | None:
        seen.append(x)
        if out.ndim != 3:
            return None
        return torch.arange(out.shape[1], device=out.device, dtype=torch.float32)[:, None].expand(out.shape)

    with evaluating(model), torch.no_grad(), recording({"": layer}, note):
        for batch in batches:
            seen.clear()
            inputs = {key: value for key, value in batch.items() if key != "labels"}
            outputs = model(**place(inputs, model))
            if len(seen) != 1:
                raise ValueError(f"the layer was called {len(seen)} times in one forward pass; it must be called once")
            yield batch, seen[0], outputs


def _rows(model: PreTrainedModel, layer: nn.Module, batches: Iterable[Batch]) -> Iterator[tuple[Tensor, Tensor]]:
    """Features (n, d) in the model's dtype and labels (n,) or (n, k), on the CPU, without ignored labels."""
    for batch, h, outputs in inputs_of(model, layer, _labelled(batches)):
        labels, h = torch.as_tensor(batch["labels"]).cpu(), h.cpu()
        if h.ndim == 3 and labels.shape[:2] != h.shape[:2]:
            picked = outputs.logits.cpu()
            if picked.ndim != 2 or len(picked) != len(h):
                raise ValueError(f"labels of shape {tuple(labels.shape)} do not fit features {tuple(h.shape)}")
            h = h[torch.arange(len(h)), picked[:, 0].long()]
        lead = h.ndim - 1
        if labels.shape[:lead] != h.shape[:-1] or labels.ndim > lead + 1:
            raise ValueError(f"labels of shape {tuple(labels.shape)} do not fit features of shape {tuple(h.shape)}")
        h, labels = h.flatten(0, lead - 1), labels.flatten(0, lead - 1)
        if not labels.is_floating_point() and labels.ndim == 1:
            h, labels = h[labels != IGNORED], labels[labels != IGNORED]
        if len(h):
            yield h, labels


def _labelled(batches: Iterable[Batch]) -> Iterator[Batch]:
    for batch in batches:
        if "labels" not in batch:
            raise ValueError(f"every batch needs 'labels' for a closed form; got {', '.join(batch)}")
        yield batch


def _task(config: PretrainedConfig, labels: Tensor, k: int) -> str:
    """The task, by the rules with which transformers chooses a loss."""
    if config.problem_type is not None:
        return _checks.choose(config.problem_type, TASKS, "problem_type")
    if k == 1:
        return TASKS[0]
    return TASKS[2] if labels.is_floating_point() else TASKS[1]


def _targets(labels: Tensor, task: str, k: int) -> Tensor:
    """Targets (n, k) in float32, one-hot for classes."""
    if task == TASKS[1]:
        if labels.is_floating_point() or labels.ndim != 1 or (len(labels) and not int(labels.min()) >= 0):
            raise ValueError(f"labels must be classes 0 to {k - 1}; got {labels.dtype} of shape {tuple(labels.shape)}")
        if len(labels) and int(labels.max()) >= k:
            raise ValueError(f"labels must be classes 0 to {k - 1}; got {int(labels.max())}. Set num_labels")
        return F.one_hot(labels.long(), k).float()
    y = labels.float().reshape(len(labels), -1)
    if y.shape[1] != k:
        raise ValueError(f"labels for {task} must be (n, {k}); got shape {tuple(labels.shape)}")
    return y


def _left_out(data: _Data, factor: RidgeFactor, along: Tensor) -> Callable[[float], Tensor]:
    """A function of lam: the predictions (n, k) for each row of the regression without that row, which are exact.

    They are y - r / (1 - v) with residuals r and leverages v. With as many features as rows, both r and 1 - v go to 0
    with lam; each is therefore summed from what no lam can fit and from what lam adds, so that nothing cancels.
    `along` has the centred rows in the directions of the factor's eigenvectors, (n, r).
    """
    y = data.y - data.shift
    shares, best = along.square() / factor.values, factor.target / factor.values[:, None]
    # with an intercept each row also moves the mean
    free = (1 - data.intercept / factor.total_weight - shares.sum(1)).clamp_min(0)
    unfitted = y - factor.mean[-y.shape[1] :] - along @ best

    def predictions(lam: float) -> Tensor:
        shrunk = lam / (factor.values + lam)
        residuals = unfitted + along @ (best * shrunk[:, None])
        return y - residuals / (free + shares @ shrunk).clamp_min(1e-12)[:, None]

    return predictions


def _errors(data: _Data, left_out: Callable[[float], Tensor], lams: Tensor) -> Tensor:
    """Mean squared errors of leave-one-out predictions at lams (L,)."""
    y = data.y - data.shift
    return torch.stack([(y - left_out(lam)).square().mean() for lam in lams.tolist()])


@torch.enable_grad()
def _logits(z: Tensor, y: Tensor, task: str, *, offsets: bool) -> tuple[float, Tensor, float]:
    """t >= 0, c (k,) and the loss of logits t z + c, a convex problem in k + 1 numbers; c = 0 without offsets."""
    mean = z.mean(0) if offsets else torch.zeros_like(z[0])
    z = z - mean
    size = z.square().mean().sqrt().clamp_min(1e-30)  # so that t is of the order of 1 for every lam
    z = z / size
    t = torch.ones((), dtype=z.dtype, requires_grad=True)
    c = torch.zeros(z.shape[1], dtype=z.dtype, requires_grad=offsets)
    loss = F.cross_entropy if task == TASKS[1] else F.binary_cross_entropy_with_logits
    optimizer = torch.optim.LBFGS([t, c], max_iter=200, tolerance_grad=1e-9, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        total = loss(t * z + c, y) + PENALTY * ((t * z).square().sum(1).mean() + c.square().mean())
        total.backward()
        return total.detach()

    optimizer.step(closure)
    if t < 0:  # rows that are left out are predicted worse than by chance: only the frequencies of classes are learnt
        t = torch.zeros_like(t)
        if offsets:
            c.data.zero_()
            optimizer = torch.optim.LBFGS([c], max_iter=200, tolerance_grad=1e-9, line_search_fn="strong_wolfe")
            optimizer.step(closure)
    with torch.no_grad():
        return float(t / size), c - t / size * mean, float(loss(t * z + c, y))
