"""How values of Arrow columns are read; most of it is tested with whole tables, in test_columns.py and test_scan.py."""

import numpy as np
import pyarrow as pa

from snnk.tabular.values import UNITS, as_seconds

DAY = 86_400


def test_the_same_time_in_other_units_and_types():
    days = [0, 17_000, 19_999]
    seconds = [d * DAY for d in days]
    forms = [pa.array(days, pa.date32()), pa.array([1000 * s for s in seconds], pa.date64())]
    forms += [pa.array([s * 10**e for s in seconds], pa.timestamp(u)) for u, e in zip(UNITS, (0, 3, 6, 9), strict=True)]
    for form in forms:
        assert as_seconds(form).tolist() == seconds
    assert as_seconds(pa.array([1, None], pa.time64("us")))[0] == 1e-6
    assert np.isnan(as_seconds(pa.array([1, None], pa.duration("ms")))[1])
    zones = [pa.array(seconds, pa.timestamp("s", zone)) for zone in ("UTC", "Asia/Tokyo")]
    assert as_seconds(zones[0]).tolist() == as_seconds(zones[1]).tolist() == seconds  # the instant counts
