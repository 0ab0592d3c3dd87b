"""The table of the tests, in a file."""

import pyarrow.parquet as pq
import pytest

from helpers.tables import make_table


@pytest.fixture
def parquet(tmp_path):
    path = tmp_path / "data.parquet"
    pq.write_table(make_table(), path, row_group_size=400)
    return path
