"""`snnk.hf.export`: a folder with a model in, a folder with its graph for ONNX Runtime or OpenVINO and a report out.

Each stage, the exported graph and then its int8 form, is run on texts that nothing was fitted to and compared with the
model in PyTorch. The output folder appears only if the loss of every stage is within the limit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from snnk import _io
from snnk._environment import environment
from snnk.hf import doubts
from snnk.hf.compression.opening import Source, open_source, pooling_with_note, read_given
from snnk.hf.compression.outputs import probe
from snnk.hf.folders import copy_others
from snnk.hf.models import quiet, without_place
from snnk.hf.serve import report as pages
from snnk.hf.serve.graphs import refusal
from snnk.hf.serve.served import MAX_LOSS, check_settings, make_graphs
from snnk.hf.widening import Gathered, gather

OWN = ("plan.json", "report.json", "report.html")  # files of `snnk compress` that do not describe a graph


@quiet()
def export(
    model: str | Path,
    calibration: str | Path | None = None,
    *,
    to: str,
    out: str | Path,
    max_loss: float = MAX_LOSS,
    text: str | None = None,
    text_pair: str | None = None,
    max_length: int = 128,
    show_texts: bool = True,
    seed: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Export a model to ONNX or OpenVINO into a new folder, with a report; what `snnk export` does.

    Args:
        model: folder of a Hugging Face model, also of sentence-transformers or compressed by snnk, or its name on the
            hub.
        calibration: unlabelled inputs like those of `snnk.hf.compress`, on which the loss is measured and with which
            int8 is calibrated. Default: the general English text of snnk.
        to: "openvino" or "onnx", in float32; "openvino-int8", with fixed scales of activations from the calibration;
            "onnx-int8", with scales that are computed for each batch; or "onnx-int8-static", with fixed ones.
        out: new folder for the graph, the tokenizer, all other files of the model's folder, and report.json.
        max_loss: nothing is written if a stage loses more on held-out inputs: 1 - mean cosine for vectors, 1 - part of
            equal predictions for classes, 1 - Spearman correlation for scores, log of the ratio of perplexities for
            decoders.
        text, text_pair: columns of the calibration file, as in `snnk.hf.compress`.
        max_length: tokens per text or pair of the calibration at most; the graph takes any length.
        show_texts: show the held-out texts that lost most in report.json and report.html.
        seed: of the sample of inputs.
        say: called with lines for people.

    Returns:
        The contents of report.json.

    Example:
        >>> import tempfile
        >>> from tokenizers import Tokenizer, models, pre_tokenizers
        >>> from transformers import BertConfig, BertModel, PreTrainedTokenizerFast
        >>> folder, words = Path(tempfile.mkdtemp()), {"[UNK]": 0, "one": 1, "two": 2}
        >>> tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
        >>> tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        >>> PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder / "model")  # doctest: +ELLIPSIS
        (...)
        >>> sizes = dict(hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
        >>> BertModel(BertConfig(vocab_size=3, **sizes)).save_pretrained(folder / "model")
        >>> _ = (folder / "texts.txt").write_text("one two one two\\n" * 40)
        >>> report = export(folder / "model", folder / "texts.txt", to="onnx", out=folder / "served")
        >>> report["file"], report["outputs"], report["stages"][1]["name"]
        ('onnx/model.onnx', ['last_hidden_state'], 'onnx')
    """
    settings = check_settings(to=to, max_loss=max_loss) | {
        "text": text,
        "text_pair": text_pair,
        "max_length": max_length,
        "show_texts": show_texts,
        "seed": seed,
    }
    out = Path(out)
    if calibration is not None and not Path(calibration).exists():
        raise FileNotFoundError(f"no calibration file or folder {calibration}")
    with _io.locked_output(out):
        _io.check_out(out)
        source = open_source(str(model), out, say)
        return _export(source, calibration, out, settings, say)


def _export(
    source: Source,
    calibration: str | Path | None,
    out: Path,
    settings: Mapping[str, Any],
    say: Callable[[str], None],
) -> dict[str, Any]:
    network = source.network
    inputs = read_inputs(source, calibration, settings)
    say(f"inputs: {inputs.given}")
    pooling, note = pooling_with_note(source.folder)
    try:
        outputs = probe(network, inputs.batches[0], pooling)
    except Exception as error:
        if not network.config.is_encoder_decoder:
            raise
        raise ValueError(refusal(network, error)) from error  # the model's code needs inputs of its decoder
    with _io.new_folder(out) as temporary:
        card = copy_others(source.folder, source.inner, temporary)
        for name in OWN:
            (temporary / name).unlink(missing_ok=True)
        made = make_graphs(
            network,
            inputs,
            temporary / source.inner,
            settings,
            pooling=pooling,
            say=say,
        )
        save_config(network, temporary / source.inner)
        if (doubt := doubts.merged(source.folder)) is not None:
            made["warnings"].append(doubt)
            say(f"warning: {doubt}")
        found = {
            "format": pages.FORMAT,
            "base_model": source.name,
            "model_class": type(network).__name__,
            "sentence_transformers": source.sentences,
            **made,
            "file": str(source.inner / made["file"]),
            "compared": outputs.compared + (note if outputs.pooled else ""),
            "calibration": {
                "file": inputs.given.source,
                "kind": inputs.given.kind,
                "count": inputs.given.items,
                "column": inputs.given.column,
            },
            "settings": dict(settings),
            "versions": environment(),
        }
        _io.write_json(temporary / "report.json", found)
        (temporary / "README.md").write_text(pages.model_card(found, card), encoding="utf-8")
        (temporary / "report.html").write_text(pages.html(found), encoding="utf-8")
    return found


def save_config(network: PreTrainedModel, folder: Path) -> None:
    """Write config.json, without the mark of a compressed model: runtimes read names of classes from it alone.

    The folder that the model was read from is left out, as transformers does.
    """
    config = without_place(network.config.to_dict())
    config.pop("quantization_config", None)
    config["architectures"] = [type(network).__name__]
    _io.write_json(folder / "config.json", config)


def read_inputs(source: Source, calibration: str | Path | None, settings: Mapping[str, Any]) -> Gathered:
    """The inputs of an export: those for the scales of int8, and those that it is measured on."""
    given, length = read_given(source, calibration, settings)
    return gather(given, source.processor, max_length=length, wide=False, seed=settings["seed"])
