"""A cache of its own for each test, and nothing said yet."""

from __future__ import annotations

from pathlib import Path

import pytest
from foretune.runtime import arguments
from foretune.runtime.timing import flywheel
from foretune.runtime.tuning.cache import kernel_cache


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the files of choices are."""
    monkeypatch.setenv(kernel_cache.VARIABLE, str(tmp_path / "cache"))
    monkeypatch.delenv(flywheel.VARIABLE, raising=False)
    monkeypatch.setattr(arguments, "_warned", set())
    monkeypatch.setattr(flywheel, "_logs", {})
    kernel_cache._shared.cache_clear()
    return tmp_path / "cache" / "choices"
