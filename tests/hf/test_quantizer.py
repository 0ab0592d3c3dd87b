"""Saved and loaded by transformers alone, in a fresh process: the same model, or a loud failure; and tools on top."""

import json
import re

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

import snnk
from snnk.hf import find_ffns
from snnk.hf.quantizer import register
from snnk.hf.replace import SNNKQuantizationConfig, replace_

from helpers.architectures import (
    KINDS,
    ROWS,
    TOWERS,
    WIDTH,
    D,
    heads,
    inputs,
    make,
    output,
    perturb_,
    replaced,
    towers,
)
from helpers.processes import in_a_fresh_process

MIXED = ("atoms", "linear", "drop", "relu", "cos")  # one layer each


def save(model, folder, row):
    model.save_pretrained(folder)
    save_file({**inputs(row), "output": output(model, row).contiguous()}, folder / "example.safetensors")


def mixed(auto=hf.AutoModelForSequenceClassification, **options):
    model = make("bert", auto, num_hidden_layers=len(MIXED), **options)
    for i, kind in enumerate(MIXED):
        replaced(model, kind, [i])
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A saved sequence classifier with one block of each kind; nobody writes here."""
    folder = tmp_path_factory.mktemp("mixed")
    save(mixed(), folder, "bert")
    return folder


def edited(folder, tmp_path, change):
    """A copy of a saved model whose config.json was changed."""
    config = json.loads((folder / "config.json").read_text())
    change(config["quantization_config"]["blocks"])
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    return tmp_path


def test_a_fresh_process_gives_equal_outputs_for_all_architectures_heads_and_kinds(tmp_path):
    cases, pairs = {}, (("atoms", "relu"), ("linear", "cos"), ("drop", "tanh_power"))
    for row in ROWS:
        for auto, kinds in zip(heads(row), pairs, strict=True):
            model = make(row, getattr(hf, auto))
            for layer, kind in enumerate(kinds):
                replaced(model, kind, [layer])
            name = f"{row}-{'-'.join(kinds)}"
            save(model, tmp_path / name, row)
            cases[name] = (auto, row)
    answers = in_a_fresh_process(tmp_path, cases, "import snnk.hf")
    assert {name: error for name, error in answers.items() if error != 0} == {}
    assert len(answers) == 3 * len(ROWS)


def test_without_snnk_loading_fails(tmp_path):
    cases = {}
    rows = ("bert", "dinov2+swiglu", "gpt2", "gte", "llama", "opt", "phi3", "t5+gated", "vit")
    for row in rows:
        for kind in KINDS:
            model = make(row)
            # as many features as neurons: the second layer's weight alone would not clash
            replaced(model, kind, [1], m=6 if kind == "atoms" else WIDTH)
            save(model, tmp_path / f"{row}-{kind}", row)
            cases[f"{row}-{kind}"] = (heads(row)[0], row)
        for ffn in find_ffns(model := make(row)):
            replace_(ffn, "atoms", WIDTH).copy_rows_(range(WIDTH))
        save(model, tmp_path / f"{row}-all", row)
        cases[f"{row}-all"] = (heads(row)[0], row)
    answers = in_a_fresh_process(tmp_path, cases, "assert 'snnk' not in sys.modules")
    # all atoms of nn.Linear blocks are the plain model again
    plain = {name: answers.pop(name) for name in [f"{row}-all" for row in rows if row != "gpt2"]}
    assert max(plain.values()) < 1e-6
    assert {name: a for name, a in answers.items() if "mismatch" not in str(a)} == {}


def test_towers_and_encoders_of_decoders(tmp_path):
    """Models of two towers, and models whose encoder alone is replaced, which still generate."""
    for name in TOWERS:
        model = towers(name)
        for i, kind in enumerate(("atoms", "relu", "linear", "drop")):
            replaced(model, kind, [i])
        model.save_pretrained(tmp_path / name)
        loaded = hf.AutoModel.from_pretrained(tmp_path / name)
        torch.testing.assert_close(output(loaded, name), output(model, name), atol=1e-6, rtol=1e-6)
        assert [f.kind for f in find_ffns(loaded)] == ["atoms", "relu", "linear", "drop"]
    for row, auto in (("t5+gated", hf.AutoModelForSeq2SeqLM), ("whisper", hf.AutoModelForSpeechSeq2Seq)):
        model = make(row, auto, decoder_start_token_id=1)
        replaced(model, "relu", [0])
        replaced(model, "atoms", [1])
        model.save_pretrained(tmp_path / row)
        loaded = auto.from_pretrained(tmp_path / row)
        batch = inputs(row) | {"decoder_input_ids": torch.ones(3, 2, dtype=torch.long)}
        with torch.no_grad():
            torch.testing.assert_close(loaded(**batch).logits, model(**batch).logits, atol=1e-5, rtol=1e-5)
        tokens = [m.generate(**inputs(row), max_new_tokens=4, do_sample=False) for m in (model, loaded)]
        assert torch.equal(*tokens)


def test_gated_t5_in_half_precision(tmp_path):
    """transformers leaves T5's second layers in float32; the modules in their place get what they can multiply."""
    model = make("t5+gated")
    replaced(model, "relu", [0])
    replaced(model, "linear", [1])
    model.save_pretrained(tmp_path)
    loaded = hf.AutoModelForTextEncoding.from_pretrained(tmp_path, dtype=torch.float16)
    assert {find_ffns(loaded)[0].slot(which).weight.dtype for which in ("up", "down")} == {torch.float16, torch.float32}
    assert (output(loaded, "t5+gated").float() - output(model, "t5+gated")).abs().max() < 0.05


def test_registering_twice_is_harmless():
    register()
    assert AUTO_QUANTIZER_MAPPING["snnk"].__module__ == "snnk.hf.quantizer"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device_map", [None, "cpu", "auto"])
def test_dtypes_and_device_maps(folder, dtype, device_map):
    model = hf.AutoModelForSequenceClassification.from_pretrained(folder, dtype=dtype, device_map=device_map)
    wanted = mixed().to(dtype).state_dict()
    for key, value in model.state_dict().items():
        assert torch.equal(value, wanted[key]), key
    assert {t.dtype for t in model.state_dict().values() if t.is_floating_point()} == {dtype}
    error = (output(model, "bert") - output(mixed().to(dtype), "bert")).abs().max()
    assert error <= (1e-6 if dtype == torch.float32 else 1e-2)


def test_a_loaded_model_is_a_plain_one(folder, tmp_path):
    model = hf.AutoModelForSequenceClassification.from_pretrained(folder)
    assert not model.is_quantized
    assert not hasattr(model, "hf_quantizer")
    assert not hasattr(model, "quantization_method")
    configs = [module.config for module in model.modules() if isinstance(module, hf.PreTrainedModel)]
    assert len(configs) > 1 and not any(getattr(config, "_is_quantized", False) for config in configs)
    assert [f.kind for f in find_ffns(model)] == list(MIXED)
    assert output(model.to(torch.bfloat16), "bert").dtype == torch.bfloat16
    model.half().float()
    perturb_(model, seed=9)
    model.save_pretrained(tmp_path / "again")
    again = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "again")
    same(again, model)
    assert (tmp_path / "again/config.json").read_text() == (folder / "config.json").read_text()
    in_memory = hf.AutoModelForSequenceClassification.from_pretrained(folder, config=model.config)
    same(in_memory, mixed())


def same(model, other):
    """Equal tensors; outputs may differ by rounding, as tensors of a file are not aligned in memory."""
    tensors = other.state_dict()
    assert all(torch.equal(value, tensors.pop(key)) for key, value in model.state_dict().items())
    assert not tensors
    torch.testing.assert_close(output(model, "bert"), output(other, "bert"), atol=1e-6, rtol=1e-6)


def test_head_to_base_and_base_to_head(folder, tmp_path):
    base, whole = hf.AutoModel.from_pretrained(folder), mixed()
    same(base, whole.bert)
    whole.bert.save_pretrained(tmp_path)
    same(hf.AutoModelForSequenceClassification.from_pretrained(tmp_path).bert, base)
    other = hf.AutoModelForQuestionAnswering.from_pretrained(folder).bert
    torch.testing.assert_close(output(other, "bert"), output(base, "bert"), atol=1e-6, rtol=1e-6)


def test_maps_with_options_and_sharded_files(tmp_path):
    model = make("bert")
    first, second = find_ffns(model)
    replace_(first, "cos", 8, projection="iid", seed=3)  # has no limit: an infinity in the file
    replace_(second, snnk.ProjectedURF(D, 8, "gelu", seed=4))
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = hf.AutoModel.from_pretrained(tmp_path)
    same(loaded, model)
    maps = [ffn.slot("up").map for ffn in find_ffns(loaded)]
    assert (maps[0].limit, maps[0].kind.name, type(maps[1])) == (float("inf"), "iid", snnk.ProjectedURF)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b["encoder.layer.0"].update(kind="os.system"), "unknown kind of encoder.layer.0 'os.system'"),
        (lambda b: b["encoder.layer.0"].update(code="x"), "must have the keys ['kind', 'num_features']; got ['code'"),
        (lambda b: b["encoder.layer.0"].update(num_features=-1), "must be a positive integer; got -1"),
        (lambda b: b["encoder.layer.0"].update(num_features=10**12), "has 32 neurons"),
        (lambda b: b["encoder.layer.0"].update(num_features=7), "intermediate.dense.weight (6, 16) instead of (7, 16)"),
        (lambda b: b.update({"encoder.layer.9": {"kind": "drop"}}), "names encoder.layer.9; the model has"),
        (
            lambda b: b.update({"encoder.layer.3": {"kind": "drop"}}),
            "quantization_config does not name: {'projection': 1}",
        ),
        (lambda b: b.update({"encoder.layer.1": {"kind": "drop"}}), "output.dense.weight (16, 16) instead of (0,)"),
        (lambda b: b.update({"encoder.layer.2": {"kind": "linear"}}), "output.dense.weight (0,) instead of (16, 16)"),
        (lambda b: b.pop("encoder.layer.1"), "(16, 16) instead of (16, 32)"),
        (lambda b: b["encoder.layer.3"]["map"].update({"class": "nn.Linear"}), "unknown feature map"),
        (lambda b: b["encoder.layer.3"]["map"].update({"num_features": 10**12}), "must be 16 -> 6"),
        (lambda b: b["encoder.layer.3"]["map"].update({"order": 7}), "order must be 0, 1 or 2"),
        (lambda b: b["encoder.layer.3"].update({"map": 3}), "must be a dict"),
        (lambda b: b["encoder.layer.4"]["map"].update({"activation": "eval"}), "cannot make the feature map"),
    ],
)
def test_bad_configurations_are_refused(folder, tmp_path, change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        hf.AutoModelForSequenceClassification.from_pretrained(edited(folder, tmp_path, change))


def test_sizes_are_checked_before_anything_is_allocated(folder, tmp_path):
    def change(blocks):
        blocks["encoder.layer.3"]["num_features"] = blocks["encoder.layer.3"]["map"]["num_features"] = 10**12

    with pytest.raises(ValueError, match="does not fit"):
        hf.AutoModelForSequenceClassification.from_pretrained(edited(folder, tmp_path, change))


def test_missing_tensors_and_other_heads_are_errors(folder, tmp_path):
    edited(folder, tmp_path, lambda blocks: None)
    tensors = load_file(folder / "model.safetensors")
    del tensors["bert.encoder.layer.3.intermediate.dense.map.projection"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"no encoder\.layer\.3\.intermediate\.dense\.map\.projection"):
        hf.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"classifier\.weight \(2, 16\) instead of \(5, 16\)"):
        hf.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=5)


def test_other_quantizers_and_dense_models_are_refused(tmp_path):
    model = make("bert")
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="pre-quantized"):
        hf.AutoModel.from_pretrained(tmp_path, quantization_config=SNNKQuantizationConfig({}))
    for other in ({"quant_method": "gptq"}, hf.QuantoConfig()):
        model.config.quantization_config = other
        with pytest.raises(ValueError, match="compress first"):
            replace_(find_ffns(model)[0], "linear")
    with pytest.raises(ValueError, match="quant_method 'snnk' and blocks"):
        SNNKQuantizationConfig({}, version=2)


def test_files_other_than_safetensors_are_refused(folder, tmp_path):
    edited(folder, tmp_path, lambda blocks: None)
    (tmp_path / "model.safetensors").unlink()
    torch.save(load_file(folder / "model.safetensors"), tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"saved as safetensors only; got .*pytorch_model\.bin"):
        hf.AutoModelForSequenceClassification.from_pretrained(tmp_path)


def test_training_with_the_trainer(folder, tmp_path):
    model = hf.AutoModelForSequenceClassification.from_pretrained(folder)
    example = {key: value[1] for key, value in inputs("bert").items()} | {"labels": torch.tensor(1)}
    arguments = hf.TrainingArguments(
        str(tmp_path), max_steps=2, report_to=[], learning_rate=0.1, use_cpu=True, disable_tqdm=True,
        dataloader_pin_memory=False,
    )  # fmt: skip
    before = {key: value.clone() for key, value in model.state_dict().items()}
    hf.Trainer(model, arguments, train_dataset=[example] * 16).train()
    moved = {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    for layer in range(len(MIXED)):
        assert f"bert.encoder.layer.{layer}.output.dense.bias" in moved
    assert not any(".map." in key for key in moved)


def test_lora_on_top(folder, tmp_path):
    peft = pytest.importorskip("peft")
    model = hf.AutoModelForSequenceClassification.from_pretrained(folder)
    tuned = peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_CLS", target_modules="all-linear", r=2))
    optimizer = torch.optim.SGD([p for p in tuned.parameters() if p.requires_grad], lr=1.0)
    for _ in range(2):
        loss = tuned(**inputs("bert"), labels=torch.tensor([0, 1, 1])).loss
        loss.backward()
        optimizer.step()
    tuned.eval().save_pretrained(tmp_path)
    base = hf.AutoModelForSequenceClassification.from_pretrained(folder)
    plain = output(base, "bert")
    loaded = peft.PeftModel.from_pretrained(base, tmp_path).eval()
    torch.testing.assert_close(output(loaded, "bert"), output(tuned, "bert"), atol=1e-6, rtol=1e-6)
    assert (output(loaded, "bert") - plain).abs().max() > 1e-4
    merged = loaded.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    again = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(output(again, "bert"), output(tuned, "bert"), atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_int8_on_top(folder):
    model = hf.AutoModelForSequenceClassification.from_pretrained(folder)
    small = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
    blocks = [ffn.layer for ffn in find_ffns(model)]
    swapped = [module for module in small.modules() if type(module).__module__.startswith("torch.ao.nn.quantized")]
    assert len(swapped) > 4 * len(blocks)  # attention, and what is linear in the blocks
    wanted, got = output(model, "bert"), output(small, "bert")
    assert bool(got.isfinite().all()) and 0 < float((got - wanted).abs().max()) < 0.05 * float(wanted.abs().max())


def test_pipeline(folder):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1, "good": 2, "bad": 3}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")
    pipe = hf.pipeline("text-classification", model=str(folder), tokenizer=tokenizer, device="cpu")
    with torch.no_grad():
        logits = mixed()(**tokenizer("good bad good", return_tensors="pt")).logits
    assert pipe("good bad good")[0]["score"] == pytest.approx(float(logits.softmax(-1).max()), abs=1e-6)


def test_generation(tmp_path):
    model = make("llama", hf.AutoModelForCausalLM)
    replaced(model, "relu", [0])
    replaced(model, "atoms", [1])
    model.save_pretrained(tmp_path)
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens = [m.generate(**inputs("llama"), max_new_tokens=4, do_sample=False) for m in (model, loaded)]
    assert torch.equal(*tokens)


class Logits(torch.nn.Module):
    """A model for exporters, which want tensors in and tensors out."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask):
        return self.model(input_ids=input_ids, attention_mask=attention_mask).logits


def test_compile_without_graph_breaks(folder):
    model = hf.AutoModelForSequenceClassification.from_pretrained(folder)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(output(compiled, "bert"), output(model, "bert"), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("row", ["bert", "llama"])
def test_export(folder, row):
    if row == "bert":
        model = hf.AutoModelForSequenceClassification.from_pretrained(folder)
    else:
        model = make(row, hf.AutoModelForSequenceClassification, use_cache=False)
        replaced(model, "relu", [0])
        replaced(model, "linear", [1])
    program = torch.export.export(Logits(model), tuple(inputs(row).values()))
    got = program.module()(*inputs(row).values())
    torch.testing.assert_close(got, output(model, row), atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_onnx(folder, tmp_path):
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    model = hf.AutoModelForSequenceClassification.from_pretrained(folder)
    example = inputs("bert")
    torch.onnx.export(Logits(model), tuple(example.values()), tmp_path / "m.onnx", dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    feed = {i.name: value.numpy() for i, value in zip(session.get_inputs(), example.values(), strict=True)}
    got = torch.from_numpy(session.run(None, feed)[0])
    torch.testing.assert_close(got, output(model, "bert"), atol=1e-4, rtol=1e-4)
