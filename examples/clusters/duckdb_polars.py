"""Fit a query of DuckDB or Polars on one machine: `fit` reads it as a stream, and the table need not fit in memory.

pip install 'snnk[tables]' duckdb polars
python examples/clusters/duckdb_polars.py
"""

import tempfile
from pathlib import Path

import duckdb
import polars as pl
import pyarrow.parquet as pq

from snnk.tabular import FitConfig, fit


def fit_duckdb(query: str, out: str | Path, config: FitConfig) -> dict:
    """Fit the result of a query, which runs once per pass; it must give its rows in the same order each time."""
    return fit(lambda: duckdb.connect().sql(query).to_arrow_reader(), out, config)


def fit_polars(frame: pl.LazyFrame, out: str | Path, config: FitConfig) -> dict:
    """Fit a lazy frame, which is collected in batches."""
    return fit(lambda: frame.collect_batches(maintain_order=True), out, config)


if __name__ == "__main__":
    from rows import make_table

    folder = Path(tempfile.mkdtemp())
    pq.write_table(make_table(), folder / "trips.parquet")
    query = f"SELECT * FROM '{folder}/trips.parquet' WHERE distance < 50"
    frame = pl.scan_parquet(folder / "trips.parquet").filter(pl.col("distance") < 50)
    for report in (
        fit_duckdb(query, folder / "duckdb", FitConfig("price")),
        fit_polars(frame, folder / "polars", FitConfig("price")),
    ):
        print(f"{report['rows']:,} rows, R2 {report['quality']['r2']:.3f} on held-out rows")
