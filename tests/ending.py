"""`python ending.py MODULE ARGUMENTS...`: runs a module as `python -m` does, and ends with who has started it.

Standard input is a pipe whose other end that process holds: when it is closed, however that comes about, all that was
started here is killed. This has to lead a process group of its own.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from threading import Thread


def end_with_parent() -> None:
    while os.read(0, 1):
        pass
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    Thread(target=end_with_parent, daemon=True).start()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
