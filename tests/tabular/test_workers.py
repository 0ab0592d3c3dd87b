"""Several workers give the result of one."""

import json
from dataclasses import replace

import numpy as np
import pytest

from snnk.tabular import fit

from helpers.tables import CONFIG, FILES, predictions, run_fit, weights


@pytest.mark.once
def test_two_workers_give_the_result_of_one(parquet, tmp_path):
    fit(parquet, tmp_path / "one", CONFIG)
    run_fit(parquet, tmp_path / "two", workers=2, torchrun=True)
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert (one - two).abs().max() <= 1e-10 * one.abs().max()
    assert json.loads((tmp_path / "two" / "report.json").read_text())["workers"] == 2
    process = run_fit(parquet, tmp_path / "two", workers=2, wait=False)  # every worker reports that there is a model
    output = process.communicate(timeout=300)[0].decode()
    assert process.returncode and output.count("snnk: ") == output.count("holds a model already") >= 1
    assert {path.name for path in (tmp_path / "two").iterdir()} == FILES


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.once
def test_workers_do_not_change_float32_results_either(parquet, tmp_path, workers):
    """Products within blocks are rounded to float32, but all workers round them about one origin."""
    fit(parquet, tmp_path / "one", replace(CONFIG, block_dtype="float32"))
    run_fit(parquet, tmp_path / "many", double=False, workers=workers)
    one, many = (predictions(tmp_path / name, parquet) for name in ("one", "many"))
    np.testing.assert_allclose(one, many, rtol=0, atol=1e-10)
    assert (weights(tmp_path / "one") - weights(tmp_path / "many")).abs().max() <= 1e-9
