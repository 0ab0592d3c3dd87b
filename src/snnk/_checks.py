"""Checks of arguments. Each error states what came in, what was expected and what to do.

torch is imported by the checks of tensors alone, so that the command line checks its options without it.
"""

from __future__ import annotations

import difflib
import numbers
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, TypeGuard, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


def choose(name: object, known: Iterable[str], kind: str) -> str:
    """Return `name` if it is one of `known`, else raise an error that lists them and the nearest."""
    known = list(known)
    if isinstance(name, str) and name in known:
        return name
    if not isinstance(name, str):
        raise TypeError(f"{kind} must be one of {', '.join(known)}; got {type(name).__name__}")
    raise ValueError(f"unknown {kind} {name!r}{_hint(name, known) or '.'} Known: {', '.join(known)}")


def no_column(name: str, there: Iterable[str], source: object) -> ValueError:
    """The error of a missing column, with the nearest name and all that there are.

    Example:
        >>> no_column("label", ["text", "Label"], "train.csv")
        ValueError("no column 'label' in train.csv; did you mean 'Label'? Its columns are text, Label")
    """
    there = list(there)
    hint = _hint(name, there)
    its = "Its" if hint else "; its"
    return ValueError(
        f"no column {name!r} in {source}{hint}{' ' * bool(hint)}{its} columns are {', '.join(there) or 'none'}"
    )


def _hint(name: str, known: list[str]) -> str:
    """The nearest of the known names, whatever its capitals, as the end of a sentence; empty if none is near."""
    lower = {word.lower(): word for word in reversed(known)}
    near = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.5)
    return f"; did you mean {lower[near[0]]!r}?" if near else ""


def look_up(name: object, table: Mapping[str, T], kind: str) -> T:
    """Return `table[name]`, with the error of `choose` for an unknown name."""
    return table[choose(name, table, kind)]


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a real number, which may be one of numpy's, and no bool."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_integer(value: object) -> TypeGuard[int]:
    """Whether a value is an integer, which may be one of numpy's, and no bool."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def at_least_zero(value: object, name: str) -> None:
    """Refuse what is no number, negative or not finite."""
    if not is_number(value) or not 0 <= value < float("inf"):
        raise ValueError(f"{name} must be a number of at least 0; got {value!r}")


def positive_int(value: object, name: str) -> int:
    """Return an integer, which may be one of numpy's, as an int: JSON takes no other."""
    if not is_integer(value) or value < 1:
        raise ValueError(f"{name} must be a positive integer; got {value!r}")
    return int(value)


def ranks(value: object, name: str) -> tuple[int, int]:
    """Return the dimensions per head of queries and keys, and of values, as a tuple, for which JSON has a list."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError(
            f"ranks of {name} must be two numbers, of queries and keys and of values; got {str(value)[:200]}"
        )
    return positive_int(value[0], f"rank of {name}"), positive_int(value[1], f"rank of {name}")


def even_features(num_features: object) -> int:
    """Return the number of features of a map that makes a pair of features per projection, such as (cos, sin)."""
    m = positive_int(num_features, "num_features")
    if m % 2:
        choices = f"{m - 1} or {m + 1}" if m > 1 else "2"
        raise ValueError(f"num_features must be even, with two features per projection; got {m}. Use {choices}")
    return m


def positive(value: object, name: str) -> float:
    """Return a positive and finite number as a float."""
    if not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:  # an int from JSON may have any size
        raise ValueError(f"{name} must be a positive number; got {value!r}")
    return float(value)


def matrix(x: Tensor, in_features: int, name: str) -> Tensor:
    """Return a floating tensor whose last dimension is `in_features`; torch.compile can trace this check."""
    from torch import Tensor

    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor; got {type(x).__name__}")
    if not x.is_floating_point():
        raise TypeError(f"{name} must be a floating tensor; got {x.dtype}. Convert it with .float()")
    if x.ndim == 0 or x.shape[-1] != in_features:
        raise ValueError(f"{name} must end in dimension {in_features}; got shape {tuple(x.shape)}")
    return x


def finite(x: Tensor, name: str) -> Tensor:
    """Return a tensor without NaN or infinite values."""
    bad = x.numel() - int(x.isfinite().sum())
    if bad:
        raise ValueError(f"{name} has {bad} NaN or infinite values of {x.numel()}; clean them first")
    return x


def layer_weights(weight: Tensor, bias: Tensor | None, in_features: int) -> tuple[Tensor, Tensor]:
    """Return a layer's (out, in) weight and (out,) bias in float64; a missing bias becomes zeros."""
    finite(matrix(weight, in_features, "weight"), "weight")
    if weight.ndim != 2:
        raise ValueError(f"weight must be (out_features, {in_features}); got shape {tuple(weight.shape)}")
    if bias is None:
        bias = weight.new_zeros(weight.shape[0])
    finite(matrix(bias, weight.shape[0], "bias"), "bias")
    if bias.ndim != 1:
        raise ValueError(f"bias must be ({weight.shape[0]},); got shape {tuple(bias.shape)}")
    return weight.double(), bias.double()
