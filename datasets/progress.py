"""Progress of long computations: reporting it, showing it, and ending computations whose result is not needed.

A computation calls `advance` with the share of the current task that it has done, and need not know the task:

>>> reported = []
>>> with reporting(reported.append):
...     with share_of(0.8):
...         advance(0.5)
...     advance(0.2)
>>> [round(share, 2) for share in reported]
[0.4, 0.8, 1.0]

`showing` and `showing_steps` show progress on stderr: as a bar on a terminal or in a notebook, as log lines otherwise.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from .errors import printable

_Result = TypeVar("_Result")


class AbandonedError(Exception):
    """Raised in a thread whose result is no longer needed."""


@dataclass(frozen=True)
class _Task:
    """The current task of a thread: `advance` adds to its progress."""

    add: Callable[[float], None]  # adds a share of the task
    abandoned: tuple[threading.Event, ...] = ()  # set if the task's result is no longer needed


_task: ContextVar[_Task] = ContextVar("_task", default=_Task(lambda share: None))  # noqa: B039 - it is frozen
_adding = threading.Lock()  # several threads advance one task


def advance(share: float) -> None:
    """Report that a further share of the current task, from 0 to 1, is done.

    Raises:
        AbandonedError: This thread was started by `side_by_side` and its result is not needed. A computation that calls
            `advance` often therefore ends soon.
    """
    task = _task.get()
    if any(event.is_set() for event in task.abandoned):
        raise AbandonedError
    with _adding:
        task.add(share)


@contextmanager
def share_of(share: float) -> Iterator[None]:
    """Count the block's progress as a share of the current task; all of that share is done when the block ends."""
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
    """Call `on_progress` with the share of the block that is done, from 0 to 1, whenever it changes, in any thread."""
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
    """Run several calls in threads, at most `jobs` at a time, and return their results.

    Calls of `advance` in these threads count for the current task. If a thread fails, or Ctrl-C is pressed, the error
    is raised without waiting for the other threads, which end at their next `advance`.

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


#: Seconds between two log lines.
_EVERY_S = 30.0
#: Computations that are expected to take fewer seconds are not announced in the log.
_SOON_S = 2.0


class Steps(Protocol):
    """The state of a computation with a known number of steps; its `str` describes the current step."""

    @property
    def done(self) -> int:
        """The number of completed steps."""

    @property
    def total(self) -> int:
        """The number of all steps."""


@contextmanager
def showing(text: str, about_s: float = 0.0) -> Iterator[Callable[[str], None]]:
    """Show the block's progress (see `advance`) and its remaining time on stderr.

    Args:
        text: A description of the computation.
        about_s: The expected seconds on two idle cores; the log announces them if they are at least two.

    Yields:
        A function that replaces the text.
    """
    began, share, text = time.monotonic(), 0.0, printable(text)

    def status() -> str:
        left = time_left(share, time.monotonic() - began, about_s)
        return f"{text}: {share:.0%}" + ("" if left is None else f", about {in_words(left)} left")

    def show(new_share: float) -> None:
        nonlocal share
        share = new_share
        update(status(), share, 1.0)

    def say(content: str) -> None:
        nonlocal text
        text = printable(content)
        update(status(), share, 1.0)

    with _display(True, transient=True) as (update, log):
        if about_s >= _SOON_S:
            log(f"{text}: about {in_words(about_s)} on two idle cores")
        update(status(), share, 1.0)
        with _every(_EVERY_S, lambda: log(status())), reporting(show):
            yield say


@contextmanager
def showing_steps(shown: bool = True) -> Iterator[Callable[[Steps], None]]:
    """Show the steps of a computation on stderr, if `shown`.

    A bar shows every step. A log gets a line for each tenth of the steps, and one whenever 30 seconds have passed.

    Yields:
        A function to call with the computation's current state.
    """
    tenths, logged_s = -1, 0.0  # of the last log line
    with _display(shown, transient=False) as (update, log):

        def show(now: Steps) -> None:
            nonlocal tenths, logged_s
            text = printable(str(now))
            update(text, now.done, now.total)
            reached, at_s = 10 * now.done // max(now.total, 1), time.monotonic()
            if reached > tenths or at_s - logged_s >= _EVERY_S:
                tenths, logged_s = reached, at_s
                log(f"{now.done}/{now.total} {text}")

        update("starting", 0, None)
        yield show


@contextmanager
def _display(
    shown: bool, *, transient: bool
) -> Iterator[tuple[Callable[[str, float, float | None], None], Callable[[str], None]]]:
    """Yield two functions: one that updates the bar, and one that prints a log line if there is no bar.

    Both do nothing unless `shown`. A `transient` bar is removed at the end.
    """
    from rich import progress as rich
    from rich.console import Console

    console = Console(stderr=True, quiet=not shown)
    interactive = console.is_terminal or console.is_jupyter
    counted: list[Any] = [] if transient else [rich.MofNCompleteColumn()]
    columns = (rich.SpinnerColumn(), rich.BarColumn(20), rich.TextColumn("{task.description}", markup=False), *counted)
    with rich.Progress(*columns, console=console, transient=transient, disable=not interactive) as bar:
        task = bar.add_task("", total=None)

        def update(text: str, done: float, total: float | None) -> None:
            bar.update(task, description=text, completed=done, total=total)

        def log(line: str) -> None:
            if not interactive:
                console.print(line, soft_wrap=True, markup=False, emoji=False, highlight=False)

        yield update, log


def time_left(share: float, spent_s: float, about_s: float) -> float | None:
    """Estimate the remaining seconds of a computation; None if nothing is known.

    Args:
        share: The share that is done. From 10 % on, the estimate is extrapolated from it alone; below, it is a mean
            with the rest of `about_s`, whose weight falls from 1 to 0.
        spent_s: The seconds spent so far.
        about_s: The expected total in seconds; 0.0 = unknown.

    >>> time_left(0.0, 10.0, 60.0), time_left(0.05, 10.0, 60.0), time_left(0.5, 10.0, 60.0), time_left(0.0, 10.0, 0.0)
    (50.0, 123.5, 10.0, None)
    """
    if share <= 0.0 or (about_s <= 0.0 and share < 0.01):
        return max(about_s - spent_s, 0.0) if about_s > 0.0 else None
    trust = min(share / 0.1, 1.0) if about_s > 0.0 else 1.0
    return trust * spent_s * (1 - share) / share + (1 - trust) * about_s * (1 - share)


def in_words(seconds: float) -> str:
    """Return a duration as text in a readable unit.

    >>> in_words(0.2), in_words(89), in_words(170), in_words(7000)
    ('1 s', '89 s', '3 min', '1.9 h')
    """
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@contextmanager
def _every(seconds: float, call: Callable[[], None]) -> Iterator[None]:
    """Call `call` every `seconds` seconds while the block runs."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(seconds):
            call()

    ticking = threading.Thread(target=run, daemon=True)
    ticking.start()
    try:
        yield
    finally:
        over.set()
        ticking.join()
