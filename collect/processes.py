"""Child processes: each is started with a pipe of its own, and one loop in the parent watches all of them.

A child ends when its parent ends, in whatever way, and its own subprocesses (such as ptxas) end with it: it leads a
process group of its own. Therefore, Ctrl-C in a terminal reaches only the parent, which decides what to do.

`multiprocessing` is not used, because it runs the caller's main module again in every child, and starts no child in a
daemon process, such as a dask worker.
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
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any, NamedTuple

#: While a child ends: how often to check whether it is gone, and after how many seconds to stop checking.
_ENDING_SECONDS, _UNKILLABLE_SECONDS = 0.02, 60.0
#: The signals of Ctrl-C, and of batch systems that end a job.
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_START = f"import sys, json; sys.path[:] = json.loads(sys.argv[1]); from {__name__} import main; main()"


class Interrupt:
    """Turns Ctrl-C and SIGTERM into a flag, so that a run ends between two messages and never during a write.

    In its `with` block the first signal sets `requested`, and the second one raises `KeyboardInterrupt`. Outside of the
    main thread, which signals do not reach, `requested` stays False.
    """

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> Interrupt:
        """Install the signal handlers."""
        here = threading.current_thread() is threading.main_thread()
        self._before = {number: signal.signal(number, self._handle) for number in _ENDING_SIGNALS if here}
        return self

    def __exit__(self, *exc: object) -> None:
        """Restore the previous signal handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


class Child:
    """A new Python process that runs `serve(connection, *arguments)`, and the parent's end of its pipe.

    `serve` and the arguments are pickled, so `serve` and the classes of the arguments must be importable by name.
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
        """The process id."""
        return self._process.pid

    @property
    def exitcode(self) -> int | None:
        """The exit code, minus the signal number if a signal ended the process; None while it lives."""
        return self._process.poll()

    def send(self, message: Any) -> None:
        """Send a message. If the child has ended, do nothing: `Watch` reports its end."""
        with suppress(OSError):
            self.connection.send(message)

    def kill(self) -> None:
        """Kill the process with its own subprocesses, without waiting until they are gone."""
        if self.exitcode is None:
            os.killpg(self.pid, signal.SIGKILL)


class ThreadChild(Child):
    """A thread of this process in place of a child process, for a `serve` that touches no GPU and cannot crash.

    It starts at once, and its arguments are not pickled. It cannot be killed: it ends at its next message.
    """

    def __init__(self, serve: Callable[..., None], *arguments: Any) -> None:
        self.connection, self._theirs = Pipe()
        self._exitcode: int | None = None
        threading.Thread(target=self._run, args=(serve, *arguments), daemon=True).start()

    def _run(self, serve: Callable[..., None], *arguments: Any) -> None:
        exitcode = 1
        try:
            exitcode = self._served(serve, *arguments)
        finally:
            self._exitcode = exitcode
            self._theirs.close()

    def _served(self, serve: Callable[..., None], *arguments: Any) -> int:
        """Run `serve`, and return the exit code that a process would have."""
        try:
            serve(self._theirs, *arguments)
        except (EOFError, OSError):  # `kill` has closed the pipe
            return -signal.SIGKILL
        return 0

    @property
    def pid(self) -> int:
        """The id of this process."""
        return os.getpid()

    @property
    def exitcode(self) -> int | None:
        """The exit code that a process would have; None while the thread lives."""
        return self._exitcode

    def kill(self) -> None:
        """Close the pipe, so that the thread ends at its next message."""
        self.connection.close()


class _Watched(NamedTuple):
    child: Child
    on_message: Callable[[Any], None]
    on_end: Callable[[int | None], None]


class Watch:
    """Waits for messages of many children at once. At the end of its `with` block it kills the remaining children."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._ending: dict[_Watched, float] = {}  # since what time

    def __enter__(self) -> Watch:
        """Return the object itself."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Kill the children."""
        self.close()

    def close(self) -> None:
        """Kill the children."""
        for key in list(self._selector.get_map().values()):
            key.data.child.kill()
            key.data.child.connection.close()
        self._selector.close()

    def add(self, child: Child, on_message: Callable[[Any], None], on_end: Callable[[int | None], None]) -> None:
        """Start to watch a child.

        Args:
            child: The child.
            on_message: `handle` calls it with each message of the child.
            on_end: `handle` calls it once, after the last message, with the exit code; None if the process cannot be
                killed, for example because a driver hangs.
        """
        self._selector.register(child.connection, selectors.EVENT_READ, _Watched(child, on_message, on_end))

    def kill(self, child: Child) -> None:
        """Kill a child and ignore its further messages. `handle` reports its end."""
        self._hang_up(self._selector.get_key(child.connection).data)
        child.kill()

    def dismiss(self, child: Child) -> None:
        """Kill a child, and report neither messages nor its end."""
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
        """Handle one message of every child that has sent one, and the end of children.

        Args:
            timeout_s: The longest time in seconds to wait for the first message.
        """
        for key, _ in self._selector.select(_ENDING_SECONDS if self._ending else timeout_s):
            watched: _Watched = key.data
            if watched in self._ending:  # it was killed while another child's message was handled
                continue
            try:
                message = watched.child.connection.recv()
            except (EOFError, OSError):  # the child closed its end of the pipe, perhaps within a message
                self._hang_up(watched)
            else:
                watched.on_message(message)
        # The pipe closes before the process is gone and has freed its GPU memory.
        for watched, since in self._ending.copy().items():
            exitcode = watched.child.exitcode
            if exitcode is not None or time.monotonic() - since > _UNKILLABLE_SECONDS:
                del self._ending[watched]
                watched.on_end(exitcode)


def main() -> None:
    """Run in a child process: receive `serve` and its arguments from the parent's pipe, and call it."""
    os.dup2(2, 1)  # what compilers print must not appear in the parent's standard output
    connection = Connection(int(sys.argv[2]))
    threading.Thread(target=_end_with, args=(connection.fileno(),), daemon=True).start()
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent has closed the pipe
        serve, arguments = connection.recv()
        serve(connection, *arguments)


def _end_with(pipe: int) -> None:
    """Kill this process group when the parent's end of the pipe is closed.

    This also works if the parent was killed, and while this process is busy and does not read the pipe.
    """
    poll = select.poll()
    poll.register(pipe, 0)
    poll.poll()
    os.killpg(os.getpgrp(), signal.SIGKILL)
