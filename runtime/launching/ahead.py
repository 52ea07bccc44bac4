"""`only_compiling`: a block in which a `Launcher` launches nothing, but has its binaries compiled in threads for the
launches that follow; each of those waits for its own binary alone.

Most of a compile is spent outside of Python's lock. Nothing that runs differs: a binary is the one that the launch
would have compiled, and where compiling ahead fails, the launch compiles again and says what is wrong.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from threading import Lock
from typing import Any

_active: ContextVar[bool] = ContextVar("only_compiling", default=False)
#: Whether this thread is in such a block; asked at every launch.
is_only_compiling = _active.get
_underway: dict[Hashable, Future[Any]] = {}
_lock = Lock()


@contextmanager
def only_compiling() -> Iterator[None]:
    """In this block, and this thread, launches only compile. Tensors may be on torch's "meta" device."""
    token = _active.set(True)
    try:
        yield
    finally:
        _active.reset(token)


def compile_ahead_of(key: Hashable, job: Callable[[], object]) -> None:
    """Runs the job in a thread, once for each key that nobody has asked `wait_for` since."""
    with _lock:
        if key not in _underway:
            _underway[key] = _pool().submit(job)


def wait_for(key: Hashable) -> None:
    """Returns when the job of that key has ended, if there is one, however it ended."""
    future = _underway.get(key)
    if future is not None:
        wait([future])
        _underway.pop(key, None)


def cores() -> int:
    """How many processes, or threads without Python's lock, can run at once here."""
    if hasattr(os, "sched_getaffinity"):  # a container's share of the machine
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@cache
def _pool() -> Executor:
    return ThreadPoolExecutor(min(16, cores()), "foretune-ahead")


def _forget() -> None:
    """In a process that was forked no thread goes on, so nobody may wait for one."""
    global _lock
    _lock = Lock()
    _underway.clear()
    _pool.cache_clear()


os.register_at_fork(after_in_child=_forget)
