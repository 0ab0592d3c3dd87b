"""The paper's scores on GLUE, with BERT-base, in percent."""

from __future__ import annotations

TASKS = ("rte", "mrpc", "qnli", "qqp", "sst2", "mnli", "stsb", "cola")
ANSWERS = dict(zip(TASKS, (277, 408, 5463, 40430, 872, 9815, 1500, 1043), strict=True))  # rows of the dev files
PAPER: dict[str, dict[str, float]] = {
    "pooler": dict(zip(TASKS, (57.5, 81.5, 74.5, 72.0, 84.9, 56.4, 78.1, 29.4), strict=True)),
    "snnk-pooler": dict(zip(TASKS, (61.36, 82.07, 73.5, 70.43, 85.21, 52.69, 78.93, 35.81), strict=True)),
    "tanh-pooler": {"rte": 52.08, "mrpc": 68.71, "stsb": 63.49, "cola": 20.72},
    "linear-probe": dict(zip(TASKS, (57.76, 81.23, 69.18, 62.22, 83.02, 43.4, 69.87, 35.41), strict=True)),
    "bundled": dict(zip(TASKS, (60.01, 81.48, 72.21, 70.19, 82.97, 53.69, 71.84, 32.79), strict=True)),
    "bundled-solved": {"stsb": 67.0},
    "snnk-relu": dict(zip(TASKS, (69.68, 91.26, 90.44, 85.82, 92.31, 82.06, 88.81, 58.21), strict=True)),
    "snnk-cos": dict(zip(TASKS, (64.77, 85.06, 88.67, 86.47, 91.97, 79.28, 88.57, 52.12), strict=True)),
    "adapter baseline": dict(zip(TASKS, (63.83, 84.8, 90.63, 88.12, 91.74, 83.53, 88.48, 56.51), strict=True)),
    "houlsby": dict(zip(TASKS, (69.8, 91.5, 91.2, 88.6, 92.8, 84.1, 89.2, 59.1), strict=True)),
    "pfeiffer": dict(zip(TASKS, (70.8, 89.7, 91.3, 88.2, 90.2, 84.1, 89.0, 58.9), strict=True)),
    "lora": dict(zip(TASKS, (72.5, 90.1, 91.5, 88.5, 92.7, 84.1, 89.1, 59.2), strict=True)),
    "bitfit": dict(zip(TASKS, (72.3, 90.4, 90.2, 84.0, 92.1, 82.2, 89.2, 58.8), strict=True)),
}
