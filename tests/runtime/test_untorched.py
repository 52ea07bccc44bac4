"""Pruning where torch is not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.compile, pytest.mark.usefixtures("own_cache")]
SCRIPT = Path(__file__).with_name("untorched.py")


def run(where):
    done = subprocess.run([sys.executable, str(SCRIPT), where], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


def test_a_real_autotuner_is_pruned_for_a_named_device():
    done = run("H200")
    assert done.stdout.strip() == "[256, 128] (4, 1, 1)"
    assert "ForetuneWarning" not in done.stderr


def test_without_a_named_device_every_config_goes_through_and_the_warning_says_why():
    done = run("live")
    assert done.stdout.strip() == "[32, 64, 128, 256, 512]"
    assert "cannot be queried, because torch is not installed. Devices that can be named instead" in done.stderr
    assert "h200" in done.stderr
