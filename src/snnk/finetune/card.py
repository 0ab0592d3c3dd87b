"""The model card (README.md) of a fine-tuned model, made from its metrics.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from snnk._text import code, markdown, printable
from snnk.hf.compression.report import front_matter

MOST = 20  # names of classes that are listed
# the tests run these lines in the parent folder of a model that is called "this folder"
LOADING = """import torch
from snnk.finetune import load  # pip install 'snnk[peft]'

model, {processor} = load("this folder")
inputs = {inputs}
with torch.inference_mode():
    logits = model(**inputs).logits[0]
"""
CLASSES = """for name, probability in zip(model.config.id2label.values(), logits.softmax(-1).tolist()):
    print(f"{probability:.3f} {name}")"""


def model_card(metrics: Mapping[str, Any], original_card: str = "") -> str:
    """The card, with licence and language of the base model if its own card is in a local folder."""
    front = {
        "base_model": printable(metrics["base_model"]),
        "library_name": "peft" if metrics["adapter"] else "transformers",
        "pipeline_tag": "image-classification" if metrics["images"] else "text-classification",
        "tags": list(dict.fromkeys(["snnk", metrics["method"]])),
    }
    carried = [line for line in front_matter(original_card) if not line.startswith("pipeline_tag")]
    yaml = [f"{key}: {json.dumps(value)}" for key, value in front.items()] + carried  # JSON is YAML
    done, counts, start = metrics["training"], metrics["parameters"], metrics["classifier_start"]
    names = [name for name in done["epochs"][0] if name not in ("epoch", "step")]
    epochs = [
        "| "
        + " | ".join([f"{row['epoch']:g}" + (" (kept)" if i == done["best"] else ""), *_numbers(row, names)])
        + " |"
        for i, row in enumerate(done["epochs"])
    ]
    scores = [
        f"| {part} | {', '.join(f'{name} {value:.4f}' for name, value in found.items())} |"
        for part, found in metrics["scores"].items()
    ]
    settings = ", ".join(f"{key} {markdown(value)}" for key, value in metrics["settings"].items() if value is not None)
    features = f", {metrics['features']} features" if metrics["features"] else ""
    lines, name = "\n".join, markdown(metrics["base_model"])
    data = "images" if metrics["images"] else "rows.csv"
    return f"""---
{lines(yaml)}
---

# {name}, fine-tuned with {metrics["method"]}

{name}, fine-tuned by snnk {metrics["versions"]["snnk"]} on {_data(metrics)}. Method `{metrics["method"]}`:
{metrics["summary"]}{features}; {counts["trained"]:,} of {counts["total"]:,} parameters were trained.

| part | measured |
|---|---|
{lines(scores)}

## How to use it

For all rows of a file (.csv, .tsv, .jsonl or .parquet), or for a folder of images:

```
snnk predict "this folder" {data} --out predictions.csv
```

In Python:

```python
{_inference(metrics)}
```
{_base(metrics)}{_plain(metrics)}
{_outputs(metrics)}{_merged(metrics)}

## Data

{_parts(metrics)} The validation part chose the epoch. The test part, if there is one, was used only for its line in the
table above.

## Training

{settings}. Classifier start: {start["kind"]}. {done["steps"]:,} steps of {done["planned_steps"]:,}\
{", stopped early" if done["stopped_early"] else ""}, {done["seconds"]:.0f} s.\
{"".join(f" Warning: {doubt}." for doubt in metrics.get("warnings", ()))}

| epoch | {" | ".join(name.replace("_", " ") for name in names)} |
|---|{"---|" * len(names)}
{lines(epochs)}

Epoch 0 is the start. The loss is the cross-entropy, or the squared error for regression; the train loss of a regression
is divided by the variance of the labels. metrics.json has all figures, options and versions.
"""


def _inference(metrics: Mapping[str, Any]) -> str:
    """Code that loads the model and prints its output for one input."""
    if metrics["images"]:
        image = 'processor(PIL.Image.open("image.png").convert("RGB"), return_tensors="pt")'
        code = "import PIL.Image\n" + LOADING.format(processor="processor", inputs=image)
    else:
        texts = '"a text", "its second text"' if metrics["data"].get("text_pair") else '"a text"'
        length = metrics["data"].get("max_length")  # files of earlier versions have none
        limit = f"truncation=True, max_length={length}" if isinstance(length, int) else "truncation=True"
        inputs = f'tokenizer({texts}, {limit}, return_tensors="pt")'
        code = LOADING.format(processor="tokenizer", inputs=inputs)
    return code + (CLASSES if metrics["labels"] is not None else "print(logits.item())")


def _merged(metrics: Mapping[str, Any]) -> str:
    """What was lost when an adapter was merged, if there was one and something was."""
    found = metrics.get("merged")
    if found is None:
        return ""
    if found["exact"]:
        return "\n\nIts adapter was merged into the weights."
    return (
        f"\n\nIts adapter was replaced by the nearest LoRA adapter, which explains {found['explained']:.1%} of its "
        f"effect, and which was merged into the weights. On {found['held_out']:,} other inputs, "
        + (
            f"1 - Spearman correlation with the outputs before is {found['loss']:.4f}."
            if metrics["labels"] is None
            else f"{found['loss']:.1%} of the predictions changed by that."
        )
        + " The figures above are of the model before."
    )


def _plain(metrics: Mapping[str, Any]) -> str:
    """How to load the model without `load`."""
    if metrics["config"]["pooling"] != "model":
        return (
            "\nIts classifier reads means over tokens, which no class of transformers does: "
            "its from_pretrained refuses the model.\n"
        )
    if not metrics["adapter"]:
        kind = "ImageClassification" if metrics["images"] else "SequenceClassification"
        return f"\nAutoModelFor{kind}.from_pretrained works too, once `snnk.hf` is imported.\n"
    return (
        "\nPeftModel.from_pretrained works too, on the base model with as many classes, once `snnk.peft` is imported.\n"
    )


def _base(metrics: Mapping[str, Any]) -> str:
    """Where `load` looks for the base model of an adapter."""
    if not metrics["adapter"]:
        return ""
    where = "where it was relative to this folder" if metrics["base"].get("place") else "on the hub"
    name = code(metrics["base_model"])
    return f"\nIts base model, {name}, is looked for {where}; `load(..., base=...)` and `--base` name another place.\n"


def _outputs(metrics: Mapping[str, Any]) -> str:
    names = metrics["labels"]
    if names is None:
        return f"Its output is a number: {code(metrics['data']['label'])}."
    more = f" and {len(names) - MOST} more" if len(names) > MOST else ""
    return f"Its classes are {', '.join(map(code, names[:MOST]))}{more}."


def _data(metrics: Mapping[str, Any]) -> str:
    data = metrics["data"]
    return f"{data['task']} of GLUE" if data.get("task") else code(data["train"])


def _parts(metrics: Mapping[str, Any]) -> str:
    data = metrics["data"]
    listed = []
    for part, count in data["rows"].items():
        if count is not None:
            listed.append(f"{part}: {count:,} rows of {code(data[part] or data['train'])}")
    return "; ".join(listed) + "."


def _numbers(row: Mapping[str, Any], names: list[str]) -> list[str]:
    return ["-" if row.get(name) is None else f"{row[name]:.4f}" for name in names]
