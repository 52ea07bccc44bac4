"""All tests marked `interpret`, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent


def test_everything_that_runs_in_the_interpreter():
    # The files that have some, and no others: each process would collect them all, only to leave them out.
    files = [str(path) for path in sorted(TESTS.rglob("test_*.py")) if "mark.interpret" in path.read_text()]
    files.remove(__file__)
    # Two at once: they take longer than any other test, and one would be left over at the end.
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", *files]
    run = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, cwd=TESTS.parent, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
