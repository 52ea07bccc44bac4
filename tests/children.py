"""What children do in `collect/test_processes.py`, which import it, and which children there are."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import time
from pathlib import Path

from waiting import until


def count(connection, most):
    for number in range(most):
        connection.send(number)


def echo(connection):
    while True:
        connection.send(connection.recv())


def half_a_message(connection):
    os.write(connection.fileno(), struct.pack("!i", 100) + b"half")


def with_a_sleeper(connection):
    connection.send(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]).pid)
    time.sleep(1000)


def lives(pid):
    """Whether a process runs (and is not just waiting for its parent to note its end)."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):  # the latter where it ends meanwhile
        return False


def children_of(process):
    """The ids of the processes that it has started."""
    try:
        return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return []


def assert_end(pids):
    """That processes end soon, if they have not yet."""
    until(lambda: not any(map(lives, pids)), lambda: f"{[pid for pid in pids if lives(pid)]} live on")
