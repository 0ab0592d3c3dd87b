"""SNNK adapters inside models: where they stand, what they add, and what PEFT users do with them."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import transformers as hf
from peft import LoraConfig, PeftConfig, PeftModel, PeftType, get_peft_config, get_peft_model
from peft.helpers import disable_input_dtype_casting

import snnk.peft.model
from snnk.hf import find_ffns, plan
from snnk.hf.architectures import ARCHITECTURES
from snnk.maps import Directions
from snnk.peft import SNNKConfig, fit_directions_, register
from snnk.peft.directions import Moments
from snnk.peft.layer import AdaptedLinear
from snnk.peft.model import MOST_VALUES, layers_of

from helpers.adapters import adapted, maps, train_
from helpers.architectures import ROWS, D, inputs, make, output


def names(model, adapter_name="default"):
    return [name for name, _ in layers_of(model, adapter_name)]


def trainable(model):
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("row", ROWS)
def test_placement(row):
    base = make(row)
    before = output(base, row)
    ffns = find_ffns(base)
    model = get_peft_model(base, SNNKConfig(num_features=4)).eval()
    assert trainable(model) == 2 * len(ffns) * (D * 4 + D)
    assert torch.equal(output(model, row), before)  # the identity at first
    part = ARCHITECTURES[row]
    assert set(names(model)) == {f"{f.name}.{slot}" for f in ffns for slot in (part.attention.out, part.down)}
    train_(model)
    after = output(model, row)
    assert (after - before).abs().max() > 1e-2
    with model.disable_adapter():
        assert torch.equal(output(model, row), before)
    assert torch.equal(output(model, row), after)
    assert torch.equal(output(model.unload(), row), before)
    assert not any(isinstance(m, AdaptedLinear) for m in base.modules())
    pfeiffer = get_peft_model(make(row), SNNKConfig(num_features=4, target_modules="pfeiffer"))
    assert names(pfeiffer) == [f"{ffn.name}.{part.down}" for ffn in ffns]


@pytest.mark.parametrize("row", ["bert", "vit", "opt"])
def test_adapters_stand_before_the_residual_sum(row):
    """The model equals one whose linear layers have the adapter's sum written out behind them."""
    model = adapted(row, use_bias=True, dtype=torch.float64)
    found = output_double(model, row)
    written = make(row).double()
    for name, layer in layers_of(model, "default"):
        a = layer.snnk_adapter["default"]

        def behind(_, args, y, a=a):
            phi = torch.relu(y @ a.feature_map.projection.T)
            return a.gate * (phi @ a.weight.T) + a.bias + y

        written.get_submodule(name).register_forward_hook(behind)
    assert torch.allclose(output_double(written, row), found, atol=1e-10)


def output_double(model, row):
    batch = {k: v.double() if v.is_floating_point() else v for k, v in inputs(row).items()}
    with torch.no_grad():
        return model(**batch)[0]


@pytest.mark.parametrize("config", [hf.BertConfig(), hf.ViTConfig()], ids=["bert-base", "vit-base"])
def test_counts_of_base_models(config):
    with torch.device("meta"):
        base = hf.AutoModel.from_config(config)
    model = get_peft_model(base, SNNKConfig(num_features=16))
    assert trainable(model) == 313_344 and len(names(model)) == 24
    assert all(p.is_meta for p in model.parameters())


def test_layers_and_patterns():
    def count(**options):
        return names(adapted(trained=False, **options))

    assert count(layers_to_transform=[1]) == ["encoder.layer.1.attention.output.dense", "encoder.layer.1.output.dense"]
    assert count(layers_to_transform=0, target_modules="pfeiffer") == ["encoder.layer.0.output.dense"]
    assert count(layers_to_transform=[1], target_modules=["intermediate.dense"]) == [
        "encoder.layer.1.intermediate.dense"
    ]
    assert count(target_modules=r".*\.1\..*query", layers_to_transform=[1]) == ["encoder.layer.1.attention.self.query"]
    assert count(exclude_modules=["attention.output.dense"]) == [f"encoder.layer.{i}.output.dense" for i in (0, 1)]
    everything = adapted(trained=False, target_modules="all-linear")
    assert len(names(everything)) == 13  # six for each layer, and the pooler
    for first in ({}, {"target_modules": "all-linear"}):
        several = adapted(trained=False, **first)
        several.add_adapter("second", SNNKConfig(num_features=4, target_modules="all-linear"))
        assert names(several, "second") == names(everything)
    assert len(count(target_modules="all-linear", layers_to_transform=[1])) == 6
    layers = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(torch.nn.Linear(D, D) for _ in range(2))})
    options = {"target_modules": "all-linear", "layers_to_transform": [1]}
    assert names(get_peft_model(layers, SNNKConfig(num_features=4, **options))) == ["layers.1"]


def test_a_configuration_can_be_used_again(tmp_path):
    """An earlier model has left names of layers in it, and checksums of its projections."""
    config = SNNKConfig(num_features=4, save_directions=False)
    for row in ("bert", "gpt2"):
        model = get_peft_model(make(row), config)
        assert len(names(model)) == 4
        model.save_pretrained(tmp_path)
    assert len(names(get_peft_model(make("bert"), replace(config, target_modules="pfeiffer")))) == 2
    config.seed = 1
    get_peft_model(make("gpt2"), config)
    options = {"peft_type": "SNNK", "num_features": 4, "save_directions": False}
    assert len(names(get_peft_model(make("bert"), get_peft_config(options)))) == 4
    read = PeftConfig.from_pretrained(tmp_path)
    new = get_peft_model(make("gpt2"), replace(read, num_features=6, inference_mode=False))
    assert trainable(new) == 4 * (6 * D + D)
    with pytest.raises(ValueError, match=r"fits no layer.*dataclasses.replace\(config, inference_mode=False\)"):
        get_peft_model(make("vit"), PeftConfig.from_pretrained(tmp_path))
    config = SNNKConfig(num_features=4)
    get_peft_model(make("bert"), config)
    assert len(names(get_peft_model(make("bert"), replace(config, target_modules=["query"])))) == 2


def test_adapters_may_have_as_many_values_as_the_model(monkeypatch):
    monkeypatch.setattr(snnk.peft.model, "MOST_VALUES", 1)
    adapted(trained=False)
    with pytest.raises(ValueError, match="at most"):
        adapted(trained=False, num_features=1000)


def test_layers_in_other_dtypes():
    base = torch.nn.Sequential(torch.nn.Linear(D, D), torch.nn.Linear(D, D))
    base[1].weight.data = base[1].weight.data.to(torch.float8_e4m3fn)
    model = get_peft_model(base, SNNKConfig(num_features=4, target_modules=["0", "1"]))
    assert {p.dtype for n, p in model.named_parameters() if "snnk_adapter" in n} == {torch.float32}
    half = adapted(dtype=torch.bfloat16)
    expected = output(half, "bert")
    with disable_input_dtype_casting(half):
        assert torch.equal(output(half, "bert"), expected)


def test_blocks_with_adapters_are_not_compressed():
    for config in (SNNKConfig(num_features=4), LoraConfig(target_modules=["output.dense"])):
        with pytest.raises(ValueError, match=r"has adapters of PEFT .*merge_and_unload\(\)"):
            plan(get_peft_model(make("bert"), config).get_base_model(), keep=0.5)


def test_directions_of_chunked_blocks_and_decoders_leave_padding_out():
    options = {"num_features": 4, "directions": "pca", "feature_map": "gelu"}
    fitted = []
    for chunk in (0, 1):
        model = get_peft_model(make("bert", chunk_size_feed_forward=chunk), SNNKConfig(**options))
        fit_directions_(model, [inputs("bert")])
        fitted.append(torch.cat([fm.projection for fm in maps(model).values()]))
        assert model.base_model.model.encoder.layer[0].chunk_size_feed_forward == chunk
    assert not inputs("bert")["attention_mask"].all() and torch.allclose(*fitted, atol=1e-4)

    t5 = hf.T5Config(vocab_size=40, d_model=D, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0)
    ids = torch.randint(3, 40, (4, 6), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(6) < 2).long().expand(4, 6)
    batch = {"input_ids": ids, "decoder_input_ids": ids, "attention_mask": mask}
    counts = {}
    for name, more in {
        "without": {},
        "with": {"decoder_attention_mask": (torch.arange(6) < 5).long().expand(4, 6)},
    }.items():
        sites = ["wo", "EncDecAttention.q", "EncDecAttention.k"]
        model = get_peft_model(hf.T5ForConditionalGeneration(t5), SNNKConfig(**options, target_modules=sites))
        with count_tokens() as seen:
            fit_directions_(model, [batch | more])
        counts[name] = seen
    assert counts == {"without": [8, 24, 8, 24], "with": [8, 20, 8, 20]}  # keys are of the encoder's tokens


@contextmanager
def count_tokens():
    """Tokens that were added to the sums of each adapter, in the order of the model."""
    seen, add = [], Moments.add

    def counted(self, x, g=None):
        seen.append(len(x))
        add(self, x, g)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Moments, "add", counted)
        yield seen


@pytest.mark.parametrize("feature_map", ["cos", "gelu", "tanh_power", "arccos0"])
def test_feature_maps(feature_map):
    model = adapted(feature_map=feature_map, normalize="dim", num_features=4)
    assert torch.isfinite(output(model, "bert")).all()
    assert not torch.equal(output(model, "bert"), output(make("bert"), "bert"))


def test_directions_and_the_bottleneck_baseline():
    model = adapted(directions="pca", feature_map="gelu")
    assert all(type(fm) is Directions for fm in maps(model).values())
    bottleneck = adapted(
        trained=False, directions="pca", feature_map="relu", train_directions=True, use_bias=True, gate=False
    )
    assert trainable(bottleneck) == 4 * (4 * (D + 1) + D * 4 + D)  # two linear layers with biases
    assert torch.equal(output(bottleneck, "bert"), output(make("bert"), "bert"))


def test_directions_are_those_that_the_configuration_asks_for():
    batch = {**inputs("bert"), "labels": torch.tensor([0, 1, 1])}
    options = {"directions": "gradient", "feature_map": "gelu"}

    def fitted(*method):
        model = adapted("bert", hf.AutoModelForSequenceClassification, trained=False, **options)
        fit_directions_(model, [batch], *method)
        return torch.cat([fm.projection for fm in maps(model).values()])

    assert torch.equal(fitted(), fitted("gradient")) and not torch.allclose(fitted(), fitted("pca"), atol=1e-3)
    model = make("bert", hf.AutoModelForSequenceClassification)
    model.add_adapter(SNNKConfig(num_features=4, **options))  # transformers' own way in
    fit_directions_(model, [batch])
    assert torch.equal(torch.cat([fm.projection for fm in maps(model).values()]), fitted())

    model = adapted("bert", hf.AutoModelForSequenceClassification, trained=False, **options)
    model.add_adapter("second", SNNKConfig(num_features=4, directions="pca", feature_map="gelu"))
    fit_directions_(model, [batch])  # the second is not active
    model.base_model.set_adapter(["default", "second"])
    with pytest.raises(ValueError, match=r"default 'gradient', second 'pca'; give directions="):
        fit_directions_(model, [batch])


def test_sites_have_streams_of_their_own():
    one, again, other = (maps(adapted(trained=False, **k)) for k in ({}, {}, {"seed": 1}))
    part = maps(adapted(trained=False, layers_to_transform=[1]))
    assert all(torch.equal(one[n].projection, again[n].projection) for n in one)
    assert all(torch.equal(one[n].projection, part[n].projection) for n in part)
    assert not any(torch.equal(one[n].projection, other[n].projection) for n in one)
    assert len({tuple(fm.projection.flatten().tolist()) for fm in one.values()}) == 4
    state = torch.random.get_rng_state()
    adapted(trained=False)
    assert torch.equal(state, torch.random.get_rng_state())


def test_several_adapters():
    model = adapted()
    first = output(model, "bert")
    model.add_adapter("second", SNNKConfig(num_features=6, feature_map="cos", layers_to_transform=[1], use_bias=True))
    assert torch.equal(output(model, "bert"), first)
    model.set_adapter("second")
    assert trainable(model) == 2 * (D * 6 + 2 * D)
    base = output(make("bert"), "bert")
    assert torch.equal(output(model, "bert"), base)
    train_(model, "second")
    second = output(model, "bert")
    assert not torch.allclose(second, base) and not torch.allclose(second, first)
    model.set_adapter("default")
    assert torch.equal(output(model, "bert"), first)
    model.set_adapter("second")
    model.delete_adapter("default")
    assert torch.equal(output(model, "bert"), second) and names(model) == []


def test_active_adapters_are_summed():
    model = adapted()
    model.add_adapter("second", SNNKConfig(num_features=6, feature_map="sin"))
    train_(model, "second", seed=5)
    layer = layers_of(model, "default")[0][1]
    x = torch.randn(3, D, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        y = layer.base_layer(x)
        wanted = y + layer.snnk_adapter["default"].delta(y) + layer.snnk_adapter["second"].delta(y)
        outputs = []
        for order in (["default", "second"], ["second", "default"]):
            model.base_model.set_adapter(order)
            assert torch.allclose(layer(x), wanted, atol=1e-6)
            outputs.append(output(model, "bert"))
    assert torch.allclose(*outputs, atol=1e-5)


def test_merging_is_refused_and_nothing_changes():
    model = adapted()
    before = output(model, "bert")
    layer = layers_of(model, "default")[0][1]
    for call in (model.merge_adapter, model.merge_and_unload, model.unmerge_adapter, layer.merge):
        with pytest.raises(ValueError, match=r"unload\(\).*to_lora"):
            call()
    with pytest.raises(ValueError, match="to_lora"):
        model.add_weighted_adapter(["default"], [1.0], "mixed")
    with pytest.raises(ValueError, match=r"adapter_names.*set_adapter"):
        model(**inputs("bert"), adapter_names=["default"] * 3)
    assert torch.equal(output(model, "bert"), before)


@pytest.mark.parametrize("feature_map", ["relu", "cos", "tanh_power"])
def test_projections_survive_half_precision_models(feature_map):
    drawn = maps(adapted(trained=False, feature_map=feature_map))
    for upcast, dtype in ((True, torch.float32), (False, torch.bfloat16)):
        base = make("bert").bfloat16()
        model = get_peft_model(base, SNNKConfig(num_features=4, feature_map=feature_map), autocast_adapter_dtype=upcast)
        for name, layer in layers_of(model.eval(), "default"):
            adapter = layer.snnk_adapter["default"]
            assert adapter.weight.dtype == adapter.gate.dtype == dtype
            for ours, exact in zip(adapter.feature_map.buffers(), drawn[name].buffers(), strict=True):
                assert torch.equal(ours, exact)
            layer._move_adapter_to_device_of_base_layer("default")
            assert torch.equal(adapter.feature_map.projection, drawn[name].projection)
        assert torch.equal(output(model, "bert"), output(make("bert").bfloat16(), "bert"))
        train_(model)
        y = output(model, "bert")
        assert y.dtype == torch.bfloat16 and torch.isfinite(y).all()
        assert output(model.float(), "bert").dtype == torch.float32
        assert torch.isfinite(output(model.half(), "bert")).all()


def test_autocast_and_gradients():
    model = adapted("bert", hf.AutoModelForSequenceClassification).train()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**inputs("bert"), labels=torch.tensor([0, 1, 1])).loss
    loss.backward()
    trained = {n for n, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert trained == {n for n, p in model.named_parameters() if ".snnk_adapter." in n}


def test_gradient_checkpointing():
    grads = []
    for checkpointing in (False, True):
        model = adapted("bert", hf.AutoModelForSequenceClassification)
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            model.train()  # without dropout, so that both runs are the same
            for module in model.modules():
                if isinstance(module, torch.nn.Dropout):
                    module.p = 0.0
        model(**inputs("bert"), labels=torch.tensor([0, 1, 1])).loss.backward()
        grads.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
    assert grads[0].keys() == grads[1].keys() and len(grads[0]) == 8
    assert all(torch.allclose(grads[0][n], grads[1][n], atol=1e-6) for n in grads[0])


def test_compile_without_graph_breaks():
    model = get_peft_model(make("vit", num_hidden_layers=1), SNNKConfig(num_features=4, feature_map="cos")).eval()
    train_(model)
    batch, eager = inputs("vit"), output(model, "vit")
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert torch.allclose(compiled(**batch)[0], eager, atol=1e-5)


def test_modules_to_save():
    model = adapted("bert", hf.AutoModelForSequenceClassification, modules_to_save=["classifier"])
    assert trainable(model) == 4 * (D * 4 + D) + 2 * D + 2
    task = adapted("bert", hf.AutoModelForSequenceClassification, task_type="SEQ_CLS")
    assert trainable(task) == trainable(model)


def test_trainer(tmp_path):
    model = adapted("bert", hf.AutoModelForSequenceClassification, task_type="SEQ_CLS", trained=False)
    rows = [{"input_ids": torch.randint(3, 40, (7,)), "labels": torch.tensor(i % 2)} for i in range(8)]
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "logging_steps": 9}
    arguments = hf.TrainingArguments(tmp_path, max_steps=2, per_device_train_batch_size=4, **quiet)
    hf.Trainer(model, arguments, train_dataset=rows).train()
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert changed and all("snnk_adapter" in n or "modules_to_save" in n for n in changed)
    assert any(n.endswith(".gate") for n in changed)
    loaded = PeftModel.from_pretrained(make("bert", hf.AutoModelForSequenceClassification), tmp_path / "checkpoint-2")
    assert torch.equal(output(loaded, "bert"), output(model.eval(), "bert"))


def test_registered_once():
    register()
    assert PeftType("SNNK") is PeftType.SNNK and "SNNK" in list(PeftType)
    assert SNNKConfig().peft_type == "SNNK" and isinstance(SNNKConfig(), PeftConfig)


BAD_CONFIGS = [
    ({"feature_map": "rellu"}, "did you mean 'relu'"),
    ({"feature_map": "relus", "directions": "pca"}, "unknown activation 'relus'; did you mean 'relu'"),
    ({"directions": "pcb"}, "did you mean 'pca'"),
    ({"projection": "iiid"}, "did you mean 'iid'"),
    ({"projection": "iid", "feature_map": "tanh_power"}, "tanh_power has no projection to choose; got 'iid'"),
    ({"projection": "iid", "directions": "pca"}, "directions='pca' has no projection to choose"),
    ({"num_features": 0}, "positive integer; got 0"),
    ({"save_directions": False, "directions": "pca"}, "fitted to data.*save_directions=True"),
    ({"save_directions": False, "train_directions": True}, "trained.*save_directions=True"),
    ({"feature_map": "arccos0", "train_directions": True}, "have no gradient"),
]


@pytest.mark.parametrize("options, message", BAD_CONFIGS)
def test_bad_configurations(options, message):
    with pytest.raises(ValueError, match=message):
        SNNKConfig(**options)
    with pytest.raises(TypeError, match="seed"):
        SNNKConfig(seed=0.5)


REFUSED = [
    ({"target_modules": ["outputt.dense", "query"[:-1]]}, "did you mean .*output.dense"),
    ({"target_modules": ".*nothing"}, "the linear layers are .*encoder.layer.0"),
    ({"layers_to_transform": [7]}, r"in layers \[7\]"),
    ({"target_modules": ["LayerNorm"]}, "got LayerNorm"),
    ({"feature_map": "cos", "num_features": 5}, "even, with two features per projection; got 5"),
    ({"directions": "pca", "num_features": D + 1}, f"at most {D} directions there; got num_features={D + 1}"),
    ({"num_features": MOST_VALUES}, "GiB; at most"),
    ({"num_features": MOST_VALUES // 256, "feature_map": "tanh_power"}, "GiB; at most"),
    ({"target_modules": ["query"], "exclude_modules": ["query"]}, r"no layer but those of exclude_modules=\{'query'\}"),
]


@pytest.mark.parametrize("options, message", REFUSED)
def test_refused_adapters_leave_the_model_as_it_was(options, message):
    base = make("bert")
    before, state = output(base, "bert"), [(n, p.requires_grad) for n, p in base.named_parameters()]
    with pytest.raises((ValueError, TypeError), match=message):
        get_peft_model(base, SNNKConfig(**options))
    assert [(n, p.requires_grad) for n, p in base.named_parameters()] == state
    assert torch.equal(output(base, "bert"), before) and not any(isinstance(m, AdaptedLinear) for m in base.modules())
    model = adapted()
    before, state = output(model, "bert"), [(n, p.requires_grad) for n, p in model.named_parameters()]
    with pytest.raises((ValueError, TypeError), match=message):
        model.add_adapter("second", SNNKConfig(**options))
    assert [(n, p.requires_grad) for n, p in model.named_parameters()] == state
    assert torch.equal(output(model, "bert"), before) and list(model.peft_config) == ["default"]


def test_unknown_architectures_and_names():
    bart = hf.BartConfig(vocab_size=9, d_model=8, encoder_ffn_dim=8, decoder_ffn_dim=8, encoder_layers=1)
    bart.decoder_layers, bart.encoder_attention_heads, bart.decoder_attention_heads = 1, 2, 2
    with pytest.raises(ValueError, match=r"got a bart model\. Give target_modules"):
        get_peft_model(hf.BartModel(bart), SNNKConfig())
    model = get_peft_model(hf.BartModel(bart), SNNKConfig(target_modules=["fc2"]))
    assert len(names(model)) == 2
    with pytest.raises(ValueError, match="got a Sequential model"):
        get_peft_model(torch.nn.Sequential(torch.nn.Linear(3, 3)), SNNKConfig())
    assert names(get_peft_model(torch.nn.Sequential(torch.nn.Linear(3, 3)), SNNKConfig(target_modules=["0"]))) == ["0"]
    with pytest.raises(ValueError, match="cannot be named 'gate'"):
        get_peft_model(make("bert"), SNNKConfig(), adapter_name="gate")
