"""The training loop, against a plain one, in bfloat16 and in two processes."""

import json
from dataclasses import replace

import pytest
import torch
import transformers
from torch import nn

from snnk.finetune import finetune, load
from snnk.finetune.data import Data
from snnk.finetune.settings import TrainingSettings
from snnk.finetune.trainer import _tell_no_checkpoint, evaluate, train

from helpers.processes import free_port, run_code
from helpers.tuning import (
    make_config,
    make_model,
    outputs,
    same,
    save,
    weights,
)


def test_steps_against_a_plain_loop(data):
    settings = TrainingSettings(epochs=2, batch_size=64, learning_rate=1e-2, warmup=0.5, weight_decay=0.1, clip=0.1)
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model, plain = make_model(**quiet), make_model(**quiet)
    train(model, data, None, settings)
    adam = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1)
    step = 0
    for epoch in range(2):
        for indices in data.epoch(64, 0, epoch):
            adam.param_groups[0]["lr"] = 1e-2 * min(1, (step + 1) / 3)
            plain(**data.batch(indices)).loss.backward()
            nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
            adam.step()
            adam.zero_grad()
            step += 1
    assert step == 6
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_the_best_epoch_is_kept_and_patience_ends_the_run(data):
    train_rows, held = data.split(0.3, 0)
    model = make_model()
    done = train(model, train_rows, held, TrainingSettings(epochs=40, learning_rate=0.05, patience=2, batch_size=64))
    assert done.stopped_early and len(done.history) == done.best + 3 and done.steps < done.total_steps
    kept = done.history[done.best]
    assert evaluate(model, held, ["accuracy"])["accuracy"] == kept["accuracy"]
    assert evaluate(model, held, ["accuracy"])["loss"] == pytest.approx(kept["loss"], rel=1e-5)
    assert all((row["accuracy"], -row["loss"]) <= (kept["accuracy"], -kept["loss"]) for row in done.history)


def test_without_validation_the_last_weights_stay(data):
    model = make_model()
    before = weights(model)
    done = train(model, data, None, TrainingSettings(max_steps=3, batch_size=64))
    assert done.steps == 3 and len(done.history) == 2 and not same(before, weights(model))


def test_bf16_and_back_and_the_global_generator(data):
    found = {}
    torch.manual_seed(3)
    state = torch.get_rng_state()
    for name, bf16 in (("before", False), ("bf16", True), ("after", False)):
        model = make_model()
        torch.set_rng_state(state)
        train(model, data, None, TrainingSettings(max_steps=2, bf16=bf16))
        assert torch.equal(torch.get_rng_state(), state)
        found[name] = weights(model)
        assert outputs(model).dtype == torch.float32
    assert same(found["before"], found["after"]) and not same(found["before"], found["bf16"])
    for a, b in zip(found["before"].values(), found["bf16"].values(), strict=True):
        assert b.dtype == torch.float32 and (a - b).abs().max() < 0.01


def test_a_loss_that_is_not_finite_is_reported(data):
    with pytest.raises(ValueError, match="try a lower learning rate"):
        train(make_model(), data, None, TrainingSettings(learning_rate=1e30, max_steps=5, warmup=0.0))


@pytest.mark.once
def test_bad_input_to_train(data):
    model = make_model().requires_grad_(False)
    with pytest.raises(ValueError, match="nothing to train"):
        train(model, data)
    with pytest.raises(ValueError, match="no rows to train on"):
        train(make_model(), Data([], torch.tensor([]), data.collate, []))


def test_fsdp_says_that_it_has_no_checkpoint(tmp_path):
    with pytest.raises(ValueError, match="resume does not work under FSDP"):
        _tell_no_checkpoint(tmp_path / "c", True, True)
    with pytest.warns(UserWarning, match="no checkpoint is written under FSDP"):
        _tell_no_checkpoint(tmp_path / "c", False, True)
    _tell_no_checkpoint(tmp_path / "c", False, False)  # once, by one process
    _tell_no_checkpoint(None, False, True)


SCRIPT = """
import os, sys, warnings
warnings.simplefilter("ignore")
import torch
from snnk.finetune import FinetuneConfig, finetune  # once, before the processes part: it takes longer than the rest
torch.set_num_threads(1)
root, out, port, kind = sys.argv[1:]
if kind == "FSDP":  # accelerate leaves it to accelerators: all is as there but for this choice
    from accelerate import PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
    from snnk.finetune import trainer as loop

    make = loop.make_accelerator

    def make_sharded(bf16):
        made = make(bf16)
        made.state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
        made.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
        return made

    loop.make_accelerator = make_sharded
child = os.fork()
rank = "0" if child else "1"
os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}  # as torchrun does
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "ACCELERATE_USE_CPU": "true"}
finetune(FinetuneConfig(root + "/quiet", out, "snnk-relu", train=root + "/train.tsv", test=root + "/test.tsv",
                        bf16=False, epochs=2, batch_size=50, pooling="mean"))
torch.distributed.destroy_process_group()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.fixture(scope="module")
def one(root):
    save(transformers.BertModel, root / "quiet", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    config = make_config(root, root / "one", method="snnk-relu", batch_size=50)
    return finetune(replace(config, model=str(root / "quiet")))


@pytest.mark.parametrize("kind", ["MULTI_CPU", "FSDP"])
@pytest.mark.once
def test_two_processes_give_what_one_gives(root, one, tmp_path, kind):
    """143 rows in batches of 50: the last has 43, 22 and 21 for the two."""
    done = run_code(SCRIPT, root, tmp_path / "two", free_port(), kind)
    assert done.returncode == 0, done.stderr[-3000:]
    two, _ = load(tmp_path / "two")
    found = json.loads((tmp_path / "two" / "metrics.json").read_text())
    assert found["training"]["processes"] == 2 and one.metrics["training"]["processes"] == 1
    assert found["training"]["distributed"] == kind
    for a, b in zip(one.metrics["training"]["epochs"], found["training"]["epochs"], strict=True):
        assert {k: v for k, v in a.items() if v is not None} == pytest.approx(
            {k: v for k, v in b.items() if v is not None}, rel=1e-4
        )
    # PEFT keeps the classifier that it copied, unused and unsaved
    a, b = ({k: v for k, v in weights(m).items() if "original_module" not in k} for m in (one.model, two))
    assert a.keys() == b.keys()
    assert max(float((a[name] - b[name]).abs().max()) for name in a) < 1e-5


def test_a_second_training_of_a_model_is_in_bfloat16_too(data):
    model, seen = make_model(), []
    model.classifier.register_forward_pre_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    for bf16 in (True, False, True):
        train(model, data, None, TrainingSettings(max_steps=1, bf16=bf16))
    assert seen == [True, False, True]
