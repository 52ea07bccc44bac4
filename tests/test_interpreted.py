"""All tests marked `interpret`, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_everything_that_runs_in_the_interpreter():
    # Two at once: on the oldest Triton little else is left to test beside them.
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", str(Path(__file__).parent)]
    run = subprocess.run(
        command,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
