"""A saved model loaded in a fresh process."""

import json
import subprocess
import sys
from pathlib import Path

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


def in_a_fresh_process(folder, cases, imports):
    (folder / "cases.json").write_text(json.dumps(cases))
    code = LOAD.format(tests=str(Path(__file__).parents[1]), imports=imports)
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.split("ANSWERS", 1)[1])
