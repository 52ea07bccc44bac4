"""Compiles configs in a pool of processes while the GPUs measure.

The processes never touch a GPU: a stub driver gives Triton the target, and the binaries land in Triton's disk
cache under the key that the real driver looks up. One pool serves all GPUs of a run, so a binary is compiled once.
"""

from __future__ import annotations

import heapq
import itertools
import os
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from ..datasets import DeviceSpec, ForetuneError, KernelConfig, Measurable, Problem
from ..datasets.errors import abridged, cause_of
from ..runtime.launching.ahead import cores
from ..runtime.launching.stub_driver import gpu_target, use_stub_driver
from .processes import Child, Watch

#: A config is given up when it has killed this many processes: once may be the system's doing (no memory left).
TRIES = 2
#: A compile that takes longer is given up.
COMPILE_SECONDS = 120.0
#: A process that takes longer to begin is stuck: importing Triton from a slow disk takes a while.
START_SECONDS = 300.0


@dataclass(frozen=True)
class Binary:
    """What is compiled once: all calls that share a binary, on all devices of one arch."""

    family: str
    key: Hashable  # see `Measurable.binary_key`
    arch: str
    config: KernelConfig = field(compare=False)  # any that has this binary
    problem: Problem = field(compare=False, repr=False)  # likewise
    device: DeviceSpec = field(compare=False, repr=False)  # any of that arch

    @classmethod
    def of(cls, family: Measurable, config: KernelConfig, problem: Problem, device: DeviceSpec) -> Binary:
        """The binary that `config` runs on this problem and device."""
        like = problem.without_sizes()  # a message need not carry hundreds of sizes
        arch = f"{device.backend}:{device.arch}"
        return cls(family.name, family.binary_key(config, like), arch, config, like, device)


def signature_of(family: Measurable, problem: Problem, device: DeviceSpec) -> Hashable:
    """Return what is the same for problems that share their binaries: the key of the first config's binary.

    All problems of a family that fails at it have one signature.
    """
    with suppress(ForetuneError):
        if space := family.space(device):
            return family.name, family.binary_key(space[0], problem.without_sizes())
    return family.name, None


def binary_if_able(family: Measurable, config: KernelConfig, problem: Problem, device: DeviceSpec) -> Binary | None:
    """Return the binary of a config that can run the problem; None where it cannot, or the family fails to say."""
    with suppress(ForetuneError):
        if family.supports(config, problem, device) is None:
            return Binary.of(family, config, problem, device)
    return None


@dataclass(frozen=True)
class Compiled:
    """What came of compiling one binary; `error` is None where it worked."""

    compile_ms: float
    error: str | None = None


class CompilePool:
    """Compiles what is requested, the lowest rank first, and says so to `on_finished` (settable).

    A process that crashes, or takes longer than `timeout_s` (settable), costs the binary that it was at, and is
    replaced.
    """

    def __init__(
        self,
        families: Mapping[str, Measurable],
        watch: Watch,
        size: int | None = None,
        *,
        timeout_s: float = COMPILE_SECONDS,
    ) -> None:
        self._families, self._watch, self.timeout_s = families, watch, timeout_s
        self._size = size or cores()
        self._workers: list[_Compiler] = []
        self._done: dict[Binary, Compiled] = {}
        self._ranks: dict[Binary, float] = {}  # of what is requested and not begun
        self._begun: set[Binary] = set()
        self._queue: list[tuple[float, int, Binary]] = []
        self._order = itertools.count()
        self.on_finished: Callable[[Binary, Compiled], None] = lambda binary, compiled: None
        self.compile_s = 0.0  # of all processes together

    def start(self) -> None:
        """Starts the processes that requests would start, ahead of them: they take seconds to import Triton."""
        while len(self._workers) < self._size:
            self._workers.append(_Compiler(self._families, self._watch, self._finish))

    def request(self, binary: Binary, rank: float) -> Compiled | None:
        """Return what came of compiling a binary; None until it is compiled. The lowest rank requested counts.

        Raises `ForetuneError` where there is no compiler for the device.
        """
        if binary in self._done or binary in self._begun:
            return self._done.get(binary)
        if rank < self._ranks.get(binary, float("inf")):
            if binary not in self._ranks:
                gpu_target(binary.device)
            self._ranks[binary] = rank
            heapq.heappush(self._queue, (rank, next(self._order), binary))
            self._dispatch()
        return None

    @property
    def is_hungry(self) -> bool:
        """Whether its processes will soon have nothing to do."""
        return len(self._ranks) < self._size

    def know(self, binary: Binary, compiled: Compiled) -> None:
        """Record a binary's result from an earlier run, so that it is not compiled."""
        self._done[binary] = compiled

    def check(self) -> None:
        """Kills the processes that have taken too long. To be called now and then."""
        for worker in self._workers:
            worker.check(self.timeout_s)

    def _dispatch(self) -> None:
        while self._queue:
            worker = next((worker for worker in self._workers if worker.binary is None), None)
            if worker is None and len(self._workers) < self._size:
                worker = _Compiler(self._families, self._watch, self._finish)
                self._workers.append(worker)
            if worker is None:
                return
            rank, _, binary = heapq.heappop(self._queue)
            if self._ranks.get(binary) == rank:  # else it has begun, under a lower rank
                del self._ranks[binary]
                self._begun.add(binary)
                worker.compile(binary)

    def _finish(self, binary: Binary, compiled: Compiled) -> None:
        self._begun.remove(binary)
        self._done[binary] = compiled
        self.compile_s += compiled.compile_ms / 1e3
        self._dispatch()
        self.on_finished(binary, compiled)


class _Compiler:
    """One process of the pool, or its successors."""

    def __init__(
        self, families: Mapping[str, Measurable], watch: Watch, on_finished: Callable[[Binary, Compiled], None]
    ) -> None:
        self._families, self._watch, self._on_finished = families, watch, on_finished
        self.binary: Binary | None = None  # at hand
        self._tries = 0
        self._overdue = False
        self._up, self._stillborn = False, 0
        self._child: Child | None = self._started()

    def _started(self) -> Child:
        self._up = False
        child = Child(serve, self._families)
        self._watch.add(child, self._answered, self._ended)
        return child

    def compile(self, binary: Binary) -> None:
        self.binary, self._tries = binary, 0
        self._send(binary)

    def _send(self, binary: Binary) -> None:
        self._began, self._overdue = time.monotonic(), False
        self._child = self._child or self._started()
        self._child.send(binary)

    def check(self, timeout_s: float) -> None:
        limit_s = timeout_s if self._up else START_SECONDS
        if self._child and self.binary and not self._overdue and time.monotonic() - self._began > limit_s:
            self._overdue = True
            self._watch.kill(self._child)

    def _answered(self, compiled: Compiled | None) -> None:
        if compiled is None:
            self._up, self._stillborn = True, 0
            self._began = time.monotonic()
        elif self.binary is not None:
            binary, self.binary = self.binary, None
            self._on_finished(binary, compiled)

    def _ended(self, exitcode: int | None) -> None:
        self._child = None
        if not self._up:
            self._stillborn += 1
            if self._stillborn == TRIES:  # else nothing would be compiled, and every config be blamed for it
                raise ForetuneError(f"the compiling processes end with exit code {exitcode} before they begin")
        if self.binary is None:
            return
        self._tries += self._up
        spent_ms = (time.monotonic() - self._began) * 1e3
        if self._overdue and self._up:
            self._answered(Compiled(spent_ms, f"the compiler was stopped after {spent_ms / 1e3:.0f} s"))
        elif self._tries >= TRIES:
            self._answered(Compiled(spent_ms, f"the compiler killed its process (exit code {exitcode})"))
        else:
            self._send(self.binary)


def compile_ahead(
    family: Measurable,
    calls: Sequence[tuple[KernelConfig, Problem]],
    device: DeviceSpec,
    size: int | None = None,
) -> None:
    """Compiles what these calls will launch into Triton's disk cache, on all cores or `size` processes, each binary
    once. What fails to compile fails again where it is launched.

    Raises `ForetuneError` where there is no compiler for the device.
    """
    left = dict.fromkeys(Binary.of(family, config, problem, device) for config, problem in calls)
    with Watch() as watch:
        pool = CompilePool({family.name: family}, watch, min(size or cores(), max(len(left), 1)))
        pool.on_finished = lambda binary, compiled: left.pop(binary)
        for rank, binary in enumerate(tuple(left)):
            pool.request(binary, rank)
        while left:
            watch.handle(0.1)
            pool.check()


def serve(connection: Connection, families: Mapping[str, Measurable]) -> None:
    """A process of the pool: compiles one binary after the other."""
    os.nice(10)  # the processes that measure, and the one that feeds them, come first

    import torch  # noqa: F401 - takes seconds, which are not the first binary's
    import triton  # noqa: F401

    with open(os.devnull, "w") as nowhere:  # a compiler that fails prints the whole program; the row says enough
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    connection.send(None)
    arch = ""
    with ExitStack() as driver:
        while True:
            binary: Binary = connection.recv()
            if binary.arch != arch:
                arch = binary.arch
                driver.pop_all().close()
                driver.enter_context(use_stub_driver(binary.device))
            connection.send(_compile(families[binary.family], binary))


def _compile(family: Measurable, binary: Binary) -> Compiled:
    start = time.perf_counter()
    error = None
    try:
        family.compile(binary.config, binary.problem)
    except Exception as failure:  # noqa: BLE001 - whatever the compiler raises is this config's error
        cause = cause_of(failure)
        error = abridged(f"{type(cause).__name__}: {cause}")
    return Compiled((time.perf_counter() - start) * 1e3, error)
