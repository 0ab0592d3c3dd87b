import json
import random
import tracemalloc
from collections import Counter

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import torch
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from snnk.hf.calibration import _sample, load_calibration
from snnk.hf.data import read_images

from helpers.texts import WORDS, make_english, make_images, make_paired, make_texts, make_tokenizer


def in_order(found):
    rows = [ids[mask.bool()][1:] for batch in found for ids, mask in zip(*map(batch.get, KEYS), strict=True)]
    return [" ".join(WORDS[i - 3] for i in row) for row in rows]


def decoded(found):
    return sorted(in_order(found))


KEYS = "input_ids", "attention_mask"


def write(folder, kind, texts):
    path = folder / f"data.{kind}"
    if kind == "parquet":
        pq.write_table(pa.table({"id": range(len(texts)), "body": texts, "other": ["w7"] * len(texts)}), path)
    elif kind == "jsonl":
        path.write_text("\n".join(json.dumps({"id": i, "body": t, "other": "w7"}) for i, t in enumerate(texts)))
    elif kind in ("csv", "tsv"):
        comma = "," if kind == "csv" else "\t"
        path.write_text(
            f"id{comma}body{comma}other\n" + "".join(f"{i}{comma}{t}{comma}w7\n" for i, t in enumerate(texts))
        )
    else:
        path.write_text("\n\n".join(texts) + "\n")
    return path


@pytest.mark.parametrize("kind", ["txt", "jsonl", "csv", "tsv", "parquet"])
def test_every_text_is_read_once_and_the_column_is_named(tmp_path, kind):
    texts = make_texts()
    found = load_calibration(write(tmp_path, kind, texts), make_tokenizer())
    assert decoded(found) == sorted(texts) and found.items == 60
    assert found.column == (None if kind == "txt" else "body") and found.source == f"data.{kind}"
    assert ("'body'" in str(found)) == (kind != "txt")
    if kind != "txt":
        chosen = load_calibration(write(tmp_path, kind, texts), make_tokenizer(), text="other")
        assert chosen.column == "other" and all(batch["input_ids"].unique().tolist() == [2, 10] for batch in chosen)
        with pytest.raises(ValueError, match=r"no column 'none'.*are id, body, other"):
            load_calibration(tmp_path / f"data.{kind}", make_tokenizer(), text="none")
        if kind in ("csv", "tsv"):  # where everything is a string, also digits are read by name
            assert load_calibration(tmp_path / f"data.{kind}", make_tokenizer(), text="id").items == 60
        else:
            with pytest.raises(ValueError, match=r"'id' of .* has no texts.*are id, body, other"):
                load_calibration(tmp_path / f"data.{kind}", make_tokenizer(), text="id")


def write_arrow(folder, kind, columns):
    path = folder / f"data.{kind}"
    (pq.write_table if kind == "parquet" else pyarrow.feather.write_feather)(pa.table(columns), path)
    return path


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_other_columns_of_a_table_are_not_decoded(tmp_path, kind):
    """20,000 rows of 64 numbers are 41 MB as objects of Python, and the texts less than 2."""
    texts, count = make_texts(20_000), 64
    numbers = pa.FixedSizeListArray.from_arrays(pa.array(torch.rand(count * len(texts)).numpy()), count)
    path = write_arrow(tmp_path, kind, {"vector": numbers, "body": texts})
    load_calibration(path, make_tokenizer(), max_tokens=100)
    tracemalloc.start()
    try:
        found = load_calibration(path, make_tokenizer(), max_tokens=100)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.column == "body" and peak < 15e6


@pytest.mark.parametrize("side", ["right", "left"])
def test_of_long_documents_no_more_is_kept_than_the_model_reads(tmp_path, side):
    """60 documents of 200,000 characters are 12 MB, and the tokens that are read of them less than 0.1."""
    texts = [f"{text} {'w1 w2 w3 w4 ' * 16_000} {text}" for text in make_texts(60)]
    path = write(tmp_path, "txt", texts)
    tokenizer = make_tokenizer()
    tokenizer.truncation_side = side
    tracemalloc.start()
    try:
        found = load_calibration(path, tokenizer, max_length=16)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    part = slice(15) if side == "right" else slice(-15, None)
    assert decoded(found) == sorted(" ".join(text.split()[part]) for text in texts) and peak < 6e6


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize("column", [None, "body"])
def test_the_schema_of_a_table_tells_texts(tmp_path, kind, column):
    """Not the first rows, which may have none; but an id in digits is passed over where there are other strings."""
    texts = make_texts()
    body = pa.array([None] * 150 + texts, pa.string())
    ids = [str(i) for i in range(len(body))]
    path = write_arrow(tmp_path, kind, {"id": ids, "body": body.dictionary_encode(), "label": ["w7"] * len(body)})
    found = load_calibration(path, make_tokenizer(), text=column)
    assert found.column == "body" and decoded(found) == sorted(texts)
    assert load_calibration(path, make_tokenizer(), text="id").items == len(ids)
    path = write_arrow(tmp_path, kind, {"n": range(len(ids)), "id": ids})
    assert load_calibration(path, make_tokenizer()).column == "id"
    path = write_arrow(tmp_path, kind, {"n": range(12), "x": [0.5] * 12})
    with pytest.raises(ValueError, match=r"no column of .* has texts; its columns are n, x"):
        load_calibration(path, make_tokenizer())


@pytest.mark.parametrize(("kind", "comma"), [("csv", ","), ("tsv", "\t")])
def test_values_may_be_quoted(tmp_path, kind, comma):
    path = tmp_path / f"a.{kind}"
    path.write_text(f"id{comma}text\n" + f'1{comma}"w1\nw2"\n' * 12)
    assert decoded(load_calibration(path, make_tokenizer())) == ["w1 w2"] * 12


def test_lone_quotes_of_glue_swallow_no_lines(tmp_path):
    texts = [f"{quote}{text}" for text, quote in zip(make_texts(), ['"', "", ""] * 20, strict=True)]
    path = write(tmp_path, "tsv", texts)
    assert load_calibration(path, make_tokenizer()).items == 60


def test_batches_are_of_like_lengths_padded_and_shuffled_by_seed(tmp_path):
    path = write(tmp_path, "txt", make_texts(200))
    found, again, other = (load_calibration(path, make_tokenizer(), batch_size=8, seed=s) for s in (0, 0, 1))
    assert len(found) == 25 and all(len(batch["input_ids"]) == 8 for batch in found)
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(found, again, strict=True))
    assert [b["input_ids"].shape for b in found] != [b["input_ids"].shape for b in other]
    padding = sum(int((batch["attention_mask"] == 0).sum()) for batch in found)
    assert padding < 0.1 * sum(batch["attention_mask"].numel() for batch in found)
    assert all(bool((b["input_ids"][b["attention_mask"] == 0] == 0).all()) for b in found)
    widths = [batch["input_ids"].shape[1] for batch in found]
    assert widths != sorted(widths)


def test_limits_of_length_and_of_tokens(tmp_path):
    path = write(tmp_path, "txt", make_texts(400))
    found = load_calibration(path, make_tokenizer(), max_length=5, max_tokens=500, batch_size=16)
    assert max(batch["input_ids"].shape[1] for batch in found) == 5
    assert 500 <= sum(int(batch["attention_mask"].sum()) for batch in found) < 500 + 16 * 5
    first = set(make_texts(400)[:100])
    assert not set(decoded(load_calibration(path, make_tokenizer(), max_tokens=500))) <= first  # a sample, not the head


def test_more_texts_than_tokens_are_sampled_in_one_pass(tmp_path):
    """Each ordered pair of six items comes up as often as any other, in 9,000 independent draws."""
    generator, draws = random.Random(0), 9000
    found = Counter(tuple(_sample(range(6), 2, generator)) for _ in range(draws))
    pairs = {(i, j) for i in range(6) for j in range(6) if i != j}
    assert set(found) == pairs
    share = 1 / len(pairs)
    error = (share * (1 - share) / draws) ** 0.5
    assert all(abs(count / draws - share) <= 5 * error for count in found.values())
    assert sorted(_sample(range(6), 9, generator)) == list(range(6))
    texts = make_texts(400)
    some = decoded(load_calibration(write(tmp_path, "txt", texts), make_tokenizer(), max_tokens=60, batch_size=1))
    assert set(some) <= set(texts) and not set(some) <= set(texts[:60])  # 60 of 400 texts are held, and not the first


def test_held_out_texts_are_what_is_left_of_a_longer_file_with_their_names(tmp_path):
    texts = make_texts(400)
    path = write(tmp_path, "txt", texts)
    found = load_calibration(path, make_tokenizer(), max_tokens=2000, held_out=50, batch_size=8)
    held = found.held_out
    assert found.items > 100 and held.items == 50 and held.source == "data.txt" and found.names == ()
    assert in_order(held) == list(held.names) and set(held.names) <= set(texts)
    assert not set(held.names) & set(decoded(found)) and held.held_out is None
    assert "; held out: 50" in str(found)
    wide = load_calibration(path, make_tokenizer(), max_tokens=2000, held_out=50, more_tokens=900, batch_size=8)
    parts = [set(part) for part in (decoded(wide), wide.held_out.names, decoded(wide.more))]
    assert [bool(part) for part in parts] == [True] * 3 and len(set.union(*parts)) == sum(map(len, parts))
    few = load_calibration(path, make_tokenizer(), max_tokens=500, held_out=300, batch_size=8).held_out
    assert 250 <= sum(int(batch["attention_mask"].sum()) for batch in few) < 250 + 8 * 20  # half of max_tokens


def test_a_tenth_of_a_short_file_is_held_out_if_asked_for(tmp_path):
    path = write(tmp_path, "txt", make_texts(60))
    found = load_calibration(path, make_tokenizer(), held_out=500)
    assert (found.items, found.held_out.items) == (54, 6)
    assert sorted([*decoded(found), *found.held_out.names]) == sorted(make_texts(60))
    assert load_calibration(path, make_tokenizer(), held_out=2).held_out.items == 2
    assert load_calibration(path, make_tokenizer()).held_out is None
    short = write(tmp_path, "txt", make_texts(11))
    assert load_calibration(short, make_tokenizer(), held_out=500).items == 10
    shortest = load_calibration(write(tmp_path, "txt", make_texts(10)), make_tokenizer(), held_out=500)
    assert (shortest.items, shortest.held_out.items) == (9, 1)
    with pytest.raises(ValueError, match="held_out must be an integer of at least 0; got -1"):
        load_calibration(path, make_tokenizer(), held_out=-1)


def test_no_held_out_text_is_a_copy(tmp_path):
    """Neither of a text that is fitted to nor of another one that is held out."""
    texts = make_texts(200)
    found = load_calibration(write(tmp_path, "txt", texts * 3), make_tokenizer(), max_tokens=1500, held_out=500)
    names = found.held_out.names
    assert len(names) > 20 and len(set(names)) == len(names) and not set(names) & set(decoded(found))
    for count, wanted in ((200, 20), (10, 1), (2, 1)):  # all of them are fitted to if none is held out
        few = load_calibration(write(tmp_path, "txt", texts[:count] * 8), make_tokenizer(), held_out=500, seed=1)
        names = few.held_out.names
        assert 0.8 * wanted <= len(names) <= wanted and not set(names) & set(decoded(few))
        assert set(names) | set(decoded(few)) == set(texts[:count])
    assert load_calibration(write(tmp_path, "txt", ["w1 w2"] * 40), make_tokenizer(), held_out=9).held_out is None


def test_texts_that_differ_behind_the_cut_are_copies(tmp_path):
    """200 beginnings, each with two ends that the model does not read; also for the distillation."""
    texts = [f"w{i} w{j} w2 w3 w4 w{k}" for i in range(40) for j in range(5) for k in (8, 9)]
    path = write(tmp_path, "txt", texts)
    found = load_calibration(path, make_tokenizer(), max_length=5, max_tokens=200, held_out=5, more_tokens=200)
    parts = [in_order(part) for part in (found, found.held_out, found.more)]
    assert all(parts) and len(set(parts[1])) == len(parts[1]) and len(set(parts[2])) == len(parts[2])
    assert not set(parts[1]) & set(parts[0] + parts[2]) and not set(parts[0]) & set(parts[2])


def test_texts_of_another_result_are_left_out(tmp_path):
    texts = make_texts(80)
    first = load_calibration(write(tmp_path, "txt", texts[:40]), make_tokenizer(), held_out=4, more_tokens=9)
    path = write(tmp_path, "txt", texts)
    other = load_calibration(path, make_tokenizer(), held_out=4, more_tokens=9, without=first.groups)
    assert sorted(decoded(other) + list(other.held_out.names)) == sorted(texts[40:])


def test_names_of_long_texts_are_cut(tmp_path):
    texts = [f"{text} {'w1 ' * 100}w2" for text in make_texts(40)]
    held = load_calibration(write(tmp_path, "txt", texts), make_tokenizer(), held_out=4).held_out
    assert all(len(name) == 200 and name.endswith("...") for name in held.names)
    assert all(any(text.startswith(name[:-3]) for text in texts) for name in held.names)


def test_a_tokenizer_without_padding_is_not_changed(tmp_path):
    tokenizer = make_tokenizer(eos_token="[CLS]")
    found = load_calibration(write(tmp_path, "txt", make_texts()), tokenizer)
    assert tokenizer.pad_token is None and decoded(found) == sorted(make_texts())


def test_strings_as_jsonl_and_values_with_line_breaks(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(text) + "\n" for text in make_texts()))
    assert decoded(load_calibration(tmp_path / "a.jsonl", make_tokenizer())) == sorted(make_texts())
    (tmp_path / "a.csv").write_text("text\n" + '"w1\nw2"\n' * 12)
    assert decoded(load_calibration(tmp_path / "a.csv", make_tokenizer())) == ["w1 w2"] * 12


def make_pairs(count=60):
    return list(zip(make_texts(count), make_texts(count, seed=1), strict=True))


def write_pairs(folder, kind, pairs, names=("one", "two")):
    first, second = map(list, zip(*pairs, strict=True))
    path = folder / f"pairs.{kind}"
    if kind == "parquet":
        pq.write_table(pa.table({"id": range(len(pairs)), names[0]: first, names[1]: second}), path)
    elif kind == "jsonl":
        path.write_text("\n".join(json.dumps({"id": 1, names[1]: b, names[0]: a}) for a, b in pairs))
    else:
        comma = "," if kind == "csv" else "\t"
        path.write_text("".join(comma.join(row) + "\n" for row in [("id", *names), *(("1", *pair) for pair in pairs)]))
    return path


def split(found):
    """Both texts of every pair, told apart by the types of their tokens."""
    keys = ("input_ids", "attention_mask", "token_type_ids")
    rows = [row for batch in found for row in zip(*(batch[key] for key in keys), strict=True)]
    parts = [[ids[mask.bool() & (types == i)] for i in (0, 1)] for ids, mask, types in rows]
    return [tuple(" ".join(WORDS[i - 3] for i in ids if i > 2) for ids in both) for both in parts]


@pytest.mark.parametrize("kind", ["jsonl", "csv", "tsv", "parquet"])
def test_two_columns_are_pairs(tmp_path, kind):
    pairs = make_pairs()
    path = write_pairs(tmp_path, kind, pairs)
    found = load_calibration(path, make_paired(), text="one", text_pair="two", held_out=10)
    assert found.kind == found.held_out.kind == "pairs" and found.column == found.held_out.column == "one,two"
    assert (found.items, found.held_out.items) == (54, 6) and f"54 pairs of pairs.{kind}, column 'one,two'" in str(
        found
    )
    held = split(found.held_out)
    assert sorted(split(found) + held) == sorted(pairs)
    assert list(found.held_out.names) == [" / ".join(pair) for pair in held]
    again = load_calibration(path, make_paired(), text="two", text_pair="one")
    assert sorted(split(again)) == sorted(pair[::-1] for pair in pairs) and again.column == "two,one"
    assert decoded(load_calibration(path, make_paired(), text="two")) == sorted(pair[1] for pair in pairs)


def test_the_longer_text_of_a_pair_is_cut(tmp_path):
    pairs = [(f"w1 w2 w{i}", " ".join(["w3", "w4"] * 50)) for i in range(12)]
    path = write_pairs(tmp_path, "csv", pairs)
    found = load_calibration(path, make_paired(), text="one", text_pair="two", max_length=20, held_out=1)
    for one, two in split(found):
        assert one in dict(pairs) and two == " ".join((["w3", "w4"] * 8)[:16])  # 20 tokens, of which [CLS] is one
    (name,) = found.held_out.names
    assert name.startswith("w1 w2 w") and " / w3 w4 w3" in name and name.endswith("...") and len(name) <= 200


def test_a_name_with_a_comma_is_one_column_if_there_is_one(tmp_path):
    rows = [{"a,b": one, "a": two, "b": "w7"} for one, two in make_pairs()]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = load_calibration(tmp_path / "a.jsonl", make_paired(), text="a,b")
    assert found.kind == "texts" and found.column == "a,b" and decoded(found) == sorted(make_texts())
    both = load_calibration(tmp_path / "a.jsonl", make_paired(), text="a,b", text_pair="a")
    assert both.kind == "pairs" and sorted(split(both)) == sorted(make_pairs())


def test_pairs_that_lack_a_text_are_left_out_and_equal_ones_are_not_held_out(tmp_path):
    pairs = make_pairs(40)
    rows = [*pairs, *pairs, (" ", "w1"), ("w1", "")]
    found = load_calibration(write_pairs(tmp_path, "csv", rows), make_paired(), text="one", text_pair="two", held_out=8)
    assert not set(split(found)) - set(pairs) and not set(split(found)) & set(split(found.held_out))
    swapped = [pair for i, (a, b) in enumerate(pairs) for pair in ((a, b), (b, a)) if i < 20]
    other = load_calibration(
        write_pairs(tmp_path, "csv", swapped), make_paired(), text="one", text_pair="two", held_out=8
    )
    assert other.held_out.items == 4 and sorted(split(other) + split(other.held_out)) == sorted(swapped)


@pytest.mark.parametrize("count", [40, 4])
def test_the_first_texts_of_held_out_pairs_are_in_no_other_part(tmp_path, count):
    """Queries with 15 answers each, of which the fit has room for a third."""
    queries, answers = make_texts(count), make_texts(count * 15, seed=1)
    rows = [(queries[i % count], answer) for i, answer in enumerate(answers)]
    path = write_pairs(tmp_path, "csv", rows)
    options = {"max_tokens": count * 100, "held_out": 20, "more_tokens": 10_000, "batch_size": 8}
    found = load_calibration(path, make_paired(), text="one", text_pair="two", **options)
    fitted, held, more = (split(part) for part in (found, found.held_out, found.more))
    assert min(map(len, (fitted, held, more))) >= 8
    assert not {one for one, _ in held} & {one for one, _ in fitted + more}
    assert not set(fitted) & set(more)


@pytest.mark.parametrize(
    ("name", "content", "columns", "message"),
    [
        ("a.csv", "one,two\nw1,w2\n", ("one", "three"), r"no column 'three' in .*a\.csv; its columns are one, two"),
        ("a.csv", "one,two\nw1,w2\n", ("three", "two"), "no column 'three'"),
        ("a.csv", "one,two\nw1,w2\n", ("one", "one"), "must be two different columns; got 'one' for both"),
        ("a.csv", "one,two\nw1,w2\n", ("one", ""), "text_pair must be the name of a column; got ''"),
        (
            "a.csv",
            "one,two\nw1,w2\n",
            (["one", "two"], None),
            r"text must be the name of a column; got \['one', 'two'\]",
        ),
        ("a.csv", "one,two\nw1,w2\n", ("one", "two"), "has 1 pairs; at least 10 are needed"),
        ("a.csv", "one,two\nw1,w2\n", (None, "two"), "has 1 pairs; at least 10 are needed"),
        ("a.csv", "one,two\nw1,\n", ("one", "two"), "is empty: there is no pair of texts in it"),
        ("a.txt", "w1\n", ("one", "two"), "lines of text, without columns; got text 'one' and text_pair 'two'"),
        ("a.jsonl", '"w1"\n', (None, "two"), "a string per line, without columns; got text_pair 'two': leave it out"),
        ("a.jsonl", '{"one": "w1", "two": 2}\n', ("one", "two"), r"column 'two' of .* has no texts; .* are one, two"),
    ],
)
def test_bad_pairs(tmp_path, name, content, columns, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        load_calibration(tmp_path / name, make_paired(), **dict(zip(("text", "text_pair"), columns, strict=True)))


def test_images(tmp_path):
    folder = make_images(tmp_path / "images")
    (folder / "notes.txt").write_text("not an image")
    processor = ViTImageProcessorPil(size={"height": 16, "width": 16})
    found = load_calibration(folder, processor)
    assert found.items == 12 and found.kind == "images" and found.column is None
    assert all(batch["pixel_values"].shape == (1, 3, 16, 16) for batch in found)
    (folder / "0.png").rename((folder / "more").mkdir() or folder / "more" / "0.png")
    parts = [load_calibration(folder, processor, held_out=1, seed=seed) for seed in range(40)]
    names = [name for part in parts for name in part.held_out.names]
    assert all((part.items, part.held_out.items) == (11, 1) for part in parts)
    assert "more/0.png" in names and all((folder / name).is_file() for name in names)
    (wanted,) = read_images([folder / names[0]], processor)["pixel_values"]
    assert torch.equal(parts[0].held_out[0]["pixel_values"][0], wanted)
    assert not any(torch.equal(batch["pixel_values"][0], wanted) for batch in parts[0])
    (folder / "broken.png").write_bytes(b"\x89PNG but no more")
    with pytest.raises(ValueError, match=r"broken\.png cannot be read as an image"):
        load_calibration(folder, processor)
    with pytest.raises(ValueError, match="calibrated with a folder of images"):
        load_calibration(folder / "notes.txt", processor)
    with pytest.raises(ValueError, match="calibrated with a file of texts"):
        load_calibration(folder, make_tokenizer())
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match="has no images"):
        load_calibration(tmp_path / "none", processor)
    with pytest.raises(ValueError, match="has 3 images; at least 10"):
        load_calibration(make_images(tmp_path / "few", 3), processor)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "", "is empty"),
        ("a.txt", " \n\n", "is empty"),
        ("a.jsonl", "", "is empty"),
        ("a.csv", "text\n", "is empty"),
        ("a.txt", "w1\nw2\n", "has 2 texts; at least 10"),
        ("a.txt", b"\xff\xfe\x00", "cannot be read as .txt in UTF-8"),
        ("a.jsonl", '{"a": "b"}\n{', "line 2, is no JSON"),
        ("a.jsonl", "[1]\n", "an object or a string per line"),
        ("a.jsonl", '{"a": 1}\n', "no column of .* has texts; .* are a"),
        ("a.csv", "a,b\n1,2.5\n", "no column of .* has texts; .* are a, b"),
        ("a.parquet", "text", "cannot be read as Parquet"),
    ],
)
def test_bad_files(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        load_calibration(path, make_tokenizer())


@pytest.mark.parametrize(("unknown", "fails"), [(5, False), (6, True)])
def test_texts_that_the_tokenizer_does_not_know(tmp_path, unknown, fails):
    """Half of ten words may be; [CLS], which is in every text, counts as neither."""
    path = write(tmp_path, "txt", [" ".join(["other"] * unknown + ["w1"] * (10 - unknown))] * 12)
    if fails:
        with pytest.raises(ValueError, match=r"60% of the tokens of .*data\.txt are unknown to the tokenizer.* has 43"):
            load_calibration(path, make_tokenizer(pad_token="[PAD]", cls_token="[CLS]"))
    else:
        assert load_calibration(path, make_tokenizer(pad_token="[PAD]", cls_token="[CLS]")).items == 12
    assert load_calibration(path, make_tokenizer(eos_token="[UNK]")).items == 12  # it stands for something else too


def test_bad_arguments(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no calibration file or folder .*a\.txt"):
        load_calibration(tmp_path / "a.txt", make_tokenizer())
    path = write(tmp_path, "txt", make_texts())
    with pytest.raises(ValueError, match="without columns; got text 'x': leave it out"):
        load_calibration(path, make_tokenizer(), text="x")
    with pytest.raises(ValueError, match="max_length must be a positive integer"):
        load_calibration(path, make_tokenizer(), max_length=0)


def test_without_a_file_the_general_text_is_read():
    tokenizer = make_english()
    found, again = (load_calibration(None, tokenizer, max_tokens=3000, held_out=40) for _ in range(2))
    assert found.source == "general text of snnk" and found.column is None and found.held_out.items == 40
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(found, again, strict=True))
    tokens = sum(int(batch["attention_mask"].sum()) for batch in found)
    assert 3000 <= tokens < 3500 and "general text of snnk; held out: 40" in str(found)
    used = {
        tuple(ids[mask.bool()].tolist()) for batch in found for ids, mask in zip(*map(batch.get, KEYS), strict=True)
    }
    held = {tuple(tokenizer(text)["input_ids"]) for text in found.held_out.names if not text.endswith("...")}
    assert len(held) > 30 and not held & used


def test_general_text_as_pairs():
    tokenizer = make_paired(make_english)
    found = load_calibration(None, tokenizer, pairs=True, max_tokens=3000, held_out=40)
    assert found.kind == "pairs" and found.held_out.items == 40 and "pairs of general text of snnk" in str(found)
    assert all(batch["token_type_ids"].unique().tolist() == [0, 1] for batch in found)
    both = [name.split(" / ") for name in found.held_out.names]
    assert all(len(parts) == 2 for parts in both) and len({text for parts in both for text in parts}) == 80


def test_the_general_text_is_refused_where_it_means_nothing():
    with pytest.raises(ValueError, match="no general calibration for images; name a folder"):
        load_calibration(None, ViTImageProcessorPil())
    with pytest.raises(ValueError, match="general text of snnk has no columns; got text 'body': name a file"):
        load_calibration(None, make_english(), text="body")
    with pytest.raises(ValueError, match="of the tokens of general text of snnk are unknown to the tokenizer"):
        load_calibration(None, make_tokenizer())
