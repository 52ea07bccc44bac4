"""The state of tuning in this process and thread: what is being timed, and who may tune."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any, Protocol

from ....datasets.forking import renew_in_children
from .calls import FunctionCall
from .config_space import Candidate

#: A thread that waits for a tuning checks the tuning thread every `_LOOK_EVERY_S` seconds. It gives up once that thread
#: has waited for other threads for `_PATIENCE_S`, or has stayed at one instruction (a compile, a long launch) for
#: `_LONG_PATIENCE_S`.
_LOOK_EVERY_S, _PATIENCE_S, _LONG_PATIENCE_S = 1.0, 5.0, 60.0
#: Top-level modules of Python's library whose code waits for other threads.
_WAITING = ("threading", "queue", "concurrent", "multiprocessing")

_here = threading.local()


class Context(Protocol):
    """A contextual function that is being tuned: it chooses the configs of all tuned functions and kernels in it."""

    def run_function(self, function: Any, call: FunctionCall) -> Any:
        """Run a call of a `TunedFunction` with the config that this context chooses; return the result."""


class TuningLock:
    """A lock for tuning that does not deadlock.

    A tuning may run code in other threads and wait for them, while they need the same lock. A thread therefore stops
    waiting once the holder itself has waited for a while (`_PATIENCE_S`); it continues without the lock, and neither
    tunes nor remembers anything.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder = 0
        self._is_stuck = False  # then other threads do not wait for this holder

    @contextmanager
    def turn(self, is_waiting: bool | None = None) -> Iterator[bool]:
        """Try to hold the lock during the block; yield whether it is held.

        Args:
            is_waiting: Whether to wait for another thread that holds the lock, unless that is stuck. By default a
                thread waits unless it is timing a config, since the holder might be waiting for that thread.
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
            now = sys._current_frames().get(holder)  # a reference, so that its id is not reused
            looks = looks + 1 if now is not None and now is frame and now.f_lasti == at else 0
            frame, at = now, -1 if now is None else now.f_lasti
            patience_s = _PATIENCE_S if _is_waiting(now) else _LONG_PATIENCE_S
            if looks * _LOOK_EVERY_S >= patience_s and holder == self._holder:
                self._is_stuck = True
        return False


def _is_waiting(frame: FrameType | None) -> bool:
    """Return whether a thread in this frame waits for others: in a lock of Python's library, or in an event loop."""
    if frame is None:
        return False
    own, caller = (str(one.f_globals.get("__name__")).partition(".")[0] for one in (frame, frame.f_back or frame))
    return own in _WAITING or "asyncio" in (own, caller)


class _Contexts:
    """The context that is being tuned and its thread (`now`), and the lock that this thread holds (`taken`)."""

    now: tuple[int, Context] | None = None

    def __init__(self) -> None:
        renew_in_children(self)

    def renew(self) -> None:
        """Forget a context and lock of another thread, which a forked process lacks (see `renew_in_children`)."""
        if self.now is None or self.now[0] != threading.get_ident():
            self.now, self.taken = None, TuningLock()


_contexts = _Contexts()


@contextmanager
def on_trial(function: Any, candidate: Candidate) -> Iterator[None]:
    """Record, during the block, that this thread is timing a config of a function."""
    stack = _stack()
    stack.append((function, candidate))
    try:
        yield
    finally:
        stack.pop()


def is_on_trial() -> bool:
    """Return whether this thread is timing a config."""
    return bool(_stack()) or context_now() is not None


def config_on_trial(function: Any) -> Candidate | None:
    """Return the config of this function that this thread is timing; None if there is none."""
    return next((candidate for one, candidate in reversed(_stack()) if one is function), None)


@contextmanager
def in_context(context: Context) -> Iterator[None]:
    """Let a context choose configs during the block, for this thread, which holds the `context_turn`.

    The context also applies to threads that Python did not start, such as those of torch's backward passes.
    """
    _contexts.now = (threading.get_ident(), context)
    try:
        yield
    finally:
        _contexts.now = None


def context_now() -> Context | None:
    """Return the context that chooses configs in this thread; None if there is none."""
    found = _contexts.now
    if found is None:
        return None
    is_its_own = found[0] == threading.get_ident()
    return found[1] if is_its_own or isinstance(threading.current_thread(), threading._DummyThread) else None


def context_turn() -> AbstractContextManager[bool]:
    """Return a context manager that waits until no other thread runs a `Context`.

    It yields whether this thread may run one (see `TuningLock.turn`). Threads that are timing a config wait too, which
    cannot deadlock, because contexts do not take the locks of keys that are being tuned.
    """
    return _contexts.taken.turn(is_waiting=True)


def _stack() -> list[tuple[Any, Candidate]]:
    stack: list[tuple[Any, Candidate]] = _here.__dict__.setdefault("stack", [])
    return stack
