"""`collecting_later`: turn Python's garbage collector off in a block, for work that a process does once.

Importing, reading a bundle and compiling create tens of thousands of objects that stay alive. The collector runs every
few hundred objects, and sooner or later visits every object of the process: for torch's alone that takes 0.1 s, in the
middle of a first call of 0.3 s. This module imports little, because it is imported before the others.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock, get_ident

from ...datasets.forking import renew_in_children


class _Inside:
    """Counts the blocks of `collecting_later` that threads are in; leaving the last one turns the collector on again.

    There is one collector for the process, so it is off while any thread is in a block.
    """

    def __init__(self) -> None:
        self.blocks: Counter[int] = Counter()  # the depth of nested blocks by thread
        self.was_on = False  # whether the collector was on before the first block
        renew_in_children(self)

    def renew(self) -> None:
        """Forget all threads but the current one: the others do not exist in a forked process and would never leave."""
        self.lock = Lock()
        mine, had = self.blocks[get_ident()], bool(self.blocks)
        self.blocks.clear()
        if mine:
            self.blocks[get_ident()] = mine
        elif had and self.was_on:
            gc.enable()

    def leave(self, thread: int) -> None:
        """Leave one block of a thread, and turn the collector on again after the last one."""
        self.blocks[thread] -= 1
        if not self.blocks[thread]:
            del self.blocks[thread]
        if not self.blocks and self.was_on:
            gc.enable()


_inside = _Inside()


@contextmanager
def collecting_later() -> Iterator[None]:
    """Turn Python's cyclic garbage collector off in this block. Blocks may be nested.

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
