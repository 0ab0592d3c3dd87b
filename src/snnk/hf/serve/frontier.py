"""`snnk.hf.frontier`: the curve of size, latency and agreement over several budgets, in one run.

What does not depend on the budget is done once: the model is loaded, the inputs are read, mixed and tokenized, and one
pass over them measures what every choice for every block would cost (damage.py), from which each budget takes its plan.
The fit is not shared: each block is fitted to what the smaller blocks before it leave to repair, so that from the
second block on its inputs are those of one budget alone. What it aims at, the residual streams and the outputs of the
original, is the same for all budgets, but is too large to be kept: one forward pass per budget computes it again for
the fit, and one for the distillation.

A budget that is finished stays in the checkpoint beside the output, and is not computed again if the run is killed.
Latencies of all points are measured at the end, in turns, in one process. Exported models are compared with the
original in PyTorch, like all others.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from snnk import _checks, _io
from snnk._checkpoint import CheckpointError, checkpoint_of
from snnk._environment import environment
from snnk.hf.calibration import Calibration
from snnk.hf.compression.agreement import compare, measure
from snnk.hf.compression.checkpoint import ADVICE, fingerprint
from snnk.hf.compression.damage import TooFewTokens
from snnk.hf.compression.distill import AUTO, Progress, unseen
from snnk.hf.compression.opening import Prepared, load, open_model, prepare
from snnk.hf.compression.outputs import VECTORS, Outputs, outputs_of
from snnk.hf.compression.pipeline import default_settings, described_inputs, first_plan, fit_and_write
from snnk.hf.compression.planning import Choices, measure_choices
from snnk.hf.compression.settings import LEAST, check_settings, chosen_jointly
from snnk.hf.compression.times import check_tokens
from snnk.hf.compression.timing import described
from snnk.hf.cost import bytes_of, counting_mode
from snnk.hf.folders import makes_vectors
from snnk.hf.models import Batch, evaluating, quiet
from snnk.hf.serve import graphs, latency, quantizing
from snnk.hf.serve.forms import FORMS, check_form, write_form
from snnk.hf.serve.frontier_page import FORMAT, html
from snnk.hf.serve.latency import Run, clock_of, run_torch
from snnk.hf.serve.static import Static, static_models

KEEP = (0.5, 0.33, 0.25, 0.15)
TOKENS = ((1, 32), (32, 32))  # inputs, and tokens per text, of the batches whose latency is measured
SECONDS = 30.0  # of the measurement of one of them, at most


@dataclass
class Point:
    """One model of the curve.

    Attributes:
        name: for people.
        keep: part of the parameters of blocks that stays, 1 for the original; None for other models.
        form: "torch", or a name in `FORMS`; None for other models.
        bytes: that it stores.
        held_out: its agreement with the original, as `measure` of agreement.py returns it.
        run: makes the function that runs it on a batch.
        folder: with its files, if they are saved.
    """

    name: str
    keep: float | None
    form: str | None
    bytes: int
    held_out: list[dict[str, Any]]
    run: Callable[[Batch], Run]
    folder: str | None = None

    def to_dict(self, times: Sequence[latency.Latency]) -> dict[str, Any]:
        """The point without its inputs that lost most, and with its seconds per batch."""
        return {
            "name": self.name,
            "keep": self.keep,
            "form": self.form,
            "bytes": self.bytes,
            "seconds": [found.seconds[self.name] for found in times],
            "held_out": [{**held, "worst": []} for held in self.held_out],
            "folder": self.folder,
        }


@quiet()
def frontier(
    model: str | Path,
    calibration: str | Path | None = None,
    *,
    out: str | Path,
    keep: Sequence[float] = KEEP,
    to: str | Sequence[str] | None = None,
    rivals: bool = True,
    save: bool = False,
    tokens: Sequence[tuple[int, int]] = TOKENS,
    threads: int = 1,
    layers: str = "all",
    blocks: str = "all",
    refine: int | None = None,
    recover: int | str = AUTO,
    recover_minutes: float = 5.0,
    text: str | None = None,
    text_pair: str | None = None,
    max_length: int = 128,
    seed: int = 0,
    say: Callable[[str], None] = lambda text: None,
    progress: Progress = unseen,
) -> dict[str, Any]:
    """Compress a model with several budgets, and compare size, latency and agreement; what `snnk frontier` does.

    Args:
        model: folder of a Hugging Face model, also of sentence-transformers, or its name on the hub.
        calibration: unlabelled inputs, as for `snnk.hf.compress`. Default: general English text.
        out: new folder for frontier.json and report.html.
        keep: the budgets, each the part of the parameters of blocks that stays, as in `snnk.hf.compress`.
        to: a form of `snnk.hf.export`, such as "openvino-int8", or a list of them: also export the original and
            the model of every budget, and compare these. Default: int8 of the original alone, as a rival.
        rivals: points to compare with, as far as their packages are installed: int8 of the original (the extra serve)
            and, for a sentence encoder, static embeddings of model2vec and wordllama.
        save: also keep the compressed models, in folders such as keep-0.33 in `out`.
        tokens: numbers of inputs, and of tokens per text, of the batches whose latency is measured.
        threads: of torch and of the other runtime while latency is measured.
        layers, blocks, refine, recover, text, text_pair, max_length, seed: of `snnk.hf.compress`, for every budget.
        recover_minutes: most minutes of distillation per budget, with recover="auto".
        say: called with lines for people.
        progress: called with (step, done, all), then with (stage, steps done, all steps, note).

    Returns:
        The contents of frontier.json.

    Example:
        >>> import tempfile
        >>> from tokenizers import Tokenizer, models, pre_tokenizers
        >>> from transformers import BertConfig, BertModel, PreTrainedTokenizerFast
        >>> folder, words = Path(tempfile.mkdtemp()), {"[UNK]": 0, "one": 1, "two": 2}
        >>> tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
        >>> tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        >>> PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder / "model")  # doctest: +ELLIPSIS
        (...)
        >>> sizes = dict(hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
        >>> BertModel(BertConfig(vocab_size=3, **sizes)).save_pretrained(folder / "model")
        >>> _ = (folder / "texts.txt").write_text("one two one two\\n" * 40)
        >>> options = dict(keep=[0.5], recover=0, rivals=False)
        >>> found = frontier(folder / "model", folder / "texts.txt", out=folder / "curve", **options)
        >>> [point["name"] for point in found["points"]]
        ['original', 'keep 0.5']
    """
    out, calibration = Path(out), None if calibration is None else Path(calibration)
    budgets, batches = check_budgets(keep), check_batches(tokens)
    _checks.positive_int(threads, "threads")
    forms = [to] if isinstance(to, str) else list(dict.fromkeys(to or ()))
    for form in forms:
        check_form(form)
    settings = default_settings() | {
        "layers": layers,
        "blocks": blocks,
        "refine": refine,
        "recover": recover,
        "recover_minutes": recover_minutes,
        "text": text,
        "text_pair": text_pair,
        "max_length": max_length,
        "seed": seed,
    }
    check_settings({**settings, "keep": budgets[0]}, calibration)
    with _io.locked_output(out) as left:
        work = checkpoint_of(out)
        if (out / "frontier.json").is_file():  # its run was killed before it could remove its checkpoint
            _remove(work)
        _io.check_out(out)
        for path in left:
            say(f"removed {path}, which a run that was killed had left")
        opened = open_model(str(model), out, settings, say)
        plans = {
            keep: first_plan(replace(opened, settings={**opened.settings, "keep": keep}), progress)[0]
            for keep in budgets
        }
        prepared = prepare(opened, calibration, say)
        for form in forms:
            _of_int8(prepared, form)  # too few inputs fail before there is a checkpoint
        done = _begin(work, prepared, say)
        for i, form in enumerate(forms):
            progress(f"exporting to {form}", i, len(forms))
            _graph(prepared, prepared.network, work / f"original-{form}", form)  # an error comes before the work
        choices: Choices | None = None
        if set(budgets) - set(done) and chosen_jointly(prepared.settings):
            progress("measuring choices for all budgets", 0, len(budgets))
            prepared, choices = _choices(prepared, say)
        for i, budget in enumerate(budgets):
            if budget in done:
                continue
            say(f"keep {budget:g}, budget {i + 1} of {len(budgets)}")
            one = replace(
                prepared, network=copy.deepcopy(prepared.network), settings={**prepared.settings, "keep": budget}
            )
            fit_and_write(
                one,
                plans[budget],
                work / name_of(budget),
                say,
                _named(progress, budget),
                choices=choices,
                original=prepared.network,
            )
        found = _measured(prepared, budgets, work, forms, rivals, save, batches, threads, say, progress)
        with _io.new_folder(out) as temporary:
            _io.write_json(temporary / "frontier.json", found)
            (temporary / "report.html").write_text(html(found), encoding="utf-8")
            for budget in budgets if save else ():
                shutil.copytree(work / name_of(budget), temporary / name_of(budget))
        _remove(work)
        return found


def check_budgets(budgets: Sequence[float]) -> list[float]:
    """The budgets with the digits that the names of folders have, the largest first, each once.

    Example:
        >>> check_budgets([0.25, 0.5, 0.25, 1 / 3])
        [0.5, 0.333333, 0.25]
    """
    if not isinstance(budgets, list | tuple) or not budgets:
        raise TypeError(
            f"keep must be a list of numbers, parts of the blocks that stay, such as [0.5, 0.25]; got {budgets!r}"
        )
    wrong = [keep for keep in budgets if not _checks.is_number(keep) or not LEAST <= keep < 1]
    if wrong:
        raise ValueError(f"keep must be at least {LEAST} and less than 1, which is the original; got {wrong[0]!r}")
    return sorted({float(f"{keep:g}") for keep in budgets}, reverse=True)


def check_batches(tokens: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The batches whose latency is measured, each once.

    Example:
        >>> check_batches([(1, 32), [8, 128], (1, 32)])
        [(1, 32), (8, 128)]
    """
    if not isinstance(tokens, list | tuple) or not tokens or not all(isinstance(each, list | tuple) for each in tokens):
        raise TypeError(
            "tokens must be a list of batches, inputs and tokens per text of each, such as [(1, 32), (32, 32)]; got "
            f"{tokens!r}"
        )
    return list(dict.fromkeys(check_tokens(each) for each in tokens))


def name_of(keep: float) -> str:
    """The folder of a budget.

    Example:
        >>> name_of(0.25)
        'keep-0.25'
    """
    return f"keep-{keep:g}"


def _begin(work: Path, prepared: Prepared, say: Callable[[str], None]) -> list[float]:
    """Begin or continue a run; returns the budgets that are finished."""
    inputs = prepared.inputs
    key = fingerprint(prepared.settings, prepared.network, [*inputs.batches, *inputs.more])
    start = work / "start.json"
    if not work.exists():
        work.mkdir()
        _io.write_json(start, {"frontier": key})
        return []
    stored = _io.read_json(start, f"the start of a run of snnk frontier, so move {work} away")
    if not isinstance(stored, dict) or stored.get("frontier") != key:
        raise CheckpointError(
            f"{work} belongs to a run that was stopped, with other options, texts, weights or versions; use those, "
            f"name another output, or {ADVICE}"
        )
    _io.remove_leftovers_in(work)
    done = [float(path.parent.name.removeprefix("keep-")) for path in work.glob("keep-*/report.json")]
    say(f"going on from {work}, which has {len(done)} budgets")
    return done


def _remove(work: Path) -> None:
    if (work / "start.json").is_file() and not work.is_symlink():
        shutil.rmtree(work, ignore_errors=True)


def _choices(prepared: Prepared, say: Callable[[str], None]) -> tuple[Prepared, Choices | None]:
    """What every block could become, from one pass; without it, every block keeps the same share."""
    settings = prepared.settings
    try:
        found = measure_choices(
            prepared.network, prepared.inputs.batches, layers=prepared.layers, blocks=settings["blocks"]
        )
    except TooFewTokens as error:
        say(f"note: every block keeps the same share, as a joint plan needs more inputs: {error}")
        return replace(prepared, settings={**settings, "joint": False}), None
    return prepared, found


def _named(progress: Progress, keep: float) -> Progress:
    def named(what: str, done: int, total: int, note: str = "") -> None:
        progress(f"keep {keep:g}: {what}", done, total, note)

    return named


def _measured(
    prepared: Prepared,
    budgets: Sequence[float],
    work: Path,
    forms: Sequence[str],
    rivals: bool,
    save: bool,
    batches: Sequence[tuple[int, int]],
    threads: int,
    say: Callable[[str], None],
    progress: Progress,
) -> dict[str, Any]:
    """Load all models, and measure them side by side."""
    original, sets = prepared.network, prepared.inputs.held_out
    pooling = prepared.outputs.pooling
    progress("comparing", 0, 1)
    with evaluating(original):
        exact = [[outputs_of(original, batch, pooling) for batch in held] for held in sets]
    same = [measure(original, original, held, pooling=pooling, texts=False) for held in sets]
    points = [_torch("original", 1.0, original, same)]
    models = [original]
    reported: list[str] = []
    warned: list[str] = []
    if original.dtype != torch.float32:
        warned.append("the points of PyTorch are in 16 bits, and graphs are in float32 or int8")
    for keep in budgets:
        folder = work / name_of(keep)
        network, _ = load(
            folder / prepared.inner, lambda _: None, sentences=prepared.sentences, headless=makes_vectors(folder)
        )
        report = _io.read_json(folder / "report.json", "a report of snnk compress")
        reported += [f"keep {keep:g}: {doubt}" for doubt in report["warnings"]]  # and said when it was made
        models.append(network)
        points.append(_torch(f"keep {keep:g}", keep, network, report["held_out"]))
        points[-1].folder = name_of(keep) if save else None
    own = list(zip(points, models, strict=True))
    exported = [(form, own) for form in forms]
    exported += [(form, own[:1]) for form in _installed()[:1] if rivals and form not in forms]
    for form, chosen in exported:
        for i, (point, network) in enumerate(chosen):
            progress(f"exporting to {form}", i, len(chosen))
            try:
                points.append(_served(prepared, point, network, work, form, threads))
            except Exception as error:  # of another package
                if form in forms:
                    raise
                say(f"note: there is no point of {form} to compare with: {error}")
                break
        else:
            warned += _of_int8(prepared, form)
    if rivals and prepared.outputs.pooled and makes_vectors(prepared.folder) and prepared.inputs.given.kind == "texts":
        points += [
            _static(prepared, static, sets, exact) for static in static_models(prepared.folder / prepared.inner, say)
        ]
    times = []
    names = [name for name in prepared.inputs.batches[0] if name in graphs.INPUTS]
    with ExitStack() as modes:
        for network in models:
            modes.enter_context(counting_mode(network))
        for i, batch in enumerate(batches):
            progress("measuring latency", i, len(batches))
            inputs = graphs.example(original, names, batch)
            runs = {point.name: point.run(inputs) for point in points}
            times.append(
                latency.measure(runs, described(inputs), threads=threads, clock=clock_of(original), seconds=SECONDS)
            )
    for found in times:
        warned += [f"latency of {found.inputs}: {doubt}" for doubt in found.doubts()]
    for doubt in warned:
        say(f"warning: {doubt}")
    warned = [*reported, *warned]
    return {
        "format": FORMAT,
        "base_model": prepared.name,
        "model_class": type(original).__name__,
        "compared": prepared.compared,
        "calibration": described_inputs(prepared.inputs),
        "latency": [found.to_dict() for found in times],
        "points": [point.to_dict(times) for point in points],
        "warnings": warned,
        "settings": {
            **prepared.settings,
            "keep": list(budgets),
            "to": ",".join(forms) or None,
            "tokens": list(batches),
            "threads": threads,
        },
        "seed": prepared.settings["seed"],
        "versions": environment(),
    }


def _torch(name: str, keep: float, network: PreTrainedModel, held_out: list[dict[str, Any]]) -> Point:
    return Point(name, keep, "torch", bytes_of(network), held_out, lambda batch: run_torch(network, batch))


def _installed() -> list[str]:
    """The int8 forms whose packages are installed."""
    found = []
    for form in FORMS:
        with suppress(ImportError):
            _, int8 = check_form(form)
            found += [form] if int8 else []
    return found


def _of_int8(prepared: Prepared, form: str) -> list[str]:
    """Warnings of the scales of int8; a ValueError if there are too few inputs for them."""
    (to, int8), given = FORMS[form], prepared.inputs.given
    found = (quantizing.doubt(int8, given.kind, given.items), quantizing.on_others(to)) if int8 else ()
    return [f"{form}: {doubt}" for doubt in found if doubt is not None]


def _graph(prepared: Prepared, network: PreTrainedModel, folder: Path, form: str) -> Path:
    """The graph of a model in a folder, which is made unless it is there."""
    to, _ = FORMS[form]
    if not folder.exists():
        _of_int8(prepared, form)
        with _io.new_folder(folder) as temporary:
            write_form(network, prepared.inputs.own, temporary, form)
    return folder / graphs.FILES[to]


def _served(prepared: Prepared, point: Point, network: PreTrainedModel, work: Path, form: str, threads: int) -> Point:
    """The same model as it is served."""
    folder = work / f"{point.name.replace(' ', '-')}-{form}"
    path = _graph(prepared, network, folder, form)
    session = graphs.open_graph(path, FORMS[form][0], threads=threads)
    pooling = prepared.outputs.pooling
    held_out = [
        measure(prepared.network, network, held, pooling=pooling, texts=False, run=session)
        for held in prepared.inputs.held_out
    ]
    size = sum(file.stat().st_size for file in folder.iterdir())
    return Point(f"{point.name}, {form}", point.keep, form, size, held_out, lambda batch: lambda: session(batch))


def _static(prepared: Prepared, static: Static, sets: list[Calibration], exact: list[list[Outputs]]) -> Point:
    """A static model on the texts that the tokens of the held-out inputs spell; its time includes its tokenizer."""

    def texts(batch: Batch) -> list[str]:
        return list(prepared.processor.batch_decode(batch["input_ids"], skip_special_tokens=True))

    def outputs(held: Calibration, wanted: list[Outputs]) -> Iterator[Outputs]:
        for batch, own in zip(held, wanted, strict=True):
            vectors: Tensor = static.encode(texts(batch))[own.inputs[VECTORS]]
            yield replace(own, values={VECTORS: vectors})

    held_out = []
    for held, wanted in zip(sets, exact, strict=True):
        found = compare(wanted, outputs(held, wanted))
        held_out.append(
            {
                "name": held.source,
                "kind": held.kind,
                "inputs": found.inputs,
                "figures": found.figures,
                "quantiles": found.quantiles,
                "classes": [],
                "worst": [],
            }
        )

    def run(batch: Batch) -> Run:
        words = texts(batch)
        return lambda: static.encode(words)

    return Point(f"{static.name}, with its tokenizer", None, None, static.bytes, held_out, run)
