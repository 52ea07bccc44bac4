"""Test that with --json, stdout holds only JSON, whatever a family's module and methods print."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from commands import call

TESTS = Path(__file__).parents[1]
NOISY = """
import atexit, os
print("imported")
os.write(1, b"written")
os.system("echo a child")
atexit.register(print, "at the end")
from fakes import FakeFamily

class Noisy(FakeFamily):
    name = "noisy"

    def space(self, device=None):
        print("asked")
        return super().space()

class Wrong(Noisy):
    def space(self, device=None):
        print("asked")
        raise RuntimeError("\x1b[31mred")
"""
LAYER = "--device h200 --groups 4 --rows 64 --n 512 --k 512"


@pytest.fixture
def folder(monkeypatch, tmp_path):
    (tmp_path / "noisy_families.py").write_text(NOISY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("noisy_families", None)


def test_a_process_prints_json_alone(folder):
    command = [sys.executable, "-m", "foretune", "predict", "noisy_families:Noisy", *LAYER.split(), "--json"]
    environment = {"PYTHONPATH": str(TESTS), "PATH": "/usr/bin:/bin"}
    ended = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, check=False)
    assert ended.returncode == 1  # no bundle has the family
    assert list(json.loads(ended.stdout)) == ["error"]
    for text in ("imported", "written", "a child", "asked", "at the end"):
        assert text in ended.stderr


def test_a_fault_is_one_line_and_json(folder):
    result = call(f"predict noisy_families:Wrong {LAYER}", "--json")
    told = r"family noisy: space() raised RuntimeError: \x1b[31mred"
    assert result.exit_code == 1
    assert json.loads(result.stdout) == {"error": told}
    assert f"Error: {told}" in result.stderr
    assert "asked" in result.stderr
