"""The masked mean before the classifier, and folders that must not load without it."""

import json
import subprocess
import sys

import pytest
import torch
import transformers
from peft import AutoPeftModelForSequenceClassification

from snnk.finetune import finetune
from snnk.hf.classify.mean import MeanPooled, mean_pooling_

from helpers.tuning import (
    make_config,
    save,
)

KINDS = [transformers.RobertaForSequenceClassification, transformers.MPNetForSequenceClassification]


@pytest.mark.parametrize("kind", [transformers.BertForSequenceClassification, *KINDS])
def test_mean_pooling_is_a_masked_mean(kind, tmp_path):
    folder = save(kind, tmp_path / "base", num_labels=2)
    model = MeanPooled.from_pretrained(folder, num_labels=3, ignore_mismatched_sizes=True).eval()
    ids, mask = torch.randint(3, 43, (2, 6)), torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0]])
    base = getattr(kind.from_pretrained(folder), model.base_model_prefix).eval()
    classifier = getattr(model.classifier, "out_proj", model.classifier)
    with torch.no_grad():
        hidden = base(ids, attention_mask=mask).last_hidden_state
        mean = torch.stack([hidden[0].mean(0), hidden[1, :2].mean(0)])
        assert torch.allclose(model(ids, attention_mask=mask).logits, classifier(mean), atol=1e-5)
        assert torch.allclose(model(ids).logits, classifier(base(ids).last_hidden_state.mean(1)), atol=1e-5)
    model.save_pretrained(tmp_path / "saved")
    again = MeanPooled.from_pretrained(tmp_path / "saved").eval()
    assert torch.equal(again(ids).logits, model(ids).logits) and again.config.snnk_pooling == "mean"


def test_mean_pooling_refuses_models_without_a_pooler():
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=43)
    with pytest.raises(ValueError, match="GPT2ForSequenceClassification has no"):
        mean_pooling_(transformers.GPT2ForSequenceClassification(config))


def test_a_plain_load_of_a_mean_pooled_model_fails(root, tmp_path):
    for method in ("linear-probe", "lora"):
        finetune(make_config(root, tmp_path / method, method=method, max_steps=1))
    with pytest.raises((RuntimeError, ValueError), match="mismatched_sizes"):
        transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "linear-probe")
    with pytest.raises(ValueError, match=r"snnk\.finetune"):
        AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "lora")


PLAIN = """
import json, sys
{imports}
import transformers, warnings
from peft import PeftModel
warnings.simplefilter("ignore")
transformers.utils.logging.disable_progress_bar()
auto = transformers.AutoModelForSequenceClassification
found = {{}}
for name in sys.argv[2:]:
    folder = sys.argv[1] + "/" + name
    for how, load in (
        ("auto", auto.from_pretrained),
        ("peft", lambda folder: PeftModel.from_pretrained(auto.from_pretrained(sys.argv[1] + "/bert"), folder)),
    ):
        try:
            found[name + " " + how] = str(load(folder).config.id2label)
        except Exception as error:
            found[name + " " + how] = type(error).__name__ + ": " + str(error)
print("ANSWERS", json.dumps(found))
"""


def test_without_the_mean_or_without_snnk_a_tuned_folder_fails_and_says_why(root, tmp_path):
    """Plain transformers and PEFT take the folder for another model: they must not load it."""
    methods = ("lora", "snnk", "linear-probe")
    for method in methods:
        features = None if method == "linear-probe" else 2
        finetune(make_config(root, tmp_path / method, method=method, num_features=features, max_steps=0, epochs=None))
    save(transformers.BertModel, tmp_path / "bert")
    config = json.loads((tmp_path / "linear-probe" / "config.json").read_text())
    assert config["id2label"] == {"0": "no", "1": "yes"}
    for imports in ("", "import snnk.peft, snnk.finetune"):
        command = [sys.executable, "-c", PLAIN.format(imports=imports), str(tmp_path), *methods]
        done = subprocess.run(command, capture_output=True, text=True)
        found = json.loads(done.stdout.split("ANSWERS", 1)[1])
        errors = {case: told for case, told in found.items() if "Error: " in told}
        assert errors == found  # nothing loads
        assert all("mismatched_sizes" in errors[f"{method} auto"] for method in ("lora", "linear-probe"))
        assert "pooler.dense" in errors["lora peft"]
        for case in ("snnk auto", "snnk peft"):
            assert (
                ("pooler.dense" in errors[case] or "mismatched" in errors[case])
                if imports
                else ("import snnk.peft" in errors[case])
            )
