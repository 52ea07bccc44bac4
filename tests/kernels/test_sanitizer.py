"""No kernel touches memory that is not its tensors', says compute-sanitizer where it is installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
SCRIPT = Path(__file__).parents[1] / "sanitize.py"


def test_the_sanitizer_finds_nothing():
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        pytest.skip("compute-sanitizer is not on PATH")
    # Triton starts ptxas and others, which are not of interest.
    command = [tool, "--tool", "memcheck", "--target-processes", "application-only", "--error-exitcode", "9"]
    run = subprocess.run([*command, sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
