"""The work of `snnk compress`: a folder with a model in, a folder with the compressed model and its report out.

Everything is written into a temporary folder beside the output and renamed at the end: a run that is killed leaves no
output, and never half of one.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from snnk import _io, hf
from snnk._environment import environment
from snnk.hf.architectures import parse_layers
from snnk.hf.calibration import Calibration, load_calibration
from snnk.hf.compression import report as pages
from snnk.hf.compression.agreement import Outputs, probe
from snnk.hf.cost import stored
from snnk.hf.folders import copy_others, find_folder, find_transformer, pooling_of, some
from snnk.hf.models import load_model, load_processor, quiet, token_limit

KEEP = 0.25  # where neither a share nor a target is given


@dataclass(frozen=True)
class Settings:
    """Options of the command, as report.json keeps them."""

    keep: float | None = None
    target_size: str | None = None
    target_speedup: float | None = None
    layers: str = "all"
    features: str = "atoms"
    plan: str | None = None
    joint: bool = False
    refine: int = 120
    recover: int = 0
    max_error: float | None = None
    column: str | None = None
    max_length: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        targets = {"--keep": self.keep, "--target-size": self.target_size, "--target-speedup": self.target_speedup}
        given = [name for name, value in targets.items() if value is not None]
        if len(given) > 1:
            raise ValueError(f"give one of {', '.join(targets)}; got {' and '.join(given)}")
        if self.keep is not None and not 0 < self.keep <= 1:
            raise ValueError(f"--keep must be above 0 and at most 1; got {self.keep}")
        if self.plan is not None and (given or self.joint or (self.layers, self.features) != ("all", "atoms")):
            raise ValueError(
                "--plan says what is kept: give it without --keep, --target-..., --layers, --features, --joint"
            )
        if self.joint and self.features != "atoms":
            raise ValueError(f"--joint chooses counts of atoms only; got --features {self.features}")
        for name, number in (("--target-speedup", self.target_speedup), ("--max-error", self.max_error)):
            if number is not None and not 0 < number < math.inf:
                raise ValueError(f"{name} must be a positive number; got {number}")
        parse_layers(self.layers)

    def make_plan(self, model: Any, batches: Any = None) -> hf.Plan:
        if self.plan is not None:
            plan = hf.Plan.load(self.plan)
            plan.check(model)
            return plan
        return hf.plan(
            model,
            KEEP if (self.keep, self.target_size, self.target_speedup) == (None, None, None) else self.keep,
            target_size=self.target_size,
            target_speedup=self.target_speedup,
            layers=self.layers,
            features=self.features,
            batches=batches,
        )


@quiet()
def compress_folder(
    model: str,
    calibration: Path,
    out: Path,
    settings: Settings,
    *,
    say: Callable[[str], None] = lambda text: None,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> dict[str, Any]:
    """Compress a model of a folder or of the hub into the new folder `out`; returns what report.json holds."""
    _io.check_out(out)
    if not calibration.exists():
        raise FileNotFoundError(f"no calibration file or folder {calibration}")
    with _io.locked_output(out) as left:
        _io.check_out(out)  # a run that held the lock may have made it
        for path in left:
            say(f"removed {path}, which a run that was killed had left")
        return _compress_folder(model, calibration, out, settings, say, progress)


def _compress_folder(
    model: str,
    calibration: Path,
    out: Path,
    settings: Settings,
    say: Callable[[str], None],
    progress: Callable[[str, int, int], None],
) -> dict[str, Any]:
    folder = find_folder(model)
    if out.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"--out {out} is inside the model's folder {folder}; name one outside")
    inner = find_transformer(folder)
    network, processor = load(folder / inner, say, sentences=(folder / "modules.json").is_file())
    blocks = len(hf.find_ffns(network))
    plan = settings.make_plan(network)  # fails on what is wrong with the model or the plan, before any data are read
    length = min(settings.max_length, token_limit(network.config) or settings.max_length)
    batches = load_calibration(calibration, processor, column=settings.column, max_length=length, seed=settings.seed)
    say(f"calibration: {batches}")
    if type(network).__name__.endswith("ForMultipleChoice"):  # one choice a text, whose score is compared
        batches[:] = [{name: x[:, None] for name, x in batch.items()} for batch in batches]
    compared = _compared(probe(network, batches[0]), folder)  # before any work
    if settings.joint:
        progress("choosing counts", 0, blocks)
        plan = settings.make_plan(network, batches)
    say(str(plan))
    original = copy.deepcopy(network)
    done = hf.compress_(
        network,
        plan,
        batches,
        refine=settings.refine,
        max_error=settings.max_error,
        recover=settings.recover,
        seed=settings.seed,
        progress=progress,
    )
    say(str(done))
    _check_finite(done.agreement)
    progress("measuring latency", blocks, blocks)
    found = {
        "format": pages.FORMAT,
        "base_model": model if not Path(model).exists() else folder.resolve().name,
        "model_class": type(network).__name__,
        "sentence_transformers": (folder / "modules.json").is_file(),
        "blocks_in_all": blocks,
        "bytes": {"original": _bytes(original), "compressed": _bytes(network)},
        "latency": pages.latency(original, network, batches),
        "agreement": done.agreement,
        "compared": compared,
        "calibration": _described(batches),
        "settings": asdict(settings),
        "seed": settings.seed,
        "versions": environment(),
        "plan": plan.to_dict(),
        "report": {key: value for key, value in done.to_dict().items() if key != "agreement"},
    }
    _write(network, plan, found, folder, inner, out)
    return found


def load(folder: Path, say: Callable[[str], None], sentences: bool = False) -> tuple[Any, Any]:
    """The model, with the head that its configuration names, and its tokenizer or image processor.

    A tensor that the files lack would be compressed as it is drawn, and saved as if it were trained: it is refused. The
    exception is the pooler of a folder of sentence-transformers (`sentences`), which is saved as zeros.
    """
    loaded = load_model(folder, zero_pooler=sentences)
    model = loaded.model
    if loaded.unexpected:
        say(f"note: a {type(model).__name__} does without {some(sorted(loaded.unexpected))}, which the files have")
    if loaded.missing:
        say(f"note: the files have no {some(sorted(loaded.missing))}; sentence vectors do without, these are zeros")
    images = model.main_input_name == "pixel_values"
    processor = load_processor(folder, images, vocab_size=getattr(model.config, "vocab_size", None) or 0)
    return model, processor


def _compared(outputs: Outputs, folder: Path) -> str:
    """What the figures of agreement are of; for sentence vectors also how the folder itself pools them."""
    pooling = pooling_of(folder)
    if not outputs.pooled or not pooling:
        return outputs.compared
    return f"{outputs.compared}; sentence-transformers pools by {pooling} here"


def _check_finite(agreement: dict[str, float]) -> None:
    wrong = [f"{name} {value}" for name, value in agreement.items() if not math.isfinite(value)]
    if wrong:
        raise ValueError(f"outputs are not finite: {', '.join(wrong)}; nothing was written, try the model in float32")


def _write(network: Any, plan: hf.Plan, found: dict[str, Any], folder: Path, inner: PurePosixPath, out: Path) -> None:
    with _io.new_folder(out) as temporary:
        card = copy_others(folder, inner, temporary)
        network.save_pretrained(temporary / inner)
        plan.save(temporary / "plan.json")
        _io.write_json(temporary / "report.json", found)
        (temporary / "README.md").write_text(pages.model_card(found, card), encoding="utf-8")
        (temporary / "report.html").write_text(pages.html(found), encoding="utf-8")


def _bytes(model: Any) -> int:
    return sum(tensor.nbytes for tensor in stored(model).values())


def _described(batches: Calibration) -> dict[str, Any]:
    return {"file": batches.source, "kind": batches.kind, "count": batches.items, "column": batches.column}
