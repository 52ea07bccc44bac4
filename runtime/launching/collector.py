"""`collecting_later`: a block without Python's garbage collector, for what a process does once and keeps.

Importing, reading a bundle and compiling make tens of thousands of objects that stay. The collector runs every few
hundred, and sooner or later looks at all that the process has: of what torch imports alone that takes 0.1 s, in the
middle of a first call that takes 0.3.
"""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock, get_ident

# The collector is the process's, so that it is off while any thread is in such a block.
_inside: Counter[int] = Counter()  # blocks by thread
_was_on = False
_lock = Lock()


@contextmanager
def collecting_later() -> Iterator[None]:
    """In this block nothing is collected but by reference counts; afterwards all is as it was. Blocks may be nested.

    >>> with collecting_later():
    ...     gc.isenabled()
    False
    """
    global _was_on
    thread = get_ident()
    with _lock:
        if not _inside:
            _was_on = gc.isenabled()
            gc.disable()
        _inside[thread] += 1
    try:
        yield
    finally:
        with _lock:
            _leave(thread)


def _leave(thread: int) -> None:
    _inside[thread] -= 1
    if not _inside[thread]:
        del _inside[thread]
    if not _inside and _was_on:
        gc.enable()


def _forget_the_others() -> None:
    """In a process that was forked no other thread goes on, so none will leave its block."""
    global _lock
    _lock = Lock()
    mine, had = _inside[get_ident()], bool(_inside)
    _inside.clear()
    if mine:
        _inside[get_ident()] = mine
    elif had and _was_on:
        gc.enable()


os.register_at_fork(after_in_child=_forget_the_others)
