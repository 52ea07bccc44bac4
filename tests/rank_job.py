"""`Job`: ranks as processes, each of which runs a module of this folder and prints JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from threading import Timer

TESTS = Path(__file__).parent
#: Longer than any machine takes.
_HANGS_SECONDS = 400


class Job:
    """The processes of one, each with a start of its own, and what they print: objects by look, one list for each."""

    def __init__(self, size, triton_cache, module="gloo_ranks", **environment):
        from torch.distributed import TCPStore

        self.environment = {"TRITON_CACHE_DIR": str(triton_cache), **environment}
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.processes = [self._started(module, rank, size) for rank in range(size)]
        self.guard = Timer(_HANGS_SECONDS, self.kill)
        self.guard.start()

    def _started(self, module, rank, size):
        paths = os.pathsep.join([str(TESTS), *sys.path])
        own = {"PYTHONHASHSEED": str(rank), "OMP_NUM_THREADS": str(1 + rank % 2), "PYTHONPATH": paths}
        return subprocess.Popen(
            [sys.executable, TESTS / "ending.py", module, str(rank), str(size), str(self.store.port)],
            env={**os.environ, **own, **self.environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def looks(self):
        """What each rank prints, until it ends or asks for the store to be closed; then the store is."""
        found = [[*self._lines(process)] for process in self.processes]
        self.store = None
        for process, lines in zip(self.processes, found, strict=True):
            lines += self._lines(process)
            assert process.wait() == 0, lines
        return [{name: value for line in lines for name, value in line.items()} for lines in found]

    def _lines(self, process):
        for line in process.stdout:
            if (printed := json.loads(line)) == "close the store":
                return
            yield printed

    def kill(self):
        for process in self.processes:
            process.kill()

    def close(self):
        self.guard.cancel()
        self.kill()
        for process in self.processes:
            process.communicate()
