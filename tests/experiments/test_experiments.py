"""Loaders, the page of claims and the experiments that train small networks."""

import gzip
import json
import shutil
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from snnk import URF, ProjectedURF
from snnk.cli import main
from snnk.experiments import estimators, load, mnist, names, pointwise, trainable_parameters, uci
from snnk.experiments.lab import data
from snnk.experiments.lab.page import write_page
from snnk.experiments.lab.records import Results, Stored
from snnk.experiments.lab.training import evaluate, fit_classifier, mlp


def run(capsys, *args):
    with pytest.raises(SystemExit) as stop:
        main(list(args))
    out, err = capsys.readouterr()
    return stop.value.code, out, err


def write_idx(path, array):
    head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    body = head + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(body) if path.suffix == ".gz" else body)


@pytest.fixture
def digits(tmp_path, monkeypatch):
    """A folder like MNIST's, with 40 and 20 images of bars whose place is their class."""
    monkeypatch.setitem(data.DATASETS, "mnist", replace(data.DATASETS["mnist"], rows={"train": 40, "test": 20}))
    folder = tmp_path / "mnist"
    folder.mkdir()
    for stem, rows, end in (("train", 40, ".gz"), ("t10k", 20, "")):
        labels = np.arange(rows) % 10
        images = np.zeros((rows, 28, 28))
        images[np.arange(rows), 2 * labels] = 255
        write_idx(folder / f"{stem}-images-idx3-ubyte{end}", images)
        write_idx(folder / f"{stem}-labels-idx1-ubyte{end}", labels)
    return data.Source(str(tmp_path))


def test_mnist_from_files(digits):
    splits = data.mnist(digits)
    assert splits["train"].x.shape == (40, 784) and len(splits["test"]) == 20
    assert splits["train"].x.max() == 1 and splits["train"].y.tolist() == [i % 10 for i in range(40)]
    assert (splits["test"].x.reshape(20, 28, 28).sum(2).argmax(1) == 2 * splits["test"].y).all()


def test_a_file_cut_short_or_with_other_rows_is_refused(digits, tmp_path):
    path = tmp_path / "mnist" / "t10k-labels-idx1-ubyte"
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    with pytest.raises(ValueError, match="not a complete idx file"):
        data.mnist(digits)
    write_idx(path, np.zeros(19))
    with pytest.raises(ValueError, match="19 rows instead of 20"):
        data.mnist(digits)


def test_missing_data_says_what_and_where(capsys, tmp_path):
    code, _, err = run(capsys, "reproduce", "mnist", "--data-dir", str(tmp_path), "--out", str(tmp_path / "out"))
    assert code == 2 and err.count("\n") == 1
    assert "train-images-idx3-ubyte" in err and str(tmp_path) in err and "yann.lecun.com" in err
    code, _, err = run(capsys, "reproduce", "uci", "--out", str(tmp_path / "out"))
    assert code == 2 and "--data-dir" in err and "archive.ics.uci.edu" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("end", [".csv", ".csv.gz", ".parquet"])
def test_tables_of_uci(tmp_path, monkeypatch, end):
    import pyarrow as pa
    import pyarrow.parquet as pq

    monkeypatch.setitem(data.DATASETS, "covertype", replace(data.DATASETS["covertype"], rows={"all": 3}))
    rows = [[1.5, -2e-3, 7], [0.0, 4.0, 1], [3.0, 5.0, 2]]
    path = tmp_path / f"covtype{end}"
    if end == ".parquet":
        columns = list(zip(*rows, strict=True))
        pq.write_table(pa.table({"Cover_Type": columns[2], "a": columns[0], "b": columns[1]}), path)
    else:
        text = "\n".join(",".join(map(str, row)) for row in rows) + "\n"
        path.write_bytes(gzip.compress(text.encode()) if end.endswith("gz") else text.encode())
    split = data.covertype(data.Source(str(tmp_path)))
    assert torch.allclose(split.x, torch.tensor([row[:2] for row in rows])) and split.y.tolist() == [6, 0, 1]


def test_cifar_tiles(tmp_path, monkeypatch):
    from PIL import Image

    monkeypatch.setitem(data.DATASETS, "cifar10", replace(data.DATASETS["cifar10"], rows={"train": 6, "test": 6}))
    images = np.random.default_rng(0).integers(0, 256, (6, 32, 32, 3), dtype=np.uint8)
    mosaic = images.reshape(2, 3, 32, 32, 3).swapaxes(1, 2).reshape(64, 96, 3)
    for name in ("data_batch_1", "test_batch"):
        Image.fromarray(mosaic).save(tmp_path / f"{name}.webp", lossless=True)
    np.savez(tmp_path / "labels.npz", train=np.arange(9), test=np.arange(6))
    splits = data.cifar10(data.Source(str(tmp_path)))
    assert (splits["train"].x.numpy() == images).all() and splits["train"].y.tolist() == list(range(6))


def test_images_through_datasets(tmp_path, monkeypatch):
    """A local folder in the place of a hub name takes the same path through the library."""
    from PIL import Image

    for split in ("train", "test"):
        for label in range(2):
            folder = tmp_path / "images" / split / str(label)
            folder.mkdir(parents=True)
            Image.fromarray(np.full((28, 28), 255 * label, np.uint8)).save(folder / "a.png")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    known = replace(data.DATASETS["mnist"], hub=str(tmp_path / "images"), rows={"train": 2, "test": 2})
    monkeypatch.setitem(data.DATASETS, "mnist", known)
    splits = data.mnist(data.Source(data.HUB))
    assert splits["train"].x.shape == (2, 784) and (splits["train"].x.mean(1).long() == splits["train"].y).all()


def test_stratified_halves_are_disjoint_and_fair():
    y = torch.arange(100) % 4
    kept, held = data.stratified(y, 0.25, seed=0)
    assert sorted(torch.cat([kept, held]).tolist()) == list(range(100))
    assert torch.bincount(y[held]).tolist() == [6, 6, 6, 6]


def test_training_keeps_the_best_epoch():
    """The reported figures are those of the epoch of least validation loss, and the classes are learnt."""
    whole = data.made(1200, 6, 3, seed=0)
    parts = {key: whole.take(torch.arange(*span)) for key, span in (("train", (0, 800)), ("test", (800, 1200)))}
    parts["validation"] = parts["test"]
    made = []

    def make():
        made.append(mlp((6, 32, 32, 3), 32, mnist.Config(), seed=0))
        return made[0]

    before = torch.random.get_rng_state()
    row = fit_classifier(make, parts, epochs=6, batch_size=32, learning_rate=1e-2, seed=0)
    assert torch.equal(before, torch.random.get_rng_state())
    assert row["best_epoch"] == 1 + int(np.argmin(row["validation_losses"])) and len(row["train_losses"]) == 6
    assert row["test_loss"] == pytest.approx(min(row["validation_losses"]), abs=1e-4)
    assert (row["test_loss"], row["test_accuracy"]) == evaluate(made[0], parts["test"])
    assert row["test_accuracy"] > 0.7 and row["train_losses"][-1] < row["train_losses"][0]


@pytest.mark.parametrize("late", [0, 2])
def test_a_network_that_diverges_is_reported(late, tmp_path):
    """NaN from the first epoch on, or from a later one: training ends, and the best finite epoch is kept."""

    class Breaking(torch.nn.Linear):
        def forward(self, x):
            self.calls = getattr(self, "calls", 0) + self.training
            return super().forward(x) * (float("nan") if self.calls > late else 1.0)

    whole = data.made(60, 6, 3, seed=0)
    parts = dict.fromkeys(("train", "validation", "test"), whole)
    row = fit_classifier(lambda: Breaking(6, 3), parts, epochs=4, batch_size=60, learning_rate=1e-2, seed=0)
    stored = Results(tmp_path / "rows.json", mnist.Config()).add(row)
    assert [loss is None for loss in stored["validation_losses"]] == [False] * late + [True] * (4 - late)
    assert stored["best_epoch"] == (late or 1)


def test_parameters_of_the_papers_networks():
    dense, ours = (
        sum(p.numel() for p in mlp((784, 512, 512, 10), m, mnist.Config(), 0).parameters()) for m in (None, 32)
    )
    assert dense == 784 * 512 + 512 + 512 * 512 + 512 + 5130
    assert ours == 784 * 512 + 512 + 512 * 32 + 5130
    assert [sum(p.numel() for p in mlp((54, 512, 64, 7), m, uci.Config(), 0).parameters()) for m in (None, 64)] == [
        54 * 512 + 512 + 512 * 64 + 64 + 64 * 7 + 7,
        54 * 512 + 512 + 64 * 64 + 64 * 7 + 7,
    ]


def test_mnist_resumes_and_reads_real_files(capsys, tmp_path, digits, monkeypatch):
    monkeypatch.setattr(mnist, "QUICK", replace(mnist.QUICK, features=(8,), rows=20, epochs=1))
    args = ["reproduce", "mnist", "--quick", "--data-dir", digits.data_dir, "--out", str(tmp_path / "out")]
    assert run(capsys, *args, "--seeds", "2")[0] == 0
    path = tmp_path / "out" / "mnist.json"
    stored = json.loads(path.read_text())
    assert stored["source"] == {"model": "", "data": "real"} and digits.data_dir not in path.read_text()
    assert [(r["network"], r["seed"]) for r in stored["rows"]] == [("MLP", 0), ("SNNK", 0), ("MLP", 1), ("SNNK", 1)]
    stored["rows"] = stored["rows"][:3]
    stored["rows"][0]["test_accuracy"] = -1.0
    path.write_text(json.dumps(stored))
    assert run(capsys, *args, "--seeds", "2")[0] == 0
    again = json.loads(path.read_text())["rows"]
    assert len(again) == 4 and again[0]["test_accuracy"] == -1.0


def test_uci_runs_what_the_folder_has(tmp_path, monkeypatch):
    """HIGGS without CoverType; half of HEPMASS is an error about HEPMASS."""
    rows = np.random.default_rng(0).normal(size=(60, 29))
    rows[:, 0] = rows[:, 1] > 0
    monkeypatch.setitem(data.DATASETS, "higgs", replace(data.DATASETS["higgs"], rows={"all": 60}))
    np.savetxt(tmp_path / "HIGGS.csv", rows, delimiter=",")
    config = replace(uci.QUICK, widths=(4,), rows=0)
    results, source = Results(tmp_path / "uci.json", config), data.Source(str(tmp_path))
    found = list(uci.run(config, results, source))
    assert [(r["dataset"], r["network"]) for r in found] == [("higgs", "MLP"), ("higgs", "SNNK")]
    assert uci.left(results) == ["covertype: 0 of 2 rows", "hepmass: 0 of 2 rows"]
    (tmp_path / "all_train.csv").write_text("")
    with pytest.raises(FileNotFoundError, match="hepmass: no all_test"):
        list(uci.run(config, results, source))


def test_models_of_one_name_are_not_one_source(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert data.Source("d", "org/bert").names["model"] == "org/bert" != data.Source("d", "bert").names["model"]
    assert data.Source("d", ".").names["model"] == data.Source("d", str(tmp_path)).names["model"] == tmp_path.name


def test_seeds_where_there_are_none(capsys, tmp_path):
    code, _, err = run(capsys, "reproduce", "pointwise", "--seeds", "3", "--quick", "--out", str(tmp_path))
    assert code == 2 and "takes no --seeds" in err


class Rows(Results):
    def __init__(self, rows, **config):
        self.rows, self.config = rows, {"seed": 0, "epochs": 3, **config}


def test_claims_of_mnist(tmp_path):
    def row(m, accuracy, loss):
        name = "SNNK" if m else "MLP"
        counts = {"trained": m or 900, "frozen": 7 * (m or 0), "test_rows": 10_000, "seed": 0}
        return (
            {"network": name, "num_features": m, "test_accuracy": accuracy, "test_loss": 0.1}
            | counts
            | {"train_losses": [1.0, loss]}
        )

    rows = [row(None, 0.98, 0.1), row(16, 0.99, 0.09), row(32, 0.983, 0.08), row(64, 0.981, 0.08), row(128, 0.97, 0.05)]
    table = mnist.claims(Rows(rows))
    assert [c["holds"] for c in table] == [True, False, False, True]
    assert table[0]["ours"] == "98.30 %, MLP 98.00 %; 32 trained and 224 frozen against 900"
    assert "98.10 %, MLP 98.00 % (a tie)" in table[1]["ours"] and "tie" not in table[2]["ours"]
    assert "10,000 answers, 0.19 points" in table[0]["tolerance"]
    assert "16: 0.0900, 32: 0.0800" in table[3]["ours"]
    # one number of features with a higher loss is enough
    assert not mnist.claims(Rows([*rows[:4], row(256, 0.99, 0.11)]))[-1]["holds"]
    lost = {**row(64, 0.1, None), "test_loss": None}
    table = mnist.claims(Rows([*rows[:3], lost]))
    assert [(c["ours"] == "diverged", c["holds"]) for c in table] == [(False, True), (True, False), (True, False)]
    mnist.plot(Rows([*rows[:3], lost])).savefig(tmp_path / "mnist.png")
    assert mnist.claims(Rows(rows[1:])) == mnist.claims(Rows(rows[:1])) == []


def test_claims_of_uci(tmp_path):
    def row(kind, width, trained, validation, loss):
        counts = {"trained": trained, "frozen": 400 * (kind == "SNNK"), "best_epoch": 2, "seed": 0}
        losses = {"validation_losses": [9.0, validation, None], "test_loss": loss, "test_accuracy": 0.5}
        return {"dataset": "covertype", "network": kind, "width": width, **counts, **losses}

    # the least test loss is not the least validation loss: the width is chosen by the latter
    snnk = [row("SNNK", 8, 100, 0.52, 0.40), row("SNNK", 16, 200, 0.500, 0.51)]
    small, near, large = (
        row("MLP", 8, 150, 0.60, 0.60),
        row("MLP", 16, 300, 0.504, 0.507),
        row("MLP", 32, 900, 0.3, 0.3),
    )
    same, least = uci.claims(Rows([*snnk, small, near, large]))
    assert same["holds"] and "at 2 of 2 widths" in same["ours"] and same["tolerance"] == "1 % of the test loss"
    assert "16: SNNK 0.5100 (50.00 %) with 200 trained and 400 frozen, MLP 0.5070" in same["ours"]
    assert least["holds"] and "SNNK, width 16 by validation" in least["ours"]
    assert "least MLP as good, width 16: 0.5070 (50.00 %) with 300 trained; stored 600, not fewer" in least["ours"]
    same, least = uci.claims(Rows([*snnk, row("MLP", 8, 150, 0.49, 0.6), row("MLP", 16, 300, 0.4, 0.5)]))
    assert not same["holds"] and "at 1 of 2 widths" in same["ours"]  # 0.51 is 2 % above 0.5
    assert not least["holds"] and "width 8: 0.6000 (50.00 %) with 150 trained; stored 600, not" in least["ours"]
    _, least = uci.claims(Rows([*snnk, small]))
    assert least["holds"] and "no MLP up to width 8 is as good" in least["ours"]
    lost = [{**r, "validation_losses": [None] * 3, "test_loss": None} for r in snnk]
    table = uci.claims(Rows([*lost, small, near]))
    assert [(c["ours"], c["holds"]) for c in table] == [("diverged", False)] * 2
    assert "width 16 by" in uci.claims(Rows([lost[0], snnk[1], small, near]))[1]["ours"]
    figure = uci.plot(Rows([*snnk, *lost, small, near]))
    figure.savefig(tmp_path / "uci.png")
    assert len(figure.axes[0].lines) == 3  # trained, and for SNNK with the frozen ones
    assert uci.claims(Rows([small])) == []


def test_claims_of_pointwise():
    def row(layer, p, mean, std):
        return {"layer": layer, "estimator": "paper", "projections": p, "mean": mean, "std": std, "draws": 9}

    rows = [row("sine", 2, 0.7, 0.5), row("sine", 64, 0.19, 1e-9), row("sine", 128, 0.1, 1e-9)]
    rows += [row("arc-cosine", 64, 0.21, 1e-8), row("arc-cosine", 128, 0.1, 1e-9)]
    table = pointwise.claims(Rows(rows, dim=2000))
    assert [c["holds"] for c in table] == [True, False, False, True]
    assert "arc-cosine" in table[2]["paper"] and table[2]["ours"].endswith("0.210; below 0.2 from p = 128")
    assert table[1]["ours"].startswith("spread over 9 draws 0.5 at p = 2") and table[1]["tolerance"] == "below 1e-06"
    assert pointwise.claims(Rows([], dim=2000)) == []


def test_claims_of_estimators(tmp_path):
    def row(name, squared, relative=0.1, setting="d = 64, positive", m=128):
        sizes = {"setting": setting, "estimator": name, "num_features": m}
        return {**sizes, "squared_error": squared, "relative_error": relative}

    def holds(*rows):
        return [claim["holds"] for claim in estimators.claims(Rows(rows))]

    paper, ours, calibrated = row("paper", 2.0), row("URF", 0.0399), row("ProjectedURF", 0.0002)
    bound, below = estimators.claims(Rows([paper, ours, calibrated]))
    assert bound["holds"] and bound["ours"] == "0.02: 0.04 against 2" and "at most 0.02 of the" in bound["paper"]
    assert below["holds"] and below["ours"] == "ProjectedURF 0.005 of its squared error"
    assert holds(paper, row("URF", 0.0401)) == [False]  # 0.02 of 2 is 0.04
    assert holds(paper, ours, calibrated, row("URF calibrated", 0.0400)) == [True, False]
    assert holds(paper, row("URF", 0.01, m=256)) == [False]  # with more features
    assert holds(paper, row("URF", None)) == holds(paper) == holds(ours) == []
    assert holds(row("paper", 1.0, setting="of old"), row("URF", 0.5, setting="of old")) == []
    far = estimators.POINTWISE
    for relative, true in ((0.0549, True), (0.0551, False)):
        assert holds(row("paper", 1.0, 0.13, far), row("URF", 0.9, relative, far)) == [true]
    assert set(estimators.BOUNDS) | {far} == {setting[0] for setting in estimators.Config().settings}
    figure = estimators.plot(Rows([paper, ours, calibrated, row("paper", 1.0, setting="d = 64, norms 1 and 1")]))
    figure.savefig(tmp_path / "estimators.png")
    heights = {line.get_label(): list(line.get_ydata()) for line in figure.axes[0].lines}
    assert heights == {"paper": [1.0, 1.0], "URF": [0.0399 / 2], "URF calibrated": [], "ProjectedURF": [1e-4]}


def test_estimators_measure_what_the_maps_do(tmp_path, monkeypatch):
    settings = tuple(s for s in estimators.Config().settings if s[0] in ("d = 64, positive", "d = 64, norms 2 and 0.5"))
    config = replace(estimators.QUICK, settings=settings, draws=2, pairs=4, seen=64, bias=0.3, seed=3)
    seen = []
    for kind in (URF, ProjectedURF):

        def watched(self, x, w, b, own=kind.calibrate):
            seen.append((x, w, b))
            return own(self, x, w, b)

        monkeypatch.setattr(kind, "calibrate", watched)
    rows = list(estimators.run(config, Results(tmp_path / "rows.json", config)))
    assert len(rows) == estimators.total(config) == 8 and {row["num_features"] for row in rows} == {128}
    for at, norms in ((0, (0.0, 0.0)), (4, (2.0, 0.5))):
        generator, off, exact = torch.Generator().manual_seed(3), [], []

        def draw(n, norm, generator=generator):
            if not norm:
                return torch.rand(n, 64, generator=generator) / 8
            return norm * torch.nn.functional.normalize(torch.randn(n, 64, generator=generator), dim=1)

        for seed in (4, 5):
            (x, w), others = [draw(4, norm) for norm in norms], [draw(64, norm) for norm in norms]
            # what maps were calibrated on: other points, drawn the same way, and the same for both kinds of map
            own = [found for found in seen if torch.allclose(found[0], others[0])]
            assert len(own) == 2 and all(
                torch.allclose(found[1], others[1]) and (found[2] == 0.3).all() for found in own
            )
            fm = URF.paper(64, 128, "sin", seed=seed)
            exact.append(torch.sin(x @ w.T + 0.3))
            off.append(fm.phi(x) @ fm.psi(w, torch.full((4,), 0.3)).T - exact[-1])
        squared = torch.stack(off).double().square().mean((1, 2))
        assert rows[at]["squared_error"] == pytest.approx(float(squared.mean()), rel=1e-3)
        assert rows[at]["standard_error"] == pytest.approx(float(squared.std()) / 2**0.5, rel=1e-3)
        relative = float((torch.stack(off) / torch.stack(exact)).abs().mean())
        assert rows[at]["relative_error"] == pytest.approx(relative, rel=1e-3)
        assert all(row["squared_error"] < rows[at]["squared_error"] for row in rows[at + 1 : at + 4])


def test_page_has_every_claim_and_what_is_missing(capsys, tmp_path):
    code, _, _ = run(capsys, "reproduce", "uci", "--quick", "--seeds", "2", "--out", str(tmp_path))
    assert code == 0 and len(Stored(tmp_path / "uci.json").rows) == 2 * uci.total(uci.QUICK)
    claims = uci.claims(Stored(tmp_path / "uci.json"))
    page = write_page(tmp_path).read_text()
    assert claims and not any(claim["paper"] in page for claim in claims)  # small data show nothing
    larger = json.loads((tmp_path / "uci.json").read_text())
    larger["config"]["rows"] += 1
    (tmp_path / "uci.json").write_text(json.dumps(larger))
    page = write_page(tmp_path).read_text()
    for claim in claims:
        assert claim["paper"] in page and claim["ours"] in page and claim["tolerance"] in page
    assert "![uci](uci.png)" in page and "- mnist: " in page.split("## Not run here")[1]
    left = page.split("## Not run here")[1]
    assert "- uci: higgs: 0 of 8 rows" in left and "- uci: covertype" not in left
    (tmp_path / "empty").mkdir()
    for folder, message in ((tmp_path / "empty", "no rows"), (tmp_path / "none", "no folder")):
        code, _, err = run(capsys, "reproduce", "--page", "--out", str(folder))
        assert code == 2 and message in err


def test_every_experiment_has_its_parts():
    for name in names():
        module = load(name)
        assert module.FIGURE and module.NEEDS and module.TIME and module.__doc__, name
        assert isinstance(module.QUICK, module.Config) and module.Config() != module.QUICK, name
        assert module.total(module.QUICK) > 0
        with pytest.raises(FrozenInstanceError):
            module.QUICK.seed = 1


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    config = trainable_parameters.Config()
    results = Results(tmp_path_factory.mktemp("rows") / "rows.json", config)
    assert len(list(trainable_parameters.run(config, results))) == trainable_parameters.total(config)
    return results


def test_trainable_parameters(counted):
    rows = {(r["model"], r["method"]): r["trained"] for r in counted}
    bert, vit = ({method: n for (model, method), n in rows.items() if model == name} for name in ("BERT", "ViT"))
    assert trainable_parameters.total(trainable_parameters.QUICK) == len(rows) - len(vit)
    assert bert["SNNK adapters"] == vit["SNNK adapters"] == 24 * (768 * 16 + 768) == 313_344
    assert bert["Houlsby adapters"] == 24 * (2 * 768 * 48 + 48 + 768)
    assert bert["Pfeiffer adapters"] == bert["Houlsby adapters"] / 2
    assert bert["LoRA"] == vit["LoRA"] == 12 * 2 * 2 * 768 * 8
    assert bert["SNNK pooler and classifier, merged"] == 256 * 2 + 2
    assert vit["SNNK adapters, 32 features"] == 24 * (768 * 32 + 768)
    assert vit["attention tuning"] == 12 * 4 * (768 * 768 + 768) and vit["LayerNorm tuning"] == 25 * 2 * 768
    assert vit[trainable_parameters.CIFAR100] == 12 * (2 * 768 * 64 + 64 + 768) + 76_900
    toys = [(256 * 256 + 256) * n + 256 * 4 + 1 for n in (3, 1)]
    assert [rows["SIREN", f"SIREN, {n} hidden"] for n in (3, 1)] == toys
    assert [rows["SIREN", f"SNNK, {n} hidden"] for n in (3, 1)] == [n - 256 * 257 + 256 * 64 for n in toys]
    assert (rows["QPNN", "QPNN"], rows["QPNN", "SNNK"]) == (128 * 128 + 128 * 5 + 1, 128 * 32 + 128 * 4 + 1)


def test_claims_of_trainable_parameters(counted):
    table = {c["paper"]: c for c in trainable_parameters.claims(counted)}
    assert [paper for paper, c in table.items() if not c["holds"]] == [
        "BERT, pooler and classifier: 0.059 M",
        "ViT, LoRA: 0.22 M",
        "ViT, BitFit: 0.36 M",
        "ViT, LayerNorm tuning: 0.08 M",
        "ViT, attention tuning: 28.41 M",
        "an SNNK adapter trains (d + 1) x features = 12,304",
        "bundled final layers train about 1/30 of pooler and classifier",
    ]
    assert not any("unexplained" in c["ours"] for c in table.values())
    assert table["BERT, full: 110 M"]["tolerance"] == "1 M"
    assert table["BERT, BitFit: 0.1 M"]["tolerance"] == "rounded or cut off at 0.1 M"
    assert table["pooler and classifier are 18.92 Megabit"]["ours"] == "18.92 without biases, 18.95 with them"


@pytest.mark.parametrize(
    ("trained", "holds"),
    [(0, False), (49_999, False), (50_000, True), (100_000, True), (199_999, True), (200_000, False)],
)
def test_rounding_or_cutting_off_is_all_that_is_allowed(trained, holds):
    rows = [{"model": "BERT", "method": "BitFit", "trained": trained, "paper_M": 0.1}]
    assert [c["holds"] for c in trainable_parameters.claims(Rows(rows))] == [holds]


def test_the_page_of_the_project_is_what_its_rows_say(tmp_path):
    folder = Path(__file__).parents[2] / "docs" / "results"
    shutil.copytree(folder, tmp_path / "results")
    (tmp_path / "results" / "README.md").unlink()
    assert write_page(tmp_path / "results").read_text() == (folder / "README.md").read_text()
