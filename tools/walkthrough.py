"""Paste every command and example of the README, the tutorials and the how-to pages, one after another, and time each.

    python tools/walkthrough.py --out benchmarks/results/walkthrough.json

The commands run in an empty folder with a clone of this repository and a new environment, which the README's own lines
set up. The models are real: all-MiniLM-L6-v2 comes from its package on PyPI, as in `snnk demo`, so that no hub is
needed. It stands for `MODEL` of the how-to pages as well, and with an untrained head for `RERANKER`; the calibration
files of these pages are general English text of snnk. A command that an earlier page has run already is not run again,
as its output is there. A block that its page marks as not run is left out, unless it installs something. With a
`--folder` that is there, the pages that are named are run in it, beside the rows of `--out` for the others.

    python tools/walkthrough.py --table benchmarks/results/walkthrough.json

prints the table of docs/figures.md from the rows. tests/test_docs.py runs the same blocks with tiny models.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    *("README.md", "docs/start.md"),
    *(f"docs/tutorials/{name}.md" for name in ("compress", "finetune", "table", "layer")),
    *(f"docs/howto/{name}.md" for name in ("calibration", "budget", "sentence-transformers", "trainer", "extend")),
]
BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<why>[^\n]+) -->\n)?```(?P<kind>\w*)\n(?P<text>.*?)^```", re.MULTILINE | re.DOTALL
)
SERVER = "python examples/serve.py "
TORCH = "pip install torch "
SET_UP = ("python3 -m venv ", "pip install ")
LEAST = 1.0  # seconds of a row of the printed table
PREPARE = """
import csv
from pathlib import Path
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from snnk.cli.demo import fetch_model
from snnk.hf.general import general_texts

for name in ("sentence-transformers/all-MiniLM-L6-v2", "MODEL"):
    Path(name).parent.mkdir(exist_ok=True)
    fetch_model(Path(name))
AutoModelForSequenceClassification.from_pretrained("MODEL", num_labels=1).save_pretrained("RERANKER")
AutoTokenizer.from_pretrained("MODEL").save_pretrained("RERANKER")
texts = general_texts(4000)
Path("sentences.txt").write_text("\\n".join(texts[:2000]) + "\\n", encoding="utf-8")
with open("pairs.csv", "w", newline="", encoding="utf-8") as file:
    csv.writer(file).writerows([("query", "passage"), *zip(texts[:2000], texts[2000:])])
"""
# A Python prompt that is fed one block at a time, so that names stay from block to block
PROMPT = """
import json, sys, time, traceback
names = {"__name__": "__main__"}
for line in sys.stdin:
    code, start = 0, time.process_time()
    try:
        exec(compile(json.loads(line), "block", "exec"), names)
    except BaseException:
        code = 1
        traceback.print_exc(file=sys.stdout)
    print("\\0", code, time.process_time() - start, flush=True)
"""
FACTS = "import json; from snnk._environment import environment; print(json.dumps(environment()))"


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, its first line, and the reason why it is not run, or None."""

    kind: str
    text: str
    line: int
    why: str | None


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(found["kind"], found["text"], 1 + text.count("\n", 0, found.start("text")), found["why"])
        for found in BLOCK.finditer(text)
    ]


def commands(text: str) -> list[str]:
    """The commands of a bash block, without comments; a backslash continues a line."""
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [line for line in (re.sub(r"(^|\s)#.*", "", line).strip() for line in lines) if line]


@dataclass
class Row:
    """One command, or one block of Python.

    Attributes:
        page, line: where it stands.
        kind: "bash" or "python".
        text: the command, or the first line of the block that imports nothing.
        seconds, processor_seconds: of the clock and of all processes; None if it was not run. Those of a server end
            when it listens.
        code: its exit code, 1 for an exception; None if it was not run.
        note: the reason why it was not run, or the end of what it printed if it failed.
        not_printed: words of the output on the page that it did not print.
    """

    page: str
    line: int
    kind: str
    text: str
    seconds: float | None = None
    processor_seconds: float | None = None
    code: int | None = None
    note: str = ""
    not_printed: list[str] = field(default_factory=list)


class Reader:
    """Pastes the blocks of pages in a folder, with the programs of an environment first on the path."""

    def __init__(self, folder: Path, environment: Path) -> None:
        self.folder, self.said = folder, ""
        self.variables = {
            **{name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")},
            "PATH": f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "VIRTUAL_ENV": str(environment),
        }
        self.done: set[str] = set()
        self.prompt: subprocess.Popen[str] | None = None
        self.server: subprocess.Popen[str] | None = None

    def run(self, page: str, block: Block) -> Iterator[Row]:
        """Paste a block; yields a row per command, or one row for a block of Python."""
        if block.kind == "python":
            yield self._python(Row(page, block.line, "python", _first_line(block.text)), block)
        elif block.kind == "bash":
            self.said = ""
            for command in commands(block.text):
                row = Row(page, block.line, "bash", command)
                if block.why is not None and (TORCH in block.text or not command.startswith("pip install ")):
                    row.note = block.why
                elif command in self.done and not command.startswith(SERVER):
                    row.note = "an earlier page has run it"
                else:
                    self.done.add(command)
                    self.bash(row)
                yield row

    def bash(self, row: Row) -> Row:
        """Run a command, and write its times and its exit code into the row."""
        start, before = time.monotonic(), _children()
        if row.text.startswith(SERVER):
            self.close()
            self.server = self._popen(row.text.split(), subprocess.DEVNULL)
            row.code = 0 if any(line.startswith("listening") for line in self._stdout(self.server)) else 1
        else:
            done = subprocess.run(
                ["bash", "-ec", f"set -o pipefail; {row.text}"],
                **self._options(subprocess.DEVNULL),
                stdout=subprocess.PIPE,
            )
            self.said += done.stdout
            row.code = 0 if row.text == "snnk doctor" and done.returncode == 1 else done.returncode  # 1: a finding
            row.note = done.stdout[-2000:] if row.code else ""
            row.processor_seconds = round(_children() - before, 2)
        row.seconds = round(time.monotonic() - start, 2)
        return row

    def _python(self, row: Row, block: Block) -> Row:
        if block.why is not None:
            row.note = block.why
            return row
        start = time.monotonic()
        if self.prompt is None:
            self.prompt = self._popen(["python", "-u", "-c", PROMPT], subprocess.PIPE)
        assert self.prompt.stdin is not None
        with suppress(BrokenPipeError):  # the session has ended, as the empty line below shows
            self.prompt.stdin.write(json.dumps("\n" * (block.line - 1) + block.text) + "\n")
            self.prompt.stdin.flush()
        self.said, row.code = "", 1
        for line in self._stdout(self.prompt):
            said, end, figures = line.partition("\0")
            self.said += said
            if end:
                code, seconds = figures.split()
                row.code, row.processor_seconds = int(code), round(float(seconds), 2)
                break
        row.seconds, row.note = round(time.monotonic() - start, 2), self.said[-2000:] if row.code else ""
        return row

    def new_page(self) -> None:
        """Begin a new session of Python; a server goes on until the next one is started."""
        if self.prompt is not None:
            self._stdout(self.prompt).close()
            assert self.prompt.stdin is not None
            self.prompt.stdin.close()
            self.prompt.wait(60)
            self.prompt = None

    def close(self) -> None:
        """Stop the server."""
        if self.server is not None:
            self.server.send_signal(signal.SIGTERM)
            self.server.wait(60)
            self._stdout(self.server).close()
            self.server = None

    def _options(self, stdin: int) -> dict:  # type: ignore[type-arg]
        return {"cwd": self.folder, "env": self.variables, "stdin": stdin, "stderr": subprocess.STDOUT, "text": True}

    def _popen(self, command: list[str], stdin: int) -> subprocess.Popen[str]:
        program = str(Path(self.variables["VIRTUAL_ENV"]) / "bin" / command[0])
        return subprocess.Popen([program, *command[1:]], stdout=subprocess.PIPE, **self._options(stdin))

    @staticmethod
    def _stdout(process: subprocess.Popen[str]) -> IO[str]:
        assert process.stdout is not None
        return process.stdout


def _first_line(text: str) -> str:
    return next((line for line in text.splitlines() if line and not re.match(r"import |from |#", line)), "")


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def missing(printed: str, said: str) -> list[str]:
    """Words of the output on a page that a command did not print; figures differ from machine to machine.

    Example:
        >>> missing("accuracy 0.93", "accuracy 0.91"), missing("AUC 0.9", "accuracy 0.9")
        ([], ['AUC'])
    """
    return sorted({word for word in re.findall(r"[A-Za-z]{3,}", printed) if word not in said})


def set_up(reader: Reader, torch: str) -> Iterator[Row]:
    """The README's lines of installation, with another one for torch where its own index cannot be reached."""
    lines = next(block for block in blocks(reader.folder / "README.md") if TORCH in block.text)
    yield reader.bash(Row("README.md", lines.line, "bash", "python3 -m venv .venv"))
    for command in commands(lines.text):
        yield reader.bash(Row("README.md", lines.line, "bash", torch if command.startswith(TORCH) else command))


def walk(reader: Reader, pages: list[str]) -> Iterator[Row]:
    """Paste all blocks of these pages."""
    try:
        for page in pages:
            rows: list[Row] = []
            for block in blocks(reader.folder / page):
                if block.kind == "text":
                    if rows and all(row.code is not None for row in rows):
                        rows[-1].not_printed += missing(block.text, reader.said)
                    continue
                yield from rows
                rows = list(reader.run(page, block))
            yield from rows
            reader.new_page()
    finally:
        reader.close()


def table(rows: list[Row]) -> str:
    """A Markdown table: every page, and its commands that took at least a second."""
    lines = ["| command | seconds | of the processor |", "|---|---|---|"]
    for page in dict.fromkeys(row.page for row in rows):
        own = [row for row in rows if row.page == page and row.seconds is not None]
        clock, used = sum(row.seconds or 0 for row in own), sum(row.processor_seconds or 0 for row in own)
        lines.append(f"| **{page}**, {len(own)} commands and examples | {clock:.0f} | {used:.0f} |")
        for row in own:
            if (row.seconds or 0) >= LEAST:
                named = f"`{row.text}`" if row.kind == "bash" else f"Python, line {row.line}"
                shown = "" if row.processor_seconds is None else f"{row.processor_seconds:.0f}"
                lines.append(f"| {named.replace('|', chr(92) + '|')} | {row.seconds:.0f} | {shown} |")
    return "\n".join(lines)


def show(row: Row) -> str:
    """A line for people."""
    times = "not run" if row.seconds is None else f"{row.seconds:8.1f} s {row.processor_seconds or 0:8.1f} s of CPU"
    verdict = "" if not row.code else f"  FAILED with {row.code}: {row.note}"
    lacks = f"  not printed: {', '.join(row.not_printed)}" if row.not_printed else ""
    return f"{times}  {row.page}:{row.line}  {row.text[:90]}{verdict}{lacks}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file for the rows")
    parser.add_argument("--pages", nargs="+", default=PAGES)
    parser.add_argument("--folder", type=Path, help="folder to work in, which stays; default: a temporary one")
    parser.add_argument("--torch", default="", help="command in place of the README's line that installs torch")
    parser.add_argument("--table", type=Path, help="print the table of these rows, and run nothing")
    args = parser.parse_args()
    if args.table:
        rows = json.loads(args.table.read_text(encoding="utf-8"))["rows"]
        sys.stdout.write(table([Row(**row) for row in rows]) + "\n")
        return
    if args.folder and args.folder.exists() and not (args.out and args.out.exists()):
        parser.error(f"{args.folder} exists: name the file of its rows with --out, or another folder")
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.folder or Path(temporary) / "snnk").resolve()
        goes_on = folder.exists()
        if not goes_on:
            subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
        reader = Reader(folder, folder / ".venv")
        walked: list[Row] = []
        if goes_on:
            before = [Row(**row) for row in json.loads(args.out.read_text(encoding="utf-8"))["rows"]]
            walked = [row for row in before if row.page not in args.pages or row.text.startswith(SET_UP)]
            reader.done = {row.text for row in walked if row.kind == "bash" and row.code == 0}
        lines = blocks(folder / "README.md")
        torch = args.torch or next(line for block in lines for line in commands(block.text) if line.startswith(TORCH))

        def add(row: Row) -> None:
            walked.append(row)
            sys.stdout.write(show(row) + "\n")
            sys.stdout.flush()
            if args.out:
                args.out.write_text(json.dumps(found(), indent=1) + "\n", encoding="utf-8")

        def found() -> dict[str, object]:
            commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True)
            return {"commit": commit.stdout.strip(), "environment": facts, "rows": [asdict(row) for row in walked]}

        facts: dict[str, str] = {}
        python = folder / ".venv" / "bin" / "python"
        if not goes_on:
            for row in set_up(reader, torch):
                add(row)
            prepared = subprocess.run([python, "-c", PREPARE], cwd=folder, capture_output=True, text=True)
            if prepared.returncode:
                sys.exit(f"the models and texts of the pages could not be made: {prepared.stderr[-2000:]}")
        facts |= json.loads(subprocess.run([python, "-c", FACTS], cwd=folder, capture_output=True, text=True).stdout)
        for row in walk(reader, args.pages):
            add(row)
    failed = [row for row in walked if row.code or row.not_printed]
    sys.exit(f"{len(failed)} of {len(walked)} rows failed, or printed something else" if failed else 0)


if __name__ == "__main__":
    main()
