"""What the runner makes of exceptions and times; its GPU, kernel and timer are fakes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fakes import DEVICE, FakeFamily, FakeTimer
from foretune.collect import runner as runners
from foretune.collect.runner import DeviceLostError, GpuRunner, LaunchFailedError, OutOfMemoryError, _failure
from foretune.datasets import ForetuneError, KernelConfig, Problem, Status
from foretune.runtime.timing import timer
from foretune.runtime.timing.timer import Timing

PROBLEM = Problem.of("fake", groups=2, rows=16, n=64, k=64, ragged={"rows": (8, 8)})
CONFIG = KernelConfig.of(BLOCK_M=16, BLOCK_N=32, BLOCK_K=32, num_warps=4, num_stages=2)
INFINITY = float("inf")


class CompilationError(Exception):
    """Named like Triton's, which needs a source to be made."""


class PTXASError(Exception):
    pass


@pytest.fixture
def device(monkeypatch):
    """A device that answers until told otherwise."""
    state = {"answers": True}
    monkeypatch.setattr(runners, "_device_answers", lambda: state["answers"])
    return state


def out_of_resources():
    from triton.runtime.errors import OutOfResources

    return OutOfResources(300_000, 232_448, "shared memory")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (out_of_resources(), Status.OUT_OF_RESOURCES),
        (CompilationError("no tl.dot of 8"), Status.COMPILE_FAILED),
        (PTXASError("internal"), Status.COMPILE_FAILED),
        (torch.OutOfMemoryError("tried to allocate 12 GiB"), Status.OUT_OF_RESOURCES),
        (RuntimeError("Triton Error [CUDA]: invalid argument"), Status.LAUNCH_FAILED),
        (ForetuneError("does the launch wait for it?"), Status.LAUNCH_FAILED),
    ],
)
def test_an_exception_is_a_status_and_says_what_it_was(device, error, status):
    outcome = _failure(error)
    assert (outcome.status, outcome.time_us) == (status, None)
    assert outcome.error == f"{type(error).__name__}: {error}"


def test_a_long_message_is_cut(device):
    assert len(_failure(RuntimeError("x" * 10_000)).error) == 300


def test_a_device_that_does_not_answer_any_more_is_lost(device):
    device["answers"] = False
    with pytest.raises(DeviceLostError, match="RuntimeError: illegal memory access"):
        _failure(RuntimeError("illegal memory access"))
    # What the compiler raises says nothing of the device.
    assert _failure(CompilationError()).status is Status.COMPILE_FAILED


class Binary:
    n_regs, n_spills = 128, 0

    class metadata:  # noqa: N801 - Triton's name
        shared = 1024

    def _init_handles(self):
        pass


class TensorFamily(FakeFamily):
    """Its kernel returns `result` or raises it; the reference is all ones."""

    result = 1.0
    launches = 0

    def inputs(self, problem, device, *, seed=0):
        return problem

    def launch(self, inputs, config):
        self.launches += 1
        if isinstance(self.result, Exception):
            raise self.result
        return torch.full((4, 4), self.result)

    def compile(self, config, problem):
        return Binary()

    def check_problem(self, config, problem):
        return replace(PROBLEM, dtype=problem.dtype, flags=problem.flags)

    def reference(self, inputs):
        return torch.ones(4, 4)

    def tolerance(self, problem):
        return 1e-3


@pytest.fixture
def runner(device, monkeypatch):
    monkeypatch.setattr(timer, "Timer", FakeTimer)
    runner = GpuRunner(DEVICE)
    runner.prepare(TensorFamily(), PROBLEM)
    return runner


@pytest.mark.parametrize(
    ("us", "best_us", "samples", "status"),
    [
        (251.0, 100.0, 1, Status.EARLY_STOPPED),
        (250.0, 100.0, 3, Status.OK),
        (151.0, 100.0, 3, Status.OK),
        (150.0, 100.0, 7, Status.OK),
        (50.0, 100.0, 7, Status.OK),
        (600.0, 600.0, 5, Status.OK),  # 3 ms are spent on a candidate
        (2000.0, 2000.0, 3, Status.OK),  # ... in 3 samples at least
        (1e6, INFINITY, 3, Status.OK),  # the first config has nothing to be hopeless against
    ],
)
def test_slow_configs_get_few_samples(runner, us, best_us, samples, status):
    runner._timer.us = us
    outcome = runner.scan(CONFIG, best_us)
    assert (outcome.status, outcome.samples, outcome.time_us) == (status, samples, us)
    assert (outcome.registers, outcome.spills, outcome.smem_bytes) == (128, 0, 1024)


@pytest.mark.parametrize(("best_us", "samples"), [(1.0, 25), (4.0, 15), (100.0, 10), (500.0, 4), (5000.0, 2)])
def test_a_round_takes_as_many_samples_as_the_best_config_can_afford(runner, best_us, samples):
    assert runner.confirm(CONFIG, best_us) == [100.0] * samples
    assert runner.confirm(CONFIG, best_us, is_clean=True) == [90.0] * samples


@pytest.mark.parametrize("result", [1.1, float("nan")])
def test_a_wrong_result_is_a_status_and_is_not_timed(runner, result):
    runner._family.result = result
    outcome = runner.scan(CONFIG, INFINITY)
    assert (outcome.status, outcome.time_us) == (Status.WRONG_RESULT, None)
    assert runner._family.launches == 1


def test_a_result_that_is_nan_says_what_it_may_be(runner):
    runner._family.result = float("nan")
    assert runner.scan(CONFIG, INFINITY).error.startswith("16 of 16 elements are NaN, as the output is before a launch")


class InPlace(TensorFamily):
    """Its kernel doubles a tensor, and is right only where that holds ones."""

    def inputs(self, problem, device, *, seed=0):
        return torch.ones(4, 4)

    def reset(self, inputs):
        inputs.fill_(1.0)

    def launch(self, inputs, config):
        self.launches += 1
        assert inputs.eq(1).all(), "a launch must start from fresh inputs"
        return inputs.mul_(2)

    def reference(self, inputs):
        return 2 * inputs


class ResettingTimer(FakeTimer):
    """Launches twice for each time."""

    def sample(self, launch, samples, before):
        for _ in range(2):
            before()
            launch()
        return [100.0] * samples

    def time(self, launch, *, samples, before):
        self.sample(launch, 1, before)
        return Timing(100.0, 0.01, samples(100.0))


def test_every_launch_of_a_kernel_that_works_in_place_starts_from_fresh_inputs(device, monkeypatch):
    monkeypatch.setattr(timer, "Timer", ResettingTimer)
    runner, family = GpuRunner(DEVICE), InPlace()
    for problem in (PROBLEM, replace(PROBLEM, dtype="fp16")):
        runner.prepare(family, problem)
        for config in (CONFIG, replace(CONFIG, num_warps=8)):
            assert runner.scan(config, INFINITY).status is Status.OK
            assert runner.confirm(config, 100.0)
            assert runner.probe(family, problem, config) == 100.0
    assert family.launches == 2 * 2 * (1 + 2 + 2 + 2)


def test_a_result_is_checked_once_for_all_problems_of_a_dtype_and_flags(runner):
    family = runner._family
    measured = Problem.of("fake", groups=2, rows=32, n=64, k=64, ragged={"rows": (8, 24)})
    for problem in (measured, measured.without_sizes(), replace(measured, dtype="fp16")):
        runner.prepare(family, problem)
        runner.scan(CONFIG, INFINITY)
    assert family.launches == 2 + 3  # checks, timings
    runner.prepare(family, replace(measured, flags=("transposed",)))
    family.result = 1.1
    assert runner.scan(CONFIG, INFINITY).status is Status.WRONG_RESULT


def test_memory_that_runs_out_at_a_launch_costs_that_config_on_that_problem(runner):
    runner._family.result = torch.OutOfMemoryError("scratch")
    assert runner.scan(CONFIG, INFINITY).status is Status.OUT_OF_RESOURCES
    runner._family.result = 1.0
    assert runner.scan(CONFIG, INFINITY).status is Status.OK


def test_the_drift_probe_is_timed_beside_the_problem_at_hand(runner):
    other = replace(PROBLEM, dtype="fp16")
    made = []

    class Noting(TensorFamily):
        def inputs(self, problem, device, *, seed=0):
            made.append(problem)
            return problem

    family = Noting()
    assert [runner.probe(family, other, CONFIG) for _ in range(3)] == [100.0] * 3
    assert made == [other]  # once
    assert runner.confirm(CONFIG, 100.0)  # the prepared problem is still there
    family.result = RuntimeError("invalid argument")
    with pytest.raises(LaunchFailedError, match="invalid argument"):
        runner.probe(family, other, CONFIG)


def test_a_launch_that_fails_later_is_a_failure_of_the_round(runner):
    runner.scan(CONFIG, INFINITY)
    runner._family.result = RuntimeError("invalid argument")
    assert runner.scan(CONFIG, INFINITY).status is Status.LAUNCH_FAILED
    with pytest.raises(LaunchFailedError, match="invalid argument"):
        runner.confirm(CONFIG, 100.0)


@pytest.mark.parametrize(
    ("raised", "passed_on", "answers"),
    [
        (torch.OutOfMemoryError("12 GiB"), OutOfMemoryError, True),
        (ForetuneError("inputs need group_sizes"), ForetuneError, True),
        (RuntimeError("illegal memory access"), DeviceLostError, False),
    ],
)
def test_inputs_that_do_not_fit_are_told_from_a_lost_device_and_from_bad_input(
    runner, device, raised, passed_on, answers
):
    class Unmade(TensorFamily):
        def inputs(self, problem, device, *, seed=0):
            raise raised

    device["answers"] = answers
    with pytest.raises(passed_on, match=str(raised)) as told:
        runner.prepare(Unmade(), PROBLEM)
    assert type(told.value) is passed_on
