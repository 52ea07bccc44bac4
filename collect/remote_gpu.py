"""A GPU of a cluster: what a dask worker does, and keeps between two tasks.

The dask worker itself never touches the GPU. It supervises a process that measures and some that compile, as a
campaign does for the GPUs of its own host, so that a kernel that faults costs its config and not the worker.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from ..datasets import Case, DeviceSpec, KernelConfig, Measurable, Measurement
from .campaign import CHECK_SECONDS
from .case_state import CaseState
from .case_tasks import CaseTasks, Fatal
from .compiling import Binary, Compiled, CompilePool
from .processes import Child, Watch
from .runner import DeviceLostError
from .supervisor import Limits, Supervisor
from .worker import Gpu, Probe, serve


@dataclass(frozen=True)
class RunSettings:
    """What all orders of a run have in common."""

    run: str  # an id
    gpu: Gpu
    families: Mapping[str, Measurable]
    limits: Limits = Limits()  # noqa: RUF009 - frozen


@dataclass(frozen=True)
class Order:
    """A case to measure, or a part of it."""

    case: Case
    configs: tuple[KernelConfig, ...]  # to scan, in this order
    known: CaseState  # on the device that it is for
    probe: Probe | None
    seconds: float  # to spend at most
    confirm: bool = True  # the leading ones, after the scan


@dataclass(frozen=True)
class Report:
    """What came of an order."""

    source_hash: str  # of the kernel that ran
    rows: tuple[Measurement, ...]
    readings: tuple[tuple[float, float], ...]  # of the drift probe: how many seconds ago, and its time in us
    over: bool  # whether all of the order is done, or was given up
    refused: str | None  # why it was given up
    deadly: bool  # processes died at it
    gpu: str  # who measured it
    spent: Mapping[str, float]  # seconds, as in `summary.Effort`: busy, lost and compile


class RemoteGpu:
    """Measures the orders of one run on one GPU, one after the other."""

    def __init__(self, settings: RunSettings, name: str, compilers: int) -> None:
        self._settings, self._name = settings, name
        self._watch = Watch()
        self._pool = CompilePool(settings.families, self._watch, compilers)
        self._pool.on_finished = self._compiled
        self._fatal: Fatal = {}
        self._work: CaseTasks | None = None  # at hand, until it is over
        self._readings: list[tuple[float, float]] = []  # when, and how long
        self._stopped = threading.Event()
        self._supervisor = Supervisor(
            partial(Child, serve, settings.gpu, settings.families), self._watch, self, settings.limits
        )

    def device(self) -> DeviceSpec:
        """The GPU, once it is open. Raises `DeviceLostError` where it cannot be opened."""
        self._run(lambda: self._supervisor.device is not None, float("inf"))
        assert self._supervisor.device is not None
        return self._supervisor.device

    def measure(self, order: Order) -> Report:
        """Measures a case, or as much of it as there is time for. Raises `DeviceLostError` where the GPU is lost."""
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
        return {"busy": self._supervisor.busy_s, "lost": self._supervisor.lost_s, "compile": self._pool.compile_s}

    def stop(self) -> None:
        """Ends `measure` soon, from another thread."""
        self._stopped.set()

    def close(self) -> None:
        """Ends the processes."""
        self._watch.close()

    def _run(self, done: Callable[[], bool], deadline: float) -> None:
        while not (done() or self._stopped.is_set() or time.monotonic() > deadline):
            if self._supervisor.retired:
                raise DeviceLostError(self._supervisor.trouble)
            self._watch.handle(CHECK_SECONDS)
            self._pool.check()
            self._supervisor.check()

    def _compiled(self, binary: Binary, compiled: Compiled) -> None:
        if self._work is not None:
            self._work.compiled(binary, compiled)
            self._supervisor.proceed()

    # What the supervisor tells its owner.

    def idle(self, supervisor: Supervisor) -> None:
        if self._work is not None:
            supervisor.give(self._work)

    def done(self, supervisor: Supervisor, work: CaseTasks) -> None:
        if work is self._work:
            self._work = None

    def read(self, supervisor: Supervisor, case: Case, probe_us: float) -> None:
        if self._work is not None and case == self._work.case:
            self._readings.append((time.monotonic(), probe_us))

    def retired(self, supervisor: Supervisor, work: CaseTasks | None) -> None:
        pass  # `_run` sees it


# What dask calls. A worker has one remote_gpu, for the run at hand.

_lock = threading.Lock()
_gpus: dict[str, RemoteGpu] = {}  # by run
_stopped: set[str] = set()  # runs


def introduce(settings: RunSettings) -> DeviceSpec:
    """Opens the GPU of the dask worker that this runs on. Raises `DeviceLostError` where there is none to be had."""
    return _remote_gpu(settings).device()


def measure(settings: RunSettings, order: Order) -> Report:
    """Measures a case on the dask worker that this runs on. Raises `DeviceLostError` where the GPU is lost."""
    return _remote_gpu(settings).measure(order)


def stop(run: str) -> None:
    """Ends the orders of a run soon: they return what is measured. Called in another thread."""
    _stopped.add(run)
    if run in _gpus:
        _gpus[run].stop()


def close(run: str) -> None:
    """Lets the GPU go."""
    with _lock:
        if run in _gpus:
            _gpus.pop(run).close()


def _remote_gpu(settings: RunSettings) -> RemoteGpu:
    from distributed import get_worker

    worker = get_worker()
    with _lock:
        if settings.run not in _gpus:
            while _gpus:  # a run that was killed could not say goodbye
                _gpus.popitem()[1].close()
            _gpus[settings.run] = RemoteGpu(settings, worker.address, worker.state.nthreads)
        if settings.run in _stopped:
            _gpus[settings.run].stop()
        return _gpus[settings.run]
