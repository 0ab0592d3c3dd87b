"""Kill compress, finetune and reproduce at every file event: `python killing.py FOLDER` prints the outcome as JSON.

A process that is killed leaves the files as they are at that moment. One run of a command is therefore watched, and its
folder is copied before every event that changes it: each copy is what a kill at that event would leave. The command
runs again in each copy that differs from the others, and the folder after that run is the outcome.
"""

import hashlib
import json
import os
import resource
import shutil
import sys
from contextlib import suppress
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))
CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate"}  # audit events; os.replace raises os.rename
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
TIMED = {"metrics.json", "report.json", "report.html", "README.md"}  # these hold times in seconds
watch = SimpleNamespace(folder=None, seen=lambda: None)


def hook(event, args):
    if watch.folder is None or not (event in CHANGES or (event == "open" and args[2] and args[2] & WRITING)):
        return
    if any(isinstance(arg, str | os.PathLike) and Path(arg).is_relative_to(watch.folder) for arg in args):
        folder, watch.folder = watch.folder, None  # copying is no event
        watch.seen()
        watch.folder = folder


def tree(folder):
    """Map the names of everything in a folder to hashes of contents; all temporary names become one."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = "/".join(".tmp" if part.endswith(".tmp") else part for part in path.relative_to(folder).parts)
        timed = path.is_dir() or path.name in TIMED
        data = b"" if timed else path.read_bytes()
        if path.name.startswith("tiny.") and path.suffix == ".json":  # rows name the commit, and git may be slow
            data = repr([(row["i"], row["square"]) for row in json.loads(data)["rows"]]).encode()
        found[name] = hashlib.sha256(data).hexdigest()
    return found


def kill(root, name, command, prepare=lambda folder: None):
    """Return trees of the folder after a run, and after runs that started from what each kill has left."""
    first, copies, before, events = root / name / "first", [], [], 0
    first.mkdir(parents=True)
    prepare(first)

    def seen():
        nonlocal events
        events += 1
        found = tree(first)
        if found not in before:
            before.append(found)
            copies.append(root / name / str(len(copies)))
            shutil.copytree(first, copies[-1])

    watch.folder, watch.seen = first, seen
    command(first)
    watch.folder = None
    again = []
    for copy in copies:
        with suppress(FileExistsError):  # it was complete already
            command(copy)
        again.append(tree(copy))
    return {"events": events, "calm": tree(first), "left": before, "again": again}


def disturb(root, command):
    """Return the error of a command, and what it leaves, if the disk is full or its folder is removed meanwhile."""
    found = {}
    for what in ("full", "removed"):
        folder = root / what
        folder.mkdir()
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        if what == "full":
            resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))  # a file of more bytes cannot be written
        else:
            watch.folder = folder
            watch.seen = lambda folder=folder: any(folder.rglob("plan.json")) and shutil.rmtree(folder)
        try:
            command(folder)
            found[what] = "nothing", tree(folder)
        except OSError as error:
            found[what] = str(error), tree(folder)
        watch.folder = None
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return found


def compress(model, texts):
    import snnk.hf.compression.report
    from snnk.hf import compress

    snnk.hf.compression.report.SECONDS = 0.0
    return lambda folder: compress(model, texts, out=folder / "out", keep=0.5, refine=0, recover=4)


def finetune(model, table):
    from snnk.finetune import FinetuneConfig
    from snnk.finetune import finetune as run

    options = {"method": "lora", "pooling": "mean", "epochs": 2, "batch_size": 16, "num_features": 2}
    return lambda folder: run(
        FinetuneConfig(model=str(model), train=str(table), out=str(folder / "out"), **options), resume=True
    )


def reproduce():
    from dataclasses import make_dataclass

    from matplotlib.figure import Figure

    from snnk.experiments.lab import records, runs
    from snnk.experiments.lab.data import NO_DATA

    Config = make_dataclass("Config", [("size", int, 2)], frozen=True)

    def rows(config, results, source):
        for i in range(config.size):
            yield results.find(i=i) or results.add({"i": i, "square": i * i})

    tiny = SimpleNamespace(FIGURE="none", NEEDS="nothing", TIME="none", Config=Config, QUICK=Config(), run=rows)
    tiny.total = lambda config: config.size
    tiny.claims = lambda results: [records.claim("a", "b", True)]
    tiny.plot = lambda results: Figure(figsize=(0.1, 0.1))
    runs.load = lambda name: tiny

    def prepare(folder):
        """Leave one row of this configuration, which has to come back, and rows of another, which go aside."""
        for size in (2, 3):
            list(
                islice(rows(Config(size), records.Results(folder / "tiny.json", Config(size), source=NO_DATA), None), 1)
            )

    def command(folder):
        runs.reproduce("tiny", folder, quick=True)

    return command, prepare


def main(root):
    from helpers.texts import make_texts, save
    from helpers.tuning import TINY, make_rows, write

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    model = root / "bert"
    save(transformers.BertModel(transformers.BertConfig(**{**TINY, "num_hidden_layers": 1})), model)
    texts = root / "texts.txt"
    texts.write_text("\n".join(make_texts(40)))
    table = write(root / "train.tsv", *make_rows(40))
    sys.addaudithook(hook)
    commands = {"compress": [compress(model, texts)], "finetune": [finetune(model, table)], "reproduce": reproduce()}
    found = {name: kill(root, name, *steps) for name, steps in commands.items()}
    found["disturbed"] = disturb(root, *commands["compress"])
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
