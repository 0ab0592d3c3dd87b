"""How the values of an Arrow column are read: as numbers, as exact text, as seconds, or as probabilities of classes."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import TYPE_CHECKING

import numpy as np

from snnk.tabular.codes import text_hashes
from snnk.tabular.scaling import Array

if TYPE_CHECKING:
    import pyarrow as pa

TIMES = ("timestamp", "timestamp with zone", "time", "duration")
CYCLES = {"day": 86_400.0, "week": 7 * 86_400.0, "year": 365.2425 * 86_400.0}  # in seconds
UNITS = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}  # per second


def kind_of(data_type: pa.DataType) -> str:
    """How values of a type are used: as a "number", as a "category", as one of `TIMES`, or "" if they cannot be."""
    import pyarrow.types as pt

    if pt.is_dictionary(data_type):
        inner = kind_of(data_type.value_type)
        return "category" if inner == "number" else inner
    if pt.is_string(data_type) or pt.is_large_string(data_type):
        return "category"
    if pt.is_timestamp(data_type) or pt.is_date(data_type):
        return "timestamp with zone" if pt.is_timestamp(data_type) and data_type.tz else "timestamp"
    if pt.is_time(data_type) or pt.is_duration(data_type):
        return "time" if pt.is_time(data_type) else "duration"
    number = (pt.is_null, pt.is_integer, pt.is_floating, pt.is_boolean, pt.is_decimal)
    return "number" if any(check(data_type) for check in number) else ""


def plain(data: pa.Array, name: str, label: str, kind: str = "") -> pa.Array:
    """Values without a dictionary, in a type that pyarrow computes with; other types raise a ValueError.

    If `kind` is that of the column, values that cannot be of it raise one, too.
    """
    import pyarrow as pa
    import pyarrow.types as pt

    found = kind_of(data.type)
    if not found:
        raise ValueError(
            f"column {name!r} is {data.type} in {label}, neither a number nor a category nor a time; cast it"
        )
    if kind and found != kind and (found in TIMES or kind in TIMES) and not pt.is_null(data.type):
        raise ValueError(f"column {name!r} is {data.type} in {label}, and was a {kind} in training; cast it")
    if pt.is_dictionary(data.type):
        data = data.dictionary_decode()
    if pt.is_decimal(data.type) and data.type.bit_width < 128:  # pyarrow does not compute with narrow decimals
        data = data.cast(pa.decimal128(38, data.type.scale))
    return data


def as_ticks(data: pa.Array) -> pa.Array:
    """Times as the integers that they are: days, seconds, or parts of seconds."""
    import pyarrow as pa

    return data.cast(pa.int32() if data.type.bit_width == 32 else pa.int64())


def as_seconds(data: pa.Array) -> Array:
    """Times as float64 seconds, since 1970 (in UTC, if they have a zone) or midnight, with NaN for missing ones."""
    import pyarrow as pa
    import pyarrow.types as pt

    values: Array = as_ticks(data).cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    if pt.is_date32(data.type):
        return values * CYCLES["day"]
    return values / UNITS["ms" if pt.is_date64(data.type) else data.type.unit]


def as_numbers(data: pa.Array, name: str, label: str) -> Array:
    """Values as float64, with NaN for missing ones; those of times are seconds."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if kind_of(data.type) in TIMES:
        return as_seconds(data)
    try:
        return pc.cast(data, pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    except (ValueError, pa.ArrowException) as error:
        raise ValueError(f"column {name!r} is {data.type} in {label}, which is no number: {error}") from error


def as_text(data: pa.Array, name: str, label: str) -> pa.Array:
    """Categories as exact text; whole numbers become digits, so that 1, 1.0, 1.00 and true are one category."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.types as pt

    try:
        if pt.is_boolean(data.type):
            data = pc.cast(data, pa.int8())
        if pt.is_floating(data.type) or pt.is_decimal(data.type):
            encoded = data.dictionary_encode()
            return pa.array(map(_digits, encoded.dictionary.to_pylist()), pa.string()).take(encoded.indices)
        text = pc.cast(data, pa.string())
        text.validate(full=True)  # a file can hold bytes that are not UTF-8
        return text
    except (ValueError, pa.ArrowException) as error:
        raise ValueError(f"column {name!r} of {label} cannot be read as text: {error}; correct the table") from error


def _digits(value: float | Decimal | None) -> str | None:
    if value is None or not math.isfinite(value):
        return None
    return str(int(value)) if value == int(value) else str(value)


def fold_values(data: pa.Array, kind: str, name: str, label: str) -> Array:
    """Values (n,) of an input that decide on the fold of a row: float64 numbers, or hashes of texts (0 if missing)."""
    data = plain(data, name, label, kind)
    return text_hashes(as_text(data, name, label)) if kind == "category" else as_numbers(data, name, label)


def is_soft(data_type: pa.DataType) -> bool:
    """Whether values are probabilities of classes: a struct with one number per class, the prediction of a teacher."""
    import pyarrow.types as pt

    return pt.is_struct(data_type) and len(data_type) > 0 and all(pt.is_floating(field.type) for field in data_type)


def soft_fields(data: pa.StructArray) -> dict[str, Array]:
    """Probabilities (n,) by class, with NaN for missing ones."""
    values = (field.to_numpy(zero_copy_only=False).astype(np.float64) for field in data.flatten())  # null where data is
    return dict(zip((field.name for field in data.type), values, strict=True))
