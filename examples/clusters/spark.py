"""Fit a table that is in Spark: every task returns the sums of its partition, and the sums add up to one model.

pip install 'snnk[tables]' pyspark
python examples/clusters/spark.py
"""

import os
import sys
import tempfile
from pathlib import Path

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from snnk.tabular import FitConfig, Part, Start, merge, prepare


def fit_spark(frame: DataFrame, start: Start, out: str | Path) -> dict:
    """Write the model of all rows to the folder `out`; returns its report.

    Every partition returns 8 (features)^2 bytes: coalesce a frame of very many partitions to about one per core.
    """

    def sums(batches):
        part = Part(start).read(batches)
        yield pa.record_batch({"part": [part.to_bytes()]})

    rows = frame.mapInArrow(sums, "part binary").collect()
    return merge(bytes(row.part) for row in rows).save_model(out)


def session(workers: int = 2) -> SparkSession:
    """Spark on this machine. A task whose process dies is tried again, up to four times in all, as on a cluster."""
    os.environ |= {"SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    builder = SparkSession.builder.master(f"local[{workers},4]").config("spark.driver.host", "127.0.0.1")
    for name, value in {"ui.enabled": "false", "driver.memory": "4g", "driver.maxResultSize": "2g"}.items():
        builder = builder.config(f"spark.{name}", value)
    return builder.getOrCreate()


if __name__ == "__main__":
    from rows import make_table

    spark = session()
    frame = spark.createDataFrame(make_table()).repartition(8)
    start = prepare(frame.sample(0.5, seed=0).toArrow(), FitConfig("price"))
    report = fit_spark(frame, start, Path(tempfile.mkdtemp()) / "model")
    print(f"{report['rows']:,} rows in {report['sources']} parts, R2 {report['quality']['r2']:.3f} on held-out rows")
    spark.stop()
