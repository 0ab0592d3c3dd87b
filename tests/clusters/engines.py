"""Run the recipe of an engine in a process of its own: python engines.py ENGINE FOLDER PARTITIONS.

The folder has table.parquet and start.stats, and gets the model and a file for each process that read rows. The first
process that has read some kills itself, before it returns anything.
"""

import sys
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[2]


def kill_once(folder, rows):
    """The same rows; the first process of all that comes here dies."""
    import os
    import signal

    (folder / f"process-{os.getpid()}").touch()
    try:
        (folder / "killed").touch(exist_ok=False)
    except FileExistsError:
        return rows
    return os.kill(os.getpid(), signal.SIGKILL)


def run_spark(folder, table, start, partitions):
    from spark import fit_spark, session

    def kill(batches):
        for batch in batches:
            yield kill_once(folder, batch)

    spark = session()
    frame = spark.createDataFrame(table).repartition(partitions)
    fit_spark(frame.mapInArrow(kill, frame.schema), start, folder / "model")
    spark.stop()


def run_ray(folder, table, start, partitions):
    import ray
    import ray.data
    from ray_data import fit_ray

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    dataset = ray.data.from_arrow(table).repartition(partitions)
    kill = partial(kill_once, folder)
    fit_ray(dataset.map_batches(kill, batch_format="pyarrow", batch_size=None), start, folder / "model")
    ray.shutdown()


def run_dask(folder, table, start, partitions):
    import dask.dataframe as dd
    from dask_cluster import cluster, fit_dask
    from distributed import Client

    with cluster() as workers, Client(workers):
        frame = dd.from_pandas(table.to_pandas(), npartitions=partitions)
        fit_dask(frame.map_partitions(partial(kill_once, folder), meta=frame._meta), start, folder / "model")


if __name__ == "__main__":
    import pyarrow.parquet as pq

    from snnk.tabular import Start

    sys.path.insert(0, str(ROOT / "examples" / "clusters"))
    engine, folder, partitions = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    run = {"spark": run_spark, "ray": run_ray, "dask": run_dask}[engine]
    run(folder, pq.read_table(folder / "table.parquet"), Start.load(folder / "start.stats"), partitions)
