"""How far a long computation is, for people: a bar on a terminal or in a notebook, else a line every half minute."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ..progress import reporting
from .tables import printable

#: Between two lines in a log.
_EVERY_S = 30.0
#: What takes less is over before anybody has read how long it will take.
_SOON_S = 2.0


@dataclass
class _Shown:
    text: str
    share: float = 0.0


@contextmanager
def showing(text: str, about_s: float = 0.0, *, shown: bool = True) -> Iterator[Callable[[str], None]]:
    """Shows on stderr how far its block is (see `progress.advance`), and how long it will still take; yields what
    replaces the text.

    `about_s` is how long it takes as far as one can tell beforehand, in seconds; from two on, that is said first.
    """
    from rich import progress as rich
    from rich.console import Console

    console = Console(stderr=True, quiet=not shown)
    interactive = console.is_terminal or console.is_jupyter
    began, now = time.monotonic(), _Shown(printable(text))

    def told() -> str:
        left = time_left(now.share, time.monotonic() - began, about_s)
        return f"{now.text}: {now.share:.0%}" + ("" if left is None else f", about {in_words(left)} left")

    def line(content: str) -> None:
        if not interactive:
            console.print(content, soft_wrap=True, markup=False, emoji=False, highlight=False)

    if about_s >= _SOON_S:
        line(f"{now.text}: about {in_words(about_s)}")
    columns = (rich.SpinnerColumn(), rich.BarColumn(20), rich.TextColumn("{task.description}", markup=False))
    with rich.Progress(*columns, console=console, transient=True, disable=not interactive) as bar:
        task = bar.add_task(told(), total=1.0)

        def show(share: float) -> None:
            now.share = share
            bar.update(task, completed=share, description=told())

        def say(content: str) -> None:
            now.text = printable(content)
            bar.update(task, description=told())

        with _every(_EVERY_S, lambda: line(told())), reporting(show):
            yield say


def time_left(share: float, spent_s: float, about_s: float) -> float | None:
    """Seconds that a computation still takes, of which a share is done: at first what was thought beforehand, 0.0 where
    nothing was, and more and more what the share took. None while nobody can tell.

    >>> time_left(0.0, 10.0, 60.0), time_left(0.05, 10.0, 60.0), time_left(0.5, 10.0, 60.0), time_left(0.0, 10.0, 0.0)
    (50.0, 123.5, 10.0, None)
    """
    if share <= 0.0 or (about_s <= 0.0 and share < 0.01):
        return max(about_s - spent_s, 0.0) if about_s > 0.0 else None
    trust = min(share / 0.1, 1.0) if about_s > 0.0 else 1.0
    return trust * spent_s * (1 - share) / share + (1 - trust) * about_s * (1 - share)


def in_words(seconds: float) -> str:
    """A time as people say it.

    >>> in_words(0.2), in_words(89), in_words(170), in_words(7000)
    ('1 s', '89 s', '3 min', '1.9 h')
    """
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@contextmanager
def _every(seconds: float, call: Callable[[], None]) -> Iterator[None]:
    """Calls again and again while its block runs."""
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
