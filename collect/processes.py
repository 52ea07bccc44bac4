"""Child processes: each spawned with a pipe of its own, and all watched by one loop in the parent.

A child ends with its parent, however that ends, and takes along what it started (ptxas, say): it leads a process
group of its own. So Ctrl-C in a terminal reaches the parent alone, which decides what it means.
"""

from __future__ import annotations

import os
import selectors
import signal
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe, connection, get_context, parent_process
from multiprocessing.connection import Connection
from threading import Thread
from typing import Any, NamedTuple

#: While a child ends, how often to look whether the system is through with it.
_ENDING_SECONDS = 0.02


class Child:
    """A process that runs `serve(connection, *arguments)`, and our end of that pipe."""

    def __init__(self, serve: Callable[..., None], *arguments: Any) -> None:
        self.connection, theirs = Pipe()
        # Spawned, not forked: a fork inherits threads' locks, a CUDA context, and its siblings' pipes.
        self._process = get_context("spawn").Process(target=_run, args=(serve, theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def exitcode(self) -> int | None:
        """None while the process lives; minus the signal that ended it."""
        return self._process.exitcode

    def send(self, message: Any) -> None:
        """To a child that has ended, nothing is sent: whoever watches it will hear of its end."""
        with suppress(OSError):
            self.connection.send(message)

    def kill(self) -> None:
        """At once, with all it started. Returns before the system is through with it."""
        if self._process.pid is not None and self._process.exitcode is None:
            with suppress(ProcessLookupError, PermissionError):  # it leads no group yet
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()


class _Watched(NamedTuple):
    child: Child
    on_message: Callable[[Any], None]
    on_end: Callable[[int], None]


class Watch:
    """Waits for many children at once; leaving its block kills those that are left."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._ending: list[_Watched] = []

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *exc: object) -> None:
        for key in list(self._selector.get_map().values()):
            key.data.child.kill()
        self._selector.close()

    def add(self, child: Child, on_message: Callable[[Any], None], on_end: Callable[[int], None]) -> None:
        """From now on `handle` passes on the child's messages, and after the last of them its exit code."""
        self._selector.register(child.connection, selectors.EVENT_READ, _Watched(child, on_message, on_end))

    def handle(self, timeout_s: float) -> None:
        """Handles one message of every child that has sent one; waits for the first for so long at most."""
        for key, _ in self._selector.select(_ENDING_SECONDS if self._ending else timeout_s):
            watched: _Watched = key.data
            try:
                message = watched.child.connection.recv()
            except (EOFError, OSError):  # its end of the pipe is closed, perhaps in the middle of a message
                self._selector.unregister(watched.child.connection)
                self._ending.append(watched)
            else:
                watched.on_message(message)
        # The pipe closes before the process is gone, and with it what it held of the GPU.
        for watched in self._ending.copy():
            if (exitcode := watched.child.exitcode) is not None:
                self._ending.remove(watched)
                watched.child.connection.close()
                watched.on_end(exitcode)


def _run(serve: Callable[..., None], ours: Connection, *arguments: Any) -> None:
    os.setpgrp()
    Thread(target=_end_with_parent, daemon=True).start()
    with suppress(EOFError, BrokenPipeError):  # the parent has no more to ask
        serve(ours, *arguments)


def _end_with_parent() -> None:
    # A parent that was killed cannot say goodbye, and a child that is busy does not listen.
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os.killpg(os.getpgrp(), signal.SIGKILL)
