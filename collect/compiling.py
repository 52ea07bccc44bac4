"""`CompilePool`: compiles configs in a pool of processes while the GPUs measure.

The processes use no GPU. A stub driver tells Triton the target, and the binaries are written to Triton's disk cache
under the key that the real driver looks up. One pool serves all GPUs of a run, so that each binary is compiled once.
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

#: A config is given up after it ended this many processes. Once may be the system's fault, such as missing memory.
TRIES = 2
#: A compilation that takes longer than this many seconds is given up.
COMPILE_SECONDS = 120.0
#: A process that takes more seconds to start is considered stuck. Importing Triton from a slow disk takes long.
START_SECONDS = 300.0


@dataclass(frozen=True)
class Binary:
    """Identifies a kernel binary, which is compiled once for all calls that share it on devices of one arch.

    Attributes:
        family: The family's name.
        key: See `Measurable.binary_key`.
        arch: The backend and the architecture, such as "cuda:sm_90".
        config: A config that has this binary.
        problem: A problem that has it.
        device: A device of that arch.
    """

    family: str
    key: Hashable
    arch: str
    config: KernelConfig = field(compare=False)
    problem: Problem = field(compare=False, repr=False)
    device: DeviceSpec = field(compare=False, repr=False)

    @classmethod
    def of(cls, family: Measurable, config: KernelConfig, problem: Problem, device: DeviceSpec) -> Binary:
        """Return the `Binary` that a config needs for a problem on a device."""
        like = problem.without_sizes()  # keeps messages small: there may be hundreds of sizes
        arch = f"{device.backend}:{device.arch}"
        return cls(family.name, family.binary_key(config, like), arch, config, like, device)


def signature_of(family: Measurable, problem: Problem, device: DeviceSpec) -> Hashable:
    """Return a value that is equal for problems that share their binaries.

    It is the key of the first config's binary. If the family's `binary_key` fails, all its problems have one signature.
    """
    with suppress(ForetuneError):
        if space := family.space(device):
            return family.name, family.binary_key(space[0], problem.without_sizes())
    return family.name, None


def binary_if_able(family: Measurable, config: KernelConfig, problem: Problem, device: DeviceSpec) -> Binary | None:
    """Return the `Binary` of a config for a problem; None if the config cannot run it, or the family's code fails."""
    with suppress(ForetuneError):
        if family.supports(config, problem, device) is None:
            return Binary.of(family, config, problem, device)
    return None


@dataclass(frozen=True)
class Compiled:
    """The result of compiling one binary.

    Attributes:
        compile_ms: How long it took in milliseconds.
        error: Why it failed; None if it worked.
    """

    compile_ms: float
    error: str | None = None


class CompilePool:
    """Compiles requested binaries in processes, the lowest rank first.

    If a process crashes or takes too long, its binary fails and the process is replaced.

    Args:
        families: The families by name.
        watch: Watches the processes.
        size: How many processes to use, 0 where nothing is compiled; one for each core if None.

    Attributes:
        on_finished: Called with each binary and its result; may be set.
        compile_s: Seconds of compilation in all processes together.
    """

    def __init__(
        self,
        families: Mapping[str, Measurable],
        watch: Watch,
        size: int | None = None,
    ) -> None:
        self._families, self._watch = families, watch
        self._size = cores() if size is None else size
        self._workers: list[_Compiler] = []
        self._done: dict[Binary, Compiled] = {}
        self._ranks: dict[Binary, float] = {}  # of requested binaries that are not begun
        self._begun: set[Binary] = set()
        self._queue: list[tuple[float, int, Binary]] = []
        self._order = itertools.count()
        self.on_finished: Callable[[Binary, Compiled], None] = lambda binary, compiled: None
        self.compile_s = 0.0

    def start(self) -> None:
        """Start all processes before the first request, because importing Triton takes seconds."""
        while len(self._workers) < self._size:
            self._workers.append(_Compiler(self._families, self._watch, self._finish))

    def request(self, binary: Binary, rank: float) -> Compiled | None:
        """Request a binary, and return its result if it is there already, else None.

        Args:
            binary: The binary.
            rank: Binaries of a lower rank are compiled first. If a binary is requested several times, its lowest rank
                counts.

        Raises:
            ForetuneError: Triton has no compiler for the device.
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
        """True if fewer binaries wait to be compiled than the pool has processes, so that it has room for more."""
        return len(self._ranks) < self._size

    def know(self, binary: Binary, compiled: Compiled) -> None:
        """Add a binary's result from an earlier run, so that it is not compiled."""
        self._done[binary] = compiled

    def check(self) -> None:
        """Kill the processes whose compilation takes too long. Call it regularly."""
        for worker in self._workers:
            worker.check()

    def _dispatch(self) -> None:
        while self._queue:
            worker = next((worker for worker in self._workers if worker.binary is None), None)
            if worker is None and len(self._workers) < self._size:
                worker = _Compiler(self._families, self._watch, self._finish)
                self._workers.append(worker)
            if worker is None:
                return
            rank, _, binary = heapq.heappop(self._queue)
            if self._ranks.get(binary) == rank:  # else it was begun under a lower rank
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
    """One process of the pool, which is replaced when it ends."""

    def __init__(
        self, families: Mapping[str, Measurable], watch: Watch, on_finished: Callable[[Binary, Compiled], None]
    ) -> None:
        self._families, self._watch, self._on_finished = families, watch, on_finished
        self.binary: Binary | None = None  # that is being compiled
        self._tries = 0
        self._overdue = False
        self._is_up, self._failed_starts = False, 0
        self._child: Child | None = self._started()

    def _started(self) -> Child:
        self._is_up = False
        child = Child(serve, self._families)
        self._watch.add(child, self._answered, self._ended)
        return child

    def compile(self, binary: Binary) -> None:
        """Start to compile a binary."""
        self.binary, self._tries = binary, 0
        self._send(binary)

    def _send(self, binary: Binary) -> None:
        self._began, self._overdue = time.monotonic(), False
        self._child = self._child or self._started()
        self._child.send(binary)

    def check(self) -> None:
        """Kill the process if its compilation, or its start, takes too long."""
        limit_s = COMPILE_SECONDS if self._is_up else START_SECONDS
        if self._child and self.binary and not self._overdue and time.monotonic() - self._began > limit_s:
            self._overdue = True
            self._watch.kill(self._child)

    def _answered(self, compiled: Compiled | None) -> None:
        if compiled is None:
            self._is_up, self._failed_starts = True, 0
            self._began = time.monotonic()
        elif self.binary is not None:
            binary, self.binary = self.binary, None
            self._on_finished(binary, compiled)

    def _ended(self, exitcode: int | None) -> None:
        self._child = None
        if not self._is_up:
            self._failed_starts += 1
            if self._failed_starts == TRIES:  # else every config would fail although none is the cause
                raise ForetuneError(f"the compiling processes end with exit code {exitcode} while they start")
        if self.binary is None:
            return
        self._tries += self._is_up
        spent_ms = (time.monotonic() - self._began) * 1e3
        if self._overdue and self._is_up:
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
    """Compile the binaries of some calls into Triton's disk cache, each binary once.

    A compilation that fails is not reported here: it fails again when the config is launched.

    Args:
        family: The family.
        calls: The configs and problems.
        device: The device to compile for.
        size: How many processes to use; one for each core if None.

    Raises:
        ForetuneError: Triton has no compiler for the device.
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
    """Run a process of the pool: compile the binaries that the parent sends through `connection`, one by one."""
    os.nice(10)  # so that the processes that measure, and their parent, have priority

    import torch  # noqa: F401 - takes seconds, which must not count for the first binary
    import triton  # noqa: F401

    with open(os.devnull, "w") as nowhere:  # a compiler that fails prints the program; the row has the error
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
    """Compile a binary in this process; return how long it took, and the error if it failed."""
    start = time.perf_counter()
    error = None
    try:
        family.compile(binary.config, binary.problem)
    except Exception as failure:  # noqa: BLE001 - whatever the compiler raises is this config's error
        cause = cause_of(failure)
        error = abridged(f"{type(cause).__name__}: {cause}")
    return Compiled((time.perf_counter() - start) * 1e3, error)
