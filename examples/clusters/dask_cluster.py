"""Fit a table that is in Dask: every task returns the sums of its partition, and the sums add up to one model.

pip install 'snnk[tables]' 'dask[dataframe,distributed]'
python examples/clusters/dask_cluster.py
"""

import tempfile
from pathlib import Path

import dask.dataframe as dd
import pandas as pd
from distributed import Client, LocalCluster

from snnk.tabular import FitConfig, Part, Start, merge, prepare


def fit_dask(frame: dd.DataFrame, start: Start, out: str | Path) -> dict:
    """Write the model of all rows to the folder `out`; returns its report."""

    def sums(rows: pd.DataFrame) -> pd.Series:
        return pd.Series([Part(start).read(rows).to_bytes()], dtype=object)

    parts = frame.map_partitions(sums, meta=pd.Series(dtype=object))
    return merge(parts.compute()).save_model(out)


def cluster(workers: int = 2) -> LocalCluster:
    """Dask on this machine: a worker that dies is started again, and its tasks run again."""
    return LocalCluster(n_workers=workers, threads_per_worker=1, host="127.0.0.1", dashboard_address=None)


if __name__ == "__main__":
    from rows import make_table

    with cluster() as workers, Client(workers):
        frame = dd.from_pandas(make_table().to_pandas(), npartitions=8)
        start = prepare(frame.sample(frac=0.5, random_state=0).compute(), FitConfig("price"))
        report = fit_dask(frame, start, Path(tempfile.mkdtemp()) / "model")
    print(f"{report['rows']:,} rows in {report['sources']} parts, R2 {report['quality']['r2']:.3f} on held-out rows")
