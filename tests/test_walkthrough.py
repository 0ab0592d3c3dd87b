"""The script that pastes the pages: what it runs, what it leaves out, and what it reports."""

import json
import sys
from pathlib import Path

import walkthrough
from walkthrough import Reader, Row, table, walk

ROOT = Path(__file__).parent.parent
PAGE = """
```bash
echo one two   # a comment
false
```

<!-- not run: it takes hours -->
```bash
sleep 9999
```

```bash
echo three \\
  four
```

```text
three five
```

```python
import json
x = 1
```

```python
print("x is", x)
```

```text
x is 1
```

```python
raise ValueError("wrong")
```
"""


def test_blocks_are_pasted_in_order(tmp_path):
    (tmp_path / "first.md").write_text(PAGE)
    (tmp_path / "second.md").write_text(
        "```bash\necho one two\n```\n\n```text\nnothing of it\n```\n\n```python\nx\n```\n"
    )
    rows = list(walk(Reader(tmp_path, Path(sys.prefix)), ["first.md", "second.md"]))
    assert [(row.text, row.code) for row in rows] == [
        ("echo one two", 0),
        ("false", 1),
        ("sleep 9999", None),
        ("echo three four", 0),
        ("x = 1", 0),
        ('print("x is", x)', 0),
        ('raise ValueError("wrong")', 1),
        ("echo one two", None),
        ("x", 1),  # another page has another session of Python
    ]
    assert rows[2].note == "it takes hours" and rows[7].note == "an earlier page has run it"
    assert [row.not_printed for row in rows if row.not_printed] == [["five"]]
    assert "ValueError: wrong" in rows[6].note and "NameError" in rows[8].note
    assert all(row.seconds is not None for row in rows if row.code is not None)


def test_the_lines_of_installation_are_found_in_the_readme(tmp_path):
    (tmp_path / "README.md").write_text((ROOT / "README.md").read_text())
    reader = Reader(tmp_path, tmp_path / ".venv")
    reader.bash = lambda row: row
    found = [row.text for row in walkthrough.set_up(reader, "pip install torch==2.13.0")]
    assert found == ["python3 -m venv .venv", "pip install torch==2.13.0", "pip install '.[cli,serve,peft,sklearn]'"]


def test_the_table_of_times_is_that_of_the_rows():
    rows = json.loads((ROOT / "benchmarks" / "results" / "walkthrough.json").read_text())["rows"]
    assert not [row["text"] for row in rows if row["code"] or row["not_printed"]]
    shown = table([Row(**row) for row in rows])
    assert shown in (ROOT / "docs" / "figures.md").read_text(), "run: python tools/walkthrough.py --table"
