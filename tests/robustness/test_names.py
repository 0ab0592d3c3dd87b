"""Names from files are data: on the terminal, in error lines, in cards and on pages."""

import json
import shutil
import unicodedata
from html.parser import HTMLParser
from itertools import pairwise

import pytest
import yaml
from markdown_it import MarkdownIt

from snnk._text import code, html, markdown, one_line, printable
from snnk.cli import main
from snnk.experiments import load
from snnk.experiments.lab.data import Source
from snnk.experiments.lab.page import write_page
from snnk.experiments.lab.records import Results
from snnk.finetune.card import model_card

NAME = "[red]x[/red][link=a]\x1b[31m\x9b2J\u202ec\r\n# h\n---\n- ![p](www.q.r) <b>&`|`\x7f\x85:smile: [l](http:q)"
RAW = "".join(c for c in NAME if c not in "\r\n")  # the name of a column


@pytest.fixture
def run(capfd):
    """Call a command. It prints no control character except line ends, and no invisible mark."""

    def call(*args):
        capfd.readouterr()
        with pytest.raises(SystemExit) as stop:
            main([str(arg) for arg in args])
        out, err = capfd.readouterr()
        for text in (out, err):
            bad = {c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") and c != "\n"}
            assert not bad, (bad, text)
        return stop.value.code, out, err

    return call


def shown(text, name):
    """Whether a text shows the name with controls written out; a table may break it into lines."""
    return "".join(printable(name).split()) in "".join(text.split()).replace("│", "")


def check_card(text, base=None):
    """The front matter is YAML, and the rest has no links, pictures or HTML; returns the headings."""
    _, front, body = text.split("---\n", 2)
    found = yaml.safe_load(front)
    assert base is None or found["base_model"] == printable(base)
    tokens = MarkdownIt("commonmark").enable("table").parse(body)
    inner = [part for token in tokens for part in token.children or ()]
    kinds = {token.type for token in [*tokens, *inner]}
    assert not kinds & {"html_block", "html_inline", "image", "link_open", "hr"}, kinds
    return [inline.content for token, inline in pairwise(tokens) if token.type == "heading_open"]


class Elements(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.links, self.texts = set(), set(), []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.links |= {value for name, value in attrs if name in ("href", "src")}

    def handle_data(self, data):
        self.texts.append(data)


def write_csv(path, header, rows):
    quoted = [[f'"{value.replace(chr(34), chr(34) * 2)}"' for value in row] for row in [header, *rows]]
    path.write_text("\n".join(map(",".join, quoted)) + "\n")
    return path


def test_fit_and_predict(run, tmp_path):
    """The target, a class, a column of categories, the files and the folders have hostile names."""
    rows = [[str(i % 7), ("red", RAW)[i % 2], (RAW, "b")[i // 2 % 2]] for i in range(80)]
    folder = tmp_path / NAME.replace("/", ":")
    folder.mkdir()
    table = write_csv(folder / "train.csv", ["a", f"{RAW} c", f"{RAW} y"], rows)
    code, out, _ = run("fit", table, "--target", f"{RAW} y", "--num-features", 16, "--out", folder / "model")
    assert code == 0 and shown(out, f"fit of {RAW} y") and shown(out, folder / "model")
    other = write_csv(folder / "test.csv", ["a", f"{RAW} c"], [["1", f"{RAW} new"], ["2", "red"]])
    code, out, _ = run("predict", folder / "model", other, "--out", folder / "found.csv")
    assert code == 0 and shown(out, f"{RAW} c: 1 values not seen")
    code, _, err = run("fit", table, "--target", "none", "--out", folder / "other")
    assert code == 2 and err.count("\n") == 1 and shown(err, f"{RAW} y")
    code, _, err = run("predict", folder / "model", table.with_name("none.csv"), "--out", folder / "more.csv")
    assert code == 2 and err.count("\n") == 1


def test_compress_and_audit(run, quick, bert, texts):
    name = NAME.replace("/", ":")
    folder = shutil.copytree(bert, bert.parent / name)
    card = f"---\nlicense: mit\nlicense: {NAME}\nlanguage: en\npipeline_tag: '{NAME}'\n---\n# old"
    (folder / "README.md").write_text(card)
    rows = [[str(i), line] for i, line in enumerate(texts.read_text().splitlines())]
    data = write_csv(bert.parent / f"{name}.csv", ["a", RAW], rows)
    out = bert.parent / f"{name} out"
    code, told, _ = run("compress", folder, "--calibration", data, "--text", RAW, "--out", out, "--refine", 0)
    assert code == 0 and shown(told, name) and shown(told, data.name) and shown(told, out)
    headings = check_card((out / "README.md").read_text(), name)
    assert len(headings) == 4 and headings[1] == "How to load it"
    page = Elements()
    page.feed((out / "report.html").read_text())
    assert not page.tags & {"img", "script", "link"} and page.links == {"#words"} and shown("".join(page.texts), name)
    assert "<b>&`" not in (out / "report.html").read_text()
    code, told, _ = run("audit", out, "--original", folder)
    assert code == 0 and shown(told, out)
    (folder / "config.json").write_text(json.dumps({"auto_map": NAME}))
    code, _, err = run("audit", folder)
    assert code == 2 and err.count("\n") == 1 and "auto_map" in err


def test_finetune(run, bert, texts):
    name = NAME.replace("/", ":")
    folder = shutil.copytree(bert, bert.parent / name)
    rows = [[line, (RAW, "b")[i % 2]] for i, line in enumerate(texts.read_text().splitlines())]
    data = write_csv(bert.parent / f"{name}.csv", ["text", RAW], rows)
    out = bert.parent / f"{name} out"
    options = ["--label", RAW, "--method", "linear-probe", "--max-steps", 0, "--out", out]
    code, told, _ = run("finetune", folder, "--train", data, *options)
    assert code == 0 and shown(told, name) and shown(told, out)
    headings = check_card((out / "README.md").read_text(), name)
    assert headings[1:] == ["How to use it", "Data", "Training"]
    code, _, err = run("finetune", folder, "--train", data, "--label", "none", "--out", bert.parent / "other")
    assert code == 2 and err.count("\n") == 1 and shown(err, RAW)


def test_a_page_of_results(tmp_path):
    module = load("pointwise")
    results = Results(tmp_path / "pointwise.json", module.QUICK)
    list(module.run(module.QUICK, results, Source(None, None)))
    stored = json.loads(results.path.read_text())
    kinds = []
    for name in ("plain", NAME):
        body = {**stored, "rows": [{**row, "model": name, "commit": name} for row in stored["rows"]]}
        body["config"] = {**stored["config"], name: name}
        body["environments"] = {key: {**run, "machine": name} for key, run in stored["environments"].items()}
        results.path.write_text(json.dumps(body))
        page = write_page(tmp_path).read_text()
        tokens = MarkdownIt("commonmark").enable("table").parse(page)
        kinds.append([[token.type, *(part.type for part in token.children or () if part.tag)] for token in tokens])
    assert kinds[0] == kinds[1] and "smile" in page and "<b>" not in page and "\x1b" not in page


@pytest.mark.parametrize("function", [printable, one_line, markdown, code, html])
def test_nothing_hidden_is_left(function):
    found = function(NAME + "\ud800")
    assert not {c for c in found if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")}
    found.encode()  # halves of characters cannot be


def test_text_that_is_plain_stays_as_it_is():
    for text in ("bert-base-uncased", "größe_1", "日本　語", "encoder.layer.0", "3 of 4"):
        assert printable(text) == markdown(text) == html(text) == one_line(text) == text
        assert code(text) == f"`{text}`"
    assert len(one_line("a" * 10**6)) < 5000


def test_a_card_of_hostile_metrics(tmp_path):
    """Every name in metrics.json is hostile."""
    metrics = {
        "base_model": NAME,
        "adapter": False,
        "images": False,
        "method": "snnk",
        "summary": "as it is",
        "features": 4,
        "labels": [NAME, "b"],
        "data": {"task": None, "train": NAME, "label": NAME, "validation": None, "rows": {"train": 3, "validation": 1}},
        "scores": {"validation": {"accuracy": 0.5}},
        "parameters": {"trained": 1, "total": 2},
        "classifier_start": {"kind": "random"},
        "training": {
            "epochs": [{"epoch": 0, "step": 0, "accuracy": 0.5}],
            "best": 0,
            "steps": 0,
            "planned_steps": 0,
            "stopped_early": False,
            "seconds": 1.0,
        },
        "settings": {"schedule": NAME},
        "config": {"pooling": "model"},
        "versions": {"snnk": "0"},
    }
    assert check_card(model_card(metrics, ""), NAME)[1:] == ["How to use it", "Data", "Training"]
