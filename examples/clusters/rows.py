"""A table for the examples: what a trip costs."""

import numpy as np
import pyarrow as pa


def make_table(rows: int = 20_000, seed: int = 0) -> pa.Table:
    """Trips with their price, which depends on the hour in steps and on the kind of car."""
    rng = np.random.default_rng(seed)
    distance, hour = rng.gamma(2.0, 4.0, rows), rng.integers(0, 24, rows)
    car = rng.choice(["small", "large", "van"], rows)
    rush = np.where((hour >= 7) & (hour < 10), 1.5, 1.0)
    price = 3 + 1.2 * distance * rush * np.where(car == "van", 1.8, 1.0) + rng.normal(0, 1, rows)
    return pa.table({"distance": distance, "hour": hour, "car": car, "price": price})
