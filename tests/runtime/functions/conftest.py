"""A clock that only what is timed moves, and a cache of the test's own."""

from __future__ import annotations

import pytest


class Stopwatch:
    """A `CallTimer` whose clock stands still but for `spend`."""

    def __init__(self) -> None:
        self.us, self.samples, self.began = 0.0, 0, []

    def __reduce__(self) -> str:
        return "watch"  # the same for all: functions that capture one may share what they know on the disk

    def spend(self, us: float) -> None:
        self.us += us

    def sample(self, call, samples, undo):
        times = []
        for _ in range(samples):
            if undo is not None:
                undo()
            began = self.us
            call()
            times.append(self.us - began)
        self.samples += samples
        return times


@pytest.fixture
def watch():
    return Stopwatch()


@pytest.fixture(autouse=True)
def own_folder(monkeypatch, tmp_path):
    from foretune.runtime.tuning.functions import config_cache

    monkeypatch.setenv("FORETUNE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("FORETUNE_TUNE", raising=False)
    config_cache._opened.cache_clear()
    return tmp_path / "cache"
