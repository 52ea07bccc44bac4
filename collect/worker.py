"""The process that measures on one GPU. It gets batches of tasks, and answers the tasks in order.

The parent counts the answers, so that it knows which task this process works on: the first unanswered one. Batches keep
the GPU busy while an answer is on its way. Early stopping is decided in this process, without a round trip.
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
from .runner import DeviceLostError, GpuRunner, LaunchFailedError, ReplayRunner, Runner, Times, Trial

#: The drift probe is timed every so many seconds, and at the start of each case. It takes some milliseconds.
PROBE_SECONDS = 2.0


class Gpu(Protocol):
    """A device that the measuring process opens: a `CudaGpu`, or a `ReplayGpu` without a GPU."""

    def open(self) -> tuple[DeviceSpec, Runner]:
        """Open the device, and return a runner for it. This is called once, in the measuring process."""


#: Context managers that this process stays in until it ends.
_entered = ExitStack()


@dataclass(frozen=True)
class CudaGpu:
    """A visible CUDA or HIP device.

    Attributes:
        index: Its index.
        sms: How many of its SMs to use, as a device of their own; all if None.
    """

    index: int
    sms: int | None = None

    def open(self) -> tuple[DeviceSpec, Runner]:
        """Make the device the current one, and return a runner for it."""
        import torch

        from ..runtime import sm_partition

        torch.cuda.set_device(self.index)
        device = DeviceSpec.live(self.index)
        if self.sms is not None:
            device = _entered.enter_context(sm_partition(self.sms, device))
        return device, GpuRunner(device)


@dataclass(frozen=True)
class ReplayGpu:
    """A device whose recorded times are replayed."""

    device: DeviceSpec
    times: Times

    def open(self) -> tuple[DeviceSpec, Runner]:
        """Return the device, and a runner that replays its times."""
        return self.device, ReplayRunner(self.times)


@dataclass(frozen=True)
class Probe:
    """The drift probe: a launch that is repeated during a run, to see whether the GPU gets slower."""

    problem: Problem
    config: KernelConfig


@dataclass(frozen=True)
class Prepare:
    """A task: make the inputs of the problem that the next tasks run.

    Attributes:
        problem: The problem.
        best_us: The best time in the scan so far, in microseconds; inf if there is none.
        probe: The drift probe; None for no probe.
    """

    problem: Problem
    best_us: float
    probe: Probe | None = None


@dataclass(frozen=True)
class Scan:
    """A task: check the result of a config and time it, for the first time."""

    config: KernelConfig


@dataclass(frozen=True)
class Confirm:
    """A task: time a config that ran in the scan again, for one round of a confirming pass.

    `is_clean` says whether the L2 has no dirty lines at the start, as `Timer` describes.
    """

    config: KernelConfig
    timing_pass: int
    is_clean: bool


Task: TypeAlias = "Prepare | Scan | Confirm"


@dataclass(frozen=True)
class Lost:
    """The last message that a process sends when it cannot use the GPU any more or could not open it."""

    error: str


#: A process sends its device when that is open, then a trial for each task, and `Lost` if it loses the GPU.
Message: TypeAlias = "DeviceSpec | Trial | Lost"


def serve(connection: Connection, gpu: Gpu, families: Mapping[str, Measurable]) -> None:
    """Run the measuring process: open the GPU, then answer tasks from `connection`.

    It ends with the parent, or when the GPU is lost.
    """
    try:
        device, runner = gpu.open()
    except Exception as error:  # noqa: BLE001 - the parent reports any error
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
    """Carries out tasks in the measuring process, one after the other, and returns their answers."""

    def __init__(self, runner: Runner, families: Mapping[str, Measurable]) -> None:
        self._runner, self._families = runner, families
        self._refused: Trial | None = None  # why the prepared problem cannot be run
        self._failed: dict[KernelConfig, Trial] = {}  # in a confirming pass: they are not run again
        self._best_us = float("inf")
        self._probe: Probe | None = None
        self._due = 0.0  # when to read the probe next

    def answer(self, task: Task) -> Trial:
        """Carry out a task and return its answer, with a reading of the drift probe if one is due.

        Returns:
            For a `Scan`, its trial. For a `Confirm`, a trial with the times of one round, or a failed trial. For a
            `Prepare`, an empty trial; if the inputs cannot be made, a failed trial, which is also the answer to all
            further tasks on that problem.

        Raises:
            DeviceLostError: The GPU cannot be used any more. Any other exception also ends the process.
        """
        start = time.perf_counter()
        trial = self._do(task)
        if isinstance(task, Prepare):
            self._probe, self._due = task.probe, 0.0
        probe_us = self._time_probe() if time.perf_counter() >= self._due else None
        return replace(trial, seconds=time.perf_counter() - start, probe_us=probe_us)

    def _time_probe(self) -> float | None:
        """Return the drift probe's time in microseconds; None if there is no probe."""
        if self._probe is None:
            return None
        family, probe = self._families[self._probe.problem.family], self._probe
        try:
            time_us = self._runner.probe(family, probe.problem, probe.config)
        except LaunchFailedError:  # the run continues without a probe
            self._probe = None
            return None
        self._due = time.perf_counter() + PROBE_SECONDS
        return time_us

    def _do(self, task: Task) -> Trial:
        """Carry out a task, without reading the drift probe, and return its result."""
        if isinstance(task, Prepare):
            return self._prepare(task)
        if self._refused is not None:
            return self._refused
        if isinstance(task, Scan):
            trial = self._runner.scan(task.config, self._best_us)
            if trial.time_us is not None:
                # Rounded as the store rounds it, or a continued run would stop other configs early.
                self._best_us = min(self._best_us, float(np.float32(trial.time_us)))
            return trial
        if task.config in self._failed:
            return self._failed[task.config]
        try:
            return Trial(times_us=tuple(self._runner.confirm(task.config, self._best_us, task.is_clean)))
        except LaunchFailedError as error:
            self._failed[task.config] = Trial(Status.LAUNCH_FAILED, error=str(error))
            return self._failed[task.config]

    def _prepare(self, task: Prepare) -> Trial:
        """Make the inputs of a task's problem; return an empty trial, or a failed one if they cannot be made."""
        self._refused, self._failed, self._best_us = None, {}, task.best_us
        try:
            self._runner.prepare(self._families[task.problem.family], task.problem)
        except DeviceLostError:
            raise
        except Exception as error:  # noqa: BLE001 - a problem whose inputs cannot be made is skipped
            self._refused = Trial(Status.LAUNCH_FAILED, error=abridged(str(error)))
        return self._refused or Trial()


#: About how long, in microseconds, the drift probe takes: long enough to depend on the GPU's clock and not on the
#: launch, and short enough to be repeated often.
PROBE_US = 200.0
#: From how many cases it is chosen. A GPU waits for this choice.
CONSIDERED = 64


def choose_probe(families: Mapping[str, Measurable], cases: Sequence[Case], device: DeviceSpec) -> Probe | None:
    """Choose the drift probe: the default config of the case whose roofline time is nearest to `PROBE_US`.

    The same cases give the same probe, so that all GPUs of one name have the same.

    Args:
        families: The families by name.
        cases: The cases of the run. Only the first `CONSIDERED` are looked at.
        device: The device.

    Returns:
        The probe; None if no config can run any of these cases.
    """
    distances: list[tuple[float, str, Probe]] = []
    for case in cases[:CONSIDERED]:
        family, problem = families[case.problem.family], case.problem
        with suppress(ForetuneError):  # if no config can run it
            config = family.default(problem, device)
            if family.supports(config, problem, device) is None:
                distance = abs(roofline_us(family, problem, device) - PROBE_US)
                distances.append((distance, str(problem.to_json()), Probe(problem, config)))
    return min(distances, key=lambda one: one[:2])[2] if distances else None
