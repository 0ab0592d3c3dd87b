"""Old names work with a warning, and are gone when they are due."""

import ast
import inspect
from pathlib import Path

import pytest

import snnk
from snnk._deprecation import renamed, warn_deprecated


@renamed(removed_in="9.9", features="num_features", lam="alpha")
def fit(num_features, alpha=1.0):
    """A function with two new names."""
    return num_features, alpha


def test_an_old_argument_works_with_a_warning_at_the_line_of_the_caller():
    with pytest.warns(FutureWarning, match="argument features of fit .* removed in snnk 9.9; use num_features") as seen:
        assert fit(features=3) == (3, 1.0)
    assert seen[0].filename == __file__
    with pytest.warns(FutureWarning, match="use alpha"):
        assert fit(3, lam=2.0) == (3, 2.0)


def test_a_new_argument_has_no_warning_and_both_are_an_error():
    assert fit(3, alpha=2.0) == fit(num_features=3, alpha=2.0) == (3, 2.0)
    with pytest.raises(TypeError, match="fit got lam and alpha, which are the same; give alpha"):
        fit(3, lam=1.0, alpha=1.0)
    assert list(inspect.signature(fit).parameters) == ["num_features", "alpha"] and fit.__doc__


def test_a_warning_points_to_the_user_of_a_function():
    def old():
        warn_deprecated("old", "new", removed_in="9.9")

    with pytest.warns(FutureWarning, match="old is deprecated") as seen:
        old()
    assert seen[0].filename == __file__ and seen[0].lineno == inspect.currentframe().f_lineno - 1


def due(text, version):
    """Versions that calls in a source name and that are not later than `version`."""
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    named = [word.value for call in calls for word in call.keywords if word.arg == "removed_in"]
    named = [node.value for node in named if isinstance(node, ast.Constant)]
    return [name for name in named if _numbers(name) <= _numbers(version)]


def _numbers(version):
    return [int(part) for part in version.split(".") if part.isdecimal()]


def test_old_names_are_removed_when_they_are_due():
    assert due('warn_deprecated("a", "b", removed_in="0.4")', "0.4.0") == ["0.4"]
    assert due('warn_deprecated("a", "b", removed_in="0.10")', "0.4.0") == []
    for path in Path(snnk.__file__).parent.rglob("*.py"):
        assert due(path.read_text(encoding="utf-8"), snnk.__version__) == [], path
