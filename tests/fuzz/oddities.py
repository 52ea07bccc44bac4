"""Values that nobody expects, and JSON in which some stand."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from hypothesis import strategies as st

#: Stand for what `json.dumps` cannot write: see `text_of`.
DEEP, DIGITS = "@deep@", "@digits@"
TEXTS = [
    "", " ", "0", "-1", "1e400", "nan", "x", "fake", "NVIDIA H200", "bf16", "ok", "\n", "\x1b[31m", "[red]", "[/foo]",
    "\0", "{}", "../x", "/dev/null", "~", "h200", "\u0663", "\U0001f600", "\udcff", "x" * 5000, "9" * 5000,
]  # fmt: skip
NUMBERS = [
    0, 1, -1, 2, 3, 7, 127, 32767, 2**31 - 1, 2**31, 2**63, 10**30, 10**400, True, False,
    -0.0, 0.5, 1.5, 1e-30, 1e30, 1e308, float("nan"), float("inf"), float("-inf"),
]  # fmt: skip
VALUES = [None, [], {}, [[]], {"": None}, [None], ["x"] * 1000, DEEP, DIGITS, *TEXTS, *NUMBERS]

values = st.sampled_from(VALUES) | st.integers() | st.floats() | st.text(max_size=20)


class Change(NamedTuple):
    """One change of a JSON value: at a path, "set" to a value, "drop", or "add" the value there (to an object under an
    unknown key, to an array as its last element)."""

    path: tuple[str | int, ...]
    how: str
    value: Any


def changes(base: Any) -> st.SearchStrategy[Change]:
    """Changes of a JSON value, at any place in it."""
    return st.builds(
        Change, st.sampled_from(list(_paths(base))), st.sampled_from(["set", "set", "drop", "add"]), values
    )


def changed(base: Any, change: Change) -> Any:
    """The JSON value after the change; itself where its path is gone."""
    if not change.path:
        return change.value if change.how == "set" else base
    result = at = copy.deepcopy(base)
    try:
        for step in change.path[:-1]:
            at = at[step]
        last = change.path[-1]
        if change.how == "set":
            at[last] = change.value
        elif change.how == "drop":
            del at[last]
        elif isinstance(at[last], list):
            at[last].append(change.value)
        else:
            at[last]["unknown"] = change.value
    except (KeyError, IndexError, TypeError, AttributeError):
        return base
    return result


def text_of(value: Any) -> str:
    """A value as JSON, with what JSON does not have (NaN) as Python writes it, and with what Python does not write."""
    text = json.dumps(value)
    return text.replace(f'"{DEEP}"', "[" * 100_000 + "]" * 100_000).replace(f'"{DIGITS}"', "9" * 5000)


def _paths(value: Any, at: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    yield at
    steps = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, inner in steps:
        yield from _paths(inner, (*at, step))
