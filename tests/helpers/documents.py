"""The code of documents: blocks of a Markdown page, and a folder in which they run one after another as a reader would
run them, with small models and data under the names that the pages use.
"""

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from snnk.hf.general import general_texts

from helpers.heads import make
from helpers.texts import make_english, save
from walkthrough import SERVER, commands

ROOT = Path(__file__).parents[2]
KINDS = {"": "Transformer", "1_Pooling": "Pooling"}
MODULES = [
    {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
    for i, (path, kind) in enumerate(KINDS.items())
]
POOLING = {"word_embedding_dimension": 64, "pooling_mode_mean_tokens": True}


def listed():
    """Package -> names in its table of docs/api.md."""
    parts = re.split(r"^## `(.*)`$", (ROOT / "docs" / "api.md").read_text(), flags=re.MULTILINE)[1:]
    tables = zip(parts[::2], parts[1::2], strict=True)
    rows = {name: re.findall(r"^\| `(\w+)` \|", text, flags=re.MULTILINE) for name, text in tables}
    assert all(len(set(names)) == len(names) for names in rows.values())
    return rows


def make_folder(folder):
    """Write the small models and data that pages name, beside the examples; returns the folder."""
    tokenizer = make_english(pad_token="[PAD]", model_input_names=["input_ids", "token_type_ids", "attention_mask"])
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 128, "hidden_size": 64, "num_hidden_layers": 1}
    for name, kind in {
        "sentence-transformers/all-MiniLM-L6-v2": "BertModel",
        "MODEL": "BertModel",
        "RERANKER": "BertForSequenceClassification",
    }.items():
        more = {"RERANKER": {"num_labels": 1}, "MODEL": {"intermediate_size": 2048}}.get(name, {})  # blocks to speed up
        save(make(kind, **sizes, **more), folder / name, tokenizer)
    for name, path in (("all-MiniLM-L6-v2", folder / "sentence-transformers"), ("MODEL", folder)):
        (path / name / "1_Pooling").mkdir()
        (path / name / "1_Pooling" / "config.json").write_text(json.dumps(POOLING))
        (path / name / "modules.json").write_text(json.dumps(MODULES))
    texts = general_texts(600)
    (folder / "sentences.txt").write_text("\n".join(texts[:300]) + "\n")
    pairs = [f'"{a}","{b}"' for a, b in zip(texts[:300], texts[300:], strict=True) if '"' not in a + b]
    (folder / "pairs.csv").write_text("\n".join(["query,passage", *pairs]) + "\n")
    (folder / "examples").symlink_to(ROOT / "examples")
    return folder


class Reader:
    """Runs the blocks of a page in the current folder.

    Args:
        snnk: called with the arguments of a command; returns the exit code, stdout and stderr.
        done: command -> what it printed, of commands that other pages have run in this folder. They are not run again.
    """

    def __init__(self, snnk, done):
        self.snnk, self.done, self.names, self.servers, self.said = snnk, done, {}, [], ""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]

    def run(self, page, block, capsys):
        """Run one block; what it prints is kept in `said`."""
        place = f"{page.name}, line {block.line}"
        if block.kind == "python":
            exec(compile("\n" * (block.line - 1) + block.text, page.name, "exec"), self.names)
            self.said = capsys.readouterr().out
        elif block.kind == "bash":
            self.said = ""
            for command in commands(block.text):
                if command not in self.done or command.startswith(SERVER):
                    self.done[command] = self._command(command, place)
                self.said += self.done[command]

    def _command(self, command, place):
        if command.startswith("snnk "):
            code, out, err = self.snnk(*shlex.split(command)[1:])
            diagnosis = command == "snnk doctor"  # its code is 1 if it finds a problem
            assert code == 0 or diagnosis, f"{place}: {command} ends with code {code}: {err}"
            return out
        command = command.replace("8000", str(self.port))
        environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        if command.startswith(SERVER):
            server = subprocess.Popen(shlex.split(command), stdout=subprocess.PIPE, text=True, env=environment)
            self.servers.append(server)
            assert server.stdout.readline().startswith("listening"), f"{place}: {command}"
            return ""
        if command.startswith("curl ") and not shutil.which("curl"):
            return ""
        done = subprocess.run(
            ["bash", "-ec", f"set -o pipefail; {command}"], capture_output=True, text=True, env=environment
        )
        assert done.returncode == 0, f"{place}: {command}: {done.stderr}"
        return done.stdout

    def close(self):
        """Stop the servers that a page started."""
        for server in self.servers:
            server.terminate()
            server.wait(30)
            server.stdout.close()
