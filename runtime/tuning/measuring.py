"""`measure`: times configs one after the other, compiled ahead in parallel, until a deadline."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from ...datasets import ForetuneError
from ...datasets.errors import abridged
from ..launching.ahead import compile_ahead, cores

_Config = TypeVar("_Config", bound=Hashable)

#: Configs for each compiling thread before those are timed: enough to keep all threads busy, and few enough that an
#: interrupted tuning has times to go on with. (Not both at once: compiling threads would disturb the timing.)
_AT_ONCE = 2


class TuningFailed(ForetuneError):  # noqa: N818 - what happened, as people say it
    """No config of a kernel, or of a function, works; the message lists why, for each. Of a function, `trials` has
    them all."""

    trials: Sequence[Any] = ()


def measure(
    configs: Sequence[_Config],
    compile_one: Callable[[_Config], object] | None,
    time_one: Callable[[_Config], float],
    on_outcome: Callable[[_Config, float | Exception], None],
    *,
    deadline: float = math.inf,
    workers: int | None = None,
) -> None:
    """Times configs, in order, and hands over what came of each at once: microseconds, or why it failed. Whatever
    `compile_one` (None where there is nothing to compile) or `time_one` raises is that config's failure.

    Begins no config after the deadline, in seconds of `time.monotonic`.
    """
    threads = cores() if workers is None else workers
    size = max(_AT_ONCE * threads, 1)
    for first in range(0, len(configs), size):
        if time.monotonic() >= deadline:
            return
        some = configs[first : first + size]
        jobs = [] if compile_one is None else [partial(compile_one, config) for config in some]
        errors = compile_ahead(jobs, threads) or [None] * len(some)
        for config, error in zip(some, errors, strict=True):
            if isinstance(error, Exception):
                on_outcome(config, error)
            elif time.monotonic() >= deadline:
                return
            else:
                on_outcome(config, _timed(time_one, config))


def _timed(time_one: Callable[[_Config], float], config: _Config) -> float | Exception:
    try:
        time_us = float(time_one(config))
    except Exception as error:  # noqa: BLE001 - what this config came to
        return error
    return time_us if 0 < time_us < math.inf else ForetuneError(f"its time was {time_us} us")


def failure(kernel: str, failed: Mapping[_Config, Exception]) -> TuningFailed:
    """The error of a kernel of which every config failed, caused by the first one's. What many of them failed of is
    listed once."""
    reasons: dict[str, list[str]] = {}
    for config, error in failed.items():
        reasons.setdefault(abridged(f"{type(error).__name__}: {error}"), []).append(str(config))
    lines = [f"  {reason}\n    " + "\n    ".join(configs) for reason, configs in reasons.items()]
    error = TuningFailed(f"{kernel}: none of its {len(failed)} configs could be launched:\n" + "\n".join(lines))
    error.__cause__ = next(iter(failed.values()), None)
    return error
