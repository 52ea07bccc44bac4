"""Child processes: each started afresh with a pipe of its own, and all watched by one loop in the parent.

A child ends with its parent, however that ends, and takes along what it started (ptxas, say): it leads a process
group of its own. So Ctrl-C in a terminal reaches the parent alone, which decides what it means.

Not `multiprocessing`: that runs the caller's main module once more in every child, and refuses to start any in a
process that was started as a daemon, as the workers of dask are.
"""

from __future__ import annotations

import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any, NamedTuple

#: While a child ends: how often to look whether the system is through with it, and when to look no more.
_ENDING_SECONDS, _UNKILLABLE_SECONDS = 0.02, 60.0
#: Ctrl-C, and how batch systems ask.
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_START = f"import sys, json; sys.path[:] = json.loads(sys.argv[1]); from {__name__} import main; main()"


class Interrupt:
    """Ctrl-C as a question, not an exception: a run ends between two messages, and never in the middle of a write. In
    its block the first one sets `requested`, and the second one interrupts as usual.

    Outside the main thread, where there are no signals, nothing is ever requested.
    """

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> Interrupt:
        here = threading.current_thread() is threading.main_thread()
        self._before = {number: signal.signal(number, self._ask) for number in _ENDING_SIGNALS if here}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


class Child:
    """A new Python that runs `serve(connection, *arguments)`, and our end of that pipe.

    What is passed is pickled, so `serve` and the classes of the arguments are to be found by name in a module.
    """

    def __init__(self, serve: Callable[..., None], *arguments: Any) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, json.dumps(sys.path), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.connection = Connection(ours.detach())
        self.send((serve, arguments))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exitcode(self) -> int | None:
        """None while the process lives; minus the signal that ended it."""
        return self._process.poll()

    def send(self, message: Any) -> None:
        """Send a message, unless the child has ended: `Watch` reports its end."""
        with suppress(OSError):
            self.connection.send(message)

    def kill(self) -> None:
        """At once, with all it started. Returns before the system is through with it."""
        if self.exitcode is None:
            os.killpg(self.pid, signal.SIGKILL)


class _Watched(NamedTuple):
    child: Child
    on_message: Callable[[Any], None]
    on_end: Callable[[int | None], None]


class Watch:
    """Waits for many children at once; leaving its block kills those that are left."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._ending: dict[_Watched, float] = {}  # since when

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Kills the children."""
        for key in list(self._selector.get_map().values()):
            key.data.child.kill()
            key.data.child.connection.close()
        self._selector.close()

    def add(self, child: Child, on_message: Callable[[Any], None], on_end: Callable[[int | None], None]) -> None:
        """From now on `handle` passes on the child's messages, and after the last of them its exit code: None for one
        that the system does not get rid of, as when a driver hangs."""
        self._selector.register(child.connection, selectors.EVENT_READ, _Watched(child, on_message, on_end))

    def kill(self, child: Child) -> None:
        """Kills a child, and listens to it no more. `handle` will tell of its end."""
        self._hang_up(self._selector.get_key(child.connection).data)
        child.kill()

    def dismiss(self, child: Child) -> None:
        """Kill a child, and report nothing more of it."""
        for key in list(self._selector.get_map().values()):
            if key.data.child is child:
                self._hang_up(key.data)
        self._ending = {watched: since for watched, since in self._ending.items() if watched.child is not child}
        child.kill()

    def _hang_up(self, watched: _Watched) -> None:
        self._selector.unregister(watched.child.connection)
        watched.child.connection.close()
        self._ending[watched] = time.monotonic()

    def handle(self, timeout_s: float) -> None:
        """Handles one message of every child that has sent one; waits for the first for so long at most."""
        for key, _ in self._selector.select(_ENDING_SECONDS if self._ending else timeout_s):
            watched: _Watched = key.data
            if watched in self._ending:  # since another child's message was handled
                continue
            try:
                message = watched.child.connection.recv()
            except (EOFError, OSError):  # its end of the pipe is closed, perhaps in the middle of a message
                self._hang_up(watched)
            else:
                watched.on_message(message)
        # The pipe closes before the process is gone, and with it what it held of the GPU.
        for watched, since in self._ending.copy().items():
            exitcode = watched.child.exitcode
            if exitcode is not None or time.monotonic() - since > _UNKILLABLE_SECONDS:
                del self._ending[watched]
                watched.on_end(exitcode)


def main() -> None:
    """The whole life of a child."""
    os.dup2(2, 1)  # what a compiler prints, say, is not part of what the parent says
    connection = Connection(int(sys.argv[2]))
    threading.Thread(target=_end_with, args=(connection.fileno(),), daemon=True).start()
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent has no more to ask
        serve, arguments = connection.recv()
        serve(connection, *arguments)


def _end_with(pipe: int) -> None:
    # A parent that was killed cannot say goodbye, and a child that is busy does not listen: but its pipe hangs up.
    poll = select.poll()
    poll.register(pipe, 0)
    poll.poll()
    os.killpg(os.getpgrp(), signal.SIGKILL)
