"""Waiting for what comes about, however long a busy machine takes; and jobs of a thread, run without one."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

#: A test that waits for longer hangs.
_HANGS_SECONDS = 400.0


def until(condition: Callable[[], object], told: Callable[[], object] = lambda: "") -> None:
    """Returns when the condition holds. Fails, with what is `told`, where it does not come about at all."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < _HANGS_SECONDS, told()
        time.sleep(0.02)


def at_once(job: Callable[[], object]) -> Future[Any]:
    """Run a job now, in place of a thread's pool, and return its future."""
    future: Future[Any] = Future()
    try:
        future.set_result(job())
    except Exception as error:  # noqa: BLE001 - as a pool keeps it
        future.set_exception(error)
    return future
