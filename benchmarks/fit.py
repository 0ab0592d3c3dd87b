"""Closed-form training: speed and memory on a generated table.

    python benchmarks/fit.py [--quick] [--out FILE]

The table is a Parquet file with the shape of HIGGS, 11 M rows of 28 numbers, fitted with 1024 features by the code of
`snnk fit`, once with learnt features, the default, and once with random ones. It is compared with the bare product
phi^T phi on blocks of the same shape, which is timed every few seconds between the blocks of the fit; these pauses are
subtracted from its time. All times are processor time of all threads. Memory is the peak of the whole process, which
holds the table for neither.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from snnk.experiments.lab.records import Results, Row
from snnk.tabular import FitConfig, fit
from snnk.tabular.model import ROWS

MEMORY_BOUND, SPEED_BOUND = 1.5e9, 0.6


@dataclass(frozen=True)
class Config:
    rows: int = 11_000_000
    columns: int = 28
    features: int = 1024
    threads: int = 1
    seed: int = 0


def generate(path: Path, config: Config, block: int = 1 << 18) -> None:
    """Standard normal columns; the label is 1 where a curved function of four of them, with noise, is positive."""
    rng = np.random.default_rng(config.seed)
    names = ["label", *(f"x{i}" for i in range(config.columns))]
    with pq.ParquetWriter(path, pa.schema([(name, pa.float32()) for name in names])) as writer:
        for start in range(0, config.rows, block):
            x = rng.standard_normal((min(block, config.rows - start), config.columns), dtype=np.float32)
            noise = 0.5 * rng.standard_normal(len(x), dtype=np.float32)
            y = (x[:, 0] * x[:, 1] + np.sin(2 * x[:, 2]) + x[:, 3] + noise > 0).astype(np.float32)
            writer.write_table(pa.table([y, *x.T.copy()], names=names))


def scale(data: Path, feature_map: str, config: Config, every: float = 5.0) -> Row:
    """Fit the generated table with some features, and time the product of one block in between."""
    block = torch.randn(ROWS, config.features, generator=torch.Generator().manual_seed(config.seed))
    products: list[float] = []
    pauses, last = 0.0, time.process_time()

    def pause(what: str, rows: int, total: int) -> None:
        nonlocal pauses, last
        start = time.process_time()
        if what == "fitting" and start - last > every:
            for _ in range(5):
                begin = time.process_time()
                block.T @ block
                products.append(time.process_time() - begin)
            last = time.process_time()
            pauses += last - start
            sys.stdout.write(f"\r{rows:,} of {total:,} rows")
            sys.stdout.flush()

    with tempfile.TemporaryDirectory() as folder:
        start = time.process_time()
        settings = FitConfig("label", config.features, feature_map)
        report = fit(data, Path(folder) / "model", settings, progress=pause)
        seconds = time.process_time() - start - pauses
    product = float(np.mean(products))  # the mean, as the time of the fit is a sum over blocks
    return {
        "feature_map": feature_map,
        "rows": report["rows"],
        "columns": config.columns,
        "num_features": config.features,
        "file_bytes": data.stat().st_size,
        "processor_seconds": seconds,
        "rows_per_second": report["rows"] / seconds,
        "product_rows_per_second": ROWS / product,
        "over_product": report["rows"] / seconds / (ROWS / product),
        "products_timed": len(products),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "accuracy": report["quality"]["accuracy"],
        "seed": config.seed,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a million rows")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/fit.json"))
    args = parser.parse_args()
    config = Config(rows=1_000_000) if args.quick else Config()
    torch.set_num_threads(config.threads)
    results = Results(args.out, config, resume=False)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data.parquet"
        generate(data, config)
        for feature_map in ("learned", "random-fourier"):  # the peak of memory of the second is that of both
            row = results.add(scale(data, feature_map, config))
            sys.stdout.write(
                f"\r{feature_map}: {row['rows']:,} rows in {row['processor_seconds']:.0f} s of the processor, "
                f"{row['over_product']:.2f} of the product's speed (bound {SPEED_BOUND}), peak "
                f"{row['peak_bytes'] / 1e9:.2f} GB (bound {MEMORY_BOUND / 1e9}), accuracy {row['accuracy']:.4f}\n"
            )
    return int(any(row["over_product"] < SPEED_BOUND or row["peak_bytes"] > MEMORY_BOUND for row in results))


if __name__ == "__main__":
    sys.exit(main())
