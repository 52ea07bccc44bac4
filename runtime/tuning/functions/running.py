"""What runs in this thread to be timed, so that what it calls knows."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol

from .calls import Call
from .config_space import Candidate

#: How often a thread that waits for a tuning looks what the tuning thread is doing; how long that may wait for other
#: threads, or stand at one instruction (a compile, a launch that takes long), before the waiting thread goes on.
_LOOK_EVERY_S, _PATIENCE_S, _LONG_PATIENCE_S = 1.0, 5.0, 60.0
#: Where Python code waits for other threads.
_WAITING = ("threading", "queue", "concurrent", "multiprocessing")

_here = threading.local()


class Context(Protocol):
    """A function that is tuned as a whole, with all that is tuned in it: it decides for that."""

    def run_function(self, function: Any, call: Call) -> Any:
        """The result of a call of a `TunedFunction`, with the config that is its turn."""


class TuningLock:
    """A lock that a thread holds while it tunes. A tuning may run code in other threads, which may need the same lock
    while the tuning waits for them: whoever waits here goes on without the lock once the holder has waited, too, for a
    while. Nothing is tuned then, and nothing is remembered."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder = 0
        self._is_stuck = False  # then nobody else waits for this holder

    def take(self, is_waiting: bool = True) -> bool:
        """Take the lock; False where another thread holds it and nothing is waited for, or its holder is stuck."""
        if self._lock.acquire(blocking=False) or (is_waiting and self._wait()):
            self._holder = threading.get_ident()
            return True
        return False

    def release(self) -> None:
        """Let the next thread have it."""
        self._is_stuck = False
        self._lock.release()

    def _wait(self) -> bool:
        frame, at, looks = None, -1, 0
        while not self._is_stuck:
            if self._lock.acquire(timeout=_LOOK_EVERY_S):
                return True
            holder = self._holder
            now = sys._current_frames().get(holder)  # kept, so that no other frame has its identity
            looks = looks + 1 if now is not None and now is frame and now.f_lasti == at else 0
            frame, at = now, -1 if now is None else now.f_lasti
            patience_s = _PATIENCE_S if _is_waiting(now) else _LONG_PATIENCE_S
            if looks * _LOOK_EVERY_S >= patience_s and holder == self._holder:
                self._is_stuck = True
        return False


def _is_waiting(frame: FrameType | None) -> bool:
    """Whether a thread in this frame waits for others: in a lock of Python's library, or in an event loop."""
    if frame is None:
        return False
    own, caller = (str(one.f_globals.get("__name__")).partition(".")[0] for one in (frame, frame.f_back or frame))
    return own in _WAITING or "asyncio" in (own, caller)


#: The one that is being tuned now, and by which thread.
_context: tuple[int, Context] | None = None
_taken = TuningLock()


def _renew() -> None:
    """In a forked child, where the thread whose turn it was is only if it is the one that forked."""
    global _context, _taken
    if _context is None or _context[0] != threading.get_ident():
        _context, _taken = None, TuningLock()


os.register_at_fork(after_in_child=_renew)


@contextmanager
def on_trial(function: Any, candidate: Candidate) -> Iterator[None]:
    """A config of a function is timed in this thread while the block runs."""
    stack = _stack()
    stack.append((function, candidate))
    try:
        yield
    finally:
        stack.pop()


def is_on_trial() -> bool:
    """Whether anything is timed in this thread now."""
    return bool(_stack()) or context_now() is not None


def config_on_trial(function: Any) -> Candidate | None:
    """The config of this function that is being timed in this thread."""
    return next((candidate for one, candidate in reversed(_stack()) if one is function), None)


@contextmanager
def in_context(context: Context) -> Iterator[None]:
    """Has a context decide for this thread, which holds the `context_turn`, while the block runs, and for threads that
    Python did not start: those of backward passes."""
    global _context
    _context = (threading.get_ident(), context)
    try:
        yield
    finally:
        _context = None


def context_now() -> Context | None:
    """The context that decides in this thread."""
    found = _context
    if found is None:
        return None
    is_its_own = found[0] == threading.get_ident()
    return found[1] if is_its_own or isinstance(threading.current_thread(), threading._DummyThread) else None


class Turn:
    """A lock that a thread which is itself on trial does not wait for: it might wait for one that waits for it. When
    entered, it says whether it is held."""

    def __init__(self, lock: TuningLock, is_waiting: bool | None = None) -> None:
        self._lock, self._is_held = lock, False
        self._is_waiting = not is_on_trial() if is_waiting is None else is_waiting

    def __enter__(self) -> bool:
        self._is_held = self._lock.take(self._is_waiting)
        return self._is_held

    def __exit__(self, *error: object) -> None:
        if self._is_held:
            self._lock.release()


def context_turn() -> Turn:
    """The turn to be the one context of this process. A thread on trial waits for it, too: contexts need no key's lock,
    so that none waits for what is on trial."""
    return Turn(_taken, is_waiting=True)


def _stack() -> list[tuple[Any, Candidate]]:
    stack: list[tuple[Any, Candidate]] = _here.__dict__.setdefault("stack", [])
    return stack
