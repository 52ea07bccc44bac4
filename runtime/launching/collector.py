"""`collecting_later`: a block without Python's garbage collector, for what a process does once and keeps.

Importing, reading a bundle and compiling make tens of thousands of objects that stay. The collector runs every few
hundred, and sooner or later looks at all that the process has: of what torch imports alone that takes 0.1 s, in the
middle of a first call that takes 0.3. This module imports little, because it is imported before the rest.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock, get_ident

from ...datasets.forking import renew_in_children


class _Inside:
    """The blocks of `collecting_later` that threads are in. The collector is the process's, so that it is off while any
    thread is in one."""

    def __init__(self) -> None:
        self.blocks: Counter[int] = Counter()  # by thread
        self.was_on = False
        renew_in_children(self)

    def renew(self) -> None:
        """Forget the other threads: in a forked process they do not go on, so none will leave its block."""
        self.lock = Lock()
        mine, had = self.blocks[get_ident()], bool(self.blocks)
        self.blocks.clear()
        if mine:
            self.blocks[get_ident()] = mine
        elif had and self.was_on:
            gc.enable()

    def leave(self, thread: int) -> None:
        self.blocks[thread] -= 1
        if not self.blocks[thread]:
            del self.blocks[thread]
        if not self.blocks and self.was_on:
            gc.enable()


_inside = _Inside()


@contextmanager
def collecting_later() -> Iterator[None]:
    """Collect no garbage in this block but by reference counts; afterwards all is as it was. Blocks may be nested.

    >>> with collecting_later():
    ...     gc.isenabled()
    False
    """
    thread = get_ident()
    with _inside.lock:
        if not _inside.blocks:
            _inside.was_on = gc.isenabled()
            gc.disable()
        _inside.blocks[thread] += 1
    try:
        yield
    finally:
        with _inside.lock:
            _inside.leave(thread)
