"""The page on a fitted model: its figures, pictures and words, for every kind of target, and in a browser."""

import copy
import itertools
import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy import stats

from snnk._html import page
from snnk._text import printable
from snnk.tabular import FitConfig, fit
from snnk.tabular.page import CLASS_WORDS, MOST_BARS, NUMBER_WORDS, html, interval, write_page

from helpers import browser
from helpers.browser import needs_browser
from helpers.compression import check_page
from helpers.tables import make_classes, make_table

EVIL = '<img src="x.png"> & "quotes" \x1b[31m \u202e' + "a" * 90


def hostile():
    """A table whose columns and classes have long names with HTML and control characters."""
    table = make_classes(1500)
    names = [f"{EVIL} {name}" for name in table.column_names]
    table = table.rename_columns(names)
    classes = [f"{EVIL} {value}" for value in table[names[-1]].to_pylist()]
    return table.set_column(5, names[-1], pa.array(classes))


TABLES = {
    "classes": (lambda: make_classes(4000), "y"),
    "two classes": (lambda: _two_classes(), "y"),
    "numbers": (lambda: make_table(2000), "y"),
    "few rows": (lambda: make_table(60), "y"),
    "hostile": (hostile, f"{EVIL} y"),
}


def _two_classes():
    table = make_classes(3000)
    return table.set_column(5, "y", pa.array([value == "high" for value in table["y"].to_pylist()]))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of fitted models, by the kind of table."""
    found = {}
    for kind, (make, target) in TABLES.items():
        folder = tmp_path_factory.mktemp("fit")
        pq.write_table(make(), folder / "data.parquet")
        config = FitConfig(target, num_features=64, feature_map="random-fourier", bandwidth=0.5, drop=())
        fit(folder / "data.parquet", folder / "model", config)
        found[kind] = folder / "model"
    return found


@pytest.fixture(scope="module")
def reports(folders):
    return {kind: json.loads((folder / "report.json").read_text()) for kind, folder in folders.items()}


def page_of(report):
    return check_page(html(report, report["quality"]))


@pytest.mark.parametrize("kind", TABLES)
def test_the_written_page_is_that_of_the_report(folders, reports, kind):
    report = reports[kind]
    assert (folders[kind] / "report.html").read_text() == html(report, report["quality"])


def test_a_page_is_written_whole_or_not_at_all(reports, tmp_path):
    (tmp_path / "report.html").write_text("old")
    with pytest.raises(KeyError):
        write_page(tmp_path / "report.html", reports["classes"], {"task": "classification"})
    assert (tmp_path / "report.html").read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_a_page_of_classes_has_all_figures(reports):
    quality = reports["classes"]["quality"]
    found = page_of(reports["classes"])
    text = " ".join(found.texts)
    for key in ("accuracy", "auc", "log_loss", "calibration_error"):
        assert f"{quality[key]:.4g}" in found.texts, key
    for key in ("accuracy", "most_frequent_accuracy", "balanced_accuracy", "auc"):
        assert f"{100 * quality[key]:.1f} %" in text, key
    for row in quality["classes"]:
        assert row["class"] in found.texts and f"{row['rows']:,}" in found.texts
        assert ("-" if row["recall"] is None else f"{row['recall']:.4f}") in found.texts
    for row in quality["reliability"]:
        assert f"{row['predicted']:.4f}" in found.texts and f"{row['observed']:.4f}" in found.texts
    for row in quality["importances"]["columns"]:
        assert row["column"] in found.texts
        assert f"{row['loss'] + 0.0:.4f} ± {row['standard_deviation']:.4f}".replace("-0.0000", "0.0000") in found.texts
    assert f"Always predicting {quality['most_frequent_class']!r}, the most frequent class" in text
    assert quality["warnings"][0].startswith("Imbalance: 1 of 4") and "imbalance" in found.texts
    assert all(warning in text for warning in quality["warnings"])
    assert len(found.pictures) == 1 and "4,000 rows" in text


def test_a_page_of_numbers_has_all_figures(reports):
    quality = reports["numbers"]["quality"]
    found = page_of(reports["numbers"])
    text = " ".join(found.texts)
    for key in ("r2", "mean_absolute_error", "root_mean_squared_error"):
        assert f"{quality[key]:.4g}" in found.texts, key
    assert f"explain {100 * quality['r2']:.1f} % of the variance of y" in text
    for row in quality["residual_quantiles"]:
        assert f"{100 * row['share']:g} %" in found.texts and f"{row['residual']:.4g}" in found.texts
    for row in quality["binned"]:
        assert all(f"{row[key]:.4g}" in found.texts for key in ("predicted", "observed", "low", "high"))
    assert "Warning:" not in text and len(found.pictures) == 1


@pytest.mark.parametrize(
    ("kind", "own", "other"),
    [("classes", CLASS_WORDS, NUMBER_WORDS), ("numbers", NUMBER_WORDS, CLASS_WORDS)],
)
def test_words_are_explained(reports, kind, own, other):
    found = page_of(reports[kind]).texts
    for word in ("held-out rows", "importance", "inputs", "features", "bandwidth", "penalty", "degrees of freedom"):
        assert word in found, word
    assert all(word in found and meaning in found for word, meaning in own.items())
    assert not any(meaning in found for meaning in other.values())


def facts_of(report):
    """Texts of the table of settings, each with the text behind it."""
    texts = [text for text in page_of(report).texts if text.strip()]
    return dict(itertools.pairwise(texts[texts.index("How it was fitted") : texts.index("Words on this page")]))


def test_a_page_shows_how_the_model_was_fitted(reports):
    report = copy.deepcopy(reports["numbers"])
    facts = facts_of(report)
    assert facts["rows"] == "2,000" and facts["features"] == "64" and facts["bandwidth"] == "0.5"
    assert facts["penalty"] == f"{report['lam']:.4g}, chosen by generalised cross-validation"
    assert facts["missing values"] == "none (they are an error)" and facts["kind of features"] == "random-fourier"
    assert facts["time"].endswith(" s") and "columns left out" not in facts
    report["config"] |= {"lam": 0.5, "missing": "mean", "drop": ["a", "<b>"], "feature_map": "learned"}
    facts = facts_of(report | {"lam": 0.5})
    assert facts["penalty"] == "0.5" and facts["missing values"] == "replaced by the mean of their column"
    assert facts["columns left out"] == "a, <b>" and facts["kind of features"] == "learnt from a sample of the rows"
    assert "bandwidth" not in facts


def test_bars_of_importances_are_scaled_to_the_whole_score(reports):
    for kind, key in (("classes", "accuracy"), ("numbers", "r2")):
        quality = copy.deepcopy(reports[kind]["quality"])
        whole = quality[key]
        quality["importances"]["columns"][0]["loss"] = whole / 4
        quality["importances"]["columns"][-1]["loss"] = -0.3
        text = html(reports[kind], quality)
        widths = [float(w) for w in re.findall(r'<i style="width: ([\d.]+)%', text)]
        assert widths[0] == 25 and widths[-1] == 0 and "left: calc(100.00% - 1px)" in text
        assert f"{whole:.4g}</caption>" in text
    quality["r2"] = -0.5
    assert "the dashed line" not in html(reports["numbers"], quality).partition("Predicted and observed")[0]


def test_many_columns_are_the_largest(reports):
    report = copy.deepcopy(reports["classes"])
    rows = [{"column": f"c{i}", "loss": 0.5 - 0.01 * i, "standard_deviation": 0.0} for i in range(MOST_BARS + 9)]
    report["quality"]["importances"]["columns"] = rows
    found = page_of(report).texts
    assert f"c{MOST_BARS - 1}" in found and f"c{MOST_BARS}" not in found
    assert f"These are the largest {MOST_BARS} of {MOST_BARS + 9}; the others lose less." in " ".join(found)


def test_the_calibration_picture_has_the_groups_in_their_places(reports):
    groups = reports["classes"]["quality"]["reliability"]
    text = html(reports["classes"], reports["classes"]["quality"])
    points = re.findall(r'<circle cx="([\d.]+)%" cy="([\d.]+)%"', text)
    assert len(points) == len(groups) > 2
    for (x, y), row in zip(points, groups, strict=True):  # both axes are from 0 to 1
        assert float(x) == pytest.approx(100 * row["predicted"], abs=0.006)
        assert 100 - float(y) == pytest.approx(100 * row["observed"], abs=0.006)
    label = page_of(reports["classes"]).pictures[0]["aria-label"]
    assert all(f"predicted probability {row['predicted']:.4g}" in label for row in groups)


@pytest.mark.parametrize(("hits", "rows"), [(0, 1), (1, 1), (7, 9), (500, 1000), (1000, 1000)])
def test_intervals_are_those_of_scipy(hits, rows):
    expected = stats.binomtest(hits, rows).proportion_ci(method="wilson")
    assert interval(hits / rows, rows) == pytest.approx((expected.low, expected.high), abs=1e-4)  # of 1.96


def test_few_rows_have_a_page_without_figures(reports):
    report = reports["few rows"]
    found = page_of(report)
    text = " ".join(found.texts)
    assert set(report["quality"]) == {"task", "rows", "warnings"} and not found.pictures
    assert "A regression of y, fitted in closed form to 60 rows." in text and "measured on" not in text
    assert f"Only {report['quality']['rows']} rows were held out" in text and "How it was fitted" in text


def test_hostile_names_stay_text(reports):
    """`check_page` finds tags that load something."""
    found = page_of(reports["hostile"])
    text = " ".join(found.texts)
    assert printable(EVIL) in text and "\x1b" not in text and "\u202e" not in text
    for name in ("x0", "kind", "middle", "rare"):
        assert f"{printable(EVIL)} {name}" in found.texts


def test_figures_that_are_not_defined(reports):
    """None stands for what no number of JSON can hold."""
    report = copy.deepcopy(reports["numbers"])
    quality = report["quality"]
    quality |= {"r2": None, "mean_absolute_error": None, "root_mean_squared_error": 1e290}
    quality["importances"]["columns"] = []
    quality["binned"][3]["high"] = 1.7e308
    assert not page_of(report).pictures
    quality["binned"][3]["high"] = None
    for row in quality["residual_quantiles"]:
        row["residual"] = None
    found = page_of(report)
    text = " ".join(found.texts)
    assert not found.pictures and "1e+290" in found.texts and not re.search(r"\b(nan|inf|None)\b", text)
    report = copy.deepcopy(reports["two classes"])
    report["quality"]["auc"] = None
    assert "AUC" not in " ".join(page_of(report).texts).partition("Which columns matter")[0].replace(" AUC ", "", 1)


@needs_browser
@pytest.mark.parametrize(("width", "dark"), browser.SCREENS)
@pytest.mark.parametrize("kind", TABLES)
def test_the_page_in_a_browser(folders, kind, width, dark):
    found = browser.check_page(folders[kind] / "report.html", width, dark=dark)
    assert found.pictures == (0 if kind == "few rows" else 1) and "How it was fitted" in found.text


@needs_browser
def test_large_and_small_numbers_fit_a_narrow_screen(reports, tmp_path):
    pictures = []
    for power in (-12, 7, 200):
        report = copy.deepcopy(reports["numbers"])
        for row in report["quality"]["binned"]:
            row |= {key: -1.2345 * 10.0**power * abs(row[key]) for key in ("predicted", "observed", "low", "high")}
        pictures += re.findall("<figure.*?</figure>", html(report, report["quality"]), re.DOTALL)
    (tmp_path / "report.html").write_text(page("title", "heading", "".join(pictures)))
    assert browser.check_page(tmp_path / "report.html").pictures == 3
