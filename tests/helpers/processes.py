"""Code in fresh processes: a saved model is loaded there.

Most of the time of such a process goes to the import of torch and transformers. So a process that has these, and
nothing of snnk, waits for code; it forks for each, and the fork is the fresh process.
"""

import atexit
import json
import os
import socket
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

WAITING = """
import json, os, signal, sys, traceback
import safetensors.torch, torch, transformers, transformers.modeling_utils, transformers.models.auto.modeling_auto

assert not [name for name in sys.modules if name.split(".")[0] == "snnk"]
for line in sys.stdin:
    job = json.loads(line)
    pid = os.fork()
    if not pid:
        signal.alarm(600)
        os.chdir(job["place"])
        for number, name in ((0, os.devnull), (1, job["out"]), (2, job["err"])):
            os.dup2(os.open(name, os.O_RDWR), number)
        sys.argv, code = ["-c", *job["args"]], 0
        try:
            exec(compile(job["code"], "<string>", "exec"), {"__name__": "__main__"})
        except SystemExit as stop:
            code = stop.code or 0
            if not isinstance(code, int):
                print(code, file=sys.stderr)
                code = 1
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
LOAD = """
import json, sys, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, {tests!r})
import torch, transformers as hf
from safetensors.torch import load_file
{imports}
hf.logging.set_verbosity_error()
hf.utils.logging.disable_progress_bar()
answers = {{}}
for name, (auto, row) in json.load(open(sys.argv[1] + "/cases.json")).items():
    folder = sys.argv[1] + "/" + name
    try:
        model = getattr(hf, auto).from_pretrained(folder)
    except Exception as error:
        answers[name] = f"{{type(error).__name__}}: {{error}}"
        continue
    saved = load_file(folder + "/example.safetensors")
    expected = saved.pop("output")
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data = tensor.data.clone()  # where a file's offset puts a tensor, matrix products round otherwise
    with torch.no_grad():
        answers[name] = float((model(**saved)[0] - expected).abs().max())
print("ANSWERS", json.dumps(answers))
"""


@cache
def _waiting():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", WAITING], cwd="/", **pipes)

    def end():
        process.stdin.close()
        process.wait(30)
        process.stdout.close()

    atexit.register(end)
    return process


def run_code(code, *args):
    """Run code with arguments in a process that has imported torch and transformers, and never snnk.

    Returns:
        The exit code and what was printed, as `subprocess.run` does.
    """
    if not hasattr(os, "fork"):
        return subprocess.run([sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True)
    process = _waiting()
    with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
        job = {"code": code, "args": [str(arg) for arg in args], "place": os.getcwd()}
        job |= {"out": out.name, "err": err.name}
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()
        ended = int(process.stdout.readline())
        return subprocess.CompletedProcess(job["args"], ended, out.read(), err.read())


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def in_a_fresh_process(folder, cases, imports):
    (folder / "cases.json").write_text(json.dumps(cases))
    done = run_code(LOAD.format(tests=str(Path(__file__).parents[1]), imports=imports), folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.split("ANSWERS", 1)[1])
