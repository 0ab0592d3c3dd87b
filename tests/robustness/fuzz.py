"""A fuzzer over every loader of snnk.

It makes one small, valid file or folder of each kind, damages one file of it per case, and loads it. A case ends well
if the loader

- gives the same result as for the whole file ("same"),
- raises a ValueError, TypeError or OSError that names the file or its folder ("refused"), or
- gives another result of the same structure, all finite ("other"), where the damage is of a kind that no loader can
  notice: the numbers of a tensor, or a setting that stayed valid.

It ends badly with any other exception, an error that does not name the file, a result of another structure or with
numbers that are not finite, more memory or time than allowed, and a process that dies.

    python tests/robustness/fuzz.py --cases 10000 --seed 0 --out fuzz.json

Cases run in forked processes, several per process, under a limit of memory. A case depends on the seed, its kind and
its number alone: --kind and --only run one again.
"""

import argparse
import contextlib
import io
import json
import os
import pickle
import resource
import selectors
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"  # read at import; a damaged name of a base model may be one of the hub
from helpers.heads import make
from helpers.texts import make_images, make_texts, make_tokenizer, save
from robustness.damage import damage

SECONDS = 10.0  # for one case; each takes well under one on a processor that others use too
MEMORY = 1 << 30  # beyond what the process holds before the first case
BATCH = 50  # cases per process
EXPECTED = (ValueError, TypeError, OSError)


@dataclass(frozen=True)
class Kind:
    """A kind of file.

    Args:
        make: writes the valid files into a folder.
        load: loads them; returns tensors, numbers, strings, lists and dicts of them.
        files: those to damage; default: all.
        loose: damage may change how many rows there are, as in a table.
        own: all errors are ours, and name the file or folder. False where PEFT reads files before our code is
            reached: its errors need not name them, an unknown type of adapter is a KeyError, and deep JSON is a
            RecursionError.
    """

    make: Callable[[Path], None]
    load: Callable[[Path], Any]
    files: tuple[str, ...] = ()
    loose: bool = False
    own: bool = True


# --- the files ---------------------------------------------------------------------------------------------------

TOKENS = {"input_ids": torch.tensor([[2, 3, 4, 5], [2, 40, 7, 9]])}


def make_bert(kind: str = "BertModel", **options: Any) -> Any:
    return make(kind, initializer_range=0.2, **options)


@torch.no_grad()
def outputs(model: Any, folder: Path, inputs: Any = None) -> Any:
    """Outputs of a model, and whether its weights are finite.

    Weights of 1e38 are, and their outputs are not, which everyone sees. A model whose forward pass raises is loaded
    and cannot be used without a word either: a setting such as the number of heads does not fit.
    """
    finite_weights = all(bool(p.isfinite().all()) for p in model.parameters())
    try:
        found = model.eval()(**(inputs or TOKENS))[0].nan_to_num()
    except (RuntimeError, IndexError) as error:
        raise ValueError(f"{folder}: {error}") from None
    return {"outputs": found, "weights": 1.0 if finite_weights else float("nan")}


def make_table(folder: Path, ending: str, rows: int = 60) -> None:
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.feather
    import pyarrow.parquet

    random = Random(0)
    a, b = [[round(random.gauss(0, 1), 3) for _ in range(rows)] for _ in range(2)]
    c = [random.choice(["red", "green", "blue"]) for _ in range(rows)]
    y = [round(u - 2 * v + (w == "red"), 3) for u, v, w in zip(a, b, c, strict=True)]
    table = pa.table({"a": a, "b": b, "c": c, "y": y})
    path = folder / f"table.{ending}"
    if ending == "parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=15)
    elif ending == "csv":
        pyarrow.csv.write_csv(table, path)
    else:
        pyarrow.feather.write_feather(table, path, compression="uncompressed")


def load_table(folder: Path, ending: str) -> Any:
    from snnk.tabular.scan import Scan
    from snnk.tabular.source import Table

    table = Table(folder / f"table.{ending}")
    columns = Scan.start(table, "y").read(table).columns(missing="drop")
    found = [columns.encode(batch, label)[:2] for label, batches in table.blocks() for batch in batches]
    return {"x": torch.cat([x for x, _ in found]), "y": torch.cat([y for _, y in found])}


def make_ridge(folder: Path) -> None:
    from snnk import RidgeStats

    x = torch.randn(50, 6, generator=torch.Generator().manual_seed(0))
    RidgeStats(6, 2).update(x, x[:, :2]).save(folder / "stats.safetensors")


def load_ridge(folder: Path) -> Any:
    from snnk import RidgeStats

    stats = RidgeStats.load(folder / "stats.safetensors")
    return {**stats.state_dict(), "sizes": [stats.num_features, stats.num_targets, stats.folds]}


def make_bundle(folder: Path) -> None:
    from snnk import bundle

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    bundle(net, num_features=16, calibrate=torch.randn(100, 6)).save(folder / "bundle.safetensors")


@torch.no_grad()
def load_bundle(folder: Path) -> Any:
    from snnk import Bundled

    return Bundled.load(folder / "bundle.safetensors")(torch.linspace(-1, 1, 12).reshape(2, 6))


def fit_config() -> Any:
    from snnk.tabular import FitConfig

    return FitConfig("y", num_features=16, lam=0.1)


def make_model(folder: Path) -> None:
    from snnk import tabular

    make_table(folder, "parquet")
    tabular.fit(folder / "table.parquet", folder / "model", fit_config())


def load_model(folder: Path) -> Any:
    from snnk.tabular import TableModel

    model = TableModel.load(folder / "model")
    try:
        return [found for found, _ in model.predict(folder / "table.parquet")]
    except ValueError as error:  # a valid model, of a table with other columns, which the error names
        raise ValueError(f"model.json: {error}") from None


def make_fit(folder: Path) -> None:
    """A checkpoint after the third block of four."""
    from snnk import tabular

    def stop(what: str, rows: int, total: int) -> None:
        if what == "fitting" and rows >= 45:
            raise KeyboardInterrupt

    make_table(folder, "parquet")
    with contextlib.suppress(KeyboardInterrupt):
        tabular.fit(folder / "table.parquet", folder / "out", fit_config(), checkpoint_seconds=0.0, progress=stop)
    if not list(folder.glob("out/.checkpoint/part-*")):
        raise RuntimeError("there is no checkpoint to damage")


def load_fit(folder: Path) -> Any:
    from safetensors.torch import load_file

    from snnk import tabular

    report = tabular.fit(folder / "table.parquet", folder / "out", fit_config())
    return {**load_file(folder / "out" / "model.safetensors"), "rows": report["rows"]}


def make_plan(folder: Path) -> None:
    from snnk import hf

    hf.plan(make_bert(), keep=0.5).save(folder / "plan.json")


def load_plan(folder: Path) -> Any:
    from snnk import hf

    plan = hf.Plan.load(folder / "plan.json")
    try:
        plan.check(make_bert())
    except ValueError as error:  # a valid plan, of another model: the command names the file
        raise ValueError(f"plan.json: {error}") from None
    return plan.to_dict()


def make_compressed(folder: Path, kind: str = "atoms", head: str = "BertModel") -> None:
    from snnk import hf

    model, torch_rows = make_bert(head), torch.Generator().manual_seed(0)
    batches = [{"input_ids": torch.randint(43, (8, 10), generator=torch_rows)} for _ in range(12)]
    hf.compress_(model, hf.plan(model, keep=0.5, feature_map=kind), batches, refine=0)
    save(model, folder)


def load_compressed(folder: Path) -> Any:
    from snnk.hf.compression.opening import load

    model, processor = load(folder, lambda line: None)
    return {**outputs(model, folder), "tokens": processor(["w1 w2 w39"])["input_ids"]}


def load_audit(folder: Path) -> Any:
    from snnk.hf import audit

    found = audit(folder).to_dict()
    if found["notes"]:  # the report shows files that do not fit the model: that is what it is for
        raise ValueError(f"{folder}: {found['notes']}")
    return {key: found[key] for key in ("model", "stored_bytes", "parameters_unique")}


def make_adapter(folder: Path, **options: Any) -> None:
    from peft import get_peft_model

    from snnk.peft import SNNKConfig

    model = get_peft_model(make_bert(), SNNKConfig(num_features=4, **options))
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_()
    model.save_pretrained(folder)


def make_seed_only(folder: Path) -> None:
    make_adapter(folder, save_directions=False)


def load_adapter(folder: Path) -> Any:
    from peft import PeftModel

    import snnk.peft  # noqa: F401, makes its adapters known to PEFT

    return outputs(PeftModel.from_pretrained(make_bert(), folder), folder)


def load_adapter_config(folder: Path) -> Any:
    """Read it through its own class, and apply it to a model."""
    from snnk.peft import SNNKConfig

    config = SNNKConfig.from_pretrained(folder)
    return {"features": config.num_features, "seed": config.seed}


def make_finetuned(folder: Path, method: str = "linear-probe", pooling: str = "model") -> None:
    from snnk.finetune import FinetuneConfig, finetune

    base = folder / "base"
    save(make_bert(), base)
    rows = [f"{text}\t{'yes' if 'w1' in text else 'no'}" for text in make_texts(40)]
    (folder / "train.tsv").write_text("\n".join(["sentence\tlabel", *rows]) + "\n")
    config = FinetuneConfig(
        model=str(base),
        out=str(folder / "tuned"),
        train=str(folder / "train.tsv"),
        method=method,
        max_steps=1,
        pooling=pooling,
        **({"num_features": 4} if method == "snnk" else {}),
    )
    finetune(config)


def make_tuned_adapter(folder: Path) -> None:
    make_finetuned(folder, "snnk", "mean")
    # the base model has moved: an adapter's own files only are damaged, and each case has a folder of its own
    file = folder / "tuned" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": "BASE"}))


def load_finetuned(folder: Path) -> Any:
    from snnk.finetune import load

    file = folder / "tuned" / "adapter_config.json"
    if file.is_file():
        file.write_bytes(file.read_bytes().replace(b'"BASE"', json.dumps(str(folder / "base")).encode()))
    model, processor = load(folder / "tuned")
    found = processor(["w1 w2", "w3 w4"], return_tensors="pt")
    logits = outputs(model, folder, {k: v for k, v in found.items() if k != "token_type_ids"})
    return {**logits, "labels": {str(i): name for i, name in model.config.id2label.items()}}


def training(folder: Path, resume: bool) -> Any:
    from snnk.finetune.data import Data
    from snnk.finetune.settings import TrainingSettings
    from snnk.finetune.trainer import train

    model = make_bert("BertForSequenceClassification", num_labels=2)
    rows, labels = [[2, 3, 4], [2, 30, 31]] * 8, torch.tensor([0, 1] * 8)
    data = Data(rows, labels, lambda part: {"input_ids": torch.tensor(part)}, [3] * 16)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("classifier"))
    path, settings = folder / "run.checkpoint", TrainingSettings(epochs=2, batch_size=8)
    done = train(model, data, data, settings, checkpoint=path, resume=resume, key="k")
    return {"classifier": model.classifier.weight.detach(), "steps": done.steps, "epochs": len(done.history)}


def make_results(folder: Path) -> None:
    from snnk.experiments.lab import estimate
    from snnk.experiments.lab.records import Results

    config = estimate.Config(in_features=4, num_features=(4,), draws=2)
    list(estimate.run(config, Results(folder / "estimate.json", config)))


def load_results(folder: Path) -> Any:
    from snnk.experiments.lab import estimate
    from snnk.experiments.lab.records import Results, Stored

    stored = Stored(folder / "estimate.json")
    taken = Results(folder / "estimate.json", estimate.Config(in_features=4, num_features=(4,), draws=2))
    return {"rows": [sorted(row) for row in stored.rows], "taken": len(taken.rows)}


def make_calibration(folder: Path, ending: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    texts, path = make_texts(40), folder / f"texts.{ending}"
    if ending == "parquet":
        pyarrow.parquet.write_table(pa.table({"n": range(len(texts)), "text": texts}), path)
    elif ending == "jsonl":
        path.write_text("".join(json.dumps({"n": i, "text": text}) + "\n" for i, text in enumerate(texts)))
    elif ending == "csv":
        path.write_text("n,text\n" + "".join(f'{i},"{text}"\n' for i, text in enumerate(texts)))
    else:
        path.write_text("\n".join(texts) + "\n")


def load_calibration(folder: Path, ending: str) -> Any:
    from snnk.hf.calibration import load_calibration as load

    found = load(folder / f"texts.{ending}", make_tokenizer())
    return [torch.cat([batch["input_ids"].flatten() for batch in found]).double()]


def load_labelled(folder: Path, ending: str) -> Any:
    from snnk.hf.data import read_columns, text_column

    path = folder / f"texts.{ending}"
    columns = read_columns(path)
    return list(map(str, columns[text_column(columns, path)]))  # a label may be any value


def load_images(folder: Path) -> Any:
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    from snnk.hf.calibration import load_calibration as load

    processor = ViTImageProcessorPil(size={"height": 8, "width": 8})
    return torch.cat([batch["pixel_values"] for batch in load(folder / "images", processor)]).sum()


def tables(ending: str) -> Kind:
    return Kind(lambda folder: make_table(folder, ending), lambda folder: load_table(folder, ending), loose=True)


def texts(ending: str, load: Callable[[Path, str], Any]) -> Kind:
    return Kind(lambda folder: make_calibration(folder, ending), lambda folder: load(folder, ending), loose=True)


WEIGHTS = ("config.json", "model.safetensors")
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
TUNED = tuple(f"tuned/{name}" for name in ("metrics.json", *WEIGHTS, "tokenizer_config.json"))
TUNED_ADAPTER = tuple(f"tuned/{name}" for name in ("metrics.json", *ADAPTER))
KINDS = {
    "ridge sums": Kind(make_ridge, load_ridge),
    "bundle": Kind(make_bundle, load_bundle),
    "table model": Kind(make_model, load_model, ("model/model.json", "model/model.safetensors")),
    "fit checkpoint": Kind(make_fit, load_fit, ("out/.checkpoint/columns.json", "out/.checkpoint/part-*.safetensors")),
    "plan": Kind(make_plan, load_plan, loose=True),
    "compressed model": Kind(make_compressed, load_compressed, WEIGHTS),
    "compressed model with features": Kind(partial(make_compressed, kind="random-relu"), load_compressed, WEIGHTS),
    "tokenizer": Kind(make_compressed, load_compressed, ("tokenizer.json", "tokenizer_config.json"), loose=True),
    "audited model": Kind(make_compressed, load_audit, WEIGHTS),
    "adapter": Kind(make_adapter, load_adapter, ADAPTER, own=False),
    "adapter, seed only": Kind(make_seed_only, load_adapter, ADAPTER, own=False),
    "adapter configuration": Kind(make_adapter, load_adapter_config, ADAPTER),
    "tuned model": Kind(make_finetuned, load_finetuned, TUNED),
    "tuned adapter": Kind(make_tuned_adapter, load_finetuned, TUNED_ADAPTER),
    "tuning checkpoint": Kind(lambda folder: training(folder, False) and None, lambda folder: training(folder, True)),
    "results": Kind(make_results, load_results, loose=True),
    "calibration text": texts("txt", load_calibration),
    "calibration JSONL": texts("jsonl", load_calibration),
    "calibration CSV": texts("csv", load_calibration),
    "calibration Parquet": texts("parquet", load_calibration),
    "labelled JSONL": texts("jsonl", load_labelled),
    "labelled CSV": texts("csv", load_labelled),
    "labelled Parquet": texts("parquet", load_labelled),
    "calibration images": Kind(lambda folder: make_images(folder / "images", 10) and None, load_images, loose=True),
    "table CSV": tables("csv"),
    "table Parquet": tables("parquet"),
    "table Arrow": tables("arrow"),
}


# --- one case ----------------------------------------------------------------------------------------------------


def structure(value: Any) -> Any:
    """The parts that must not change: keys, lengths, shapes and types."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), str(value.dtype)
    if isinstance(value, dict):
        return {key: structure(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [structure(part) for part in value]
    return "number" if isinstance(value, int | float) else type(value).__name__


def finite(value: Any) -> bool:
    if isinstance(value, dict | list | tuple):
        return all(map(finite, value.values() if isinstance(value, dict) else value))
    return bool(torch.as_tensor(value).isfinite().all()) if isinstance(value, torch.Tensor | float) else True


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):  # not equal to the last bit: tensors of a mapped file may be aligned differently
        return isinstance(b, torch.Tensor) and a.shape == b.shape and torch.allclose(a, b, rtol=1e-5, atol=1e-6)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return isinstance(b, list | tuple) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return isinstance(b, float) and abs(a - b) <= 1e-6 * (1 + abs(a))
    return bool(a == b)


@dataclass(frozen=True)
class Case:
    kind: str
    number: int
    seed: int

    def run(self, original: Path, expected: Any, work: Path) -> dict[str, Any]:
        """Damage a copy of the valid files, load it, and say how that ended."""
        kind, random = KINDS[self.kind], Random(f"{self.seed} {self.kind} {self.number}")
        folder = work / "case"
        shutil.copytree(original, folder)
        files = damaged_files(kind, folder)
        file = random.choice(files)
        what, data = damage(file.name, file.read_bytes(), random)
        if random.randrange(100) == 0:
            what, data = "raw: no file", None
        file.unlink()
        if data is not None:
            file.write_bytes(data)
        facts = {"kind": self.kind, "number": self.number, "file": file.name, "damage": what}
        began = time.monotonic()
        try:
            return {**facts, **self.load(kind, folder, file, what, expected), "seconds": time.monotonic() - began}
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def load(self, kind: Kind, folder: Path, file: Path, what: str, expected: Any) -> dict[str, Any]:
        try:
            with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
                found = kind.load(folder)
        except EXPECTED as error:
            message = str(error)
            named = file.name in message or str(folder) in message or not kind.own
            text = f"{type(error).__name__}: {message[:300]}"
            return {"end": "refused" if named else "unnamed", "message": text, "where": where(error)}
        except (KeyError, RecursionError) as error:
            text = f"{type(error).__name__}: {str(error)[:300]}"
            return {"end": "exception" if kind.own else "refused", "message": text, "where": where(error)}
        except MemoryError as error:
            return {"end": "memory", "message": repr(error)[:300], "where": where(error)}
        except Exception as error:
            memory = "allocate memory" in str(error)
            text = f"{type(error).__name__}: {str(error)[:300]}"
            return {"end": "memory" if memory else "exception", "message": text, "where": where(error)}
        if same(found, expected):
            return {"end": "same"}
        if not finite(found):
            return {"end": "not finite", "message": str(found)[:200]}
        if structure(found) != structure(expected) and not kind.loose:
            return {"end": "other structure", "message": f"{structure(found)}"[:300]}
        return {"end": "unnoticed" if what.startswith("header") else "other"}


def where(error: BaseException) -> str:
    """The last lines of our own and of all code."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "snnk" in frame.filename]
    told = [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in [*own[-1:], *frames[-1:]]]
    return ", ".join(dict.fromkeys(told))


def damaged_files(kind: Kind, folder: Path) -> list[Path]:
    if kind.files:
        return sorted(file for pattern in kind.files for file in folder.glob(pattern))
    return sorted(file for file in folder.rglob("*") if file.is_file())


BAD = ("exception", "unnamed", "memory", "not finite", "other structure", "unnoticed", "hang", "crash")


# --- processes ---------------------------------------------------------------------------------------------------


def forked(work: Callable[[Callable[[Any], None]], None]) -> tuple[int, int]:
    """Run `work` in a child, which may send values through a pipe; returns its process id and the pipe."""
    reading, writing = os.pipe()
    process = os.fork()
    if process:
        os.close(writing)
        return process, reading
    try:
        os.close(reading)
        with os.fdopen(writing, "wb") as pipe:

            def send(value: Any) -> None:
                pickle.dump(value, pipe)
                pipe.flush()

            work(send)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def prepare() -> None:
    """Import everything before the first fork, and do nothing else: threads do not survive a fork."""
    import peft  # noqa: F401
    import pyarrow.dataset  # noqa: F401
    import transformers

    import snnk.experiments.lab.estimate
    import snnk.finetune
    import snnk.hf.compression.pipeline
    import snnk.peft  # noqa: F401

    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity(transformers.utils.logging.CRITICAL)
    transformers.utils.logging.disable_progress_bar()


def limit_memory() -> None:
    if not Path("/proc/self/status").exists():  # of Linux
        return
    status = Path("/proc/self/status").read_text().splitlines()
    held = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (held + MEMORY, held + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def make_original(name: str, folder: Path) -> Any:
    """Write the valid files of a kind in a child, and return what loading a copy gives there."""

    def work(send: Callable[[Any], None]) -> None:
        warnings.simplefilter("ignore")
        kind = KINDS[name]
        (folder / "files").mkdir(parents=True)
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            kind.make(folder / "files")
            shutil.copytree(folder / "files", folder / "case")
            found = kind.load(folder / "case")
        shutil.rmtree(folder / "case")
        send(found)

    process, pipe = forked(work)
    with os.fdopen(pipe, "rb") as file:
        found = file.read()
    os.waitpid(process, 0)
    if not found:
        raise RuntimeError(f"the valid files of {name!r} could not be made; see above")
    return pickle.loads(found)


def run_cases(cases: list[Case], original: Path, expected: Any, work: Path) -> Iterable[dict[str, Any]]:
    """Run cases of one kind in children of BATCH cases each; one that hangs or dies costs one case."""
    left = list(cases)
    while left:
        batch = left[:BATCH]

        def go(send: Callable[[Any], None], batch: list[Case] = batch) -> None:
            warnings.simplefilter("ignore")
            limit_memory()
            for case in batch:
                send(case.run(original, expected, work))

        process, pipe = forked(go)
        done = 0
        with os.fdopen(pipe, "rb") as file, selectors.DefaultSelector() as selector:
            selector.register(file, selectors.EVENT_READ)
            end = ""
            while done < len(batch):
                if not selector.select(SECONDS):
                    end = "hang"
                    break
                try:
                    yield pickle.load(file)
                except EOFError:
                    end = "crash"
                    break
                done += 1
        if end:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
            yield {"kind": batch[done].kind, "number": batch[done].number, "end": end, "damage": "", "file": ""}
            done += 1
            shutil.rmtree(work / "case", ignore_errors=True)
        os.waitpid(process, 0)
        left = left[done:]


def fuzz(cases: int, seed: int, kinds: Iterable[str] = KINDS, only: int | None = None) -> list[dict[str, Any]]:
    """Run so many cases, shared out evenly over the kinds; returns one row per case."""
    names = list(kinds)
    prepare()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for place, name in enumerate(names):
            work = Path(folder, f"kind-{place}")
            expected = make_original(name, work)
            count = cases // len(names) + (place < cases % len(names))
            numbers = range(count) if only is None else [only]
            rows += run_cases([Case(name, i, seed) for i in numbers], work / "files", expected, work)
    return rows


def summary(rows: list[dict[str, Any]], seed: int) -> dict[str, Any]:
    """Counts by kind and end, as one JSON row."""
    by_kind: dict[str, Counter[str]] = {}
    for row in rows:
        by_kind.setdefault(row["kind"], Counter())[row["end"]] += 1
    bad = sum(row["end"] in BAD for row in rows)
    slowest = max((row.get("seconds", 0.0) for row in rows), default=0.0)
    return {"cases": len(rows), "seed": seed, "bad": bad, "slowest_seconds": slowest, "kinds": by_kind}


def main() -> int:
    parser = argparse.ArgumentParser(description="Damage files of every kind that snnk reads, and load them.")
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", action="append", choices=list(KINDS), help="only this kind; may be repeated")
    parser.add_argument("--only", type=int, help="only the case of this number, of each kind")
    parser.add_argument("--out", type=Path, help="file for the counts and the cases that ended badly, as JSON")
    args = parser.parse_args()
    began = time.monotonic()
    rows = fuzz(args.cases, args.seed, args.kind or KINDS, args.only)
    found = {**summary(rows, args.seed), "seconds": round(time.monotonic() - began, 1)}
    bad = [row for row in rows if row["end"] in BAD]
    for row in rows if args.only is not None else bad:
        sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.write(json.dumps(found) + "\n")
    if args.out is not None:
        args.out.write_text(json.dumps({**found, "failures": bad}, indent=1) + "\n")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
