"""Fixtures of the tests of runtime/: the toy kernel, and a clean slate of warnings and memos."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

_HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def toy(tmp_path_factory):
    """The module toy.py. Triton needs its source file, and pytest's importlib mode has no path to import it from."""
    spec = importlib.util.spec_from_file_location("foretune_toy", _HERE / "toy.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["foretune_toy"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    from foretune.runtime import shortlist, warn

    monkeypatch.setattr(warn, "_said", set())
    monkeypatch.setattr(sys.modules[shortlist.__module__], "_choosers", {})
    monkeypatch.delenv("FORETUNE_MODE", raising=False)
