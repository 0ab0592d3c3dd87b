"""Compressed models as plain ones: the same outputs in a process that cannot import snnk, or a reason why not."""

import json

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from snnk.hf import Plan, compress, find_ffns, plan, replace_pooler_
from snnk.hf.compression.plans import option
from snnk.hf.finding import find_attentions, find_blocks
from snnk.hf.low_rank import replace_attention_
from snnk.hf.model_blocks import FFN
from snnk.hf.replace import replace_
from snnk.hf.serve.plain import MOST, check_plan, choose, fit_of, plain_model, planned_fit, without_new_biases

from helpers.architectures import ATTENTION, ROWS, WIDTH, conditional, heads, inputs, make, output, perturb_, towers
from helpers.compression import check_page
from helpers.processes import in_a_fresh_process, run_code
from helpers.texts import make_texts, make_tokenizer, save

BLOCKED = "sys.modules['snnk'] = None  # an import of it fails"
OTHERS = ("siglip_vision_model",)  # rows whose field for the neurons per block has another meaning, too


def compress_by_hand(model, counts=(5, 6), ranks=None, new_bias=None):
    """Replace all blocks and fill the new layers at random; new biases only where the configuration has a switch."""
    for block in find_blocks(model):
        names = block.row.config
        if isinstance(block, FFN):
            allowed = bool(names.biases) if new_bias is None else new_bias
            new = replace_(block, "atoms", counts[block.index], new_bias=allowed)
        elif ranks is not None:
            allowed = bool(names.attention_biases) if new_bias is None else new_bias
            pair = (block.head_size if block.names.fixed else ranks[0], ranks[1])
            new = replace_attention_(block, pair, new_bias=allowed)
        else:
            continue
        for module in new.modules:
            perturb_(module, seed=3 + block.index)
    return model


def write(model, folder, row):
    """Save the plain model, and the outputs of the compressed one."""
    plain_model(model).save_pretrained(folder)
    save_file({**inputs(row), "output": output(model, row).contiguous()}, folder / "example.safetensors")


def test_every_family_in_a_process_without_snnk(tmp_path):
    """Also where zeros cost much; heads shrink with the field for their size, and are padded without one."""
    cases = {}
    for row in ROWS:
        for i, auto in enumerate(dict.fromkeys(heads(row)[:2])):
            if row not in OTHERS:
                ranks = (3, 4) if i == 0 and row in ATTENTION else None
                write(compress_by_hand(make(row, getattr(hf, auto)), ranks=ranks), tmp_path / f"{row}-{i}", row)
                cases[f"{row}-{i}"] = (auto, row)
                assert "quantization_config" not in json.loads((tmp_path / f"{row}-{i}/config.json").read_text())
    answers = in_a_fresh_process(tmp_path, cases, BLOCKED)
    assert {name: error for name, error in answers.items() if not (isinstance(error, float) and error < 1e-5)} == {}
    assert len(answers) > len(ROWS)


@pytest.mark.parametrize(
    ("row", "fields"),
    [
        ("bert", {"intermediate_size": 6}),
        ("dinov2", {"mlp_ratio": 1, "head_dim": 4}),
        ("distilbert", {"hidden_dim": 6}),
        ("falcon", {"ffn_hidden_size": 6, "bias": True}),
        ("gpt2", {"n_inner": 6}),
        ("llama", {"intermediate_size": 6, "mlp_bias": True, "head_dim": 8}),
        ("mistral", {"intermediate_size": 6, "head_dim": 8}),
        ("opt", {"ffn_dim": 6}),
        ("t5+gated", {"d_ff": 6, "d_kv": 4}),
        ("vit", {"intermediate_size": 6, "head_dim": 4}),
        ("whisper", {"encoder_ffn_dim": 6}),
    ],
)
def test_fields_of_the_configuration(row, fields):
    model = compress_by_hand(make(row), ranks=(3, 4))
    config = fit_of(model).config
    assert {name: getattr(config, name) for name in fields} == fields
    assert model.config.quantization_config is not None  # the model itself stays as it is


def test_sentence_transformers_loads_a_plain_folder(tmp_path):
    model = compress_by_hand(make("bert", vocab_size=43), (5, 5)).eval()
    texts, folder = make_texts(6), save(plain_model(model), tmp_path / "plain")
    code = f"""
import sys
{BLOCKED}
from sentence_transformers import SentenceTransformer
print(SentenceTransformer({str(folder)!r}).encode({texts!r}).tolist())
"""
    done = run_code(code)
    assert done.returncode == 0, done.stderr
    batch = make_tokenizer()(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        states, mask = model(**batch).last_hidden_state, batch["attention_mask"][..., None]
    found = torch.tensor(json.loads(done.stdout.splitlines()[-1]))
    torch.testing.assert_close(found, (states * mask).sum(1) / mask.sum(1), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("row", ["bert", "gpt2", "vit"])
def test_outputs_in_double_precision(row):
    """The factor of dot products, too, which follows the size of heads in a ViT."""
    model = compress_by_hand(make(row).double(), ranks=(3, 4))
    batch = {name: x.double() if x.is_floating_point() else x for name, x in inputs(row).items()}
    with torch.no_grad():
        torch.testing.assert_close(plain_model(model)(**batch)[0], model(**batch)[0], atol=1e-10, rtol=1e-10)


def test_padding_is_counted_in_multiply_adds(monkeypatch):
    model = compress_by_hand(make("bert"), (15, 16))
    fit = fit_of(model)
    blocks = 2 * 4 * 16 * 16 + 2 * 16 * (15 + 16)  # attention, and feed-forward blocks
    assert fit.padding == pytest.approx(2 * 16 / blocks) and fit.cheap and fit.padding < MOST
    assert "intermediate_size 16" in fit.reason and "the neurons per block are from 15 to 16" in fit.reason
    assert f"zeros add {fit.padding:.1%} to the multiply-adds" in fit.reason
    monkeypatch.setattr("snnk.hf.serve.plain.MOST", fit.padding / 2)
    assert not fit_of(model).cheap and fit_of(model).config is not None
    equal = fit_of(compress_by_hand(make("bert"), (16, 16)))
    assert equal.padding == 0 and equal.reason == (
        "its sizes are fields of the configuration of bert models (intermediate_size 16)"
    )


def replaced_pooler():
    model = make("bert", hf.AutoModelForSequenceClassification)
    replace_pooler_(model, num_features=4)
    return model


def with_kind(kind, row="bert", count=None):
    model = make(row)
    replace_(find_ffns(model)[0], kind, count)
    return model


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: with_kind("linear"), "encoder.layer.0 is linear now, which no layer of bert models is"),
        (lambda: with_kind("relu", count=8), "encoder.layer.0 is relu now"),
        (replaced_pooler, "the pooler was replaced"),
        (lambda: compress_by_hand(make("mistral"), new_bias=True), "the fit gave layers.0 a bias, for which mistral"),
        (lambda: compress_by_hand(make("siglip_vision_model")), "intermediate_size in the configuration of siglip_"),
        (
            lambda: compress_by_hand(make("t5", hf.AutoModelForSeq2SeqLM)),
            "d_ff in the configuration of t5 models would",
        ),
        (
            lambda: compress_by_hand(
                hf.BartModel(
                    hf.BartConfig(
                        d_model=16,
                        encoder_layers=2,
                        decoder_layers=1,
                        encoder_ffn_dim=32,
                        decoder_ffn_dim=8,
                        encoder_attention_heads=2,
                        decoder_attention_heads=2,
                        vocab_size=40,
                        max_position_embeddings=32,
                    )
                ).eval()
            ),
            "the fields of the configuration of bart models are not known to snnk",
        ),
    ],
)
def test_what_no_family_has(build, reason):
    model = build()
    fit = fit_of(model)
    assert fit.config is None and fit.reason.startswith(reason) and not fit.cheap
    with pytest.raises(ValueError, match="the model cannot be plain"):
        plain_model(model)
    for asked in ("auto", "plain", "snnk"):
        same, saved = choose(model, asked)
        assert same is model and saved["format"] == "snnk"


@pytest.mark.parametrize(
    ("row", "reason", "advice"),
    [
        ("bert", "the configuration of bert models has no field for dimensions per head", "--blocks ffn"),
        ("llama", "queries and keys of llama models keep their dimensions per head", "--blocks ffn"),
        ("bloom", "the configuration of bloom models has no field for neurons per block", ""),
        ("dinov2+swiglu", "the configuration of dinov2 models has no field for neurons per block", ""),
    ],
)
def test_what_costs_too_much(row, reason, advice):
    fit = fit_of(compress_by_hand(make(row), (6, 6), ranks=(3, 3)))
    assert fit.config is not None and fit.padding > MOST and not fit.cheap
    assert reason in fit.reason and "more than 5%" in fit.reason and fit.advice == advice


@pytest.mark.parametrize("row", ["bert", "llama"])
def test_a_dropped_block_has_no_neurons(row):
    """Its constant is the bias of a block of zeros."""
    model = make(row)
    first, second = find_ffns(model)
    perturb_(replace_(first, "drop").down)
    for module in replace_(second, "atoms", 1).modules:
        perturb_(module)
    assert fit_of(model).config.intermediate_size == 1
    torch.testing.assert_close(output(plain_model(model), row), output(model, row), atol=1e-5, rtol=1e-5)


def test_biases_of_llama():
    model = compress_by_hand(make("llama"))
    new = plain_model(model)
    mlp = new.layers[0].mlp
    assert (
        new.config.mlp_bias and not mlp.gate_proj.bias.any() and not mlp.up_proj.bias.any() and mlp.down_proj.bias.any()
    )
    for ffn in find_ffns(model):
        ffn.slot("down").bias.data.zero_()
    new = plain_model(model)
    assert not new.config.mlp_bias and new.layers[0].mlp.down_proj.bias is None


def test_towers_have_their_own_fields():
    model = towers("clip")
    for ffn in find_ffns(model):
        for module in replace_(ffn, "atoms", 6 if ffn.name.startswith("text") else 8).modules:
            perturb_(module)
    fit, new = fit_of(model), plain_model(model)
    assert (new.config.text_config.intermediate_size, new.config.vision_config.intermediate_size) == (6, 8)
    assert "clip_text_model.intermediate_size 6, clip_vision_model.intermediate_size 8" in fit.reason
    torch.testing.assert_close(output(new, "clip"), output(model, "clip"), atol=1e-5, rtol=1e-5)
    assert fit_of(conditional()).reason == "no block was replaced"


def test_generation_and_tied_weights():
    model = compress_by_hand(make("gpt2", hf.AutoModelForCausalLM))
    model.generation_config.max_new_tokens = 3
    new = plain_model(model)
    assert new.lm_head.weight is new.transformer.wte.weight
    assert torch.equal(*(m.generate(**inputs("gpt2"), do_sample=False) for m in (model, new)))
    assert new.dtype == plain_model(model.bfloat16()).to(torch.float32).dtype == torch.float32


def test_what_is_asked_for_and_what_comes():
    model = make("bert")
    same, saved = choose(model, "snnk")  # which has nothing that needs snnk
    assert same is model and saved == {"format": "plain", "reason": "no block was replaced", "padding": 0.0}
    for module in replace_(find_ffns(model)[0], "atoms", 6).modules:
        perturb_(module)
    assert choose(model, "auto")[1]["format"] == "snnk" and choose(model, "snnk")[1]["reason"] == "it was asked for"
    new, saved = choose(model, "plain")  # one block has all neurons, and so have both
    assert saved["format"] == "plain" and saved["padding"] > MOST and new.config.intermediate_size == WIDTH


@pytest.mark.parametrize("row", ROWS)
def test_a_plan_shows_what_will_fit(row):
    """It has no new biases where the family has no place for them, and the compressed model agrees with it."""
    model = make(row)
    chosen = plan(model, keep=0.5, blocks="ffn")
    steered = without_new_biases(model, chosen)
    expected = planned_fit(model, steered)
    by_name = {block.name: block for block in steered.blocks}
    for ffn in find_ffns(model):
        planned = by_name[ffn.name]
        assert planned.parameters == option(ffn, "atoms", planned.num_features, new_bias=planned.new_bias).parameters
        for module in replace_(ffn, "atoms", planned.num_features, new_bias=planned.new_bias).modules:
            perturb_(module)
        assert ffn.num_parameters == planned.parameters
    found = fit_of(model)
    assert (found.reason, found.padding, found.config is None) == (
        expected.reason,
        expected.padding,
        expected.config is None,
    )
    assert Plan.from_dict(steered.to_dict()) == steered


def test_plans_that_do_not_fit():
    model = make("bert")
    with pytest.raises(ValueError, match=r"has no field for dimensions per head; use --blocks ffn, or --format snnk"):
        check_plan(model, plan(model, keep=0.5))
    with pytest.raises(ValueError, match=r"from 16 to 32; use --equal and --layers all without a plan, or --format"):
        check_plan(model, plan(model, keep=0.5, blocks="ffn", layers="top-1"))
    check_plan(model, plan(model, keep=0.5, blocks="ffn"))
    images = make("dinov2")
    with pytest.raises(ValueError, match=r"mlp_ratio counts 16 neurons.*use a --keep that leaves a multiple of 16"):
        check_plan(images, plan(images, keep=0.3, blocks="ffn"))
    assert planned_fit(images, check_plan(images, plan(images, keep=0.5))).config.head_dim == 4
    bloom = make("bloom")
    with pytest.raises(ValueError, match=r"no field for neurons per block; use --format snnk"):
        check_plan(bloom, plan(bloom, keep=0.5, blocks="ffn"))


def test_blocks_without_a_new_bias_in_the_format_of_snnk(tmp_path):
    model = compress_by_hand(make("mistral"), ranks=(8, 4))
    model.save_pretrained(tmp_path)
    assert not [key for key in load_file(tmp_path / "model.safetensors") if key.endswith("bias")]
    loaded = hf.AutoModel.from_pretrained(tmp_path)
    torch.testing.assert_close(output(loaded, "mistral"), output(model, "mistral"), atol=1e-6, rtol=1e-6)
    assert [block.linears[-1].bias for block in find_blocks(loaded)] == [None] * 4
    assert find_attentions(loaded)[0].kind == "low-rank"
    for bias in (True, 0, "no"):
        config = json.loads((tmp_path / "config.json").read_text())
        config["quantization_config"]["blocks"]["layers.0"]["bias"] = bias
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match=r"bias of layers\.0 can only be false"):
            hf.AutoModel.from_pretrained(tmp_path)


def test_without_snnk_the_failure_names_it(tmp_path):
    """transformers warns of the quantization type, and then refuses the shapes."""
    model = make("bert")
    replace_(find_ffns(model)[0], "linear")
    model.save_pretrained(tmp_path)
    code = f"import sys\n{BLOCKED}\nimport transformers\ntransformers.AutoModel.from_pretrained(sys.argv[1])"
    done = run_code(code, tmp_path)
    assert done.returncode == 1 and "Unknown quantization type, got snnk" in done.stderr
    assert done.stderr.rstrip().splitlines()[-1].startswith("RuntimeError")


@pytest.fixture
def mistral(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = hf.MistralConfig(**sizes, num_key_value_heads=2, vocab_size=43, max_position_embeddings=64, pad_token_id=0)
    return save(hf.MistralForCausalLM(config), tmp_path / "mistral")


@pytest.mark.usefixtures("quick")
class TestCompress:
    """`snnk compress` and its option."""

    OPTIONS = ("--keep", 0.5, "--refine", 0, "--recover", 0, "--no-widen")

    def load(self, folder, auto="AutoModel"):
        """Outputs in a process without snnk."""
        model = getattr(hf, auto).from_pretrained(folder).eval()
        batch = {"input_ids": torch.arange(12).view(2, 6)}
        with torch.no_grad():
            save_file({**batch, "output": model(**batch)[0].contiguous()}, folder / "example.safetensors")
        return in_a_fresh_process(folder.parent, {folder.name: (auto, "")}, BLOCKED)[folder.name]

    def test_plain_is_asked_for(self, run, bert, texts, tmp_path):
        out = tmp_path / "out"
        code, text, err = run(
            "compress", bert, "--calibration", texts, *self.OPTIONS, "--format", "plain", "--out", out
        )
        assert code == 0, err
        assert "note: attention stays as it is, as the configuration of bert models cannot have smaller heads" in text
        assert self.load(out) < 1e-5
        config = json.loads((out / "config.json").read_text())
        assert config["intermediate_size"] == 16 and "quantization_config" not in config
        report = json.loads((out / "report.json").read_text())
        reason = "its sizes are fields of the configuration of bert models (intermediate_size 16)"
        assert report["saved_as"] == {"format": "plain", "reason": reason, "padding": 0.0}
        assert report["settings"]["format"] == "plain" and report["settings"]["blocks"] == "ffn"
        assert f"saved as plain: {reason}" in " ".join(text.split())
        assert f"plain: {reason}" in " ".join(check_page((out / "report.html").read_text()).texts)
        card = (out / "README.md").read_text()
        assert "import snnk" not in card and "they need no snnk" in card

    def test_plain_is_the_default_where_nothing_is_lost(self, bert, texts, tmp_path):
        common = {"keep": 0.5, "refine": 0, "recover": 0}
        equal = compress(bert, texts, out=tmp_path / "equal", blocks="ffn", joint=False, **common)
        assert equal["saved_as"]["format"] == "plain" and self.load(tmp_path / "equal") < 1e-5
        asked = compress(bert, texts, out=tmp_path / "snnk", blocks="ffn", joint=False, format="snnk", **common)
        assert asked["saved_as"] == {"format": "snnk", "reason": "it was asked for", "padding": 0.0}
        assert "mismatch" in self.load(tmp_path / "snnk")
        assert equal["agreement"] == pytest.approx(asked["agreement"], abs=1e-5)
        both = compress(bert, texts, out=tmp_path / "both", joint=False, **common)
        assert both["saved_as"]["format"] == "snnk" and "dimensions per head" in both["saved_as"]["reason"]
        card = (tmp_path / "both" / "README.md").read_text()
        assert "import snnk.hf" in card and "has no field for dimensions per head" in card

    def test_a_decoder_is_fitted_without_new_biases(self, mistral, texts, tmp_path):
        out = tmp_path / "out"
        found = compress(mistral, texts, out=out, keep=0.5, recover=2, format="plain")
        assert found["saved_as"]["format"] == "plain" and self.load(out, "AutoModelForCausalLM") < 1e-5
        assert not [key for key in load_file(out / "model.safetensors") if key.endswith("bias")]
        chosen = Plan.load(out / "plan.json")
        assert [block.new_bias for block in chosen.blocks] == [False, False]
        again = compress(mistral, texts, out=tmp_path / "again", plan=out / "plan.json", recover=2)
        assert again["saved_as"]["format"] == "plain"  # as there are no biases in this plan
        usual = compress(mistral, texts, out=tmp_path / "usual", keep=0.5, blocks="ffn", joint=False, recover=0)
        assert usual["saved_as"]["format"] == "snnk" and "for which mistral models have no place" in str(
            usual["saved_as"]
        )

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--layers", "top-1"], "from 16 to 32; use --equal and --layers all without a plan, or --format snnk"),
            (["--blocks", "attention"], "no field for dimensions per head; use --blocks ffn, or --format snnk"),
            (["--joint"], "format 'plain' needs atoms, as many in every block (--equal); got joint"),
            (["--feature-map", "random-relu"], "got feature_map 'random-relu'"),
        ],
    )
    def test_it_is_refused_before_any_work(self, run, bert, tmp_path, options, message):
        """The file of texts, which has too few, is not read yet."""
        (tmp_path / "few.txt").write_text("w1\n")
        few = ["--calibration", tmp_path / "few.txt", "--keep", 0.5, "--format", "plain", "--out", tmp_path / "out"]
        code, _, err = run("compress", bert, *few, *options)
        assert code == 2 and message in err
        assert "unknown format 'gguf'" in run("compress", bert, *few[:-3], "gguf", "--out", tmp_path / "out")[2]

    def test_a_run_that_was_stopped_goes_on_without_biases(self, mistral, tmp_path):
        (tmp_path / "texts.txt").write_text("\n".join(make_texts(120)))

        class Stopped(BaseException):
            pass

        def stop(what, done, total, note=""):
            if (what, done) == ("layers.0", 1):
                raise Stopped

        options = {"keep": 0.5, "recover": 0, "refine": 2, "format": "plain"}
        with pytest.raises(Stopped):
            compress(mistral, tmp_path / "texts.txt", out=tmp_path / "out", progress=stop, **options)
        notes = []
        compress(mistral, tmp_path / "texts.txt", out=tmp_path / "out", say=notes.append, **options)
        assert any("which has 1 blocks" in note for note in notes)
        compress(mistral, tmp_path / "texts.txt", out=tmp_path / "whole", **options)
        assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "whole/model.safetensors").read_bytes()
