"""Ctrl-C as a question, not an exception: a run ends between two messages, and never in the middle of a write."""

from __future__ import annotations

import signal
import threading
from types import FrameType

#: SIGTERM is how batch systems ask.
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """In its block the first Ctrl-C sets `asked`; the second one interrupts as usual.

    Outside the main thread, where there are no signals, nothing is ever asked.
    """

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> Interrupt:
        here = threading.current_thread() is threading.main_thread()
        self._before = {number: signal.signal(number, self._ask) for number in _SIGNALS if here}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
