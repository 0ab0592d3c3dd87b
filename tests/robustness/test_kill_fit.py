"""`snnk fit` is killed at each of its file events in turn; the next run must give the result of an undisturbed one."""

import os
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from snnk.tabular import TableModel

from helpers.tables import FILES

# One interpreter imports everything and forks one process per run; it computes nothing, so that it has one thread.
SERVER = """
import os, signal, sys
import pyarrow.parquet, pyarrow.compute, pyarrow.dataset, safetensors.torch, torch
from snnk.tabular import FitConfig, fit

pyarrow.set_cpu_count(1)
torch.set_num_threads(1)
source, folder = sys.argv[1:]
EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir"}  # os.replace is a rename
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def run(out, kill_at):
    # -9: killed at event `kill_at` in `out`; 0: finished; 3: refused, because there is a model
    pid = os.fork()
    if pid:
        status = os.waitpid(pid, 0)[1]
        return os.waitstatus_to_exitcode(status)
    count, inside = 0, False

    def hook(event, args):
        nonlocal count, inside
        if event not in EVENTS or inside or (event == "open" and not args[2] & WRITING):
            return
        inside = True
        path = os.fspath(args[0]) if isinstance(args[0], (str, os.PathLike)) else ""
        if path.startswith(out) or (path and not path.startswith("/")):  # rmtree names files relative to a folder
            count += 1
            if count == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
        inside = False

    sys.addaudithook(hook)
    try:
        config = FitConfig("y", 8, feature_map="random-fourier", bandwidth=1.0, block_dtype="float64", lam=1e-2)
        fit(source, out, config, checkpoint_seconds=0)
    except ValueError as error:
        if "holds a model already" not in str(error):
            print(error, file=sys.stderr)
            os._exit(1)
        os._exit(3)
    os._exit(0)


def sequence(name, *kills):
    out = os.path.join(folder, name)
    codes = [run(out, kill) for kill in (*kills, 0)]
    print(name, *codes, flush=True)
    return codes


sequence("calm")
events = 1
while sequence(f"kill-{events}", events)[0] == -9:
    events += 1
for first in range(2, events, 4):
    sequence(f"twice-{first}", first, 1 + first * 7 % events)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_at_every_file_event(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(90, 2))
    table = pa.table({"a": x[:, 0], "b": x[:, 1], "k": rng.choice(["u", "v"], 90), "y": np.sin(x[:, 0]) + x[:, 1]})
    source, folder = tmp_path / "t.parquet", tmp_path / "runs"
    folder.mkdir()
    pq.write_table(table, source, row_group_size=45)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SERVER, str(source), str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    runs = {line.split()[0]: [int(code) for code in line.split()[1:]] for line in done.stdout.splitlines()}
    killed = [name for name, codes in runs.items() if codes[0] == -9]
    assert len(killed) > 25 and {*runs["calm"]} == {0}, done.stderr
    calm = TableModel.load(folder / "calm")
    for name, codes in runs.items():
        # The last run finishes, or finds the model of the run before, which was killed after it had written it.
        assert codes[-1] in (0, 3) and all(code in (-9, 0, 3) for code in codes), (name, codes)
        assert {path.name for path in (folder / name).iterdir()} == FILES, name
        model = TableModel.load(folder / name)
        assert model.columns == calm.columns
        for mine, other in ((model.weight, calm.weight), (model.bias, calm.bias)):
            assert torch.allclose(mine, other, rtol=0, atol=1e-12 * float(calm.weight.abs().max())), name
