import pytest
import torch
from transformers import PreTrainedTokenizerFast
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from snnk.hf.calibration import load_calibration
from snnk.hf.general import general_texts
from snnk.hf.record import hold_out
from snnk.hf.widening import SHARE, gather, substitute, vocabulary, widen

from helpers.texts import make_english, make_images, make_paired, make_texts, make_tokenizer


def rows(batches):
    """Tokens of all texts, without padding."""
    return [
        ids[mask.bool()].tolist()
        for b in batches
        for ids, mask in zip(b["input_ids"], b["attention_mask"], strict=True)
    ]


def test_special_tokens_and_padding_stay_and_the_share_is_met():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 43, (200, 20), generator=generator)
    ids[:, 0], ids[:, 15:] = 2, 0
    batch = {"input_ids": ids, "attention_mask": (ids != 0).long(), "token_type_ids": torch.zeros_like(ids)}
    kept = ids.clone()
    words = torch.arange(100, 200)
    new = substitute(batch, words, [0, 1, 2], share=0.3, generator=generator)
    changed = new["input_ids"] != ids
    assert not changed[:, 0].any() and not changed[:, 15:].any() and torch.equal(batch["input_ids"], kept)
    assert bool((new["input_ids"][changed] >= 100).all()) and len(new["input_ids"][changed].unique()) == 100
    n = 200 * 14
    assert abs(int(changed.sum()) / n - 0.3) < 5 * (0.3 * 0.7 / n) ** 0.5
    assert new["attention_mask"] is batch["attention_mask"] and new["token_type_ids"] is batch["token_type_ids"]
    same = substitute(batch, words, [0, 1, 2], share=0.0, generator=generator)
    assert torch.equal(same["input_ids"], ids)


def test_equal_words_of_a_pair_become_the_same_word():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 13, (50, 20), generator=generator)
    ids[:, 0], ids[:, 15:] = 2, 0
    batch = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    words = torch.arange(100, 1_000_000)  # so many that two draws of the same word are unlikely
    new = substitute(batch, words, [0, 1, 2], share=0.5, generator=generator, alike=True)["input_ids"]
    assert torch.equal(ids[:, :, None] == ids[:, None, :], new[:, :, None] == new[:, None, :])
    changed = new != ids
    assert 0.35 < float(changed[:, 1:15].float().mean()) < 0.65  # half of ten words in each of 50 rows
    assert not changed[:, 0].any() and not changed[:, 15:].any()


def test_pairs_are_widened_by_pairs(tmp_path):
    tokenizer = make_paired(make_english)
    given = load_calibration(None, tokenizer, pairs=True, max_tokens=2000, held_out=20, seed=1)
    given.source = "mine.csv"
    inputs = gather(given, tokenizer, max_length=64, wide=True)
    assert [held.kind for held in inputs.held_out] == ["pairs", "pairs"] and inputs.mixed == inputs.general.items
    assert all(batch["token_type_ids"].unique().tolist() == [0, 1] for batch in inputs.batches)
    before, after = ({tuple(row) for row in rows(part)} for part in ([*given, *inputs.general], inputs.batches))
    assert 0.4 * len(before) < len(before - after) < 0.6 * len(before)


@pytest.mark.parametrize(
    ("tokens", "wanted"),
    [
        (["[UNK]", "the", "##ing", "of", "sea", "123", "[X]", "a.b"], ["the", "sea"]),  # WordPiece
        (["[UNK]", "Ġthe", "ing", "Ġof", "Ġsea", "sea", "Ġ12", "\u010a"], ["Ġthe", "Ġsea"]),  # byte-level BPE
        (["[UNK]", "▁the", "ing", "▁", "▁Straße", "sea"], ["▁the", "▁Straße"]),  # SentencePiece
        (["[UNK]", "w1", "w2"], ["w1", "w2"]),  # no words at all
    ],
)
def test_the_vocabulary_has_whole_words(tokens, wanted):
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="[UNK]"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")
    assert tokenizer.convert_ids_to_tokens(vocabulary(tokenizer).tolist()) == wanted


def test_half_of_the_batches_of_both_kinds_are_changed(tmp_path):
    tokenizer = make_english()
    general = load_calibration(None, tokenizer, max_tokens=4000)
    given = load_calibration(None, tokenizer, max_tokens=2000, seed=1)
    (mixed, plain), (again, _), (other, _) = (
        zip(*widen(given, general, tokenizer, seed=s), strict=True) for s in (0, 0, 1)
    )
    assert len(mixed) == len(given) + len(general)
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(mixed, again, strict=True))
    assert any(not torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(mixed, other, strict=False))
    found = {id(old): new["input_ids"] for new, old in zip(mixed, plain, strict=True)}
    special, words = torch.tensor(tokenizer.all_special_ids), vocabulary(tokenizer)
    for part in (given, general):
        pairs = [(batch["input_ids"], found[id(batch)]) for batch in part]
        assert [not torch.equal(*pair) for pair in pairs] == [i % 2 == 1 for i in range(len(pairs))]
        before, after = (torch.cat([pair[side].flatten() for pair in pairs[1::2]]) for side in (0, 1))
        may = ~torch.isin(before, special)
        assert torch.equal(before[~may], after[~may])
        share, count = float((before != after)[may].float().mean()), int(may.sum())
        # a drawn word may be the old one
        assert abs(share - SHARE) < 5 * (SHARE * (1 - SHARE) / count) ** 0.5 + SHARE / len(words)


def test_what_agreement_is_measured_on_is_neither_fitted_to_nor_changed(tmp_path):
    tokenizer = make_english()
    given = load_calibration(None, tokenizer, max_tokens=2000, held_out=50, seed=1)
    given.source = "mine.txt"
    inputs = gather(given, tokenizer, max_length=64, wide=True)
    assert inputs.held_out[0] is given.held_out and inputs.held_out[1] is inputs.general.held_out
    assert [held.items for held in inputs.held_out] == [50, 500]
    fitted = {tuple(row) for row in rows(inputs.batches)}
    assert not fitted & {tuple(row) for row in rows(inputs.general.held_out)}
    taught = [batch for batch in inputs.lessons if batch is not None]
    assert sorted(rows(taught)) == sorted(rows(given))  # the distillation reads the texts alone, without other words
    narrow = gather(given, tokenizer, max_length=64, wide=False)
    assert narrow.batches == narrow.lessons == list(given) and narrow.mixed == 0 < inputs.mixed
    assert [held.items for held in narrow.held_out] == [50, 500]  # general text is measured on all the same


def test_no_changed_text_becomes_a_held_out_one(tmp_path):
    """Texts of one word, for which other words of the vocabulary are drawn."""
    (tmp_path / "words.txt").write_text("\n".join(f"w{i % 40}" for i in range(400)))
    given = load_calibration(tmp_path / "words.txt", make_tokenizer(), held_out=500)
    for seed in range(5):
        inputs = gather(given, make_tokenizer(), max_length=64, wide=True, seed=seed)
        fitted = {tuple(row) for row in rows(inputs.batches)}
        assert rows(inputs.held_out[0]) and not fitted & {tuple(row) for row in rows(inputs.held_out[0])}


def test_general_text_that_was_given_is_not_drawn_again(tmp_path):
    (tmp_path / "texts.txt").write_text("\n".join(general_texts(2000)))
    given = load_calibration(tmp_path / "texts.txt", make_english(), max_tokens=9000, held_out=50)
    general = gather(given, make_english(), max_length=64, wide=True).general
    parts = [{tuple(row) for row in rows(part)} for part in (given, given.held_out, general, general.held_out)]
    assert not (parts[0] | parts[1]) & (parts[2] | parts[3])


def test_equal_texts_that_are_held_out_are_not_fitted_to(tmp_path):
    """If all texts are the same there is no `held_out`: a tenth of the batches is taken out of the fit."""
    (tmp_path / "same.txt").write_text("w1 w2 w3\n" * 40)
    given = load_calibration(tmp_path / "same.txt", make_tokenizer(), held_out=500)
    assert given.held_out is None
    inputs = gather(given, make_tokenizer(), max_length=64, wide=False)
    assert (inputs.batches, list(inputs.held_out[0])) == hold_out(given) and inputs.held_out[0].items == 3


def test_general_text_is_left_out_where_it_means_nothing(tmp_path):
    (tmp_path / "texts.txt").write_text("\n".join(make_texts(80)))
    given = load_calibration(tmp_path / "texts.txt", make_tokenizer(), held_out=8)
    inputs = gather(given, make_tokenizer(), max_length=64, wide=True)
    assert inputs.general is None and len(inputs.held_out) == 1 and len(inputs.batches) == len(given)
    assert sorted(rows(inputs.batches)) != sorted(rows(given))  # words of the vocabulary are drawn all the same
    general = load_calibration(None, make_english(), max_tokens=2000, held_out=8)
    assert gather(general, make_english(), max_length=64, wide=True).general is None
    images = load_calibration(make_images(tmp_path / "images"), ViTImageProcessorPil(), held_out=2)
    assert gather(images, ViTImageProcessorPil(), max_length=64, wide=True).batches == list(images)
