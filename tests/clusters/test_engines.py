"""The recipes in examples/clusters give the model of `snnk fit`, also if the process of a task is killed."""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from snnk.tabular import FitConfig, TableModel, fit, prepare

from helpers.tables import CONFIG, make_table, weights

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "examples" / "clusters"
NEEDS = {"spark": ("pyspark",), "ray": ("ray", "pandas"), "dask": ("dask", "distributed", "pandas")}
SCRIPTS = {
    "spark.py": NEEDS["spark"],
    "ray_data.py": NEEDS["ray"],
    "dask_cluster.py": NEEDS["dask"],
    "duckdb_polars.py": ("duckdb", "polars"),
}


def require(*packages):
    for name in packages:
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    if "pyspark" in packages and not (shutil.which("java") or os.environ.get("JAVA_HOME")):
        pytest.skip("Spark needs Java")


def python(*args, timeout=1200):
    """Run a script in a process of its own, as engines leave threads, sockets and settings behind."""
    done = subprocess.run(
        [sys.executable, *map(str, args)], capture_output=True, text=True, timeout=timeout, cwd=RECIPES
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("engine", NEEDS)
def test_a_killed_worker_does_not_change_the_model(engine, tmp_path):
    """The model is that of one fit, to 1e-10."""
    require(*NEEDS[engine])
    pq.write_table(make_table(), tmp_path / "table.parquet", row_group_size=400)
    prepare(tmp_path / "table.parquet", CONFIG).save(tmp_path / "start.stats")
    fit(tmp_path / "table.parquet", tmp_path / "whole", CONFIG)
    python(Path(__file__).parent / "engines.py", engine, tmp_path, 4)
    assert (tmp_path / "killed").exists() and len(list(tmp_path.glob("process-*"))) >= 2
    report = json.loads((tmp_path / "model" / "report.json").read_text())
    assert report["rows"] == 3000 and report["sources"] > 1
    assert torch.allclose(weights(tmp_path / "model"), weights(tmp_path / "whole"), rtol=0, atol=1e-10)
    assert report["quality"]["r2"] == pytest.approx(TableModel.load(tmp_path / "whole").quality["r2"], abs=1e-8)


@pytest.mark.parametrize("engine", ["duckdb", "polars"])
def test_queries_are_fitted_as_streams(engine, tmp_path, monkeypatch):
    """The blocks of a stream differ from those of a file, and the same rows give the same model."""
    require("duckdb", "polars")  # the recipe has both
    monkeypatch.syspath_prepend(str(RECIPES))
    import duckdb_polars
    import polars as pl

    pq.write_table(make_table(), path := tmp_path / "table.parquet", row_group_size=400)
    fit(path, tmp_path / "whole", CONFIG)
    if engine == "duckdb":
        duckdb_polars.fit_duckdb(f"SELECT * FROM '{path}'", tmp_path / "model", CONFIG)
    else:
        duckdb_polars.fit_polars(pl.scan_parquet(path), tmp_path / "model", CONFIG)
    assert torch.allclose(weights(tmp_path / "model"), weights(tmp_path / "whole"), rtol=0, atol=1e-10)


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_page_shows_the_recipe(script):
    """Every function of a recipe that takes rows stands in docs/clusters.md as it is in the script."""
    page, code = (ROOT / "docs" / "clusters.md").read_text(), (RECIPES / script).read_text()
    functions = re.findall(r"^def fit_\w+.*?(?=\n\n\n)", code, flags=re.MULTILINE | re.DOTALL)
    assert functions and all(function in page for function in functions)


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_run(script, tmp_path):
    require(*SCRIPTS[script])
    out = python(RECIPES / script)
    found = re.findall(r"R2 ([0-9.]+)", out)
    assert found and all(float(value) > 0.97 for value in found), out


@pytest.mark.slow
def test_spark_with_more_features_than_its_own_normal_equation(tmp_path):
    """Spark's linear regression solves the normal equation for at most 4,096 features."""
    require("pyspark")
    config = FitConfig("y", 5000, feature_map="random-fourier", bandwidth=1.0)
    pq.write_table(make_table(), tmp_path / "table.parquet", row_group_size=400)
    prepare(tmp_path / "table.parquet", config).save(tmp_path / "start.stats")
    python(Path(__file__).parent / "engines.py", "spark", tmp_path, 2)
    report = json.loads((tmp_path / "model" / "report.json").read_text())
    assert report["num_features"] == 5000 and report["quality"]["r2"] > 0.9
