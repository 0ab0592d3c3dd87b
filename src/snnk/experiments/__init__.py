"""One file for each figure or table of the paper: a configuration, `run` yielding `total` rows, `plot`, `claims`.

A module has FIGURE, NEEDS and TIME for the list; `Config` with the paper's hyperparameters, and QUICK; `run(config,
results, source)`, which takes rows over that are done; `plot(results)` and `claims(results)`, which read rows only; and
maybe `left(results)`, what of the paper and of the configuration the rows have not.
"""

from __future__ import annotations

from types import ModuleType

from snnk.experiments import (
    adapters,
    bundled_latency,
    bundled_transformers,
    compression,
    estimators,
    glue,
    mnist,
    pointwise,
    qpnn,
    siren,
    trainable_parameters,
    uci,
    uptraining,
    uptraining_images,
    vision,
)

EXPERIMENTS: dict[str, ModuleType] = {
    "pointwise": pointwise,
    "siren": siren,
    "qpnn": qpnn,
    "mnist": mnist,
    "uci": uci,
    "trainable-parameters": trainable_parameters,
    "bundled-transformers": bundled_transformers,
    "bundled-latency": bundled_latency,
    "glue": glue,
    "vision": vision,
    "uptraining": uptraining,
    "uptraining-images": uptraining_images,
    "estimators": estimators,
    "compression": compression,
    "adapters": adapters,
}
