"""Functions for mode `refine`: time calls (`CudaEvents`), limit the cost of exploring, and tell when to pause it."""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, ClassVar

from ....datasets import ForetuneError
from ....datasets.errors import shown
from ...arguments import is_pinned
from ...launching.stub_driver import stubbed
from ..ranks.agreement import may_tune

#: The environment variable with the most that exploring may cost: a share of an op's time, or seconds ("2s").
VARIABLE = "FORETUNE_MAX_COST"
_MAX_COST = "0.01"
#: The most that the host's time for a launch may be of a call's time if the device had nothing else to do meanwhile.
_MOST_GAP = 0.02


def check_cost(max_cost: Any = None) -> dict[str, float]:
    """Check how much exploring may cost, a share of the time or seconds ("2s"), and return it as `Race`'s argument.

    None means FORETUNE_MAX_COST, or else 1 %. Raises `ForetuneError` for anything else.

    >>> check_cost(0.02), check_cost("3s")
    ({'max_cost': 0.02}, {'max_s': 3.0})
    """
    name, value = ("max_cost", max_cost) if max_cost is not None else (VARIABLE, os.environ.get(VARIABLE) or _MAX_COST)
    if re.fullmatch(r"(\d+\.?\d*|\.\d+)s", str(value)):
        return {"max_s": float(str(value)[:-1])}
    try:
        share = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        share = math.nan
    if not 0 <= share <= 1:
        raise ForetuneError(f'{name} must be a share from 0 to 1, or seconds such as "2s", but is {shown(value)}')
    return {"max_cost": share}


class CudaEvents:
    """Times calls with CUDA events on the current stream, without waiting for them.

    If the device reaches the first event before the kernel is launched, the time includes a wait for the host. `read`
    marks such times, which occur if the host rather than the GPU limits the program's speed.
    """

    #: Pairs of events that can be used again, by device.
    free: ClassVar[dict[int, list[tuple[Any, Any]]]] = {}

    def __init__(self) -> None:
        import torch

        self._cuda: Any = torch.cuda  # `Event` is untyped
        self._running: deque[tuple[Any, Any, float]] = deque()

    def begin(self) -> Any:
        """Start to time a call on the current stream, and return a mark to pass to `end` or `cancel`."""
        stream = self._cuda.current_stream()
        free = self.free.setdefault(stream.device_index, [])
        try:
            start, end = free.pop()
        except IndexError:
            start, end = self._cuda.Event(enable_timing=True), self._cuda.Event(enable_timing=True)
        start.record(stream)
        return start, end, stream, free, time.perf_counter()

    def end(self, mark: Any, about: Any) -> None:
        """Record the end of the call that `begin` marked; `read` yields `about`, any object, with its time."""
        # The longest that the device can have waited for the launch, if it has reached the first event by now.
        gap_us = 1e6 * (time.perf_counter() - mark[4]) if mark[0].query() else 0.0
        mark[1].record(mark[2])
        self._running.append((mark, about, gap_us))

    def cancel(self, mark: Any) -> None:
        """Forget the call of this mark, which failed."""
        mark[3].append(mark[:2])

    def read(self) -> Iterator[tuple[Any, float]]:
        """Yield (`about`, microseconds) of each call that the GPU completed since the last `read`, without waiting.

        `about` is the object that `end` was given. The time is 0.0, which does not count, if the GPU may have waited
        for the host for more than 2 % of it.
        """
        while self._running and self._running[0][0][1].query():
            (start, end, _, free, _), about, gap_us = self._running.popleft()
            time_us = 1e3 * start.elapsed_time(end)
            free.append((start, end))
            yield about, time_us if gap_us <= _MOST_GAP * time_us else 0.0


def stopwatch() -> CudaEvents | None:
    """Return new `CudaEvents` to time the calls of one problem; None without a GPU."""
    torch = sys.modules.get("torch")
    return CudaEvents() if torch is not None and torch.cuda.is_available() and stubbed() is None else None


def is_deterministic() -> bool:
    """Return whether `torch.use_deterministic_algorithms` is on."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.are_deterministic_algorithms_enabled()


def why_paused() -> str:
    """Return the reason why no config may be explored now; "" if exploring is allowed."""
    if is_deterministic():
        return "torch.use_deterministic_algorithms is on"
    if is_pinned():
        return "choices are pinned"
    if not may_tune():
        return "a job of several ranks explores only within foretune.agree()"
    return ""
