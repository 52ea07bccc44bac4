"""The process that measures on one GPU: it takes tasks, in batches, and answers them in that order.

Whoever asks counts the answers, so the first unanswered task is the one that this process is at. Batches keep the
GPU busy while an answer is on its way; early stopping is decided here, not a round trip away.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Protocol, TypeAlias

import numpy as np

from ..datasets import Case, DeviceSpec, ForetuneError, KernelConfig, Measurable, Problem, Status, roofline_us
from ..datasets.errors import abridged
from .runner import DeviceLostError, GpuRunner, LaunchFailedError, Runner, Trial

#: The drift probe is timed this often, and at the beginning of each case: some milliseconds each time.
PROBE_SECONDS = 2.0


class Gpu(Protocol):
    """A device that a process of its own can open. `CudaGpu` is the real one; tests replay recorded times."""

    def open(self) -> tuple[DeviceSpec, Runner]:
        """Called once, in that process."""


#: What this process has entered for the rest of its life.
_entered = ExitStack()


@dataclass(frozen=True)
class CudaGpu:
    """The visible CUDA or HIP device of that index, or so many of its SMs as a device of their own."""

    index: int
    sms: int | None = None

    def open(self) -> tuple[DeviceSpec, Runner]:
        import torch

        from ..runtime import sm_partition

        torch.cuda.set_device(self.index)
        device = DeviceSpec.live(self.index)
        if self.sms is not None:
            device = _entered.enter_context(sm_partition(self.sms, device))
        return device, GpuRunner(device)


@dataclass(frozen=True)
class Probe:
    """A launch to repeat through the run, to see whether the device stays the same."""

    problem: Problem
    config: KernelConfig


@dataclass(frozen=True)
class Prepare:
    """Make the inputs of the problem that the next tasks are about."""

    problem: Problem
    best_us: float  # of what is known of it, in the scan; inf if nothing
    probe: Probe | None = None


@dataclass(frozen=True)
class Scan:
    """Run one config for the first time."""

    config: KernelConfig


@dataclass(frozen=True)
class Confirm:
    """Time one config that ran in the scan once more, for one of the confirming passes."""

    config: KernelConfig
    timing_pass: int


Task: TypeAlias = "Prepare | Scan | Confirm"


@dataclass(frozen=True)
class Lost:
    """The process can do no more: it lost the GPU at the task, or never had one."""

    error: str


#: A process sends its device once it is open, then a trial for each task, and at its end why it lost the device.
Message: TypeAlias = "DeviceSpec | Trial | Lost"


def serve(connection: Connection, gpu: Gpu, families: Mapping[str, Measurable]) -> None:
    """The process: opens the GPU, then works until there is no parent or no GPU any more."""
    try:
        device, runner = gpu.open()
    except Exception as error:  # noqa: BLE001 - whatever it is, the parent must hear of it
        connection.send(Lost(abridged(f"{type(error).__name__}: {error}")))
        return
    connection.send(device)
    task_runner = _TaskRunner(runner, families)
    try:
        while True:
            for task in connection.recv():
                connection.send(task_runner.answer(task))
    except DeviceLostError as error:
        connection.send(Lost(str(error)))


class _TaskRunner:
    """Answers tasks, one after the other."""

    def __init__(self, runner: Runner, families: Mapping[str, Measurable]) -> None:
        self._runner, self._families = runner, families
        self._refused: Trial | None = None  # why the problem at hand cannot be run at all
        self._failed: dict[KernelConfig, Trial] = {}  # while confirming: they are not run again
        self._best_us = float("inf")
        self._probe: Probe | None = None
        self._due = 0.0  # when the probe is next

    def answer(self, task: Task) -> Trial:
        """Do a task.

        Returns:
            For a `Scan` the trial. For a `Confirm` the times of a round, or the trial that failed. For a `Prepare` an
            empty trial, or the one that stands for all tasks of a problem that cannot be prepared.

        Raises:
            DeviceLostError: The GPU is gone. Whatever else a task raises ends the process.
        """
        start = time.perf_counter()
        trial = self._do(task)
        if isinstance(task, Prepare):
            self._probe, self._due = task.probe, 0.0
        probe_us = self._time_probe() if time.perf_counter() >= self._due else None
        return replace(trial, seconds=time.perf_counter() - start, probe_us=probe_us)

    def _time_probe(self) -> float | None:
        if self._probe is None:
            return None
        family, probe = self._families[self._probe.problem.family], self._probe
        try:
            time_us = self._runner.probe(family, probe.problem, probe.config)
        except LaunchFailedError:  # then there is none: the run can do without
            self._probe = None
            return None
        self._due = time.perf_counter() + PROBE_SECONDS
        return time_us

    def _do(self, task: Task) -> Trial:
        if isinstance(task, Prepare):
            return self._prepare(task)
        if self._refused is not None:
            return self._refused
        if isinstance(task, Scan):
            trial = self._runner.scan(task.config, self._best_us)
            if trial.time_us is not None:
                # As the store will give it back, or a resumed run would stop other configs early.
                self._best_us = min(self._best_us, float(np.float32(trial.time_us)))
            return trial
        if task.config in self._failed:
            return self._failed[task.config]
        try:
            return Trial(times_us=tuple(self._runner.confirm(task.config, self._best_us)))
        except LaunchFailedError as error:
            self._failed[task.config] = Trial(Status.LAUNCH_FAILED, error=str(error))
            return self._failed[task.config]

    def _prepare(self, task: Prepare) -> Trial:
        self._refused, self._failed, self._best_us = None, {}, task.best_us
        try:
            self._runner.prepare(self._families[task.problem.family], task.problem)
        except DeviceLostError:
            raise
        except Exception as error:  # noqa: BLE001 - a problem that cannot be made is passed over, not the end of a run
            self._refused = Trial(Status.LAUNCH_FAILED, error=abridged(str(error)))
        return self._refused or Trial()


#: About how long it takes: enough that the clocks count and not the launch, little enough to repeat it often.
PROBE_US = 200.0
#: It is chosen among so many cases: a GPU waits for it.
CONSIDERED = 64


def choose_probe(families: Mapping[str, Measurable], cases: Sequence[Case], device: DeviceSpec) -> Probe | None:
    """The default config of the case that is the nearest to PROBE_US, by the roofline, of the first ones; the
    same for the same cases, so that all GPUs of a device's name have one. None where there is no case."""
    distances: list[tuple[float, str, Probe]] = []
    for case in cases[:CONSIDERED]:
        family, problem = families[case.problem.family], case.problem
        with suppress(ForetuneError):  # no config can run it
            config = family.default(problem, device)
            if family.supports(config, problem, device) is None:
                distance = abs(roofline_us(family, problem, device) - PROBE_US)
                distances.append((distance, str(problem.to_json()), Probe(problem, config)))
    return min(distances, key=lambda one: one[:2])[2] if distances else None
