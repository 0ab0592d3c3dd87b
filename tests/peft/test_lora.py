"""to_lora: least squares against an oracle, exactness for linear adapters, and files that need no snnk."""

import pytest
import torch
import transformers as hf
from peft import PeftModel, get_peft_model
from safetensors.torch import save_file

from snnk.peft import SNNKConfig, to_lora
from snnk.peft.model import layers_of

from helpers.adapters import adapted, train_
from helpers.architectures import D, make, output
from helpers.processes import run_code

LINEAR = {"directions": "pca", "feature_map": "identity", "use_bias": True}  # delta(y) is linear in y, and so in x


def batches(count=12, size=16, seed=3):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(size, 7, dtype=torch.long)
    mask[: size // 2, 5:] = 0
    return [
        {"input_ids": torch.randint(3, 40, (size, 7), generator=generator), "attention_mask": mask}
        for _ in range(count)
    ]


def seen(model, site, batch):
    """x and delta(y) at one layer, tokens without padding, in float64."""
    layer = dict(layers_of(model, "default"))[site]
    rows = []
    handle = layer.register_forward_pre_hook(lambda _, args: rows.append(args[0]))
    with torch.no_grad():
        model(**batch)
        handle.remove()
        mask = batch["attention_mask"].bool().flatten()
        x = rows[0].reshape(-1, rows[0].shape[-1])[mask]
        return x.double(), layer.snnk_adapter["default"].delta(layer.base_layer(x)).double()


@pytest.mark.parametrize("row", ["bert", "gpt2", "opt"])
def test_linear_adapters_are_exact(row, tmp_path):
    model = adapted(row, dtype=torch.float64, **LINEAR)
    state = [(n, p.requires_grad) for n, p in model.named_parameters()]
    found = to_lora(model, 4, batches())
    assert [(n, p.requires_grad) for n, p in model.named_parameters()] == state and not model.training
    assert found.config.lora_bias and min(site.explained for site in found.sites) > 1 - 1e-9
    found.save_pretrained(tmp_path)
    lora = PeftModel.from_pretrained(make(row).double(), tmp_path)
    assert torch.allclose(output(lora, row), output(model, row), atol=1e-5)  # LoRA is in float32
    assert found.tokens + found.held_out_tokens == sum(int(b["attention_mask"].sum()) for b in batches())
    lost = to_lora(model, 2, batches())
    assert 0 < lost.explained < 0.999
    merged = lora.merge_and_unload()
    assert torch.allclose(output(merged, row), output(model, row), atol=1e-5)


def test_layers_without_bias():
    """Llama's layers have none: a bias is not carried, and what has no mean loses nothing."""
    options = LINEAR | {"use_bias": False, "dtype": torch.float64}
    model = adapted("llama", trained=False, **options)
    for _, layer in layers_of(model, "default"):
        adapter = layer.snnk_adapter["default"]
        adapter.feature_map.projection.mul_(1.1)  # as fitted: what was never is warned about
        for tensor in (adapter.weight, adapter.gate):
            torch.nn.init.normal_(tensor, generator=torch.Generator().manual_seed(1))
    found = to_lora(model, 4, batches())
    assert not found.config.lora_bias and not any("bias" in name for name in found.state_dict)
    assert found.explained > 1 - 1e-9
    assert "without a bias" in str(found)


def test_against_an_oracle():
    """Reduced-rank regression on all tokens at once, and its error on the held-out batch."""
    model, data = adapted(num_features=8, dtype=torch.float64), batches()
    found = to_lora(model, 3, data)
    held = data[9]  # every tenth
    tokens = [b for b in data if b is not held]
    assert found.tokens == sum(int(b["attention_mask"].sum()) for b in tokens)
    assert found.held_out_tokens == int(held["attention_mask"].sum())
    total = [0.0, 0.0]
    for site in found.sites:
        x, d = (torch.cat(parts) for parts in zip(*(seen(model, site.name, b) for b in tokens), strict=True))
        m = torch.linalg.lstsq(x - x.mean(0), d - d.mean(0), driver="gelsd").solution  # (in, out)
        _, _, v = torch.linalg.svd((x - x.mean(0)) @ m, full_matrices=False)
        m = m @ v[:3].T @ v[:3]
        c = d.mean(0) - x.mean(0) @ m
        x, d = seen(model, site.name, held)
        error = float((d - x @ m - c).square().sum(1).mean())
        variance = float((d - d.mean(0)).square().sum(1).mean())
        assert site.explained == pytest.approx(1 - error / variance, abs=2e-2)
        assert site.variance == pytest.approx(variance)
        total = [total[0] + site.error, total[1] + site.variance]
        key = f"base_model.model.{site.name}.lora_"
        lora = found.state_dict[f"{key}B.weight"] @ found.state_dict[f"{key}A.weight"]
        d_lora = x @ lora.double().T + found.state_dict[f"{key}B.bias"]
        assert float((d - d_lora).square().sum(1).mean()) == pytest.approx(site.error, rel=1e-4)
    assert found.explained == pytest.approx(1 - total[0] / total[1])
    lines = str(found).splitlines()
    assert len(lines) == 7 and lines[1].split()[1:3] == ["8", "3"] and lines[5].startswith("all layers")


def test_plain_modules_and_names_that_are_endings_of_others(tmp_path):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.inner = torch.nn.Linear(D, D), torch.nn.ModuleDict({"first": torch.nn.Linear(D, D)})
            self.outer = torch.nn.ModuleDict({"inner": torch.nn.ModuleDict({"first": torch.nn.Linear(D, D)})})

        def forward(self, x):
            return self.outer["inner"]["first"](self.inner["first"](torch.tanh(self.first(x))))

    torch.manual_seed(0)
    net, x = Net().eval(), torch.randn(20, 16, D)
    plain = {name: value.clone() for name, value in net.state_dict().items()}
    model = get_peft_model(net, SNNKConfig(num_features=4, target_modules="first|outer.inner.first", **LINEAR))
    train_(model)
    to_lora(model, 4, [{"x": batch} for batch in x]).save_pretrained(tmp_path)
    base = Net().eval()
    base.load_state_dict(plain)
    lora = PeftModel.from_pretrained(base, tmp_path)
    sites = [name for name, _ in lora.named_modules() if name.endswith("lora_A")]
    assert sites == ["base_model.model.first.lora_A", "base_model.model.outer.inner.first.lora_A"]
    assert torch.allclose(lora(x[0]), model(x[0]), atol=1e-4)


def test_only_the_named_adapter_is_converted():
    model = adapted(**LINEAR)
    alone = to_lora(model, 2, batches())
    model.add_adapter("second", SNNKConfig(num_features=6, feature_map="cos"))
    train_(model, "second")
    model.base_model.set_adapter(["default", "second"])
    together, active = to_lora(model, 2, batches()), model.active_adapters
    assert active == ["default", "second"]
    for name, tensor in alone.state_dict.items():
        assert torch.allclose(together.state_dict[name], tensor, atol=1e-6)


PLAIN = """
import sys
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification
folder = sys.argv[1]
base = AutoModelForSequenceClassification.from_pretrained(folder + "/base")
model = PeftModel.from_pretrained(base, folder + "/lora")
expected = load_file(folder + "/expected.safetensors")
with torch.no_grad():
    found = model(input_ids=expected["input_ids"]).logits
assert "snnk" not in sys.modules
assert torch.allclose(found, expected["logits"], atol=1e-4), (found - expected["logits"]).abs().max()
print("equal")
"""


@pytest.mark.once
def test_a_process_without_snnk_loads_it(tmp_path):
    base = make("bert", hf.AutoModelForSequenceClassification)
    base.save_pretrained(tmp_path / "base")
    model = get_peft_model(base, SNNKConfig(num_features=4, task_type="SEQ_CLS", **LINEAR)).eval()
    train_(model)
    torch.nn.init.normal_(model.base_model.model.classifier.modules_to_save["default"].weight)
    to_lora(model, 4, batches()).save_pretrained(tmp_path / "lora")
    ids = batches(1)[0]["input_ids"]
    with torch.no_grad():
        save_file({"input_ids": ids, "logits": model(input_ids=ids).logits}, tmp_path / "expected.safetensors")
    done = run_code(PLAIN, tmp_path)
    assert done.returncode == 0 and "equal" in done.stdout, done.stderr[-3000:]


@pytest.mark.once
def test_bad_input():
    model = adapted()
    with pytest.raises(ValueError, match=r"no SNNK adapter 'other'; its adapters are \['default'\]"):
        to_lora(model, 2, batches(), "other")
    with pytest.raises(ValueError, match=f"rank must be at most {D}"):
        to_lora(model, D + 1, batches())
    with pytest.raises(ValueError, match="rank must be a positive integer"):
        to_lora(model, 0, batches())
    with pytest.raises(ValueError, match="at least two batches"):
        to_lora(model, 2, batches(1))
    with pytest.raises(TypeError, match="a batch must be a dict"):
        to_lora(model, 2, [torch.ones(2, 3)])
    with pytest.raises(ValueError, match="no SNNK adapter"):
        to_lora(make("bert"), 2, batches())
