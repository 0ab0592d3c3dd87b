"""An audit reports what is stored, tied and computed."""

import copy
import json
import re
import shutil

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file
from torch import nn

from snnk.hf.auditing import audit
from snnk.hf.cost import multiply_adds, stored
from snnk.hf.finding import find_attentions
from snnk.hf.low_rank import replace_attention_

from helpers.architectures import IMAGES, ROWS, TEXT, TOWERS, WIDTH, D, make, replaced, towers

TIED = [
    ("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
    ("cls.predictions.bias", "cls.predictions.decoder.bias"),
]


def save(model, folder, **options):
    model.save_pretrained(folder, **options)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A masked language model, and the same with one bundled block and one of atoms."""
    path, model = tmp_path_factory.mktemp("audit"), make("bert", hf.AutoModelForMaskedLM)
    save(model, path / "plain")
    replaced(model, "relu", [0])
    replaced(model, "atoms", [1])
    save(model, path / "small")
    return path


def ffns(found):
    """The feed-forward blocks of an audit."""
    return [block for block in found.blocks if isinstance(block.features, int)]


@pytest.mark.parametrize("row", ["bert", "gpt2"])  # layers of their own, and one for queries, keys and values
def test_heads_of_fewer_dimensions(row):
    model = make(row)
    before = audit(model)
    ranks = (2, 1)
    replace_attention_(find_attentions(model)[1], ranks)
    found = audit(model)
    heads = [block for block in found.blocks if block not in ffns(found)]
    assert [(block.kind, block.features) for block in heads] == [("dense", (8, 8)), ("low-rank", ranks)]
    assert heads[1].multiply_adds == heads[0].multiply_adds * sum(ranks) // 16 and "2 and 1" in str(found)
    assert found.parameters_unique < before.parameters_unique


@pytest.mark.parametrize("row", ROWS)
def test_every_architecture_is_counted(row):
    model = make(row).train()
    modes, cache = [module.training for module in model.modules()], getattr(model.config, "use_cache", True)
    found = audit(model, tokens=(3, 4))
    assert found.notes == () and {block.kind for block in found.blocks} == {"dense"}
    heads = [(a.head_size, a.head_size) for a in find_attentions(model)]
    assert [block.features for block in found.blocks if block not in ffns(found)] == heads and len(ffns(found)) == 2
    sizes = "3 x 3 x 8 x 8 images" if row in IMAGES else "3 x 4 x 12 sounds" if row == "whisper" else "3 x 4 tokens"
    assert found.batch == sizes
    assert found.parameters_unique == sum({t.data_ptr(): t.numel() for t in model.state_dict().values()}.values())
    assert found.stored_bytes == 4 * found.parameters_unique and found.dtypes == {"float32": found.stored_bytes}
    assert sizes.endswith(f"{found.unit}s")
    assert sum(block.multiply_adds for block in found.blocks) < found.multiply_adds_one < found.multiply_adds
    assert [module.training for module in model.modules()] == modes and not any(p.is_meta for p in model.parameters())
    assert getattr(model.config, "use_cache", True) == cache == ("t5" not in row)  # T5's encoder never has a cache


def test_multiply_adds_by_hand():
    b, n = 3, 5
    model = make("bert")
    ids = {"input_ids": torch.ones(b, n, dtype=torch.long)}
    by_hand = 2 * b * n * (4 * D * D + 2 * D * WIDTH + 2 * n * D) + b * D * D  # two layers, and the pooler
    assert multiply_adds(model, ids) == by_hand == audit(model, tokens=(b, n)).multiply_adds
    biases = 2 * b * n * (5 * D + WIDTH) + b * D
    assert multiply_adds(model, ids, biases=True) == by_hand + biases
    convolution = nn.Conv2d(3, 7, 2, stride=2)
    assert multiply_adds(convolution, {"input": torch.ones(2, 3, 8, 8)}, biases=True) == 2 * 16 * 7 * (12 + 1)


def test_tied_tensors_are_counted_once_in_memory_and_in_a_folder(folders):
    model = hf.AutoModelForMaskedLM.from_pretrained(folders / "plain")
    in_file = load_file(folders / "plain" / "model.safetensors")
    for found in (audit(model), audit(folders / "plain")):
        assert list(found.tied) == TIED and found.notes == ()
        assert found.parameters_unique == sum(t.numel() for t in in_file.values())
        assert found.parameters_stated == found.parameters_unique + TEXT["vocab_size"] * (D + 1)
        assert found.stored_bytes == 4 * found.parameters_unique
        assert set(found.buffers_outside) == {"bert.embeddings.position_ids", "bert.embeddings.token_type_ids"}
        assert found.buffers_outside["bert.embeddings.position_ids"] == 8 * TEXT["max_position_embeddings"]
    assert found.source == str(folders / "plain") and found.model == "BertForMaskedLM"


def test_two_layers_that_are_one_object_are_named():
    model = make("bert")
    before = audit(model)
    layers = model.encoder.layer
    layers[1] = layers[0]
    found = audit(model)
    assert found.tied == (("encoder.layer.0", "encoder.layer.1"),)
    size = sum(p.numel() for p in layers[0].parameters())
    assert found.parameters_stated == before.parameters_stated == found.parameters_unique + size
    assert found.multiply_adds == before.multiply_adds  # it runs twice
    model.encoder.layer[1] = copy.deepcopy(layers[0])
    model.encoder.layer[1].output.dense = layers[0].output.dense
    assert audit(model).tied == (("encoder.layer.0.output.dense", "encoder.layer.1.output.dense"),)
    linear = nn.Linear(2, 2)
    assert list(stored(nn.ModuleDict({"a": linear, "b": linear}))) == ["a.weight", "a.bias"]


def test_tensors_outside_the_state_dict_are_named():
    model = make("vit")
    model.layers[0].register_buffer("mask", torch.zeros(3), persistent=False)
    model.layers[1].loose = torch.zeros(2, dtype=torch.int8)
    model.register_buffer("empty", None, persistent=False)
    assert audit(model).buffers_outside == {"layers.0.mask": 12, "layers.1.loose": 2}


def test_a_compressed_folder_against_its_original(folders):
    found = audit(folders / "small", folders / "plain", latency=True, tokens=(2, 100), rounds=2)
    assert [(b.name, b.kind, b.features) for b in ffns(found)] == [
        ("encoder.layer.0", "relu", 6),
        ("encoder.layer.1", "atoms", 6),
    ]
    assert [b.multiply_adds for b in ffns(found)] == [2 * 6 * D, 2 * 6 * D]
    assert [b.parameters for b in ffns(found)] == [2 * 6 * D + D, 2 * 6 * D + 6 + D]
    in_file = load_file(folders / "small" / "model.safetensors")
    assert found.parameters_unique == sum(t.numel() for t in in_file.values()) and found.notes == ()
    assert found.batch == "2 x 32 tokens"  # the model ends there
    saved = 2 * (2 * D * WIDTH - 2 * 6 * D)
    assert found.original.multiply_adds_one - found.multiply_adds_one == saved
    assert found.ratios["multiply_adds"] == found.multiply_adds / found.original.multiply_adds < 1
    assert found.ratios["seconds"] == found.seconds / found.original.seconds > 0
    assert f"on {torch.get_num_threads()} thread(s)" in found.timing
    assert json.loads(json.dumps(found.to_dict()))["original"]["blocks"][0]["kind"] == "dense"
    shown = str(found)
    assert all(text in shown for text in ("this/original", "encoder.layer.1", "F32", "relu", found.timing, TIED[0][1]))
    alone = audit(folders / "small")
    assert alone.ratios == {} and alone.seconds is None and "original" not in str(alone)
    loaded = audit(hf.AutoModelForMaskedLM.from_pretrained(folders / "small"))
    assert (loaded.blocks, loaded.multiply_adds, loaded.stored_bytes) == (
        alone.blocks,
        alone.multiply_adds,
        alone.stored_bytes,
    )


def test_dtypes_shards_and_another_head(tmp_path):
    model = make("vit", hf.AutoModelForImageClassification).to(torch.bfloat16)
    model.classifier.float()
    save(model, tmp_path / "mixed", max_shard_size="6kB")
    assert len(list((tmp_path / "mixed").glob("*.safetensors"))) > 1
    found = audit(tmp_path / "mixed")
    head = sum(p.numel() for p in model.classifier.parameters())
    assert found.dtypes == {"F32": 4 * head, "BF16": 2 * (found.parameters_unique - head)}
    bare = save(make("vit"), tmp_path / "bare")
    assert audit(bare, tmp_path / "mixed").original.model == "ViTModel"
    assert "the files have" in audit(bare, tmp_path / "mixed").original.notes[0]


def test_unknown_architectures_have_all_but_the_table(tmp_path):
    config = hf.AlbertConfig(**TEXT, embedding_size=8)
    for source in (hf.AlbertModel(config), save(hf.AlbertModel(config), tmp_path / "albert")):
        found = audit(source, latency=True, rounds=1, tokens=(1, 4))
        assert found.blocks == () and re.match(r"no table of blocks: .*'albert'", found.notes[0])
        assert found.multiply_adds > found.multiply_adds_one > 0 and found.seconds > 0


def test_models_that_cannot_be_run_have_all_but_multiply_adds():
    model = hf.Wav2Vec2Model(hf.Wav2Vec2Config(**TEXT, conv_dim=(8,), conv_stride=(2,), conv_kernel=(2,)))
    found = audit(model)
    assert found.multiply_adds is None and found.stored_bytes > 0 and "not counted" in found.notes[0]
    assert "-" in str(found)


@pytest.mark.parametrize("name", TOWERS)
def test_texts_and_images(name):
    found = audit(towers(name), tokens=(3, 4))
    assert found.notes == () and (found.batch, found.unit) == ("3 x 4 tokens", "token")
    assert [block.name.partition(".")[0] for block in found.blocks] == ["text_model"] * 4 + ["vision_model"] * 4
    assert found.multiply_adds > sum(block.multiply_adds for block in found.blocks)


def test_the_same_names_as_for_compress(folders, tmp_path, monkeypatch):
    """A folder of sentence-transformers, and a name on the hub."""
    shutil.copytree(folders / "small", tmp_path / "st" / "0_Transformer")
    (tmp_path / "st" / "modules.json").write_text(
        '[{"idx": 0, "name": "0", "path": "0_Transformer", "type": "sentence_transformers.models.Transformer"}]'
    )
    names = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: names.append(name) or folders / "plain")
    found = audit(tmp_path / "st", "org/name", latency=True, tokens=(1, 3), rounds=1)
    assert [block.kind for block in ffns(found)] == ["relu", "atoms"] and found.seconds > 0
    assert found.original.source == "org/name" and found.original.blocks[0].kind == "dense"
    assert set(names) == {"org/name"} and found.ratios["stored_bytes"] < 1
    (tmp_path / "st" / "0_Transformer" / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="holds an adapter"):
        audit(tmp_path / "st")


def test_errors(folders, tmp_path):
    with pytest.raises(ValueError, match=r"no folder with a model.*config\.json"):
        audit(tmp_path)
    with pytest.raises(ValueError, match="is no folder and cannot be the name of a model on the hub"):
        audit(tmp_path / "none")
    with pytest.raises(TypeError, match="got Linear"):
        audit(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="length of tokens"):
        audit(make("bert"), tokens=(1, 0))
    (tmp_path / "config.json").write_text((folders / "plain" / "config.json").read_text())
    with pytest.raises(ValueError, match=r"has no model\.safetensors"):
        audit(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not one")
    with pytest.raises(ValueError, match="is not a whole safetensors file"):
        audit(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((folders / "plain" / "model.safetensors").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": ["os"]}))
    with pytest.raises(ValueError, match="'os', which transformers does not have"):
        audit(tmp_path)
    for other in (make("bert", hidden_size=8), make("bert", num_hidden_layers=3)):
        with pytest.raises(ValueError, match="give an original of the same sizes"):
            audit(make("bert"), other)
    with pytest.raises(ValueError, match="give an original of the same sizes"):
        audit(make("bert"), make("vit"))
    with pytest.raises(ValueError, match="no weights"):
        audit(make("bert").to("meta"), latency=True)
