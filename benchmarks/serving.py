"""PyTorch, ONNX Runtime and OpenVINO in float32 and int8, each with the original and with ours.

    python benchmarks/serving.py --model FOLDER --data GLUE_FOLDER [--keeps 0.33,0.25,0.21] [--out FILE]
    python benchmarks/serving.py --model FOLDER --data GLUE_FOLDER --compressed FOLDER,FOLDER
    python benchmarks/serving.py --quick

The models of ours are folders of `snnk compress`, or are made with its default options from the sentences of STS-B's
training file. int8 is dynamic in PyTorch and ONNX Runtime, and static in OpenVINO (by NNCF, with scales from the same
sentences). OpenVINO computes what is not int8 in bfloat16 where the processor has it, as it does by default. Latency is
that of one thread, by processor time with wall time beside it, for batches of 1 x 16, 1 x 128, 32 x 32 and 32 x 128
tokens: everything takes turns in one process, until the standard error of each is 1 %, or for --seconds per batch.
STS-B dev is evaluated once per row, by the Spearman correlation of cosines with the scores, in percent; cosine and
neighbours are those of the original in PyTorch on the same sentences. A runtime that is not installed is left out.
--quick generates a small model and sentences, which show that the script runs and nothing else.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from compress import int8, size_of
from torch import Tensor
from transformers import AutoModel
from whole import Config as Reading
from whole import make, read

from snnk.experiments.compression import Batch, States, quality, states_of, vectors
from snnk.experiments.lab.records import Results
from snnk.hf import compress
from snnk.hf.compression.agreement import compare
from snnk.hf.compression.opening import open_source
from snnk.hf.compression.outputs import VECTORS, Outputs
from snnk.hf.models import has_bfloat16
from snnk.hf.serve import graphs
from snnk.hf.serve.exporting import read_inputs
from snnk.hf.serve.forms import FORMS, check_form, write_form
from snnk.hf.serve.latency import SPREAD, measure

SHAPES = {"1x16": (1, 16), "1x128": (1, 128), "32x32": (32, 32), "32x128": (32, 128)}
TORCH_INT8 = "torch-int8"
RIVAL = ("original", "openvino", "int8")
TARGETS = {2.0: 0.3, 2.5: 0.8}  # times as fast as the rival, and points of Spearman below it at most, of MiniLM
JUDGED = ("1x16", "32x32")


@dataclass(frozen=True)
class Config:
    model: str = ""
    calibration: str = "STS-B"
    seconds: float = 120.0  # per batch
    threads: int = 1
    seed: int = 0


@dataclass(frozen=True)
class Contender:
    """A model in a runtime, with the part of its parameters that stays."""

    model: str
    keep: float
    runtime: str
    precision: str
    states: States
    megabytes: float

    @property
    def name(self) -> str:
        return f"{self.model}, {self.runtime}, {self.precision}"


def contenders(
    name: str, keep: float, folder: Path, texts: Path, work: Path, threads: int, forms: Sequence[str]
) -> Iterator[Contender]:
    """The model of a folder in PyTorch, in float32 and int8, and in these forms, if their packages are installed."""
    model = AutoModel.from_pretrained(folder, trust_remote_code=False).eval()
    networks = {"float32": model}
    if TORCH_INT8 in forms:
        networks["int8"] = int8(copy.deepcopy(model))
    for precision, network in networks.items():
        yield Contender(name, keep, "torch", precision, states_of(network), size_of(network)[1])
    source = open_source(str(folder), work, lambda text: None)
    inputs = read_inputs(source, texts, {"text": None, "text_pair": None, "max_length": 128, "seed": 0})
    for form, (to, mode) in FORMS.items():
        if form not in forms:
            continue
        try:
            check_form(form)
        except ImportError as error:
            sys.stdout.write(f"{form} is left out: {error}\n")
            continue
        out = work / f"{name} {form}"
        out.mkdir()
        path = write_form(source.network, inputs.own, out, form)
        session = graphs.open_graph(path, to, threads=threads)
        megabytes = sum(file.stat().st_size for file in out.iterdir()) / 1e6
        computed = "bfloat16" if to == "openvino" and has_bfloat16("cpu") else "float32"
        yield Contender(name, keep, to, "int8" if mode else computed, states_in(session), megabytes)


def states_in(session: Callable[[Batch], dict[str, Tensor]]) -> States:
    return lambda batch: session(batch)["last_hidden_state"]


def neighbours(found: Tensor, original: Tensor) -> dict[str, float]:
    """How far two sets of vectors (n, d) have the same neighbours."""
    numbers = torch.arange(len(found))
    both = [Outputs({VECTORS: x.float()}, {VECTORS: numbers}, len(found)) for x in (original, found)]
    figures = compare(both[:1], both[1:]).figures
    return {name.replace(" ", "_"): figures[name] for name in ("same nearest", "ten nearest in common")}


def targets(rows: list[dict[str, Any]]) -> Iterator[tuple[str, bool]]:
    """For each target a line with our best, and whether it is reached."""
    rival = next((row for row in rows if (row["model"], row["runtime"], row["precision"]) == RIVAL), None)
    if rival is None:
        yield f"there is no row of {', '.join(RIVAL)} to compare with", False
        return
    for times, points in TARGETS.items():
        near = [row for row in rows if row["model"] != "original" and row["spearman"] >= rival["spearman"] - points]
        best = {
            label: max((rival[f"ms_{label}"] / row[f"ms_{label}"] for row in near), default=0.0) for label in JUDGED
        }
        reached = any(all(rival[f"ms_{s}"] >= times * row[f"ms_{s}"] for s in JUDGED) for row in near)
        shown = ", ".join(f"{value:.2f} at {label}" for label, value in best.items())
        yield f"within {points} points of {', '.join(RIVAL)}: {shown} times as fast (target {times})", reached


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="generate a small model")
    parser.add_argument("--model", type=Path, help="folder of a sentence encoder")
    parser.add_argument("--data", type=Path, help="folder of GLUE, with STS-B")
    parser.add_argument("--keeps", default="0.33,0.25,0.21")
    parser.add_argument("--compressed", default="", help="folders of snnk compress, in place of --keeps")
    parser.add_argument(
        "--judge", action="store_true", help="fail if a target is missed; these are for MiniLM and VNNI"
    )
    parser.add_argument(
        "--forms", default=",".join((TORCH_INT8, *FORMS)), help="which to run beside PyTorch in float32; default: all"
    )
    parser.add_argument("--seconds", type=float, default=120.0, help="most seconds of the measurement per batch")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/serving.json"))
    args = parser.parse_args()
    if not args.quick and not (args.model and args.data):
        parser.error("name --model and --data, or use --quick for a generated model")
    config = Config("quick", seconds=0.5) if args.quick else Config(args.model.name, seconds=args.seconds)
    torch.set_num_threads(config.threads)
    results = Results(args.out, config, resume=False)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        place = make(work) if args.quick else read(args.model, args.data, work, Reading(seed=config.seed))
        found = [("original", 1.0, place.folder)]
        for path in map(Path, args.compressed.split(",") if args.compressed else ()):
            keep = json.loads((path / "report.json").read_text())["settings"]["keep"]
            found.append((path.name, keep, path))
        for keep in [] if args.compressed else [0.5] if args.quick else map(float, args.keeps.split(",")):
            compress(place.folder, place.texts, out=work / f"keep {keep}", keep=keep, **place.options)
            found.append((f"keep {keep}", keep, work / f"keep {keep}"))
        forms = args.forms.split(",")
        entered = [c for model in found for c in contenders(*model, place.texts, work, config.threads, forms)]
        times = {}
        with torch.no_grad():
            for label, shape in SHAPES.items():
                batch = {key: torch.ones(shape, dtype=torch.int64) for key in place.task.pairs[0]}
                runs = {c.name: lambda c=c, batch=batch: c.states(batch) for c in entered}
                inputs = f"{shape[0]} x {shape[1]} tokens"
                times[label] = measure(runs, inputs, threads=config.threads, seconds=config.seconds, spread=SPREAD)
                for doubt in times[label].doubts():
                    sys.stdout.write(f"warning: {inputs}: {doubt}\n")
            original = vectors(states_of(place.model), place.task.pairs)
            rows = []
            for c in entered:
                latency: dict[str, float] = {}
                for label, one in times.items():
                    latency[f"ms_{label}"] = 1e3 * one.seconds[c.name]
                    latency[f"wall_ms_{label}"] = 1e3 * one.seconds_by("wall")[c.name]
                    latency[f"spread_{label}"] = one.spread[c.name]
                row = {
                    "model": c.model,
                    "keep": c.keep,
                    "runtime": c.runtime,
                    "precision": c.precision,
                    "stored_MB": c.megabytes,
                    **latency,
                    **quality(c.states, original, place.task),
                    **neighbours(vectors(c.states, place.task.pairs), original),
                    "rounds": {label: one.rounds for label, one in times.items()},
                    "waited": {label: one.waited for label, one in times.items()},
                    "threads": config.threads,
                    "seed": config.seed,
                }
                rows.append(results.add(row))
                shown = ", ".join(f"{rows[0][f'ms_{s}'] / rows[-1][f'ms_{s}']:.2f}" for s in SHAPES)
                sys.stdout.write(
                    f"{c.name}: {c.megabytes:.1f} MB, {shown} times as fast ({', '.join(SHAPES)}), Spearman "
                    f"{row['spearman']:.2f}, cosine {row['cosine']:.4f}, ten nearest in common "
                    f"{row['ten_nearest_in_common']:.3f}\n"
                )
    missed = 0
    for line, reached in targets(rows):
        sys.stdout.write(f"{line}: {'reached' if reached else 'missed'}\n")
        missed += not reached
    return int(args.judge and missed > 0)


if __name__ == "__main__":
    sys.exit(main())
