"""stdout under --json: the result alone. Whatever else is printed, by a kernel family's module, a compiler or a child
process, goes to stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from typing import TextIO

_result: TextIO | None = None


def result_file() -> TextIO | None:
    """Return where a result is printed; None for stdout."""
    return _result


@contextmanager
def result_alone() -> Iterator[None]:
    """Send what is printed in the block to stderr, but for what is written to `result_file`."""
    global _result
    own: int | None = None
    if _are_descriptors():
        sys.stdout.flush()
        own = os.dup(1)
        os.dup2(2, 1)
    _result = sys.stdout if own is None else os.fdopen(own, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        written, _result = _result, None
        if own is not None:
            os.dup2(own, 1)
            written.close()


def leave_to_stderr() -> None:
    """Send all that is printed from now on to stderr."""
    if _are_descriptors():
        with suppress(OSError):
            sys.stdout.flush()
            os.dup2(2, 1)


def _are_descriptors() -> bool:
    """Whether stdout and stderr are the descriptors 1 and 2: not so in a test, or where one of them is closed."""
    try:
        return (sys.stdout.fileno(), sys.stderr.fileno()) == (1, 2)
    except (OSError, ValueError, AttributeError):
        return False
