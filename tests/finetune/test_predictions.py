"""`predict`: rows of files in, probabilities, numbers or scores out, in bounded memory."""

import csv
import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers
from sentence_transformers import CrossEncoder

from snnk.finetune import finetune, load, predict, predictions

from helpers.texts import make_images, make_paired, make_texts, make_tokenizer
from helpers.texts import save as save_model
from helpers.tuning import TINY, make_config, make_rows, write

COUNT = 30
CLASSES = {"id2label": {0: "entailment", 1: "neutral", 2: "contradiction"}}


def rows_of(count=COUNT):
    texts, labels = make_rows(count, seed=3)
    return [
        {"id": f"r{i}", "sentence": text, "label": "yes" if label else "no"}
        for i, (text, label) in enumerate(zip(texts, labels, strict=True))
    ]


def put(path, rows):
    """Write rows in the format of the file's name."""
    kind = path.name.removesuffix(".gz").rpartition(".")[2]
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
        return path
    lines = [json.dumps(row) for row in rows]
    if kind in ("csv", "tsv"):
        mark = "," if kind == "csv" else "\t"
        lines = [mark.join(map(str, values)) for values in (rows[0], *(row.values() for row in rows))]
    text = "\n".join(lines) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def get(path):
    """The rows of an output, with numbers as numbers."""
    if path.suffix == ".parquet":
        return pq.read_table(path).to_pylist()
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    with path.open(newline="") as file:
        found = list(csv.DictReader(file))
    return [{k: float(v) if k.startswith(("probability", "score")) else v for k, v in row.items()} for row in found]


@pytest.fixture(scope="module")
def tuned(root):
    finetune(make_config(root, root / "tuned", method="snnk", num_features=2, max_steps=2))
    return root / "tuned"


@pytest.mark.parametrize(
    ("source", "target"),
    [("a.csv", "p.csv"), ("a.tsv", "p.jsonl"), ("a.jsonl.gz", "p.parquet"), ("a.parquet", "p.csv")],
)
def test_probabilities_and_key_columns_in_every_format(tuned, tmp_path, monkeypatch, source, target):
    """In parts of seven rows, each in batches by length, and still in the order of the rows."""
    sizes, run = [], predictions.Predictor.run

    def watch(self, inputs, *args):
        sizes.append(len(inputs["text"]))
        return run(self, inputs, *args)

    monkeypatch.setattr(predictions, "PART", 7)
    monkeypatch.setattr(predictions.Predictor, "run", watch)
    rows, seen = rows_of(), []
    done = predict(
        *(tuned, put(tmp_path / source, rows)),
        out=tmp_path / target,
        key=["id"],
        batch_size=3,
        progress=lambda done, total: seen.append((done, total)),
    )
    model, tokenizer = load(tuned)
    with torch.no_grad():
        logits = torch.cat([model(**tokenizer(row["sentence"], return_tensors="pt")).logits for row in rows])
    found = get(tmp_path / target)
    assert list(found[0]) == ["id", "predicted_label", "probability_no", "probability_yes"]
    assert [row["id"] for row in found] == [row["id"] for row in rows]
    values = torch.tensor([[row["probability_no"], row["probability_yes"]] for row in found])
    torch.testing.assert_close(values, logits.softmax(-1), rtol=0, atol=1e-5)
    names = [("no", "yes")[i] for i in logits.argmax(1).tolist()]
    assert [row["predicted_label"] for row in found] == names
    right = sum(name == row["label"] for name, row in zip(names, rows, strict=True))
    assert done == (COUNT, {"accuracy": pytest.approx(right / COUNT)}, COUNT, 0) and 0 < right < COUNT
    assert max(sizes) == 7 and sum(sizes) == COUNT  # no part of the file is larger
    assert seen[-1] == (COUNT, COUNT if source == "a.parquet" else 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([source, target])


def test_types_of_key_columns_stay_in_parquet(tuned, tmp_path):
    rows = [{"id": None if i < 3 else i, "sentence": "w1 w2"} for i in range(5)]
    predict(tuned, put(tmp_path / "a.parquet", rows), out=tmp_path / "p.parquet", key="id")
    assert pq.read_schema(tmp_path / "p.parquet").field("id").type == pa.int64()
    assert [row["id"] for row in get(tmp_path / "p.parquet")] == [None, None, None, 3, 4]


def test_predictions_are_scored_again(tuned, tmp_path):
    """The file has columns with the names of the new ones, of other types."""
    rows = [{**row, "predicted_label": 7, "probability_no": "unknown"} for row in rows_of(4)]
    predict(tuned, put(tmp_path / "a.parquet", rows), out=tmp_path / "p.parquet", key="id")
    predict(tuned, tmp_path / "a.parquet", out=tmp_path / "p.jsonl", key="id")
    assert get(tmp_path / "p.parquet") == get(tmp_path / "p.jsonl")


def test_numbers_that_json_does_not_have_are_null(tuned, tmp_path):
    rows = [{"sentence": "w1 w2", "x": x, "more": [1.0, x]} for x in (0.5, float("nan"), float("inf"))]
    predict(tuned, put(tmp_path / "a.parquet", rows), out=tmp_path / "p.jsonl", key="x,more")
    found = get(tmp_path / "p.jsonl")
    assert [(row["x"], row["more"]) for row in found] == [(0.5, [1.0, 0.5]), (None, [1.0, None]), (None, [1.0, None])]


def test_a_regression_of_pairs_gives_numbers(root, tmp_path):
    texts, _ = make_rows(80)
    rows = [
        {"first": text, "second": other, "price": len(text.split()) / 2}
        for text, other in zip(texts, texts[::-1], strict=True)
    ]
    train = put(tmp_path / "train.csv", rows)
    options = {"text": "first", "text_pair": "second", "label": "price", "test": None, "max_steps": 0, "epochs": None}
    finetune(make_config(root, tmp_path / "tuned", train=str(train), **options))
    done = predict(tmp_path / "tuned", train, out=tmp_path / "p.jsonl")
    model, tokenizer = load(tmp_path / "tuned")
    found = [row["predicted_price"] for row in get(tmp_path / "p.jsonl")]
    with torch.no_grad():
        one = model(**tokenizer(rows[5]["first"], rows[5]["second"], return_tensors="pt")).logits.item()
    assert found[5] == pytest.approx(one, abs=1e-5)
    y, guess = torch.tensor([row["price"] for row in rows]), torch.tensor(found)
    r2 = 1 - (y - guess).square().sum() / (y - y.mean()).square().sum()
    assert done.score == {"R2": pytest.approx(float(r2), abs=1e-5)} and 0.1 < r2 < 1


def reranker(folder, **options):
    torch.manual_seed(0)
    config = transformers.BertConfig(**TINY, **{"num_labels": 1, **options})
    return save_model(transformers.BertForSequenceClassification(config), folder, make_paired())


MARK = "torch.nn.modules.linear.Identity"


@pytest.mark.parametrize(
    ("options", "softmax"),
    [
        ({}, False),
        ({"sbert_ce_default_activation_function": MARK}, False),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}, False),
        ({"num_labels": 3, **CLASSES}, True),
    ],
)
def test_scores_are_those_of_the_cross_encoder_of_sentence_transformers(tmp_path, options, softmax):
    reranker(tmp_path / "model", **options)
    rows = [{"query": a, "passage": b} for a, b in zip(make_texts(12), make_texts(12, seed=1), strict=True)]
    data = put(tmp_path / "pairs.csv", rows)
    predict(tmp_path / "model", data, out=tmp_path / "p.jsonl", text="query", text_pair="passage", batch_size=5)
    encoder = CrossEncoder(str(tmp_path / "model"), device="cpu")
    expected = encoder.predict([list(row.values()) for row in rows], apply_softmax=softmax)
    names = [f"probability_{name}" for name in CLASSES["id2label"].values()] if softmax else ["score"]
    found = torch.tensor([[row[name] for name in names] for row in get(tmp_path / "p.jsonl")])
    torch.testing.assert_close(found.squeeze(1), torch.from_numpy(expected), rtol=0, atol=1e-5)
    assert found.std(0).min() > 1e-4


def test_a_folder_that_the_cross_encoder_has_saved_keeps_its_activation(tmp_path):
    encoder = CrossEncoder(str(reranker(tmp_path / "model")), device="cpu", activation_fn=torch.nn.Identity())
    encoder.save_pretrained(str(tmp_path / "saved"))
    data = put(tmp_path / "pairs.csv", [{"query": "w1 w2", "passage": "w3"}])
    predict(tmp_path / "saved", data, out=tmp_path / "p.csv", text="query", text_pair="passage")
    expected = encoder.predict([["w1 w2", "w3"]])[0]
    assert get(tmp_path / "p.csv")[0]["score"] == pytest.approx(float(expected), abs=1e-5)


@pytest.mark.parametrize("padding", [5, None])
def test_a_decoder_reads_the_last_token_of_a_text_in_any_batch(tmp_path, padding):
    """Its configuration has another padding token than its tokenizer, or none."""
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 43, "n_positions": 64, "initializer_range": 0.5}
    config = transformers.GPT2Config(**sizes, num_labels=2, pad_token_id=padding)
    folder = save_model(transformers.GPT2ForSequenceClassification(config), tmp_path / "model")
    file = put(tmp_path / "rows.csv", [{"text": text} for text in make_texts(9)])
    found = {}
    for size in (1, 9):
        predict(folder, file, out=tmp_path / f"{size}.csv", batch_size=size)
        found[size] = [row["probability_LABEL_1"] for row in get(tmp_path / f"{size}.csv")]
    assert found[1] == pytest.approx(found[9], abs=1e-5) and max(found[1]) - min(found[1]) > 0.1


def test_several_classes_may_hold(tmp_path):
    folder = reranker(tmp_path / "model", num_labels=2, problem_type="multi_label_classification")
    predict(folder, put(tmp_path / "a.csv", rows_of(4)), out=tmp_path / "p.csv", text="sentence")
    found = get(tmp_path / "p.csv")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        expected = model(**make_paired()(rows_of(4)[0]["sentence"], return_tensors="pt")).logits.sigmoid()
    assert list(found[0].values()) == pytest.approx(expected[0].tolist(), abs=1e-5)
    assert list(found[0]) == ["probability_LABEL_0", "probability_LABEL_1"]


def test_images_are_named_by_their_files(tmp_path):
    torch.manual_seed(0)
    sizes = {k: v for k, v in TINY.items() if k not in ("vocab_size", "max_position_embeddings")}
    config = transformers.ViTConfig(**sizes, image_size=16, patch_size=8, num_labels=3)
    processor = transformers.ViTImageProcessor(size={"height": 16, "width": 16})
    save_model(transformers.ViTForImageClassification(config), tmp_path / "vit", processor)
    make_images(tmp_path / "images", 5)
    (tmp_path / "images" / "0.png").rename(tmp_path / "images" / "=0.png")
    predict(tmp_path / "vit", tmp_path / "images", out=tmp_path / "p.csv")
    found = get(tmp_path / "p.csv")
    assert sorted(row["file"] for row in found) == ["'=0.png", "1.jpg", "2.JPEG", "3.png", "4.jpg"]  # no formula
    assert all(sum(list(row.values())[2:]) == pytest.approx(1, abs=1e-5) for row in found)
    with pytest.raises(ValueError, match=r"vit reads a folder of images; got .*a\.csv"):
        predict(tmp_path / "vit", put(tmp_path / "a.csv", rows_of(2)), out=tmp_path / "q.csv")


def test_a_class_that_is_a_formula_is_text_to_a_spreadsheet(tmp_path):
    folder = reranker(tmp_path / "model", num_labels=2, id2label={0: "=1+1", 1: "=2+2"})
    data = put(tmp_path / "a.csv", [{"id": "=3", "sentence": "w1"}])
    predict(folder, data, out=tmp_path / "p.csv", key="id", text="sentence")
    header, row = (tmp_path / "p.csv").read_text().splitlines()
    assert header == "id,predicted_label,probability_=1+1,probability_=2+2"
    assert row.startswith(("=3,'=1+1,", "=3,'=2+2,"))  # the key is to be found again


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"out": "p.txt"}, r"the output must end in \.csv, \.jsonl, \.parquet; got .*p\.txt"),
        ({"out": "here.csv"}, "exists already"),
        ({"out": "none/p.csv"}, "there is no folder .*none for p.csv"),
        ({"data": "none.csv"}, r"no file or folder .*none\.csv; expected \.csv"),
        ({"data": "a.xlsx"}, r"a\.xlsx is none of \.tsv, \.csv, \.jsonl"),
        ({"data": "empty.csv"}, "empty.csv is empty: it has no rows"),
        ({"data": "folder"}, "tuned reads a file of texts; got .*folder"),
        ({"data": "other.csv"}, r"no column 'sentence' in .*other\.csv; its columns are id, body.*--text"),
        ({"key": "id,url"}, r"no column 'url' in .*a\.csv; its columns are id, sentence, label"),
        ({"data": "clash.csv", "key": "predicted_label"}, "has a column 'predicted_label' of its own"),
        ({"batch_size": 0}, "batch_size must be a positive integer; got 0"),
        ({"model": "reranker"}, r"reads pairs of texts; name both columns .* are id, sentence, label"),
        ({"model": "bert"}, "bert has BertModel in its config.json, which has no head for classes"),
        ({"model": "reranker", "base": "x"}, "base is for adapters of snnk finetune"),
        ({"model": "odd", "text": "sentence", "text_pair": "id"}, "names the activation 'os.system'; expected one of"),
        ({"data": "bad.jsonl"}, r"bad\.jsonl, line 9, is no JSON"),
    ],
)
@pytest.mark.once
def test_bad_input_leaves_no_output(tuned, root, tmp_path, monkeypatch, options, message):
    monkeypatch.setattr(predictions, "PART", 4)  # the last case fails after the first part was written
    (tmp_path / "here.csv").write_text("mine")
    (tmp_path / "a.xlsx").write_text("")
    (tmp_path / "empty.csv").write_text("sentence\n")
    (tmp_path / "folder").mkdir()
    put(tmp_path / "a.csv", rows_of(3))
    put(tmp_path / "other.csv", [{"id": 1, "body": "w1"}])
    put(tmp_path / "clash.csv", [{"predicted_label": 1, "sentence": "w1"}])
    monkeypatch.setattr(predictions, "HEAD", 5)
    bad = put(tmp_path / "bad.jsonl", rows_of(8))
    bad.write_text(bad.read_text() + "{\n")
    reranker(tmp_path / "reranker", sentence_transformers={"activation_fn": MARK})
    reranker(tmp_path / "odd", sentence_transformers={"activation_fn": "os.system"})
    models = {"tuned": tuned, "bert": root / "bert"}
    name = options.get("model", "tuned")
    before = sorted(tmp_path.iterdir())
    chosen = {k: v for k, v in options.items() if k not in ("model", "data", "out")}
    with pytest.raises((ValueError, OSError), match=message):
        predict(
            models.get(name, tmp_path / name),
            tmp_path / options.get("data", "a.csv"),
            out=tmp_path / options.get("out", "p.csv"),
            **chosen,
        )
    assert sorted(tmp_path.iterdir()) == before and (tmp_path / "here.csv").read_text() == "mine"


def test_files_of_glue_are_read_as_in_the_training(root, tmp_path):
    """Lines of their .tsv may have more values than columns."""
    texts, labels = make_rows(80)
    for name in ("train", "dev"):
        write(tmp_path / f"{name}.tsv", texts, labels)
    options = {"train": None, "test": None, "glue": "sst2", "data_dir": str(tmp_path), "max_steps": 0, "epochs": None}
    done = finetune(make_config(root, tmp_path / "tuned", **options))
    (tmp_path / "dev.tsv").write_text((tmp_path / "dev.tsv").read_text().rstrip("\n") + "\tspare\n")
    found = predict(tmp_path / "tuned", tmp_path / "dev.tsv", out=tmp_path / "p.csv")
    assert found.score["accuracy"] == pytest.approx(done.metrics["scores"]["test"]["accuracy"])


def test_a_tokenizer_without_special_tokens_refuses_a_row_without_tokens(tmp_path):
    folder = reranker(tmp_path / "model", num_labels=2)
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = None
    tokenizer.save_pretrained(folder)
    data = put(tmp_path / "a.jsonl", [{"text": "w1"}, {"text": None}])
    with pytest.raises(ValueError, match=r"the text of row 2 of .*a\.jsonl has no tokens"):
        predict(folder, data, out=tmp_path / "p.csv")


def test_labels_that_are_no_classes_are_counted_and_said(root, tuned, tmp_path, run):
    """Rows without a label are none of these."""
    rows = rows_of()
    rows[0]["label"], rows[1]["label"], rows[2]["label"] = "maybe", "", "perhaps"
    found = predict(tuned, put(tmp_path / "rows.csv", rows), out=tmp_path / "p.csv")
    assert (found.rows, found.scored, found.unknown) == (COUNT, COUNT - 3, 2)
    code, out, _ = run("predict", tuned, tmp_path / "rows.csv", "--out", tmp_path / "q.csv")
    assert code == 0 and "warning: 2 of 29 labels are no class of the model" in out


def test_a_tuned_model_of_the_hub(root, tuned, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, ignore_patterns: str(tuned))
    data = put(tmp_path / "rows.csv", rows_of())
    predict("me/tuned", data, out=tmp_path / "p.csv")
    predict(tuned, data, out=tmp_path / "q.csv")
    assert (tmp_path / "p.csv").read_text() == (tmp_path / "q.csv").read_text()
    assert type(load("me/tuned")[0]).__name__ == type(load(tuned)[0]).__name__
