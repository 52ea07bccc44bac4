"""`RemoteGpu`: a GPU of a cluster, as its dask worker uses it.

The dask worker does not use the GPU itself. It supervises a process that measures and some that compile, as a campaign
does for the GPUs of its own host. If a kernel faults, only its config fails, and the worker goes on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from ..datasets import Case, DeviceSpec, KernelConfig, Measurable, Measurement
from .campaign import CHECK_SECONDS
from .case_tasks import CaseTasks, Fatal
from .cases import CaseState
from .compiling import Binary, Compiled, CompilePool
from .processes import Child, Watch
from .runner import DeviceLostError
from .supervisor import Limits, Supervisor
from .worker import Gpu, Probe, serve


@dataclass(frozen=True)
class RunSettings:
    """The settings that all orders of a run share.

    Attributes:
        run: The id of the run.
        gpu: Opens the GPU in the measuring process.
        families: The families by name.
        limits: When a process is considered stuck.
    """

    run: str
    gpu: Gpu
    families: Mapping[str, Measurable]
    limits: Limits = Limits()  # noqa: RUF009 - frozen


@dataclass(frozen=True)
class Order:
    """A case to measure, or a part of it.

    Attributes:
        case: The case.
        configs: The configs to scan, in this order.
        known: The measurements of the case so far.
        probe: The drift probe.
        seconds: How many seconds it may take.
        confirm: Whether to confirm the leading configs after the scan.
    """

    case: Case
    configs: tuple[KernelConfig, ...]
    known: CaseState
    probe: Probe | None
    seconds: float
    confirm: bool = True


@dataclass(frozen=True)
class Report:
    """The results of an order.

    Attributes:
        source_hash: The source hash of the kernel that ran.
        rows: The measurements.
        readings: Readings of the drift probe: how many seconds ago, and the time in microseconds.
        over: Whether the order is complete or given up.
        refused: Why it was given up; None if it was not.
        deadly: Whether processes died at it.
        gpu: The address of the worker that measured.
        spent: Seconds on tasks ("busy"), on those that failed ("lost") and compiling ("compile").
    """

    source_hash: str
    rows: tuple[Measurement, ...]
    readings: tuple[tuple[float, float], ...]
    over: bool
    refused: str | None
    deadly: bool
    gpu: str
    spent: Mapping[str, float]


class RemoteGpu:
    """Measures the orders that a dask worker receives in one run on its GPU, one after the other.

    It has a `Supervisor`, which gives the tasks of an order's case to the measuring process, and a pool that compiles.

    Args:
        settings: The settings of the run.
        name: A name for the GPU.
        compilers: How many processes compile.
    """

    def __init__(self, settings: RunSettings, name: str, compilers: int) -> None:
        self._settings, self._name = settings, name
        self._watch = Watch()
        self._pool = CompilePool(settings.families, self._watch, compilers)
        self._pool.on_finished = self._compiled
        self._fatal: Fatal = {}
        self._work: CaseTasks | None = None  # of the current order, until it is over
        self._readings: list[tuple[float, float]] = []  # (time, microseconds)
        self._stopped = threading.Event()
        self._supervisor = Supervisor(
            partial(Child, serve, settings.gpu, settings.families), self._watch, self, settings.limits
        )

    def device(self) -> DeviceSpec:
        """Wait until the measuring process has opened the GPU, and return it.

        Raises:
            DeviceLostError: The GPU cannot be opened.
        """
        self._run(lambda: self._supervisor.device is not None, float("inf"))
        assert self._supervisor.device is not None
        return self._supervisor.device

    def measure(self, order: Order) -> Report:
        """Measure the case of an order, or as much of it as the order's time allows.

        Raises:
            DeviceLostError: The GPU is lost.
        """
        device, family = self.device(), self._settings.families[order.case.problem.family]
        rows: list[Measurement] = []
        work = CaseTasks(
            family,
            order.case,
            device,
            order.configs,
            order.known,
            self._pool,
            rows.extend,
            order.probe,
            self._fatal,
            confirm=order.confirm,
        )
        before, self._readings = self._spent(), []
        if not work.over:
            self._work = work
            if self._supervisor.idle:
                self._supervisor.give(work)
            self._run(lambda: self._work is None, time.monotonic() + order.seconds)
        now, after = time.monotonic(), self._spent()
        return Report(
            family.source_hash(),
            tuple(rows),
            tuple((now - at, us) for at, us in self._readings),
            work.over,
            work.refused,
            work.deaths > 0,
            self._name,
            {what: after[what] - before[what] for what in before},
        )

    def _spent(self) -> dict[str, float]:
        """Return the seconds so far on tasks ("busy"), on those that failed ("lost") and compiling ("compile")."""
        return {"busy": self._supervisor.busy_s, "lost": self._supervisor.lost_s, "compile": self._pool.compile_s}

    def stop(self) -> None:
        """Make `measure` return soon. It may be called in another thread."""
        self._stopped.set()

    def close(self) -> None:
        """End the measuring and the compiling processes."""
        self._watch.close()

    def _run(self, done: Callable[[], bool], deadline: float) -> None:
        """Handle messages until `done()` is true, `deadline` (of `time.monotonic`) has passed, or `stop` was called."""
        while not (done() or self._stopped.is_set() or time.monotonic() > deadline):
            if self._supervisor.retired:
                raise DeviceLostError(self._supervisor.trouble)
            self._watch.handle(CHECK_SECONDS)
            self._pool.check()
            self._supervisor.check()

    def _compiled(self, binary: Binary, compiled: Compiled) -> None:
        """Pass the result of compiling a binary on to the case that is being measured, which may have waited for it."""
        if self._work is not None:
            self._work.compiled(binary, compiled)
            self._supervisor.proceed()

    # The methods of `supervisor.Owner`.

    def idle(self, supervisor: Supervisor) -> None:
        """Give the measuring process, which has nothing to do, the case that `measure` was called for, if any."""
        if self._work is not None:
            supervisor.give(self._work)

    def done(self, supervisor: Supervisor, work: CaseTasks) -> None:
        """Record that the order's case is complete or given up, so that `measure` returns."""
        if work is self._work:
            self._work = None

    def read(self, supervisor: Supervisor, case: Case, probe_us: float) -> None:
        """Keep a reading of the drift probe for the report: its time in microseconds while `case` is measured."""
        if self._work is not None and case == self._work.case:
            self._readings.append((time.monotonic(), probe_us))

    def retired(self, supervisor: Supervisor, work: CaseTasks | None) -> None:
        """Do nothing when the GPU is given up: `_run` notices that by itself and raises `DeviceLostError`."""


# The functions that dask calls. A worker has one `RemoteGpu`, for the current run.

_lock = threading.Lock()
_gpus: dict[str, RemoteGpu] = {}  # by run id
_stopped: set[str] = set()  # run ids


def introduce(settings: RunSettings) -> DeviceSpec:
    """Open the GPU of this dask worker, and return it.

    Raises:
        DeviceLostError: The GPU cannot be opened.
    """
    return _remote_gpu(settings).device()


def measure(settings: RunSettings, order: Order) -> Report:
    """Measure the case of an order on the GPU of this dask worker.

    Raises:
        DeviceLostError: The GPU is lost.
    """
    return _remote_gpu(settings).measure(order)


def stop(run: str) -> None:
    """Make the measurements of a run, by its id, return soon with what is measured. It is called in another thread."""
    _stopped.add(run)
    if run in _gpus:
        _gpus[run].stop()


def close(run: str) -> None:
    """End the processes that this dask worker has for a run, which frees its GPU."""
    with _lock:
        if run in _gpus:
            _gpus.pop(run).close()


def _remote_gpu(settings: RunSettings) -> RemoteGpu:
    """Return the `RemoteGpu` of this dask worker for a run, after closing those of earlier runs."""
    from distributed import get_worker

    worker = get_worker()
    with _lock:
        if settings.run not in _gpus:
            while _gpus:  # left by a run that was killed
                _gpus.popitem()[1].close()
            _gpus[settings.run] = RemoteGpu(settings, worker.address, worker.state.nthreads)
        if settings.run in _stopped:
            _gpus[settings.run].stop()
        return _gpus[settings.run]
