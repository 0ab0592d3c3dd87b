"""`snnk.hf.compress`: a folder with a model in, a folder with the compressed model and its report out.

The output is written into a temporary folder beside it, which is renamed at the end: a run that is killed leaves no
output, and never a part of one. It leaves a checkpoint, from which the same call goes on.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from snnk import _checks, _io
from snnk._checkpoint import checkpoint_of
from snnk._environment import environment
from snnk.hf import doubts
from snnk.hf.calibration import MAX_TOKENS
from snnk.hf.compression import report as pages
from snnk.hf.compression.agreement import measure
from snnk.hf.compression.blocks import CompressionReport, compress_, unknowns
from snnk.hf.compression.causal import is_causal
from snnk.hf.compression.checkpoint import (
    CompressionCheckpoint,
    NotServed,
    fingerprint,
    remove_checkpoint,
    stored_timings,
)
from snnk.hf.compression.damage import TooFewTokens
from snnk.hf.compression.distill import AUTO, Progress, unseen
from snnk.hf.compression.opening import Opened, Prepared, open_model, prepare
from snnk.hf.compression.page import html
from snnk.hf.compression.planning import Choices, Unreachable
from snnk.hf.compression.planning import plan as make_plan
from snnk.hf.compression.plans import Plan
from snnk.hf.compression.settings import TIMED, check_settings, chosen_jointly, export_settings
from snnk.hf.compression.times import Timings, check_tokens
from snnk.hf.compression.timing import TOKENS, TORCH, check_runs, compare, described
from snnk.hf.cost import bytes_of
from snnk.hf.finding import find_blocks
from snnk.hf.folders import copy_others
from snnk.hf.models import example_inputs, quiet
from snnk.hf.serve import plain
from snnk.hf.serve.served import MAX_LOSS, make_graphs
from snnk.hf.widening import Gathered

KEEP = 0.33  # if there is neither `keep` nor a target


@quiet()
def compress(
    model: str | Path,
    calibration: str | Path | None = None,
    *,
    out: str | Path,
    keep: float | None = None,
    target_size: str | None = None,
    target_speedup: float | None = None,
    target_latency: str | float | None = None,
    tokens: tuple[int, int] = TOKENS,
    layers: str = "all",
    blocks: str = "all",
    feature_map: str = "atoms",
    plan: str | Path | None = None,
    joint: bool | None = None,
    refine: int | None = None,
    recover: int | str = AUTO,
    recover_minutes: float = 5.0,
    max_error: float | None = None,
    text: str | None = None,
    text_pair: str | None = None,
    max_length: int = 128,
    widen: bool | None = None,
    show_texts: bool = True,
    format: str = "auto",
    to: str | None = None,
    max_loss: float = MAX_LOSS,
    seed: int = 0,
    say: Callable[[str], None] = lambda text: None,
    progress: Progress = unseen,
) -> dict[str, Any]:
    """Compress a model into a new folder, with a report; what `snnk compress` does.

    Args:
        model: folder of a Hugging Face model, also of sentence-transformers, or its name on the hub.
        calibration: unlabelled inputs: a file of texts (lines, .jsonl, .csv, .tsv, .parquet) or a folder of images.
            Default: the general English text of snnk, as pairs of texts if the configuration shows that the model
            reads pairs. Texts like those in use are better; images must be given.
        out: new folder for the compressed model, plan.json, report.json, report.html and a model card.
        keep, target_size, target_speedup, target_latency, layers, blocks, feature_map: of `snnk.hf.plan`.
            Default: keep=0.33.
        tokens: of `snnk.hf.plan`, for a speedup or a latency, which are those of the form `to`.
        plan: a plan.json, in place of these options.
        joint: choose numbers of atoms and ranks for all blocks together, from the calibration inputs, or (False) keep
            the same share of every block. Default: together for atoms, if there are enough tokens; but the same share
            with blocks="ffn", where the choice did not help (docs/figures.md), unless it does not reach the target.
        refine: of `snnk.hf.compress_`. Default: 120, or 0 for a decoder, as its distillation needs the time more.
        recover, recover_minutes, max_error, seed: of `snnk.hf.compress_`. The distillation also uses texts that
            the fit has no room for.
        text: column of the texts. Default: the first column of texts.
        text_pair: column of second texts, for cross-encoders and classifiers of pairs.
        max_length: tokens per text or pair at most.
        widen: mix general text and words of the tokenizer's vocabulary into the texts to fit to, so that the model
            holds for other texts too. Default: for texts, except for decoders.
        show_texts: show the held-out texts that lost most in report.json and report.html: the beginnings of ten.
        format: "plain" for a model that loads without snnk: it has one size for all blocks, no biases that the family
            of the model lacks, and attention that stays as it is where the configuration has no field for its size.
            "snnk" for files that need `import snnk.hf`. Default: "auto", plain where the model turns out to fit the
            configuration of its family, with zeros for at most 5 % of the multiply-adds of its blocks.
        to: also export the result, in a form of `snnk.hf.export`: "openvino-int8" (static), "onnx-int8" (dynamic),
            "openvino", "onnx" or "onnx-int8-static". The graph is in the same folder, and the report has size, latency
            and agreement of every stage. Default: PyTorch alone.
        max_loss: of `snnk.hf.export`: what the graph may lose against the compressed model.
        say: called with lines for people.
        progress: called with (step, blocks done, all blocks), then with (stage, steps done, all steps, note).

    Returns:
        The contents of report.json.

    Example:
        >>> import tempfile
        >>> from tokenizers import Tokenizer, models, pre_tokenizers
        >>> from transformers import AutoModel, BertConfig, BertModel, PreTrainedTokenizerFast
        >>> folder, words = Path(tempfile.mkdtemp()), {"[UNK]": 0, "one": 1, "two": 2}
        >>> tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
        >>> tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        >>> PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder / "model")  # doctest: +ELLIPSIS
        (...)
        >>> sizes = dict(hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
        >>> BertModel(BertConfig(vocab_size=3, **sizes)).save_pretrained(folder / "model")
        >>> _ = (folder / "texts.txt").write_text("one two one two\\n" * 40)
        >>> report = compress(folder / "model", folder / "texts.txt", out=folder / "small", keep=0.5, joint=False)
        >>> report["report"]["blocks"][1]["num_features"]
        8
        >>> type(AutoModel.from_pretrained(folder / "small")).__name__
        'BertModel'
    """
    settings = {
        "keep": keep,
        "target_size": target_size,
        "target_speedup": target_speedup,
        "target_latency": target_latency,
        "tokens": check_tokens(tokens),
        "layers": layers,
        "blocks": blocks,
        "feature_map": feature_map,
        "plan": None if plan is None else str(plan),
        "joint": joint,
        "refine": refine,
        "recover": recover,
        "recover_minutes": recover_minutes,
        "max_error": max_error,
        "text": text,
        "text_pair": text_pair,
        "max_length": max_length,
        "widen": widen,
        "show_texts": show_texts,
        "format": _checks.choose(format, plain.FORMATS, "format"),
        "to": to,
        "max_loss": max_loss,
        "seed": seed,
    }
    out, calibration = Path(out), None if calibration is None else Path(calibration)
    check_settings(settings, calibration)
    with _io.locked_output(out) as left:
        if (out / "report.json").is_file():  # its run was killed before it could remove its checkpoint
            remove_checkpoint(checkpoint_of(out))
        _io.check_out(out)  # a run that held the lock may have made it
        for path in left:
            say(f"removed {path}, which a run that was killed had left")
        return _compress(str(model), calibration, out, settings, say, progress)


def default_settings() -> dict[str, Any]:
    """The options of `compress` that its result depends on, as they are by default."""
    parameters = inspect.signature(compress).parameters.values()
    return {p.name: p.default for p in parameters if p.name not in ("model", "calibration", "out", "say", "progress")}


def _plan(
    model: PreTrainedModel,
    settings: dict[str, Any],
    batches: list[dict[str, Tensor]] | None = None,
    timings: Timings | None = None,
    choices: Choices | None = None,
    progress: Progress = unseen,
) -> Plan:
    if settings["plan"] is not None:
        plan = Plan.load(settings["plan"])
        plan.check(model)
        if plan.timings is not None and plan.timings.runtime != (settings["to"] or TORCH):
            plan = replace(plan, timings=None)  # times of another form predict nothing here
        if plan.timings is not None:  # before any work, as the latency is measured at the end
            check_runs(model, tokens=plan.timings.tokens, runtime=plan.timings.runtime)
        return plain.check_plan(model, plan) if settings["format"] == "plain" else plan
    names = ("keep", "target_size", *TIMED)
    options = {name: settings[name] for name in (*names, "tokens", "layers", "blocks", "feature_map")}
    options["runtime"] = settings["to"] or TORCH
    if all(options[name] is None for name in names):
        options["keep"] = KEEP
    inputs = {"batches": batches} if choices is None else {"choices": choices}

    def timed(done: int, total: int) -> None:
        progress("measuring times of blocks", done, total)

    plan = make_plan(model, timings=timings, progress=timed, **inputs, **options)
    return plain.check_plan(model, plan) if settings["format"] == "plain" else plan


def _compress(
    model: str,
    calibration: Path | None,
    out: Path,
    settings: dict[str, Any],
    say: Callable[[str], None],
    progress: Progress,
) -> dict[str, Any]:
    opened = open_model(model, out, settings, say)
    if any(settings[name] is not None for name in TIMED):  # times take minutes to measure, and data may be refused
        prepared = prepare(opened, calibration, say)
        known = stored_timings(checkpoint_of(out))
        plan, timings = first_plan(prepared, progress, known if known and _fits(known, prepared) else None)
    else:  # the model or the plan may be refused, and data take longer to read
        plan, timings = first_plan(opened, progress)
        prepared = prepare(opened, calibration, say)
    return fit_and_write(prepared, plan, out, say, progress, timings=timings)


def _fits(timings: Timings, opened: Opened) -> bool:
    """Whether times were measured for this model, form and batch."""
    settings, names = opened.settings, {block.name for block in find_blocks(opened.network)}
    (inputs, length), (asked, most) = timings.tokens, settings["tokens"]
    same = timings.runtime == (settings["to"] or TORCH) and inputs == asked and length <= most
    return same and {name for group in timings.groups for name in group.blocks} <= names


def first_plan(
    opened: Opened, progress: Progress, timings: Timings | None = None
) -> tuple[Plan | None, Timings | None]:
    """The plan of equal shares, and the times that were measured for it, now or before.

    The plan is None if equal shares do not reach the target, and sizes that are chosen together may.
    """
    settings = opened.settings
    try:
        plan = _plan(opened.network, settings, timings=timings, progress=progress)
    except Unreachable as error:
        if settings["plan"] is not None or settings["feature_map"] != "atoms" or settings["joint"] is False:
            raise
        return None, error.timings
    return plan, plan.timings


def fit_and_write(
    prepared: Prepared,
    plan: Plan | None,
    out: Path,
    say: Callable[[str], None],
    progress: Progress,
    *,
    timings: Timings | None = None,
    choices: Choices | None = None,
    original: PreTrainedModel | None = None,
) -> dict[str, Any]:
    """Choose the plan, replace the blocks, measure what was lost, and write the folder; returns report.json.

    Args:
        prepared: the model, which is changed, and its inputs.
        plan: of equal shares, or the one that was given.
        out: new folder. Its checkpoint is beside it.
        timings: measured for this model and its target.
        choices: measured for this model and these inputs. Default: they are measured if they are needed.
        original: another copy of the model, which stays as it is. Default: a copy is made.
    """
    network, inputs, settings = prepared.network, prepared.inputs, prepared.settings
    batches, layers, pooling = inputs.batches, prepared.layers, prepared.outputs.pooling
    blocks = len(find_blocks(network))
    timed = any(settings[name] is not None for name in TIMED)
    behind = bool(getattr(network.config, "is_encoder_decoder", False)) and not is_causal(network)
    known = doubts.unreached(prepared.away, inputs.given.kind), doubts.one_sided(behind), doubts.merged(prepared.folder)
    warned = _warn(known, say)
    if prepared.away and settings["plan"] is None and plan is not None:
        plan = _plan(network, {**settings, "layers": layers}, timings=plan.timings)
    later = ("max_loss",) if timed else ("to", "max_loss")  # on which the compressed model does not depend
    made_of = {name: value for name, value in settings.items() if name not in later}
    asked = {**made_of, "plan": None if settings["plan"] is None or plan is None else plan.to_dict()}
    key = fingerprint(asked, network, [*batches, *inputs.more])
    with CompressionCheckpoint(checkpoint_of(out), key) as checkpoint:
        if checkpoint.plan is not None:
            say(f"going on from {checkpoint}")
            plan = checkpoint.plan
        elif chosen_jointly(settings) or plan is None:
            progress("planning", 0, blocks)
            try:
                chosen = {**settings, "layers": layers}
                plan = _plan(network, chosen, batches, timings, choices, progress)
            except TooFewTokens as error:
                if settings["joint"] or plan is None:
                    raise
                say(f"note: every block keeps the same share, as a joint plan needs more inputs: {error}")
        checkpoint.start(plan)
        warned += _warn([*_before(inputs, plan, network), doubts.single(prepared.pairs, inputs.given.kind)], say)
        if plan.timings is not None:
            table = plan.timings
            cut = doubts.clipped(settings["tokens"][1], table.tokens[1]) if timed else None
            warned += _warn([doubts.busy(table.waited, table.threads), cut], say)
        say(str(plan))
        original = original or copy.deepcopy(network)
        options = {name: settings[name] for name in ("refine", "max_error", "recover", "recover_minutes", "seed")}
        done = compress_(
            network,
            plan,
            batches,
            lessons=inputs.lessons,
            more=inputs.more,
            max_tokens=2 * MAX_TOKENS,
            progress=progress,
            original=original,
            checkpoint=checkpoint,
            **options,
        )
        say(str(replace(done, agreement={})))  # it is measured on more inputs below
        network, saved = plain.choose(network, settings["format"])
        say(f"saved as {saved['format']}: {saved['reason']}")
        warned += _warn([doubts.padded(settings["format"], saved, plain.MOST)], say)
        progress("comparing outputs", blocks, blocks)
        sets = [
            measure(original, network, held, pooling=pooling, texts=settings["show_texts"]) for held in inputs.held_out
        ]
        for figures in (done.agreement, *(found["figures"] for found in sets)):
            _check_finite(figures)
        own = sets[0]
        warned += _warn([doubts.scarce(own["inputs"], own["kind"]), doubts.one_class(own["classes"])], say)
        warned += _warn([doubts.ruined(own["figures"])], say)
        if len(sets) > 1:
            warned += _warn([doubts.narrow(*(held["figures"] for held in sets))], say)
        progress("measuring latency", blocks, blocks)
        timing = None
        try:
            timing = _timing(original, network, plan, done)
        except Exception as error:  # of a runtime; the compressed model must not be lost
            warned += _warn([doubts.untimed(error)], say)
        if timing is not None and plan.timings is not None:
            drift = timing["original_seconds"] / plan.timings.seconds  # of the machine, since the plan was made
            warned += _warn([doubts.late(drift * timing["predicted_seconds"], timing["compressed_seconds"])], say)
        found = {
            "format": pages.FORMAT,
            "base_model": prepared.name,
            "model_class": type(network).__name__,
            "sentence_transformers": prepared.sentences,
            "blocks_in_all": blocks,
            "saved_as": saved,
            "bytes": {"original": bytes_of(original), "compressed": bytes_of(network)},
            "latency": pages.latency(original, network, batches),
            "timing": timing,
            "agreement": sets[0]["figures"],
            "held_out": sets,
            "compared": prepared.compared,
            "calibration": described_inputs(inputs),
            "warnings": warned,
            "settings": settings,
            "seed": settings["seed"],
            "versions": environment(),
            "plan": plan.to_dict(),
            "report": {key: value for key, value in done.to_dict().items() if key != "agreement"},
        }
        _write(network, original, plan, found, prepared, out, say)
        return found


def _timing(
    original: PreTrainedModel, network: PreTrainedModel, plan: Plan, done: CompressionReport
) -> dict[str, Any] | None:
    """The latency that the plan predicted, and that of both models, for the batch that the plan was made for."""
    if plan.timings is None:
        return None
    refused = {block.name for block in done.blocks if block.refused}
    table = plan.timings
    before, after = compare([original, network], tokens=table.tokens, runtime=table.runtime)
    return {
        "runtime": table.runtime,
        "tokens": list(table.tokens),
        "inputs": described(example_inputs(original, table.tokens)),
        "threads": torch.get_num_threads(),
        "original_seconds": before,
        "predicted_seconds": table.seconds_of(block for block in plan.blocks if block.name not in refused),
        "compressed_seconds": after,
    }


def _check_finite(agreement: dict[str, float]) -> None:
    wrong = [f"{name} {value}" for name, value in agreement.items() if not math.isfinite(value)]
    if wrong:
        raise ValueError(f"outputs are not finite: {', '.join(wrong)}; nothing was written, try the model in float32")


def _write(
    network: PreTrainedModel,
    original: PreTrainedModel,
    plan: Plan,
    found: dict[str, Any],
    prepared: Prepared,
    out: Path,
    say: Callable[[str], None],
) -> None:
    """Write the folder, with the graph if one was asked for, which the report `found` then has too."""
    settings, inner = prepared.settings, prepared.inner
    with _io.new_folder(out) as temporary:
        card = copy_others(prepared.folder, inner, temporary)
        network.save_pretrained(temporary / inner)
        plan.save(temporary / "plan.json")
        if settings["to"] is not None:
            chosen = {**export_settings(settings), "show_texts": settings["show_texts"]}
            options: dict[str, Any] = {"pooling": prepared.outputs.pooling, "say": say, "original": original}
            try:
                found["served"] = make_graphs(network, prepared.inputs, temporary / inner, chosen, **options)
            except Exception as error:  # of a runtime; the compressed model must not be lost
                same = "the same command" + (" with another --max-loss" if plan.timings is not None else "")
                raise NotServed(f"{error}; {same} goes on from here") from error
            found["warnings"] += found["served"]["warnings"]
        _io.write_json(temporary / "report.json", found)
        (temporary / "README.md").write_text(pages.model_card(found, card), encoding="utf-8")
        (temporary / "report.html").write_text(html(found), encoding="utf-8")


def described_inputs(inputs: Gathered) -> dict[str, Any]:
    """The calibration, as report.json has it."""
    given = inputs.given
    return {
        "file": given.source,
        "kind": given.kind,
        "count": given.items,
        "column": given.column,
        "general_texts": inputs.mixed,
    }


def _before(inputs: Gathered, plan: Plan, network: PreTrainedModel) -> Iterator[str | None]:
    """Yield warnings about the inputs that can be given before anything is fitted to them, or None."""
    given, general = inputs.given, inputs.general
    yield doubts.alike(given.kind, given.held_out is not None)
    yield doubts.broken(given.pieces, None if general is None else general.pieces)
    if given.kind != "images":
        tokens = sum(int(batch["attention_mask"].sum()) for batch in given)
        by_name = {block.name: block for block in plan.blocks}
        yield doubts.few(tokens, max(unknowns(b, by_name[b.name]) for b in plan.check(network)), given.items)


def _warn(found: Iterable[str | None], say: Callable[[str], None]) -> list[str]:
    warned = [doubt for doubt in found if doubt is not None]
    for doubt in warned:
        say(f"warning: {doubt}")
    return warned
