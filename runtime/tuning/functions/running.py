"""What runs in this thread to be timed, so that what it calls knows."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from .calls import Call
from .config_space import Candidate

_here = threading.local()


class Context(Protocol):
    """A function that is tuned as a whole, with all that is tuned in it: it decides for that."""

    def run_function(self, function: Any, call: Call) -> Any:
        """The result of a call of a `TunedFunction`, with the config that is its turn."""


#: The one that is being tuned now, and by which thread.
_context: tuple[int, Context] | None = None
_taken = threading.Lock()


def _renew() -> None:
    """In a forked child, where the thread whose turn it was is only if it is the one that forked."""
    global _context, _taken
    if _context is None or _context[0] != threading.get_ident():
        _context, _taken = None, threading.Lock()


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
    """Has a context decide for this thread while the block runs, and for threads that Python did not start: those of
    backward passes. One context at a time has its turn; other threads wait."""
    global _context
    with _taken:
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

    def __init__(self, lock: threading.Lock) -> None:
        self._lock, self._is_held = lock, False

    def __enter__(self) -> bool:
        self._is_held = self._lock.acquire(blocking=not is_on_trial())
        return self._is_held

    def __exit__(self, *error: object) -> None:
        if self._is_held:
            self._lock.release()


def _stack() -> list[tuple[Any, Candidate]]:
    stack: list[tuple[Any, Candidate]] = _here.__dict__.setdefault("stack", [])
    return stack
