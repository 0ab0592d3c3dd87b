"""The page and the model card of an exported model, both made from report.json alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from snnk._html import facts, glossary, page
from snnk._text import html as escape
from snnk._text import markdown, printable
from snnk.hf.compression import figures
from snnk.hf.compression.page import COMMON, LEGEND, lost, warnings
from snnk.hf.compression.report import front_matter
from snnk.hf.serve.using import INT8, cache_note, heads, loader, pictures, rows, shortened

FORMAT = "snnk.ExportReport/1"
RUNTIMES = {"onnx": "ONNX Runtime", "openvino": "OpenVINO"}


def sentence(report: Mapping[str, Any]) -> str:
    """What was done, in one sentence or two."""
    what = RUNTIMES[report["to"]] + (f" with {report['int8']} int8" if report["int8"] else " in float32")
    same = (
        f"In float32, the graph differs from PyTorch by {report['difference']:.1e} of the largest output at most "
        f"(limit {report['tolerance']:.0e})."
    )
    return (
        f"{report['base_model']} ({report['model_class']}) was exported for {what} by snnk "
        f"{report['versions']['snnk']}. {same}{cache_note(report)}"
    )


def model_card(report: Mapping[str, Any], original_card: str = "") -> str:
    """The model card of an exported model, with licence and language of the original's card."""
    library = "sentence-transformers" if report["sentence_transformers"] else "optimum"
    tags = ["snnk", report["to"], *(["int8"] if report["int8"] else [])]
    front = {"base_model": printable(report["base_model"]), "library_name": library, "tags": tags}
    yaml = [f"{key}: {json.dumps(value)}" for key, value in front.items()] + front_matter(original_card)
    lines, sets = "\n".join, report["held_out"]
    stages = [f"| {' | '.join(cells)} |" for cells in rows(report)]
    agreed = [
        f"| {markdown(line.name)} | {' | '.join(map(figures.shown, line.values))} |" for line in figures.lines(sets)
    ]
    warnings = "".join(f"**Warning:** {markdown(doubt)}.\n\n" for doubt in report["warnings"])
    return f"""---
{lines(yaml)}
---

# {markdown(report["base_model"])}, exported

{markdown(sentence(report))}

{warnings}| {" | ".join(heads(report))} |
|{"---|" * len(heads(report))}
{lines(stages)}

## How to load it

```python
{loader(report)}
```

The graph is {markdown(report["file"])}: inputs {shortened(report["inputs"])}, outputs {shortened(report["outputs"])}.

## Measured loss

Agreement with PyTorch, on inputs that nothing was fitted to, without labels:

| | {" | ".join(markdown(figures.described(held)) for held in sets)} |
|---|{"---|" * len(sets)}
{lines(agreed)}

Compared: {markdown(report["compared"])}. Measure the loss on your own task before you rely on it.

report.html explains the figures and shows pictures, and report.json has all figures.
"""


def html(report: Mapping[str, Any]) -> str:
    """The text of report.html, from the contents of report.json."""
    made = {
        "calibration": f"{report['calibration']['count']:,} {report['calibration']['kind']} of "
        f"{report['calibration']['file']}",
        "file": report["file"],
        "inputs": ", ".join(report["inputs"]),
        "outputs": ", ".join(report["outputs"]),
        "settings": ", ".join(f"{key} {value}" for key, value in report["settings"].items() if value is not None),
        "versions": ", ".join(f"{name} {version}" for name, version in report["versions"].items()),
    }
    body = f"""<p>{escape(sentence(report))}</p>
{warnings(report)}
{LEGEND}
<h2>From PyTorch to what is served</h2>
<p>Size, latency and loss of each stage; the loss is that against PyTorch, on held-out inputs.</p>
{pictures(report)}
{lost(report)}
<h2>How it was made</h2>
{facts(made)}
"""
    body += glossary({**COMMON, "calibration": "Unlabelled inputs, from which int8 takes its scales.", **INT8}, body)
    return page(f"{report['base_model']}, exported by snnk", f"{report['base_model']}, exported", body)
