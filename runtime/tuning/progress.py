"""Show the progress of a tuning: `ProgressLine` for long ones, and `line_reporter` for each config of a verbose one."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from ...datasets.errors import printable

if TYPE_CHECKING:
    from .functions.in_step import Ranks

#: Shorter tunings show no line; seconds.
AFTER_S = 2.0
#: Seconds between two updates: in a log, where every line stays, and on a terminal, where one replaces the other.
_EVERY_S, _ON_TERMINAL_S = 30.0, 0.5
_CLEAR = "\r\x1b[2K"


class ProgressLine:
    """A context manager that shows a tuning's progress on stderr if it takes longer than two seconds.

    The line has the kernel's name, how many of its configs are done, and the best time so far. On a terminal it is one
    line that is updated and finally removed; otherwise a new line is written every 30 seconds.

    Args:
        kernel: The kernel's name.
        total: The number of configs.
        out: Where to write; stderr if left out.
        wait: Waits for some seconds and returns whether the block has ended; a thread's event if left out.
    """

    def __init__(
        self, kernel: str, total: int, *, out: TextIO | None = None, wait: Callable[[float], bool] | None = None
    ) -> None:
        self.kernel, self.total, self.done, self.best_us = kernel, total, 0, float("inf")
        self._out = sys.stderr if out is None else out
        self._over = threading.Event()
        self._wait = wait or self._over.wait
        self._thread = threading.Thread(target=self._show, name="foretune-progress", daemon=True)

    def __enter__(self) -> ProgressLine:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def advance(self, time_us: float | None) -> None:
        """Count one more config as done, with its time in microseconds; None if it failed."""
        self.done += 1
        if time_us is not None:
            self.best_us = min(self.best_us, time_us)

    def __str__(self) -> str:
        best = "" if self.best_us == float("inf") else f", best {self.best_us:.1f} us"
        return f"foretune: tuning {self.kernel}: {self.done} of {self.total} configs{best}"

    def _show(self) -> None:
        """Write lines until the block ends; runs in a thread."""
        wait_s, is_terminal, shown = AFTER_S, _is_terminal(self._out), ""
        try:
            while not self._wait(wait_s):
                wait_s = _ON_TERMINAL_S if is_terminal else _EVERY_S
                if (text := str(self)) != shown or not is_terminal:
                    self._out.write(f"{_CLEAR}{text}" if is_terminal else f"{text}\n")
                    self._out.flush()
                shown = text
            if shown and is_terminal:
                self._out.write(_CLEAR)
                self._out.flush()
        except (OSError, ValueError):  # stderr is closed
            return


def _is_terminal(out: TextIO) -> bool:
    """Return whether a stream is a terminal; False for a closed one."""
    try:
        return out.isatty()
    except (OSError, ValueError, AttributeError):
        return False


def line_reporter(
    is_verbose: bool, function: str, key: str, ranks: Ranks, logs: Path | None = None
) -> Callable[[str], None]:
    """Return a function that reports one line of a tuning on stderr if `is_verbose`.

    With `logs`, each line is also appended to rank-N.log in that folder, whether verbose or not.
    """
    label = f"{function} {key}" if ranks.alone else f"rank {ranks.rank}: {function} {key}"

    def report(text: str) -> None:
        line = printable(f"{label}: {text}")
        if is_verbose:
            from rich.console import Console

            Console(stderr=True).print(line, soft_wrap=True, markup=False, emoji=False, highlight=False)
        if logs is not None:
            logs.mkdir(parents=True, exist_ok=True)
            with (logs / f"rank-{ranks.rank}.log").open("a") as file:
                file.write(line + "\n")

    return report
