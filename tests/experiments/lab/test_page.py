"""The page of claims."""

import json
import shutil
from pathlib import Path

from snnk.experiments import uci
from snnk.experiments.lab.page import write_page
from snnk.experiments.lab.records import Stored


def test_page_has_every_claim_and_what_is_missing(run, tmp_path):
    code, _, _ = run("reproduce", "uci", "--quick", "--seeds", "2", "--out", str(tmp_path))
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
    counts = [sum(claim["holds"] is holds for claim in claims) for holds in (True, False, None)]
    assert f"| [uci](#uci) | figure: UCI data sets | {' | '.join(map(str, counts))} |" in page
    reasons = page.partition("## What does not hold, and why")[2].partition("## uci")[0]
    assert ("With 64 random features" in reasons) == (counts[1] > 0)
    assert "![uci](uci.png)" in page and "- mnist: " in page.split("## Not run here")[1]
    left = page.split("## Not run here")[1]
    assert "- uci: higgs: 0 of 8 rows" in left and "- uci: covertype" not in left
    (tmp_path / "empty").mkdir()
    for folder, message in ((tmp_path / "empty", "no rows"), (tmp_path / "none", "no folder")):
        code, _, err = run("reproduce", "--page", "--out", str(folder))
        assert code == 2 and message in err


def test_the_page_of_the_project_is_what_its_rows_say(tmp_path):
    folder = Path(__file__).parents[3] / "docs" / "results"
    shutil.copytree(folder, tmp_path / "results")
    (tmp_path / "results" / "README.md").unlink()
    assert write_page(tmp_path / "results").read_text() == (folder / "README.md").read_text()
