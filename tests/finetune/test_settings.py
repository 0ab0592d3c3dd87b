"""Settings of training: rates and bad values."""

import math

import pytest

from snnk.finetune.settings import TrainingSettings


def test_rates():
    linear = TrainingSettings(learning_rate=1.0, schedule="linear", warmup=0.2)
    assert [round(linear.rate(i, 10), 6) for i in range(10)] == [0.5, 1, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]
    assert {TrainingSettings(learning_rate=1.0, warmup=0).rate(i, 10) for i in range(10)} == {1.0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learning_rate": 0}, "learning_rate must be a positive number"),
        ({"learning_rate": math.nan}, "learning_rate"),
        ({"batch_size": 0}, "batch_size must be a positive integer"),
        ({"optimizer": "adamx"}, "did you mean 'adam'"),
        ({"schedule": "cosine"}, "unknown schedule"),
        ({"warmup": 1.0}, "warmup must be in"),
        ({"clip": -1.0}, "clip"),
    ],
)
@pytest.mark.once
def test_bad_settings(options, message):
    with pytest.raises(ValueError, match=message):
        TrainingSettings(**options)
