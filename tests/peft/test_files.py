"""Saving and loading adapters: what was trained and what was drawn comes back, or an error says why not.

Gates are never zero here, and projections are perturbed: with either at its start a wrong one goes unnoticed.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers as hf
from peft import (
    AutoPeftModelForSequenceClassification,
    PeftModel,
    get_peft_config,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from safetensors.torch import load_file, save_file

from snnk.peft import SNNKConfig
from snnk.peft.config import checksum
from snnk.peft.directions import fit_directions_
from snnk.peft.layer import AdaptedLinear
from snnk.peft.model import layers_of
from snnk.peft.patterns import is_quick

from helpers.adapters import adapted, maps, train_
from helpers.architectures import ROWS, D, inputs, make, output, perturb_
from helpers.processes import run_code

# the others are of the same classes, or have layers of the same names, as one of these
SAME = ("camembert", "dinov2_with_registers", "dinov2_with_registers+swiglu", "gemma", "gemma3_text", "mistral", "mt5")
SAME += ("mt5+gated", "opt+post-norm", "qwen2", "siglip_text_model", "siglip_vision_model", "xlm-roberta")
FAMILIES = [row for row in ROWS if row not in SAME]
FRESH = """
import sys, warnings
import torch
from safetensors.torch import load_file
folder, rows = sys.argv[1], sys.argv[2].split(",")
sys.path.insert(0, sys.argv[3])
from peft import PeftModel
from helpers.architectures import make, output
import snnk.peft
warnings.simplefilter("error", UserWarning)
expected = load_file(folder + "/expected.safetensors")
for row in rows:
    path = folder + "/" + row
    loaded = {"PEFT": PeftModel.from_pretrained(make(row), path, low_cpu_mem_usage=len(row) % 2), "own": make(row)}
    loaded["own"].load_adapter(path)
    for how, model in loaded.items():
        # not equal to the last bit: tensors in a mapped file may be aligned differently
        if not torch.allclose(output(model, row), expected[row], rtol=1e-5, atol=1e-5):
            sys.exit(f"{row}, {how}: off by {(output(model, row) - expected[row]).abs().max()}")
print("all equal")
"""


def test_round_trip_in_a_fresh_process(tmp_path):
    """All architectures; every other one with other features, and every third without its projections."""
    expected, base = {}, {}
    for i, row in enumerate(FAMILIES):
        options = [{}, {"feature_map": "cos", "use_bias": True}][i % 2] | {"save_directions": i % 3 != 0}
        model = adapted(row, trained=False, **options)
        for _, layer in layers_of(model, "default"):
            for name, tensor in layer.snnk_adapter.state_dict(keep_vars=True).items():
                if "degrees" not in name:
                    perturb_(torch.nn.ParameterDict({"t": tensor}), 0.3, seed=len(name) + i)
        expected[row], base[row] = output(model, row), output(make(row), row)
        model.save_pretrained(tmp_path / row)
        names = load_file(tmp_path / row / "adapter_model.safetensors")
        assert any("feature_map" in name for name in names) == options["save_directions"]
        assert (expected[row] - base[row]).abs().max() > 1e-2
    save_file(expected, tmp_path / "expected.safetensors")
    done = run_code(FRESH, tmp_path, ",".join(FAMILIES), Path(__file__).parents[1])
    assert done.returncode == 0 and "all equal" in done.stdout, done.stderr[-3000:]


def test_several_adapters_in_one_folder(tmp_path):
    model = adapted()
    model.add_adapter("second", SNNKConfig(num_features=6, feature_map="tanh_power", gate=False, use_bias=True))
    train_(model, "second", seed=3)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(make("bert"), tmp_path)
    loaded.load_adapter(tmp_path / "second", "other")
    for ours, theirs in (("default", "default"), ("second", "other")):
        model.set_adapter(ours)
        loaded.set_adapter(theirs)
        assert torch.equal(output(loaded, "bert"), output(model, "bert"))


def test_transformers_own_methods(tmp_path):
    model = make("bert")
    before = output(model, "bert")
    model.add_adapter(SNNKConfig(num_features=4))
    train_(model)
    with pytest.warns(UserWarning, match="multiple adapters"):  # as PEFT does for every method
        model.add_adapter(SNNKConfig(num_features=2, target_modules="pfeiffer"), "second")
    train_(model, "second")
    model.set_adapter("default")
    after = output(model, "bert")
    assert not torch.allclose(after, before)
    model.disable_adapters()
    assert torch.equal(output(model, "bert"), before)
    model.enable_adapters()
    model.delete_adapter("second")
    assert torch.equal(output(model, "bert"), after)
    model.save_pretrained(tmp_path)
    loaded = make("bert")
    loaded.load_adapter(str(tmp_path), adapter_name="again")
    assert torch.equal(output(loaded, "bert"), after) and not any(p.requires_grad for p in loaded.parameters())
    assert torch.equal(output(PeftModel.from_pretrained(make("bert"), tmp_path), "bert"), after)


def test_auto_classes_and_modules_to_save(tmp_path):
    base = make("bert", hf.AutoModelForSequenceClassification)
    base.save_pretrained(tmp_path / "base")
    base = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "base")
    model = get_peft_model(base, SNNKConfig(num_features=4, task_type="SEQ_CLS")).eval()
    train_(model)
    perturb_(model.base_model.model.classifier.modules_to_save["default"])
    model.save_pretrained(tmp_path / "adapter")
    loaded = AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "adapter")
    assert torch.equal(output(loaded, "bert"), output(model, "bert"))


@pytest.mark.parametrize("low", [False, True])
def test_half_precision_models_load_exactly(tmp_path, low):
    model = adapted(dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "adapter_model.safetensors")
    assert {t.dtype for t in stored.values()} == {torch.float32}
    loaded = PeftModel.from_pretrained(make("bert").bfloat16(), tmp_path, low_cpu_mem_usage=low)
    for name, tensor in loaded.state_dict().items():
        if "snnk_adapter" in name:
            assert torch.equal(tensor, stored[name.replace(".default", "")])
    assert torch.equal(output(loaded, "bert"), output(model, "bert"))


def seed_only(tmp_path, **options):
    model = adapted(save_directions=False, trained=False, **options)
    for name, p in model.named_parameters():
        if p.requires_grad:
            perturb_(torch.nn.ParameterDict({"p": p}), 0.3, seed=len(name))
    model.save_pretrained(tmp_path)
    return model


@pytest.mark.parametrize("feature_map", ["relu", "cos", "tanh_power", "arccos0"])
def test_seed_only_files(tmp_path, feature_map):
    model = seed_only(tmp_path, feature_map=feature_map)
    stored = load_file(tmp_path / "adapter_model.safetensors")
    assert {name.rpartition(".")[2] for name in stored} == {"weight", "gate", "checksum"}
    for low in (False, True):
        loaded = PeftModel.from_pretrained(make("bert"), tmp_path, low_cpu_mem_usage=low)
        assert torch.equal(output(loaded, "bert"), output(model, "bert"))
    several = adapted()  # loaded after another adapter, each layer still draws its own
    several.load_adapter(tmp_path, "second")
    several.set_adapter("second")
    assert torch.equal(output(several, "bert"), output(model, "bert"))
    half = adapted(dtype=torch.bfloat16, save_directions=False, feature_map=feature_map, trained=False).bfloat16()
    half.save_pretrained(tmp_path / "half")
    configs = [json.loads((folder / "adapter_config.json").read_text()) for folder in (tmp_path, tmp_path / "half")]
    sums = [config["checksums"] for config in configs]
    assert sums[0] == sums[1] and len(sums[0]) == 4


def test_checksums_tell_draws_apart_and_bear_rounding():
    one = adapted(trained=False, num_features=16)
    two = adapted(trained=False, num_features=16, seed=1)
    sums = [checksum(fm) for model in (one, two) for fm in maps(model).values()]
    apart = [max(abs(a - b) for a, b in zip(x, y, strict=True)) for i, x in enumerate(sums) for y in sums[:i]]
    assert min(apart) > 0.02
    for fm, before in zip(maps(one).values(), sums, strict=False):
        fm.projection.mul_(1 + 1e-6 * torch.randn_like(fm.projection))
        assert max(abs(a - b) for a, b in zip(checksum(fm), before, strict=True)) < 1e-5
        fm.projection[3, 5] += 1
        assert max(abs(a - b) for a, b in zip(checksum(fm), before, strict=True)) > 1e-3


@pytest.mark.parametrize(
    "options, expected",
    [
        ({}, [0.131522, -0.476715, 0.228399, -0.567967]),
        ({"feature_map": "cos"}, [-1.381196, 0.135142, -0.008021, 0.052897]),
        ({"directions": "pca", "feature_map": "gelu"}, [-0.200676, -0.331284, 0.27127, -0.497295]),
    ],
)
def test_checksums_are_those_of_earlier_files(options, expected):
    """Files without projections hold such numbers: with others, or another draw, none of them could be loaded."""
    found = checksum(SNNKConfig(num_features=4, **options).make_feature_map("layer.0", 16))
    assert found == pytest.approx(expected, abs=1e-5)


def edit(folder, **changes):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def refused(folder, message, row="bert", error=ValueError):
    """The adapter does not load, neither first nor second, and the models stay as they were."""
    base, second = make(row), adapted(row)
    before = output(base, row), output(second, row), [p.requires_grad for p in base.parameters()]
    with pytest.raises(error, match=message):
        PeftModel.from_pretrained(base, folder)
    with pytest.raises(error, match=message):
        second.load_adapter(folder, "second")
    assert not any(isinstance(m, AdaptedLinear) for m in base.modules()) and list(second.peft_config) == ["default"]
    assert [p.requires_grad for p in base.parameters()] == before[2]
    assert torch.equal(output(base, row), before[0]) and torch.equal(output(second, row), before[1])


def test_seed_only_files_are_verified(tmp_path):
    seed_only(tmp_path)
    edit(tmp_path, seed=1)
    refused(tmp_path, "checksum.*save_directions=True")
    edit(tmp_path, seed=0, normalize="unit")
    refused(tmp_path, "checksum")
    sums = json.loads((tmp_path / "adapter_config.json").read_text())["checksums"]
    for bad in ({}, dict.fromkeys(sums, "text"), dict.fromkeys(sums, [float("nan")] * 4), {key: [] for key in sums}):
        edit(tmp_path, normalize=None, checksums=bad)
        with pytest.raises(ValueError, match="checksum"):
            PeftModel.from_pretrained(make("bert"), tmp_path)
    edit(tmp_path, checksums=sums)
    PeftModel.from_pretrained(make("bert"), tmp_path)
    edit(tmp_path, normalize=None, num_features=2**36)
    refused(tmp_path, r"is \(16, 4\) in the file and \(16, 68719476736\) in the model")
    edit(tmp_path, num_features=4, feature_map="os.system")
    refused(tmp_path, "unknown feature map 'os.system'")


def test_seed_only_files_are_verified_for_an_adapter_that_is_there(tmp_path):
    """PEFT, and Trainer that resumes, load the tensors alone then."""
    model = seed_only(tmp_path)
    same = adapted(save_directions=False, trained=False).bfloat16()
    same.load_adapter(tmp_path, "default")
    same.float().save_pretrained(tmp_path / "again")
    loaded = PeftModel.from_pretrained(make("bert"), tmp_path / "again")
    assert torch.allclose(output(loaded, "bert"), output(model, "bert"), atol=0.1)  # rounded to half precision
    state = {name: tensor.bfloat16() for name, tensor in get_peft_model_state_dict(model).items()}
    set_peft_model_state_dict(adapted(save_directions=False, trained=False), state)
    other = adapted(save_directions=False, trained=False, seed=1)
    before = output(other, "bert")
    with pytest.raises(ValueError, match=r"directions drawn for encoder\.layer\.0.* have the checksum"):
        other.load_adapter(tmp_path, "default")
    assert torch.equal(output(other, "bert"), before)


def test_seed_only_files_of_transformers_are_verified(tmp_path):
    model = make("bert")
    model.add_adapter(SNNKConfig(num_features=4, save_directions=False))
    for _, layer in layers_of(model, "default"):
        torch.nn.init.ones_(layer.snnk_adapter["default"].gate)
    model.save_pretrained(tmp_path)
    loaded = make("bert")
    loaded.load_adapter(str(tmp_path))
    assert torch.equal(output(loaded, "bert"), output(model, "bert"))
    edit(tmp_path, seed=7)
    refused(tmp_path, "have the checksum")
    base = make("bert")
    with pytest.raises(ValueError, match="have the checksum"):
        base.load_adapter(str(tmp_path))
    assert not any(isinstance(m, AdaptedLinear) for m in base.modules())


def test_seed_only_files_without_checksums_are_refused(tmp_path):
    """By PEFT and by transformers, which reads the configuration in another way."""
    model = seed_only(tmp_path)
    edit(tmp_path, checksums=None, seed=1)
    refused(tmp_path, "no checksums to verify those that seed=1 draws")
    base = make("bert")
    before = output(base, "bert")
    with pytest.raises(ValueError, match="no checksums"):
        base.load_adapter(str(tmp_path))
    assert torch.equal(output(base, "bert"), before)
    assert not any(isinstance(m, AdaptedLinear) for m in base.modules())
    # no file of weights, no refusal: these are settings
    fresh = SNNKConfig(num_features=4, save_directions=False)
    fresh.save_pretrained(tmp_path / "settings")
    for config in (SNNKConfig.from_pretrained(tmp_path / "settings"), replace(fresh, num_features=6)):
        get_peft_model(make("bert"), config)
    model.save_pretrained(tmp_path)
    loaded = make("bert")
    loaded.load_adapter(str(tmp_path))
    assert torch.equal(output(loaded, "bert"), output(model, "bert"))


def test_the_law_of_the_rows_is_kept(tmp_path):
    model = seed_only(tmp_path, projection="iid")
    norms = next(iter(maps(model).values())).projection.norm(dim=1)
    orthogonal = next(iter(maps(adapted(trained=False)).values())).projection.norm(dim=1)
    assert norms.std() > 0.01 * norms.mean() and orthogonal.std() < 1e-5 * orthogonal.mean()
    assert json.loads((tmp_path / "adapter_config.json").read_text())["projection"] == "iid"
    loaded = PeftModel.from_pretrained(make("bert"), tmp_path)
    assert torch.equal(output(loaded, "bert"), output(model, "bert"))
    edit(tmp_path, projection="orthogonal")
    refused(tmp_path, "checksum")
    edit(tmp_path, projection="os.system")
    refused(tmp_path, "unknown projection 'os.system'")


def test_directions_that_were_never_fitted_are_reported(tmp_path):
    model = adapted(trained=False, directions="pca", feature_map="gelu")
    with pytest.warns(UserWarning, match=r"directions='pca' was never fitted.*fit_directions_"):
        model.save_pretrained(tmp_path / "never")
    fit_directions_(model, [inputs("bert")])
    model.save_pretrained(tmp_path / "fitted")
    adapted(trained=False, directions="pca", train_directions=True).save_pretrained(tmp_path / "trained")


def test_changed_projections_are_not_left_out(tmp_path):
    model = adapted(save_directions=False, trained=False)
    next(iter(maps(model).values())).projection.mul_(1.1)
    with pytest.raises(ValueError, match="they were changed"):
        model.save_pretrained(tmp_path)


def test_bad_files(tmp_path):
    adapted().save_pretrained(tmp_path / "good")

    def copy(name):
        shutil.copytree(tmp_path / "good", tmp_path / name)
        return tmp_path / name, tmp_path / name / "adapter_model.safetensors"

    folder, path = copy("truncated")
    path.write_bytes(path.read_bytes()[:-100])
    refused(folder, "is not a whole safetensors file")
    folder, path = copy("corrupted")
    path.write_bytes(b"\xff" * 64)
    refused(folder, "is not a whole safetensors file")
    folder, path = copy("pickle")
    path.unlink()
    torch.save({}, folder / "adapter_model.bin")
    refused(folder, "pickle")
    folder, path = copy("missing")
    tensors = load_file(path)
    gone = next(name for name in tensors if name.endswith("gate"))
    save_file({name: t for name, t in tensors.items() if name != gone}, path)
    refused(folder, f"lacks {gone.removeprefix('base_model.model.')}")
    folder, path = copy("more")
    save_file(tensors | {gone + "s": torch.ones(1)}, path)
    refused(folder, "gates in addition")
    folder, path = copy("features")
    edit(folder, num_features=6)
    refused(folder, rf"\({D}, 4\) in the file and \({D}, 6\) in the model")
    refused(tmp_path / "good", "target_modules=.*fits no layer", row="vit")
    with pytest.raises(ValueError, match="of another size"):
        PeftModel.from_pretrained(make("bert", hidden_size=8), tmp_path / "good")
    with pytest.raises(ValueError, match="lacks"):
        PeftModel.from_pretrained(make("bert", num_hidden_layers=3), tmp_path / "good")


def test_loading_a_state_dict_by_hand_is_strict(tmp_path):
    model = adapted()
    state = get_peft_model_state_dict(model)
    other = adapted(trained=False)
    set_peft_model_state_dict(other, state)
    assert torch.equal(output(other, "bert"), output(model, "bert"))
    state.pop(next(iter(state)))
    with pytest.raises(ValueError, match="lacks"):
        set_peft_model_state_dict(other, state)


def test_a_slow_pattern_is_refused_from_a_file_and_taken_from_python(tmp_path):
    """A lookahead may hide anything, so that no file may have one; the error's advice is to pass config=."""
    pattern = r"encoder\.layer\.\d+\.(?=out)output\.dense"
    options = {"num_features": 4, "target_modules": pattern, "init_weights": False}
    model = get_peft_model(make("bert"), SNNKConfig(**options)).eval()
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="may take hours to match"):
        PeftModel.from_pretrained(make("bert"), tmp_path)
    loaded = PeftModel.from_pretrained(make("bert"), tmp_path, config=SNNKConfig(**options)).eval()
    torch.testing.assert_close(output(loaded, "bert"), output(model, "bert"))


@pytest.mark.parametrize(
    ("pattern", "quick"),
    [
        (r"(.*\.)?encoder\.layer\.\d+\.(attention\.output\.dense|output\.dense)", True),
        (r".*\.layers\.\d+\.(?:q|v)_proj", True),
        (r".*[qkv]_proj$", True),
        ("(a+)+b", False),
        ("(a|a)*b", False),
        ("(a|b){9}", False),
        (".*.*.*.*x", False),
        ("a?" * 20 + "a" * 20, False),
        ("(.|.)" * 25 + "Z|encoder.*", False),
        (r"(.)\1", False),
        ("(?=a)b", False),
        ("a++", False),
        (".*" + "a" * 20_000, False),
    ],
)
def test_patterns_that_a_file_may_have(pattern, quick):
    assert is_quick(pattern, 3) is quick


OLD = {"projection": "random", "rows": "iid", "train_projection": False, "save_projection": False, "projection_seed": 3}


def test_files_from_before_the_rename(tmp_path):
    """They load as they did, and are saved again in today's words."""
    model = seed_only(tmp_path / "new", projection="iid", seed=3)
    config = json.loads((tmp_path / "new" / "adapter_config.json").read_text())
    now = {
        name: config.pop(name) for name in ("directions", "projection", "train_directions", "save_directions", "seed")
    }
    assert now == dict(zip(now, OLD.values(), strict=True))
    unset = {"placement": None, "layers_pattern": None, "feature_pattern": {}}
    old = config | OLD | unset | {"projection_checksums": config.pop("checksums")}
    shutil.copytree(tmp_path / "new", tmp_path / "old")
    (tmp_path / "old" / "adapter_config.json").write_text(json.dumps(old))
    loaded, own = PeftModel.from_pretrained(make("bert"), tmp_path / "old"), make("bert")
    own.load_adapter(str(tmp_path / "old"))
    for found in (loaded, own):
        assert torch.equal(output(found, "bert"), output(model, "bert"))
    loaded.save_pretrained(tmp_path / "again")
    written = json.loads((tmp_path / "again" / "adapter_config.json").read_text())
    assert not written.keys() & (OLD.keys() - {"projection"} | unset.keys()) and written["projection"] == "iid"
    edit(tmp_path / "old", projection_seed=4)
    refused(tmp_path / "old", "checksum")
    edit(tmp_path / "old", feature_pattern={"dense": 2})
    refused(tmp_path / "old", "feature_pattern is set to .*snnk has this setting no more: train without it")


def test_settings_from_before_the_rename():
    found = get_peft_config({"peft_type": "SNNK", "projection": "pca", "placement": "pfeiffer"})
    assert (found.directions, found.projection, found.target_modules) == ("pca", "orthogonal", "pfeiffer")
    with pytest.raises(TypeError, match="unexpected keyword"):
        SNNKConfig(rows="iid")
