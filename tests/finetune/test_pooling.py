"""The masked mean before the classifier, and folders that must not load without it."""

import copy
import inspect
import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers
from peft import AutoPeftModelForSequenceClassification

from snnk.finetune import finetune, load
from snnk.finetune.config import POOLING
from snnk.hf import bundle_, replace_ffn_
from snnk.hf.classify.means import (
    POOLED,
    READINGS,
    LayersPooled,
    MeanPooled,
    NeuronPairsPooled,
    NeuronsPooled,
    PairsPooled,
    pool_means_,
)
from snnk.hf.models import class_of

from helpers.processes import run_code
from helpers.tuning import (
    make_config,
    save,
)

KINDS = [
    transformers.BertForSequenceClassification,
    transformers.RobertaForSequenceClassification,
    transformers.MPNetForSequenceClassification,
]


class Neurons(list):
    """The outputs of the first half of every feed-forward block of a base model, in the last pass."""

    def __init__(self, base):
        for layer in base.encoder.layer:
            layer.intermediate.register_forward_hook(lambda module, args, output: self.append(output))


@pytest.mark.parametrize("loader", [MeanPooled, LayersPooled, NeuronsPooled])
@pytest.mark.parametrize("kind", KINDS)
def test_pooling_is_a_masked_mean(kind, loader, tmp_path):
    folder = save(kind, tmp_path / "base", num_labels=2, num_hidden_layers=3)
    model = loader.from_pretrained(folder, num_labels=3, ignore_mismatched_sizes=True).eval()
    ids, mask = torch.randint(3, 43, (2, 6)), torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0]])
    base = getattr(kind.from_pretrained(folder), model.base_model_prefix).eval()
    classifier = getattr(model.classifier, "out_proj", model.classifier)
    layers, neurons = [3] if loader is MeanPooled else [1, 2, 3], Neurons(base)

    def states(**inputs):
        neurons.clear()
        found = base(ids, output_hidden_states=True, **inputs).hidden_states
        return torch.cat([*(neurons if loader is NeuronsPooled else []), *(found[i] for i in layers)], -1)

    with torch.no_grad():
        hidden = states(attention_mask=mask)
        mean = torch.stack([hidden[0].mean(0), hidden[1, :2].mean(0)])
        found = model(ids, attention_mask=mask)
        assert torch.allclose(found.logits, classifier(mean), atol=1e-5) and found.hidden_states is None
        assert torch.allclose(model(ids).logits, classifier(states().mean(1)), atol=1e-5)
    model.save_pretrained(tmp_path / "saved")
    again = loader.from_pretrained(tmp_path / "saved").eval()
    assert torch.equal(again(ids).logits, model(ids).logits) and again.config.snnk_pooling == loader.pooling
    assert class_of(again.config).__name__ == type(model).__name__ == f"{loader.__name__}{kind.__name__}"


def apart(base, ids, layers):
    """Means of one text, whose first token attends to itself alone: of its neurons, and of some hidden states."""
    tokens = len(ids)
    mask = torch.zeros(1, 1, tokens, tokens)
    mask[:, :, 0, 1:] = torch.finfo(torch.float32).min
    neurons = Neurons(base)
    found = base(torch.tensor([ids]), attention_mask=mask, output_hidden_states=True).hidden_states
    return [part[0, 1:].mean(0) for part in neurons], [found[i][0, 1:].mean(0) for i in layers]


@pytest.mark.parametrize("loader", [PairsPooled, NeuronPairsPooled])
@pytest.mark.parametrize("kind", KINDS)
def test_two_texts_are_read_apart_and_compared(kind, loader, tmp_path):
    folder = save(kind, tmp_path / "base", num_labels=3, num_hidden_layers=3, eos_token_id=2, pad_token_id=0)
    model = loader.from_pretrained(folder, ignore_mismatched_sizes=True).eval()
    base = getattr(kind.from_pretrained(folder), model.base_model_prefix).eval()
    classifier = getattr(model.classifier, "out_proj", model.classifier)
    for network in (base, model.base_model):  # MPNet's further positions count within the whole row
        if hasattr(network.encoder, "relative_attention_bias"):
            torch.nn.init.zeros_(network.encoder.relative_attention_bias.weight)
    bert = kind is KINDS[0]
    first, second = [7, 8, 9, 2], [11, 12, 2]
    between = [] if bert else [2]  # RoBERTa has two separators between the texts
    ids = torch.tensor([[3, *first, *between, *second, 0, 0]])
    mask = (torch.arange(ids.shape[1]) < ids.shape[1] - 2).long()[None]
    types = {"token_type_ids": ((torch.arange(ids.shape[1]) > len(first)) & mask.bool()).long()} if bert else {}
    with torch.no_grad():
        found = model(ids, attention_mask=mask, **types)
        read = [apart(base, [3, *text], [1, 2, 3]) for text in (first, second)]
        means = [[*(neurons if loader is NeuronPairsPooled else []), *states] for neurons, states in read]
        parts = zip(*means, strict=True)
        features = torch.cat([part for u, v in parts for part in ((u - v).abs(), u * v)])
        torch.testing.assert_close(found.logits[0], classifier(features), atol=1e-5, rtol=1e-5)
        keep = int(mask.sum())
        short = model(ids[:, :keep], **{key: value[:, :keep] for key, value in types.items()})  # no padding, no mask
        torch.testing.assert_close(short.logits, found.logits, atol=1e-5, rtol=1e-5)
        same = torch.tensor([[3, *first, *between, *first]])
        kinds = {"token_type_ids": (torch.arange(9) > 4).long()[None]} if bert else {}
        seen = []
        classifier.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        model(same, **kinds)
        (last,) = seen[0][:, -3 * 2 * 16 :].reshape(3, 2, 16).unbind(1)[:1]  # |u - v| of the hidden states
        assert last.abs().max() < 1e-5 < seen[0].abs().max()  # of equal texts
    with pytest.raises(ValueError, match="finds the second text by tokens: give input_ids"):
        model(inputs_embeds=torch.randn(1, 4, 16))
    assert found.hidden_states is None
    model.save_pretrained(tmp_path / "saved")
    again = loader.from_pretrained(tmp_path / "saved").eval()
    assert torch.equal(again(ids, attention_mask=mask, **types).logits, found.logits)
    assert class_of(again.config).__name__ == f"{loader.__name__}{kind.__name__}"


@pytest.fixture
def neurons(tmp_path):
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    folder = save(KINDS[0], tmp_path / "base", num_labels=2, num_hidden_layers=2, **none)
    return NeuronsPooled.from_pretrained(folder, ignore_mismatched_sizes=True).eval()


def test_threads_and_copies_do_not_mix_their_neurons(neurons):
    """A server may answer several requests at once with one model."""
    copied = copy.deepcopy(neurons)
    batches = [torch.randint(3, 43, (2, 4 + i % 5), generator=torch.Generator().manual_seed(i)) for i in range(40)]
    with torch.inference_mode():
        alone = [neurons(ids).logits for ids in batches]
        neurons.bert.encoder.layer[0].intermediate(torch.randn(1, 3, 16))  # a block by itself leaves nothing behind
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda i: (neurons, copied)[i % 2](batches[i]).logits, range(40)))
    for exact, logits in zip(alone, found, strict=True):
        torch.testing.assert_close(logits, exact, atol=1e-6, rtol=1e-6)


def passing_of(model):
    """What the hooks of a model keep during a pass."""
    kept = (inspect.getclosurevars(hook).nonlocals.get("passing") for hook in model.base_model._forward_hooks.values())
    return next(found for found in kept if found is not None)


def test_a_pass_leaves_nothing_to_the_next(neurons):
    ids = torch.randint(3, 43, (2, 5))
    with torch.inference_mode():
        exact = neurons(ids).logits
        assert passing_of(neurons) == {}
        handle = neurons.bert.encoder.layer[1].register_forward_pre_hook(lambda module, args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            neurons(ids)
        handle.remove()
        assert torch.equal(neurons(ids).logits, exact)


def test_blocks_that_were_replaced_have_no_neurons(neurons):
    replace_ffn_(neurons, "top-1", num_features=4)
    bundle_(neurons)
    with pytest.raises(
        ValueError, match=r"'neurons' reads 2 feed-forward blocks, and 1 activations were run: .* 'layers'"
    ):
        neurons(torch.randint(3, 43, (2, 5)))


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradients_through_checkpointed_blocks_are_exact_or_refused(neurons, reentrant):
    ids = torch.randint(3, 43, (2, 5))
    neurons.train()
    weight = neurons.bert.encoder.layer[0].intermediate.dense.weight

    def gradient():
        weight.grad = None
        neurons(ids).logits.square().sum().backward()
        return weight.grad

    exact = gradient()
    neurons.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        neurons.enable_input_require_grads()
        with pytest.raises(ValueError, match=r"gradient_checkpointing_kwargs=\{'use_reentrant': False\}"):
            gradient()
    else:
        torch.testing.assert_close(gradient(), exact)


def test_every_pooling_has_a_reading():
    assert set(POOLING) == {"model", *READINGS} and set(POOLED) == set(READINGS)


@pytest.mark.parametrize("pooling", ["layers", "neurons"])
@pytest.mark.parametrize("method", ["linear-probe", "lora", "snnk"])
def test_a_model_that_reads_layers_is_saved_and_loaded(root, tmp_path, method, pooling):
    features = None if method == "linear-probe" else 2
    config = make_config(root, tmp_path / "out", method=method, pooling=pooling, num_features=features)
    done = finetune(config)
    assert done.model.get_submodule("classifier") is not None
    model, tokenizer = load(tmp_path / "out")
    batch = tokenizer(["w1 w2", "w3"], padding=True, return_tensors="pt")
    with torch.no_grad():
        assert torch.allclose(model(**batch).logits, done.model(**batch).logits, atol=1e-6)
    with pytest.raises((RuntimeError, ValueError)):
        transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")


def test_mean_pooling_refuses_models_without_a_pooler():
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=43)
    with pytest.raises(ValueError, match="GPT2ForSequenceClassification has no"):
        pool_means_(transformers.GPT2ForSequenceClassification(config))


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


@pytest.mark.once
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
        done = run_code(PLAIN.format(imports=imports), tmp_path, *methods)
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
