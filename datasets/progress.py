"""How far a long computation is, whoever computes and whoever wants to know; and its end when nobody waits any more.

What takes long says so with `advance`, in shares of the task that it is part of, and need not know of what task:

>>> told = []
>>> with reporting(told.append):
...     with share_of(0.8):
...         advance(0.5)
...     advance(0.2)
>>> [round(share, 2) for share in told]
[0.4, 0.8, 1.0]
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

_Result = TypeVar("_Result")


class AbandonedError(Exception):
    """Raised in a thread whose result nobody waits for any more."""


@dataclass(frozen=True)
class _Task:
    """What `advance` is about in this thread."""

    add: Callable[[float], None]  # takes a further share of the task
    abandoned: tuple[threading.Event, ...] = ()


_task: ContextVar[_Task] = ContextVar("_task", default=_Task(lambda share: None))  # noqa: B039 - it is frozen
_adding = threading.Lock()  # several threads advance one task


def advance(share: float) -> None:
    """Says that a further share of the current task is done, 0 to 1. Raises `AbandonedError` in a thread of
    `side_by_side` whose result nobody waits for any more: whoever calls this often ends soon."""
    task = _task.get()
    if any(event.is_set() for event in task.abandoned):
        raise AbandonedError
    with _adding:
        task.add(share)


@contextmanager
def share_of(share: float) -> Iterator[None]:
    """What is done within is this share of the current task, and all of it when the block ends."""
    outer, spent = _task.get(), 0.0

    def add(part: float) -> None:
        nonlocal spent
        part = min(part, 1.0 - spent)
        spent += part
        outer.add(part * share)

    token = _task.set(_Task(add, outer.abandoned))
    try:
        yield
    finally:
        _task.reset(token)
    with _adding:
        add(1.0)


@contextmanager
def reporting(on_progress: Callable[[float], None]) -> Iterator[None]:
    """Calls `on_progress` with the share of the block that is done, from 0 to 1, whenever it changes, from whatever
    thread."""
    done = 0.0

    def add(share: float) -> None:
        nonlocal done
        if share > 0:
            done = min(done + share, 1.0)
            on_progress(done)

    token = _task.set(_Task(add))
    try:
        with share_of(1.0):
            yield
    finally:
        _task.reset(token)


def side_by_side(calls: Sequence[Callable[[], _Result]], jobs: int) -> list[_Result]:
    """The results of several calls, at most `jobs` at a time, in threads that advance the current task.

    Where one of them fails, or Ctrl-C ends the waiting, the others end at their next `advance`, and nobody waits for
    that.

    >>> side_by_side([lambda: 1, lambda: 2], jobs=2)
    [1, 2]
    """
    from joblib import Parallel, delayed

    over, outer = threading.Event(), _task.get()
    task = _Task(outer.add, (*outer.abandoned, over))

    def run(call: Callable[[], _Result]) -> _Result:
        token = _task.set(task)
        try:
            advance(0.0)
            return call()
        finally:
            _task.reset(token)

    try:
        results: list[_Result] = Parallel(n_jobs=jobs, prefer="threads")(delayed(run)(call) for call in calls)
    except BaseException:
        over.set()
        raise
    return results
