"""Waiting for what comes about, however long a busy machine takes."""

from __future__ import annotations

import time
from collections.abc import Callable

#: A test that waits for longer hangs.
_HANGS_SECONDS = 400.0


def until(condition: Callable[[], object], told: Callable[[], object] = lambda: "") -> None:
    """Returns when the condition holds. Fails, with what is `told`, where it does not come about at all."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < _HANGS_SECONDS, told()
        time.sleep(0.02)
