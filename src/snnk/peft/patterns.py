"""Patterns of module names in adapter_config.json: only those that Python's `re` matches fast.

PEFT matches them as regular expressions against the name of every module, and `(a+)+b` takes hours on one name of 40
letters. Patterns in a file may contain names, alternatives, optional groups, `.`, `\\d+`, classes such as `[qkv]`, and
a few `*` or `+` behind a single character. Patterns in a configuration that was made in Python are not restricted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

# With three repeats, a name of n letters takes at most n^3 / 6 steps: a millisecond for 60 letters. PEFT puts repeats
# of its own around the patterns of the fields that have a lower number here.
REPEATS = {"target_modules": 3, "exclude_modules": 3, "feedforward_modules": 3, "layers_pattern": 2}
KEYS = {"rank_pattern": 2, "alpha_pattern": 2}
WAYS = 128  # combinations of the alternatives of groups and of optional parts
LONGEST = 10_000


def check_patterns(config: Mapping[str, Any], source: Any = "adapter_config.json") -> None:
    """Refuse a configuration from a file with a pattern that may take long to match.

    Example:
        >>> check_patterns({"target_modules": r".*\\.layer\\.\\d+\\.output\\.(dense|LayerNorm)"})
        >>> check_patterns({"target_modules": "(a+)+b"})
        Traceback (most recent call last):
        ...
        ValueError: target_modules in adapter_config.json is '(a+)+b', which may take hours to match: ...
    """
    for name, repeats in REPEATS.items():
        value = config.get(name)
        # a list contains endings of names, except for layers_pattern
        patterns = [value] if isinstance(value, str) else value if name == "layers_pattern" and value else []
        _check(patterns, repeats, name, source)
    for name, repeats in KEYS.items():
        value = config.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise ValueError(f"{name} in {source} must be an object of names and numbers; got {str(value)[:200]}")
        _check(value or (), repeats, name, source)
    _check(config.get("modules_to_save") or (), 0, "modules_to_save", source)


def _check(patterns: Any, repeats: int, name: str, source: Any) -> None:
    if not isinstance(patterns, Iterable):
        raise ValueError(f"{name} in {source} must be names or patterns of names; got {str(patterns)[:200]}")
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise ValueError(f"{name} in {source} must be names or patterns of names; got {str(pattern)[:200]}")
        if not is_quick(pattern, repeats):
            raise ValueError(
                f"{name} in {source} is {pattern[:200]!r}, which may take hours to match: a file may contain names, "
                f"alternatives, \\d+ and at most {repeats} of * and +, none behind a group. Write names into it, or "
                "pass config= with a configuration that was made in Python"
            )


def is_quick(pattern: str, repeats: int) -> bool:
    """Whether a pattern has at most that many repeats, all of single characters."""
    plain = re.sub(r"\\d[+*]?|\\[w.-]|\[[^][\\]*\]", "_", pattern[: LONGEST + 1])  # names contain few digits
    plain = re.sub(r"([*+?])\?", r"\1", plain.replace("(?:", "("))  # lazy repeats take as many steps
    known = len(pattern) <= LONGEST and re.fullmatch(r"[\w.:|()*+?^$-]*", plain)
    if not known or re.search(r"\)[*+]|[*+?][*+]|\(\?", plain):
        return False
    return len(re.findall(r"[*+]", plain)) <= repeats and _ways(plain) <= WAYS


def _ways(plain: str) -> int:
    """The number of combinations of alternatives and optional parts, all of which a match may try."""
    ways, groups = 2 ** min(plain.count("?"), 20), list[int]()
    for character in plain:
        if character == "(":
            groups.append(1)
        elif groups and character == "|":
            groups[-1] += 1
        elif groups and character == ")":
            ways = min(ways * groups.pop(), 2**20)
    return ways
