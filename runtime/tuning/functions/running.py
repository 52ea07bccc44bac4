"""What runs in this thread to be timed, so that what it calls knows."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any, Protocol

from ....datasets.forking import renew_in_children
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

    @contextmanager
    def turn(self, is_waiting: bool | None = None) -> Iterator[bool]:
        """Hold the lock in the block, and say whether it is held.

        Not where another thread holds it and nothing is waited for, or its holder is stuck. A thread that is itself on
        trial does not wait unless told to: it might wait for one that waits for it.
        """
        waits = not is_on_trial() if is_waiting is None else is_waiting
        is_held = self._lock.acquire(blocking=False) or (waits and self._wait())
        if is_held:
            self._holder = threading.get_ident()
        try:
            yield is_held
        finally:
            if is_held:
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


class _Contexts:
    """`now` is the context that is being tuned, and by which thread; `taken` is held by that thread."""

    now: tuple[int, Context] | None = None

    def __init__(self) -> None:
        renew_in_children(self)

    def renew(self) -> None:
        """See `renew_in_children`: the thread whose turn it was is in a child only if it is the one that forked."""
        if self.now is None or self.now[0] != threading.get_ident():
            self.now, self.taken = None, TuningLock()


_contexts = _Contexts()


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
    _contexts.now = (threading.get_ident(), context)
    try:
        yield
    finally:
        _contexts.now = None


def context_now() -> Context | None:
    """The context that decides in this thread."""
    found = _contexts.now
    if found is None:
        return None
    is_its_own = found[0] == threading.get_ident()
    return found[1] if is_its_own or isinstance(threading.current_thread(), threading._DummyThread) else None


def context_turn() -> AbstractContextManager[bool]:
    """The turn to be the one context of this process. A thread on trial waits for it, too: contexts need no key's lock,
    so that none waits for what is on trial."""
    return _contexts.taken.turn(is_waiting=True)


def _stack() -> list[tuple[Any, Candidate]]:
    stack: list[tuple[Any, Candidate]] = _here.__dict__.setdefault("stack", [])
    return stack
