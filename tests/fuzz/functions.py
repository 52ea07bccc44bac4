"""Functions that `foretune.tune` makes: odd arguments, spaces, times and failures, over the calls of several processes.

The function returns the same for every config, and which config is fastest depends on the argument. So a result that
differs, or a config that another argument's tuning chose, is a silent change.
"""

from __future__ import annotations

import asyncio
import datetime
import decimal
import fractions
import hashlib
import io
import os
import uuid
import warnings
from collections import deque
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import foretune
import numpy as np
from foretune.runtime import arguments
from foretune.runtime.tuning.functions import TuningFailed, config_cache
from fuzz.judging import REFUSED, TroubleError, same, within
from fuzz.oddities import VALUES
from hypothesis import strategies as st

TILES = (1, 2, 4, 8)
#: Values that are easily mistaken for each other, beside those of `oddities`.
ALIKE: list[Any] = [
    1, 1.0, True, "1", b"1", "True", "None", None, float("inf"), "float inf", "inf", (1,), [1], {1}, frozenset({1}),
    decimal.Decimal("1.0"), decimal.Decimal("1.00"), fractions.Fraction(1, 2), 0.5, 1j, complex(1, 0), range(3),
    [0, 1, 2], slice(0, 3), slice(None, 3), datetime.date(2026, 1, 1), "2026-01-01",
    datetime.datetime(2026, 1, 1), datetime.timedelta(1), uuid.UUID(int=1), PurePosixPath("x"), "x",
    np.float32(1), np.int64(1), np.zeros((2, 3)), np.zeros((2, 3), order="F"), np.zeros((4, 3))[::2], np.zeros((3, 2)),
    np.zeros((2, 3), np.float32), "a" * 100 + "b", "a" * 100 + "c", "a" * 500 + "b", "a" * 500 + "c", bytearray(b"x"),
    10**4999, 10**4999 + 1, {"a": 1}, {"a": "1"}, {1: "a"}, {"1": "a"}, int, "builtins.int", len,
]  # fmt: skip
#: What must not be consumed, or has nothing measured.
STREAMS = ("generator", "file", "map")
TIMES = (-1.0, 0.0, float("nan"), float("inf"), "3", None, 10**400)


class Step(NamedTuple):
    """One thing that happens: a call with an argument, or a new process."""

    what: str  # "call", "tune", "process", "fail", "mend"
    value: Any


class Tuned(NamedTuple):
    steps: tuple[Step, ...]
    space: Any
    how: str  # which kind of function, or of timer
    odd_time: Any


def _steps() -> st.SearchStrategy[tuple[Step, ...]]:
    values = st.integers(0, len(ALIKE) + len(VALUES) - 1) | st.sampled_from(STREAMS)
    step = st.builds(Step, st.sampled_from(["call", "call", "call", "tune", "process", "fail", "mend"]), values)
    return st.lists(step, min_size=1, max_size=8).map(tuple)


_SPACES = [{"tile": TILES}, [{"tile": tile} for tile in TILES], {"tile": range(1, 9)}, {"tile": TILES[:1]}]
inputs = st.builds(
    Tuned,
    _steps(),
    st.sampled_from([0, 0, 0, 1, 2, 3] * 2)
    | st.sampled_from([0, 1])
    | st.sampled_from([0, 1])
    | st.integers(0, len(_SPACES) + len(VALUES) - 1),
    st.sampled_from(["plain", "plain", "plain", "times", "coroutine", "partial", "closure", "restore"]),
    st.sampled_from(TIMES),
)


def check(one: Tuned, folder: Path) -> str:
    """Judge one input: "answered", "refused", or trouble."""
    cache = folder / hashlib.sha256(ascii(one).encode()).hexdigest()[:16]
    with mock.patch.dict(os.environ, {"FORETUNE_CACHE_DIR": str(cache)}), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config_cache._opened.cache_clear()
        arguments._warned.clear()
        answered = within(lambda: _run(one))
    return "refused" if answered is REFUSED else "answered"


class _Watch:
    """A timer whose clock only the function moves."""

    def __init__(self, odd: Any = ...) -> None:
        self.us, self.odd, self.count = 0.0, odd, 0

    def sample(self, call: Any, samples: int, undo: Any) -> list[Any]:
        times: list[Any] = []
        for _ in range(samples):
            if undo is not None:
                undo()
            began = self.us
            call()
            self.count += 1
            times.append(self.us - began if self.odd is ... or self.count % 3 else self.odd)
        return times


class _FailedError(Exception):
    pass


def _run(one: Tuned) -> None:
    watch = _Watch(one.odd_time if one.how == "times" else ...)
    state = SimpleNamespace(fails=False, ran=[])
    space = _SPACES[one.space] if one.space < len(_SPACES) else VALUES[one.space - len(_SPACES)]

    def work(value: Any, tile: int = 0) -> Any:
        if state.fails:
            raise _FailedError("not mounted")
        state.ran.append(tile)
        watch.us += 10.0 + (tile != _fastest(value))
        if one.how == "restore":
            value[0][0] += 1.0
            return float(value[0][0])
        return list(value) if hasattr(value, "__next__") else described(value)

    def declare() -> Any:
        function: Any = work
        options: dict[str, Any] = {"timer": watch, "n_warmup": 1, "n_repeat": 3}
        if one.how == "coroutine":

            async def function(value: Any, tile: int = 0) -> Any:
                return described(value)

        elif one.how == "closure":
            function = _closure(work)
        elif one.how == "restore":
            options |= {"restore": ["value"], "key": lambda value: len(value)}
        return foretune.tune(space, **options)(function)

    tuned = declare()
    for step in one.steps:
        if step.what == "process":
            config_cache._opened.cache_clear()
            tuned = declare()
        elif step.what in ("fail", "mend"):
            state.fails = step.what == "fail"
        else:
            _call(one, tuned, step, state, watch)


def _closure(work: Any) -> Any:
    def inner(value: Any, tile: int = 0) -> Any:
        return work(value, tile)

    return inner


def _call(one: Tuned, tuned: Any, step: Step, state: Any, watch: _Watch) -> None:
    if one.how == "restore":
        value: Any = [[1.0], deque([np.ones(2)])]
        expected: Any = 2.0
    elif isinstance(step.value, str):
        value, expected = _stream(step.value)
    else:
        value = (ALIKE + VALUES)[step.value]
        expected = described(value)
    state.ran.clear()
    try:
        if step.what == "tune":
            result = tuned.tune(value)
            if one.how == "plain" and not isinstance(step.value, str):
                best = result.best_config.get("tile")
                tried = [dict(trial.config).get("tile") for trial in result.trials]
                if best != _fastest(value) in tried:
                    raise TroubleError("silent change", "another argument's choice", described(value))
            return
        found = tuned(value)
    except _FailedError:
        if not state.fails:
            raise
        return
    except TuningFailed:
        if not state.fails and one.how != "times":
            raise TroubleError("silent change", "a failure that is over is kept", described(value)) from None
        return
    except foretune.ForetuneError:  # this argument is refused
        return
    if asyncio.iscoroutine(found):
        found.close()
        raise TroubleError("silent change", "a coroutine was timed")
    if state.fails:
        raise TroubleError("silent change", "a function that fails returned")
    same("the result", expected, found)
    tiles = {dict(config).get("tile") for config in tuned.configs}
    if state.ran and state.ran[-1] not in tiles | {0}:
        raise TroubleError("silent change", "a config that is not in the space", str(state.ran[-1]))
    if one.how == "plain" and not isinstance(step.value, str) and _fastest(value) in tiles:
        same("the config of this argument", _fastest(value), state.ran[-1])


def _stream(kind: str) -> tuple[Any, Any]:
    if kind == "generator":
        return (x for x in range(3)), [0, 1, 2]
    if kind == "map":
        return map(int, "012"), [0, 1, 2]
    return io.StringIO("a\nb"), ["a\n", "b"]


def described(value: Any) -> str:
    """Return what tells a value from others: arrays by type and layout, all else by type and contents."""
    if isinstance(value, np.ndarray):
        return f"{value.shape} {value.dtype} {value.strides}"
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, (list, tuple)):  # one key for both, as ever
        return f"list{[described(one) for one in value]}"
    if isinstance(value, (set, frozenset)):
        return f"set{sorted(map(described, value))}"
    if isinstance(value, bytearray):
        value = bytes(value)
    if isinstance(value, dict):
        return f"dict{[(described(name), described(one)) for name, one in value.items()]}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"int {value:x}"
    return f"{type(value).__name__} {value!r}"


def _fastest(value: Any) -> int:
    number = int(hashlib.sha256(described(value).encode("utf-8", "surrogatepass")).hexdigest(), 16)
    return TILES[number % len(TILES)]
