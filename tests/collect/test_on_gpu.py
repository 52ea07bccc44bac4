"""A real GPU at its worst: kernels that fault, hang and run out of memory cost their row, and the run goes on."""

from __future__ import annotations

import multiprocessing
from functools import partial

import pytest
from foretune.collect import case_tasks
from foretune.collect.campaign import Campaign, collect_on_gpus
from foretune.collect.compiling import CompilePool
from foretune.collect.processes import Child, Watch
from foretune.collect.run_state import RunState
from foretune.collect.supervisor import Limits
from foretune.collect.worker import CudaGpu, serve
from foretune.datasets import DeviceSpec, load
from hurting import FAULTS, HurtingFamily, SoundFamily, cases, hog
from replay import rows_of

pytestmark = pytest.mark.gpu
FAMILIES = {"hurting": HurtingFamily()}
TOLD = {
    "none": ("ok", None),
    "far": ("launch_failed", "illegal memory access"),
    "endless": ("timeout", "stopped after"),
    "wrong": ("wrong_result", "relative error"),
    "slow": ("hopeless", None),
    "ptxas": ("compile_failed", "PTXASError"),
    "uncompilable": ("compile_failed", "this config does not compile"),
    "memory": ("out_of_resources", "OutOfMemoryError"),
}


def measure(out, drawn, **limits):
    with Watch() as watch:
        starts = [partial(Child, serve, CudaGpu(0), FAMILIES)]
        pool = CompilePool(FAMILIES, watch, 4)
        return Campaign(RunState(FAMILIES, drawn, out), [starts], pool, watch, Limits(**limits)).measure()


def test_each_fault_costs_its_config_and_the_gpu_measures_on(tmp_path, own_cache, monkeypatch):
    """Each strikes once: a process that ends takes ten seconds, with the next one's `import torch`."""
    monkeypatch.setattr(case_tasks, "FATAL_CASES", 1)
    drawn = cases(1 << 16, 1 << 20, 1 << 18)
    summary = measure(tmp_path / "measured", drawn, task_s=8.0)
    assert summary.complete, summary
    found = rows_of(tmp_path / "measured")
    space = HurtingFamily().space()
    assert set(found) == {(case.problem, config) for case in drawn for config in space}
    wrong = {}
    for (problem, config), passes in found.items():
        status, error = TOLD[FAULTS[config["FAULT"]]]
        if passes[1].status != status or (error and error not in passes[1].error):
            wrong[str(config), problem["n"]] = (passes[1].status, passes[1].error)
    assert wrong == {}
    sound = [passes for (_, config), passes in found.items() if config["FAULT"] == 0]
    assert all(passes[p].time_us < 1000 for passes in sound for p in (1, 2, 3))
    (device,), again = load(tmp_path / "measured").devices, RunState(FAMILIES, drawn, tmp_path / "measured")
    assert all(again.is_known(again.take(device), device) for _ in drawn)


def test_a_part_of_the_card_is_a_device_that_is_slower(tmp_path, own_cache):
    (case,) = cases(1 << 26)
    assert collect_on_gpus([SoundFamily()], [case], tmp_path / "measured", gpus=1, sms=[16], compilers=2).complete
    whole, dataset = DeviceSpec.live(), load(tmp_path / "measured")
    (part,) = dataset.devices
    assert part == whole.with_sms(part.sm_count)
    assert 16 <= part.sm_count < whole.sm_count / 2
    whole_us = 8e-3 * case.problem["n"] / whole.copy_bandwidth_gbs  # to read and write 4 bytes each
    assert dataset.measurements["time_us"].min() > 1.5 * whole_us


def test_a_process_that_hogs_the_gpu_is_noticed(tmp_path, own_cache):
    """The problems take so long that the card is taken away meanwhile, and that a fault would take minutes."""
    spawn = multiprocessing.get_context("spawn")
    ready, hogging = spawn.Event(), None
    sizes = [(1 << 27) + 16 * i for i in range(16)]

    def begin_in_the_middle(progress):
        nonlocal hogging
        if progress.done == 12:
            hogging = spawn.Process(target=hog, args=(ready,), daemon=True)
            hogging.start()
            assert ready.wait(60)

    out = tmp_path / "measured"
    try:
        summary = collect_on_gpus(
            [SoundFamily()], cases(*sizes), out, gpus=1, compilers=4, on_progress=begin_in_the_middle
        )
    finally:
        if hogging is not None:
            hogging.kill()
    dataset = load(tmp_path / "measured")
    # The median is that of the undisturbed cases: most of them.
    flagged = {case.problem["n"] for case in dataset.drifted()}
    assert flagged & set(sizes[12:]), (summary, dataset.drift.groupby("problem")["time_us"].max())
    assert not flagged & set(sizes[:11]), flagged
