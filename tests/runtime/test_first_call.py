"""What compares first calls, with a stub driver and without the waiting for a device."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import triton
from foretune.runtime import bench, use_stub_driver
from foretune.runtime.bench import WHOLE_SPACE, compare_first_calls

pytestmark = [pytest.mark.compile, pytest.mark.usefixtures("own_cache")]
torch = pytest.importorskip("torch")


def test_each_way_starts_cold_in_turn_and_the_whole_space_comes_last(filler, monkeypatch):
    folders, calls = set(), []

    class Measured(filler.Filler):
        def inputs(self, problem, device):
            return torch.zeros(problem["m"], problem["n"])

        def launch(self, inputs, config):
            calls.append(config.num_warps)

    def autotuned(family, inputs, configs, declare):
        kernel = declare(configs, ["M", "N"])(triton.jit(filler.fill_kernel))

        def call():
            folders.add((os.environ["FORETUNE_CACHE_DIR"], triton.knobs.cache.dir))
            return filler.launch(kernel, *inputs.shape)

        return kernel, call

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(bench, "Timer", lambda: SimpleNamespace(time=lambda run: run() or SimpleNamespace(time_us=5.0)))
    monkeypatch.delenv("FORETUNE_CACHE_DIR", raising=False)
    problem, said = filler.Filler().problem_from_call({"M": 8, "N": 8}), []
    with use_stub_driver(filler.H200):
        found = compare_first_calls(
            Measured(),
            problem,
            filler.H200,
            filler.FillerBundle(),
            autotuned,
            ks=(1, 2),
            repeats=2,
            rounds=1,
            on_start=said.append,
        )
    ways = ["triton.autotune, k=1", "foretune.autotune, k=1", "triton.autotune, k=2", "foretune.autotune, k=2"]
    assert said == [*ways, *ways, WHOLE_SPACE]
    assert [way.label for way in found.ways] == [*ways, WHOLE_SPACE]
    assert [way.benchmarked for way in found.ways][1:] == [1, 2, 2, 4]
    assert [way.chosen.num_warps for way in found.ways] == [8, 8, 8, 8, 1]
    assert calls == [8, 8, 8, 8, 1]
    assert len(folders) == 9
    assert all(ours == theirs for ours, theirs in folders)
    assert "FORETUNE_CACHE_DIR" not in os.environ
    assert len(found.to_json()["first_call"]) == 5
