r"""Replace the blocks of a model one by one by smaller ones, fitted in closed form to unlabelled inputs.

Blocks are replaced in depth order. targets.py defines what each block is fitted to: with it the block restores the
original's residual stream, and repairs errors made in the layers below.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from snnk import _checks
from snnk.hf.classify.means import refuse_neurons
from snnk.hf.compression.agreement import agreement
from snnk.hf.compression.attention import Calls, fit_attention
from snnk.hf.compression.causal import is_causal
from snnk.hf.compression.checkpoint import CompressionCheckpoint
from snnk.hf.compression.damage import enough
from snnk.hf.compression.distill import AUTO, Progress, recover_, unseen
from snnk.hf.compression.ffn import fit_ffn
from snnk.hf.compression.outputs import outputs_of
from snnk.hf.compression.plans import BlockPlan, Plan, describe
from snnk.hf.compression.stages import Recovery
from snnk.hf.compression.targets import Tokens, make_tokens
from snnk.hf.cost import stored
from snnk.hf.finding import find_blocks
from snnk.hf.low_rank import LowRank
from snnk.hf.model_blocks import FFN, KEPT, Attention, ModelBlock
from snnk.hf.models import Batch, check_batches, evaluating, without_gguf_
from snnk.hf.record import ActivationCache, Reached, hold_out, unreached
from snnk.hf.replace import Replacement

Site = Tokens | Calls  # what a block is fitted to or measured on: for attention whole calls, as it mixes tokens
CHOOSING = 16  # further batches that the length of the distillation is chosen by
CHOOSING_CAUSAL = 4  # of a decoder, which has more to compare in each


@dataclass(frozen=True)
class BlockReport:
    """One block after compression and recovery.

    The error is the squared error over the variance of the targets, on held-out inputs, with the weights of the fit.
    """

    name: str
    kind: str
    num_features: int | None
    parameters_before: int
    parameters: int
    error: float | None = None
    refused: bool = False
    seconds: float = 0.0
    ranks: tuple[int, int] | None = None


@dataclass(frozen=True)
class CompressionReport:
    """The result of `compress_`: each block, and how far outputs on held-out inputs agree with the original's."""

    blocks: tuple[BlockReport, ...]
    agreement: dict[str, float]
    tokens: int
    held_out_tokens: int
    held_out_inputs: int  # that the figures of agreement are about
    model_parameters_before: int
    model_parameters: int
    seconds: float
    recovery: Recovery | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{'block':<28}{'is now':<18}{'parameters':>24}{'held-out error':>16}"]
        for b in self.blocks:
            what = describe(b.kind, b.num_features, b.ranks)
            error = "" if b.error is None else f"{b.error:.4f}"
            sizes = f"{b.parameters_before:,} -> {b.parameters:,}"
            lines.append(f"{b.name:<28}{what:<18}{sizes:>24}{error:>16}{'  refused' if b.refused else ''}")
        whole = f"{self.model_parameters_before:,} -> {self.model_parameters:,} parameters"
        lines.append(f"whole model: {whole}, {self.model_parameters / self.model_parameters_before:.3f}")
        agreed = ", ".join(f"{name} {value:.4f}" for name, value in self.agreement.items())
        lines.append(
            f"fitted to {self.tokens:,} tokens in {self.seconds:.0f} s; errors are on {self.held_out_tokens:,} others"
        )
        if agreed:
            lines.append(f"on {self.held_out_inputs:,} held-out inputs, against the original: {agreed}")
        return "\n".join(lines if self.recovery is None else [*lines, str(self.recovery)])


def compress_(
    model: PreTrainedModel,
    plan: Plan,
    batches: Iterable[Batch],
    *,
    refine: int = 120,
    max_error: float | None = None,
    recover: int | str = 0,
    recover_minutes: float = 5.0,
    lessons: Sequence[Batch | None] | None = None,
    more: Sequence[Batch] = (),
    max_tokens: int = 50_000,
    seed: int = 0,
    progress: Progress = unseen,
    original: PreTrainedModel | None = None,
    checkpoint: CompressionCheckpoint | None = None,
) -> CompressionReport:
    """Replace the blocks of a model as planned, in place, fitted to inputs without labels.

    An error on the way, also Ctrl-C, leaves the model as it was.

    Args:
        model: a transformers model with any head.
        plan: made by `snnk.hf.plan` for this model.
        batches: inputs of the model, dicts of tensors; attention masks are respected. Every tenth batch is held out.
            Batches behind the first `max_tokens` tokens are not used; there must be two tokens per feature of a block.
        refine: gradient steps per block that move atoms; 0 leaves the model's own neurons, all in closed form.
        max_error: a block whose held-out error is larger, or not a number, stays as it was.
        recover: steps of distillation from the original afterwards, or "auto": as many as help on inputs that neither
            the fit nor the steps see, and fit into `recover_minutes`. The agreement is measured on other inputs again.
            Whatever the number, the model stays as it was fitted if the steps do not help.
        lessons: what the distillation reads in place of the `batches`, one for each, or None for nothing. Default: the
            batches themselves.
        more: further inputs for the distillation alone. Its length is chosen by the first 16 of these batches, or 4 for
            a decoder. If there are fewer, a tenth of the batches for the fit is taken out of the fit for this choice.
        seed: of random features, which differ between blocks, and of the steps.
        progress: called with (step, blocks done, all blocks), then with (stage, steps done, all steps, note).
        original: a copy of the model, if there is one, for `recover`. Default: a copy is made.
        checkpoint: keeps what is done, and has what a run that was stopped has done.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> from snnk.hf import plan
        >>> sizes = dict(hidden_size=8, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
        >>> model = BertModel(BertConfig(vocab_size=50, **sizes))
        >>> batches = [{"input_ids": torch.randint(50, (8, 16))} for _ in range(10)]
        >>> report = compress_(model, plan(model, keep=0.5), batches)
        >>> [(block.name, block.ranks or block.num_features) for block in report.blocks]
        [('encoder.layer.0.attention', (2, 2)), ('encoder.layer.0', 16)]
    """
    start = time.monotonic()
    _check_arguments(plan, refine, recover, recover_minutes, max_error, max_tokens, seed)
    refuse_neurons(model)
    seed = int(seed)  # feature maps take no integers of numpy
    blocks, by_name = plan.check(model), {block.name: block for block in plan.blocks}
    before = _parameters(model)
    reports: list[BlockReport] = []
    replacements: list[Replacement | LowRank] = []
    recovery, earlier = None, 0.0  # seconds of a run that was stopped
    with ExitStack() as undo, ExitStack() as modes, evaluating(model), torch.no_grad():
        undo.callback(without_gguf_(model))
        more = list(check_batches(more))
        count = CHOOSING_CAUSAL if is_causal(model) else CHOOSING
        few = len(more) < count
        changed = [block for block in blocks if by_name[block.name].kind != KEPT] or blocks
        used, counts = _use(model, changed, batches, max_tokens)
        if lessons is not None and len(lessons) < len(used):
            raise ValueError(f"lessons must have one batch for each of the {len(used)} batches; got {len(lessons)}")
        fitted, tested = hold_out(range(len(used)))
        taught = {i: batch for i in fitted if (batch := (lessons or used)[i]) is not None}
        chosen = hold_out([*taught])[1] if recover and few else []
        choosing = [taught.pop(i) for i in chosen]
        fitted = [i for i in fitted if i not in chosen]
        training, held = [used[i] for i in fitted], [used[i] for i in tested]
        tokens = sum(counts[i] for i in fitted), sum(counts[i] for i in tested)
        if not few:
            choosing, more = more[:count], more[count:]
        enough(tokens[0], max(unknowns(block, by_name[block.name]) for block in blocks))
        progress("original", 0, len(blocks))
        teacher = original or copy.deepcopy(model)
        modes.enter_context(evaluating(teacher))
        originals = {block.name: block for block in find_blocks(teacher)}
        outputs = [outputs_of(model, batch) for batch in held]
        cache, exact = ActivationCache(model, [*training, *held]), ActivationCache(teacher, [*training, *held])
        for block in blocks:
            if checkpoint is not None and (found := checkpoint.restore_(block, undo)) is not None:
                kept, facts = found
                replacements += [] if kept is None else [kept]
                reports.append(BlockReport(**facts))
                earlier += reports[-1].seconds
                continue
            planned, began = by_name[block.name], time.monotonic()
            size = block.num_parameters
            done = BlockReport(block.name, planned.kind, planned.num_features, size, size, ranks=planned.ranks)
            if planned.kind != KEPT:
                sites = _sites(block, cache.advance(block), exact.advance(originals[block.name]).sums, training, held)
                new = _fit(block, planned, sites[0], refine, seed, undo)
                error = _error(block, sites[1])
                done = replace(done, parameters=block.num_parameters, error=error)
                if max_error is not None and not error <= max_error:
                    new.restore_()
                    done = replace(done, kind=KEPT, num_features=None, ranks=None, parameters=size, refused=True)
                else:
                    replacements.append(new)
            reports.append(replace(done, seconds=time.monotonic() - began))
            if checkpoint is not None:
                checkpoint.keep(block, replacements[-1] if done.kind != KEPT else None, asdict(reports[-1]))
            progress(block.name, len(reports), len(blocks))
        if recover and replacements:
            del cache, exact
            began = time.monotonic()
            recovery = recover_(
                model,
                teacher,
                replacements,
                [*taught.values(), *more],
                choosing,
                steps=recover,
                minutes=recover_minutes,
                seed=seed,
                checkpoint=None if checkpoint is None else checkpoint.distillation,
                key="" if checkpoint is None else checkpoint.key,
                progress=progress,
            )
            earlier += max(0.0, recovery.seconds - (time.monotonic() - began))
            cache, exact = ActivationCache(model, held), ActivationCache(teacher, held)
            errors = {}
            for block in blocks:
                if block.kind != KEPT:
                    site = _sites(block, cache.advance(block), exact.advance(originals[block.name]).sums, [], held)[1]
                    errors[block.name] = _error(block, site)
            reports = [replace(report, error=errors.get(report.name, report.error)) for report in reports]
        agreed = agreement(outputs, [outputs_of(model, batch) for batch in held])
        undo.pop_all()
    return CompressionReport(
        blocks=tuple(reports),
        agreement=agreed,
        tokens=tokens[0],
        held_out_tokens=tokens[1],
        held_out_inputs=sum(found.size for found in outputs),
        model_parameters_before=before,
        model_parameters=_parameters(model),
        seconds=earlier + time.monotonic() - start,
        recovery=recovery,
    )


def _check_arguments(
    plan: Any, refine: Any, recover: Any, recover_minutes: Any, max_error: Any, max_tokens: Any, seed: Any
) -> None:
    if not isinstance(plan, Plan):
        raise TypeError(f"plan must be a Plan, as snnk.hf.plan(model, keep=0.5) returns; got {plan!r}")
    if recover != AUTO and not _checks.is_integer(recover):
        raise TypeError(f"recover must be a number of steps or {AUTO!r}; got {recover!r}")
    for name, value in (("refine", refine), ("seed", seed)):
        if not _checks.is_integer(value):
            raise TypeError(f"{name} must be an integer; got {value!r}")
    _checks.at_least_zero(refine, "refine")
    _checks.at_least_zero(0 if recover == AUTO else recover, "recover")
    _checks.positive(recover_minutes, "recover_minutes")
    if max_error is not None:
        _checks.at_least_zero(max_error, "max_error")
    _checks.positive_int(max_tokens, "max_tokens")


def _error(block: ModelBlock, site: Site) -> float:
    """Weighted squared error of a block in its present state, over the variance of the targets."""
    if isinstance(block, Attention) and isinstance(site, Calls):
        return site.error(block)
    if isinstance(block, FFN) and isinstance(site, Tokens):
        return site.error(block)
    raise TypeError(f"{block.name} is a {type(block).__name__} block, which is not measured on {type(site).__name__}")


def unknowns(block: ModelBlock, planned: BlockPlan) -> int:
    """Numbers that are fitted per output of a block."""
    if isinstance(block, Attention):
        return 0 if planned.ranks is None else block.heads[0] * planned.ranks[1]
    return planned.num_features or (block.in_features if isinstance(block, FFN) and planned.kind == "linear" else 0)


def _sites(
    block: ModelBlock, reached: Reached, streams: list[Tensor], training: list[Batch], held: list[Batch]
) -> list[Site]:
    """What a block is fitted to, and what it is measured on."""
    found: list[Site] = []
    cut = len(training)
    for part, batches in ((slice(cut), training), (slice(cut, None), held)):
        inputs = reached.inputs[part]
        if not inputs:
            found.append(Calls([], [], [], Tokens(*[torch.empty(0)] * 4)))
            continue
        tokens = make_tokens(block, inputs, reached.residuals[part], streams[part])
        calls = [call for call in reached.calls[part] if call is not None]
        found.append(Calls(calls, batches, [len(x) for x in inputs], tokens) if calls else tokens)
    return found


def _fit(
    block: ModelBlock, planned: BlockPlan, site: Site, refine: int, seed: int, undo: ExitStack
) -> Replacement | LowRank:
    if isinstance(block, Attention) and isinstance(site, Calls) and planned.ranks is not None:
        return fit_attention(block, planned.ranks, site, refine // 2, seed, undo, new_bias=planned.new_bias)
    if isinstance(block, FFN) and isinstance(site, Tokens):
        return fit_ffn(block, planned, site, refine, seed, undo)
    raise TypeError(f"{block.name} cannot become {planned.kind!r}")


def _use(
    model: PreTrainedModel, blocks: list[ModelBlock], batches: Iterable[Batch], max_tokens: int
) -> tuple[list[Batch], list[int]]:
    """The first batches, up to `max_tokens` tokens, and how many tokens each has."""
    used: list[Batch] = []
    counts: list[int] = []
    for batch in check_batches(batches):
        if not used:
            _refuse_unreached(model, blocks, batch)
        used.append(batch)
        counts.append(_count(model, blocks[0], batch))
        if sum(counts) >= max_tokens:
            break
    return used, counts


def _refuse_unreached(model: PreTrainedModel, blocks: list[ModelBlock], batch: Batch) -> None:
    away = unreached(blocks, model, batch)
    if away:
        raise ValueError(
            f"the inputs, {', '.join(batch)}, do not reach {len(away)} of {len(blocks)} blocks, {away[0].name} the "
            "first, so that there is nothing to fit these to; give inputs that do, or plan the other layers only"
        )


def _count(model: PreTrainedModel, block: ModelBlock, batch: Batch) -> int:
    """Tokens of a block that are not padding; without a mask, as for images, they are counted at the block."""
    if "attention_mask" in batch and block.row.masked:
        return int(batch["attention_mask"].bool().sum())
    return len(ActivationCache(model, [batch]).advance(block).inputs[0])


def _parameters(model: PreTrainedModel) -> int:
    return sum(tensor.numel() for tensor in stored(model).values())
