"""Mode `refine` of `foretune.autotune`, `foretune.attach` and the ops, on a stub device with a clock of its own."""

from __future__ import annotations

import threading

import foretune
import pytest
import triton
from foretune.datasets import ForetuneError
from foretune.runtime import use_stub_driver
from foretune.runtime.launching import ahead
from foretune.runtime.tuning import known_times, one_launch, triton_adapter
from foretune.runtime.tuning.refine import calls, refinement
from foretune.runtime.tuning.refine.race import CALLS
from waiting import at_once

pytestmark = [pytest.mark.compile, pytest.mark.usefixtures("own_cache")]
torch = pytest.importorskip("torch")


class Watch:
    """A stopwatch: `time_us` of the last launch."""

    def __init__(self, driver, time_us):
        self.driver, self.time_us, self.running, self.timed = driver, time_us, [], []

    def begin(self):
        return len(self.driver.launches)

    def end(self, mark, about):
        assert len(self.driver.launches) == mark + 1  # one launch for each call
        self.running.append((about, self.time_us(self.driver.launches[-1].metadata)))

    def cancel(self, mark):
        pass

    def read(self):
        while self.running:
            self.timed.append(self.running[0])
            yield self.running.pop(0)


#: Microseconds by the number of warps: the family's bundle predicts 8 warps to be the fastest.
TIMES = {8: 100.0, 4: 80.0, 2: 120.0, 1: 150.0}


@pytest.fixture
def watch(filler, monkeypatch, tmp_path):
    monkeypatch.setenv("FORETUNE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(refinement, "_all", {})
    monkeypatch.setattr(one_launch, "in_background", at_once)
    with use_stub_driver(filler.H200) as driver:
        watch = Watch(driver, lambda metadata: TIMES[metadata.num_warps])
        for module in (known_times, calls):
            monkeypatch.setattr(module, "stopwatch", lambda: watch)
        yield watch


def ran(watch):
    """The number of warps of each launch, which are forgotten."""
    warps = [launch.metadata.num_warps for launch in watch.driver.launches]
    watch.driver.launches.clear()
    return warps


def declared(filler, **options):
    options = {"family": filler.Filler(), "bundle": filler.FillerBundle(), "mode": "refine"} | options
    return foretune.autotune(filler.configs(), ["M", "N"], **options)(triton.jit(filler.fill_kernel))


def test_autotune_finds_the_fastest_with_its_own_launches(filler, watch):
    kernel = declared(filler, max_cost=0.1)
    filler.launch(kernel)
    assert ran(watch) == [8]  # a single launch, of the predicted config
    for _ in range(CALLS + 20):
        filler.launch(kernel)
    warps = ran(watch)
    assert len(warps) == CALLS + 20  # nothing is launched to be timed
    assert set(warps) >= {8, 4}
    assert warps[-1] == kernel.best_config.num_warps == 4
    assert {config.num_warps for config in kernel.cache.values()} == {4}
    assert kernel._refining == {}
    timed = len(watch.timed)
    filler.launch(kernel)
    assert (ran(watch), len(watch.timed)) == ([4], timed)
    rows = {row["config"]: row for row in foretune.refining().rows}
    assert [row["state"] for config, row in rows.items() if "num_warps: 4" in config] == ["chosen"]


def test_the_mode_of_the_environment_and_one_of_another_process(filler, watch, monkeypatch):
    monkeypatch.setenv("FORETUNE_MODE", "refine")
    kernel = declared(filler, mode=None)
    for _ in range(3):
        filler.launch(kernel)
    assert ran(watch)[0] == 8
    assert len(kernel._refining) == 1
    predicted = declared(filler, mode="predict")
    filler.launch(predicted)
    assert predicted._refining == {}
    assert len(predicted.cache) == 1


def test_sizes_of_a_bucket_share_what_they_find_out(filler, watch):
    kernel = declared(filler, max_cost=0.1)
    for call in range(CALLS + 20):
        filler.launch(kernel, m=(4096, 4000)[call % 2])
    assert ran(watch)[-2:] == [4, 4]
    assert len(foretune.refining().rows) == 4


def test_a_hook_of_a_config_runs_in_each_launch(filler, watch):
    called = []
    configs = [
        triton.Config({"BLOCK": 32}, num_warps=warps, pre_hook=lambda arguments: called.append(arguments["num_warps"]))
        for warps in filler.WARPS
    ]
    options = {"family": filler.Filler(), "bundle": filler.FillerBundle(), "mode": "refine", "max_cost": 0.1}
    kernel = foretune.autotune(configs, ["M", "N"], **options)(triton.jit(filler.fill_kernel))
    for _ in range(50):
        filler.launch(kernel)
    assert called == ran(watch)
    assert set(called) >= {8, 4}


def test_without_a_gpu_the_prediction_runs(filler, watch, monkeypatch):
    monkeypatch.setattr(known_times, "stopwatch", lambda: None)
    kernel = declared(filler)
    for _ in range(3):
        filler.launch(kernel)
    assert ran(watch) == [8, 8, 8]
    assert [config.num_warps for config in kernel.cache.values()] == [8]


def test_an_attached_kernel_finds_the_fastest_with_its_own_launches(filler, watch, monkeypatch):
    monkeypatch.setattr("foretune.runtime.shortlist._shipped", filler.FillerBundle)
    kernel = triton.autotune(filler.configs(), ["M", "N"])(triton.jit(filler.fill_kernel))
    foretune.attach(kernel, filler.Filler(), mode="refine", max_cost=0.1)
    for _ in range(CALLS + 20):
        filler.launch(kernel)
    warps = ran(watch)
    assert (len(warps), warps[0], warps[-1]) == (CALLS + 20, 8, 4)
    assert {config.num_warps for config in kernel.cache.values()} == {4}
    there = triton_adapter.Attachment.of(kernel)
    assert there._refining == {}
    foretune.detach(kernel)
    filler.launch(kernel)
    assert ran(watch) == [4]


def test_a_kernel_without_a_family_starts_with_its_first_config(filler, watch):
    kernel = triton.autotune(filler.configs(), ["M", "N"])(triton.jit(filler.fill_kernel))
    foretune.attach(kernel, mode="refine")
    for _ in range(CALLS + 20):
        filler.launch(kernel)
    warps = ran(watch)
    assert (len(warps), warps[0], warps[-1]) == (CALLS + 20, 1, 4)


def loaded_by(watch, monkeypatch, fails=False):
    """Which thread loads each binary first; if `fails`, other threads than this one cannot."""
    threads, load, here = {}, watch.driver.utils.load_binary, threading.current_thread()

    def load_binary(name, binary, *rest):
        threads.setdefault(binary, threading.current_thread())
        if fails and threading.current_thread() is not here:
            raise RuntimeError("no memory")
        return load(name, binary, *rest)

    monkeypatch.setattr(watch.driver.utils, "load_binary", load_binary)
    return threads


def settle():
    """Wait for the jobs that compile and load."""
    for one in refinement._all.values():
        for jobs in list(one._compiling.values()):
            for job in jobs:
                job.exception(timeout=120)


def calls_that_settle(filler, kind, calls):
    """Calls of an attached kernel, or of an op, each of which finds the candidates so far loaded."""
    if kind == "op":
        a, b = torch.zeros(256, 128, dtype=torch.bfloat16), torch.zeros(128, 256, dtype=torch.bfloat16)
    else:
        kernel = triton.autotune(filler.configs(), ["M", "N"])(triton.jit(filler.fill_kernel))
        foretune.attach(kernel, mode="refine")
    for _ in range(calls):
        foretune.matmul(a, b, mode="refine") if kind == "op" else filler.launch(kernel)
        settle()


@pytest.mark.parametrize("kind", ["op", "attached"])
def test_only_the_first_binary_is_loaded_in_a_call(filler, watch, monkeypatch, kind):
    monkeypatch.setattr(one_launch, "in_background", ahead.in_background)
    if kind == "op":
        watch.time_us = lambda metadata: 100.0
    threads = loaded_by(watch, monkeypatch)
    calls_that_settle(filler, kind, 60)
    kinds = {(launch.metadata.num_warps, launch.metadata.shared) for launch in watch.driver.launches}
    assert len(kinds) > 1
    # Candidates begin to compile before the first launch, so one of them may be loaded before it.
    others = [thread for thread in threads.values() if thread is not threading.current_thread()]
    assert len(others) == len(threads) - 1 >= len(kinds) - 1
    assert all(thread.name.startswith("foretune-ahead") for thread in others)


@pytest.mark.parametrize("kind", ["op", "attached"])
def test_a_config_whose_binary_cannot_be_loaded_takes_no_part(filler, watch, monkeypatch, kind):
    monkeypatch.setattr(one_launch, "in_background", ahead.in_background)
    watch.time_us = lambda metadata: 100.0
    threads = loaded_by(watch, monkeypatch, fails=True)
    calls_that_settle(filler, kind, 60)
    assert len(threads) > 1
    assert len({launch.metadata.hash for launch in watch.driver.launches}) == 1
    (one,) = refinement._all.values()
    assert one.final == one.candidates[0]


def test_a_launch_of_another_key_is_refined_apart(filler, watch):
    kernel = triton.autotune(filler.configs(), ["M", "N"])(triton.jit(filler.fill_kernel))
    foretune.attach(kernel, mode="refine")
    for call in range(60):
        filler.launch(kernel, n=(64, 128)[call % 2])
    assert len(triton_adapter.Attachment.of(kernel)._refining) == 2
    assert len({row["problem"] for row in foretune.refining().rows}) == 2


def test_an_op_finds_the_fastest_with_its_own_calls(watch, monkeypatch):
    a, b = torch.zeros(256, 128, dtype=torch.bfloat16), torch.zeros(128, 256, dtype=torch.bfloat16)
    foretune.matmul(a, b, mode="predict")
    predicted = [launch.kernel for launch in watch.driver.launches]
    assert len(predicted) == 1
    first = watch.driver.launches[0].metadata
    watch.driver.launches.clear()
    kinds = []

    def time_us(metadata):
        kinds.append((metadata.num_warps, metadata.num_stages, metadata.shared))
        return 100.0 if kinds[-1] == kinds[0] else 90.0

    watch.time_us = time_us
    for _ in range(60):
        foretune.matmul(a, b, mode="refine")
        settle()
    assert kinds[0] == (first.num_warps, first.num_stages, first.shared)
    assert len(set(kinds)) > 1
    (one,) = refinement._all.values()
    assert one.race.best != 0
    launches = len(watch.driver.launches)
    one.final = one.candidates[1]
    timed = len(watch.timed)
    for _ in range(3):
        foretune.matmul(a, b, mode="refine")
    assert (len(watch.driver.launches), len(watch.timed)) == (launches + 3, timed)


@pytest.mark.parametrize("value", ["fast", 2.0])
def test_an_invalid_limit_is_refused_at_the_declaration(filler, value):
    with pytest.raises(ForetuneError, match="max_cost must be a share from 0 to 1"):
        declared(filler, max_cost=value)
    kernel = triton.autotune(filler.configs(), ["M", "N"])(triton.jit(filler.fill_kernel))
    with pytest.raises(ForetuneError, match="max_cost must be a share from 0 to 1"):
        foretune.attach(kernel, max_cost=value)
    with pytest.raises(ForetuneError, match="mode must be one of off, shortlist, predict, refine"):
        foretune.attach(kernel, mode="fast")
