"""Old names keep working for two minor versions, with a warning that has the new name and the version without the old.

    @renamed(removed_in="0.4", features="num_features")          # an argument
    def fit(*, num_features): ...

    warn_deprecated("snnk.hf.shrink", "snnk.hf.compress", removed_in="0.4")      # anything else, where it is used

tests/test_deprecation.py fails once the version of snnk has reached one that is named in this way.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


def warn_deprecated(old: str, new: str, *, removed_in: str, stacklevel: int = 3) -> None:
    """Warn of an old name. It is a FutureWarning, as Python hides a DeprecationWarning from users of a library.

    Args:
        old, new: the two names, as users write them.
        removed_in: first version without the old one.
        stacklevel: of `warnings.warn`. Default: the line that called the function that calls this one.

    Example:
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     warn_deprecated("snnk.old", "snnk.new", removed_in="0.4")
        >>> str(caught[0].message)
        'snnk.old is deprecated and will be removed in snnk 0.4; use snnk.new'
    """
    text = f"{old} is deprecated and will be removed in snnk {removed_in}; use {new}"
    warnings.warn(text, FutureWarning, stacklevel=stacklevel)


def renamed(*, removed_in: str, **names: str) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Let a function take old names of keyword arguments, with a warning.

    Args:
        removed_in: first version without them.
        names: the new name by the old one.

    Example:
        >>> @renamed(removed_in="0.4", features="num_features")
        ... def fit(num_features):
        ...     return num_features
        >>> with warnings.catch_warnings(record=True):
        ...     warnings.simplefilter("always")
        ...     fit(features=8)
        8
    """

    def wrap(function: Callable[..., Result]) -> Callable[..., Result]:
        @functools.wraps(function)
        def call(*args: object, **kwargs: object) -> Result:
            for old in names.keys() & kwargs.keys():
                new = names[old]
                if new in kwargs:
                    raise TypeError(f"{function.__qualname__} got {old} and {new}, which are the same; give {new}")
                warn_deprecated(f"the argument {old} of {function.__qualname__}", new, removed_in=removed_in)
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return call

    return wrap
