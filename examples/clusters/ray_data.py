"""Fit a table that is in Ray Data: every task returns the sums of its block, and the sums add up to one model.

pip install 'snnk[tables]' 'ray[data]'
python examples/clusters/ray_data.py
"""

import tempfile
from pathlib import Path

import pyarrow as pa
import ray
import ray.data

from snnk.tabular import FitConfig, Part, Start, merge, prepare


def fit_ray(dataset: ray.data.Dataset, start: Start, out: str | Path) -> dict:
    """Write the model of all rows to the folder `out`; returns its report."""

    def sums(block: pa.Table) -> pa.Table:
        return pa.table({"part": [Part(start).read(block).to_bytes()]})

    parts = dataset.map_batches(sums, batch_format="pyarrow", batch_size=None)
    return merge(row["part"] for row in parts.iter_rows()).save_model(out)


if __name__ == "__main__":
    from rows import make_table

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    dataset = ray.data.from_arrow(make_table()).repartition(8)
    sample = dataset.random_sample(0.5, seed=0)
    start = prepare(lambda: sample.iter_batches(batch_format="pyarrow"), FitConfig("price"))
    report = fit_ray(dataset, start, Path(tempfile.mkdtemp()) / "model")
    print(f"{report['rows']:,} rows in {report['sources']} parts, R2 {report['quality']['r2']:.3f} on held-out rows")
    ray.shutdown()
