"""Compiles configs in a pool of processes while the GPU measures.

The workers never touch the GPU: a stub driver gives Triton the target, and the binaries land in Triton's disk
cache under the key that the real driver looks up.
"""

from __future__ import annotations

import os
import queue
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import chain
from multiprocessing import connection, get_context, parent_process
from threading import Thread

from ..datasets import DeviceSpec, Family, KernelConfig
from ..runtime.stub import gpu_target, stub_driver

#: A config is given up when it has killed this many processes: once may be the system's doing (no memory left).
TRIES = 2
# Holds a worker process's stub driver until the process ends.
_worker = ExitStack()


@dataclass(frozen=True)
class Compiled:
    """The outcome of compiling one config in a worker; `error` is None where it worked."""

    compile_ms: float
    error: str | None = None


class CompilePool:
    """Compiles each (config, dtype) once, in the order asked; results are taken as they come.

    A compiler may crash, and a broken `ProcessPoolExecutor` loses every task it holds and takes no more. So each
    worker is an executor of its own with one process: a crash costs the config that caused it, and a new process.
    """

    def __init__(self, family: Family, device: DeviceSpec, workers: int | None = None) -> None:
        gpu_target(device)  # raises here, not in every worker, where there is no compiler for the device
        self._family, self._device = family, device
        workers = workers or max(1, (os.cpu_count() or 2) - 1)
        self._threads = ThreadPoolExecutor(workers)
        self._idle: queue.SimpleQueue[ProcessPoolExecutor] = queue.SimpleQueue()
        for _ in range(workers):
            self._idle.put(self._worker())
        self._futures: dict[tuple[KernelConfig, str], Future[Compiled]] = {}

    def _worker(self) -> ProcessPoolExecutor:
        # Spawned, not forked: the parent holds a CUDA context and threads.
        return ProcessPoolExecutor(
            1, mp_context=get_context("spawn"), initializer=_start_worker, initargs=(self._device,)
        )

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(self, *exc: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def finished(self, configs: Sequence[KernelConfig], dtype: str) -> Iterator[tuple[KernelConfig, Compiled]]:
        """Every config with its outcome: the ones already compiled in the order given, others as they finish."""
        sharing: dict[Future[Compiled], list[KernelConfig]] = {}
        for config in configs:
            sharing.setdefault(self._future(self._family.binary_of(config), dtype), []).append(config)
        ready = [future for future in sharing if future.done()]
        for future in chain(ready, as_completed(sharing.keys() - set(ready))):
            for config in sharing[future]:
                yield config, future.result()

    def _future(self, binary: KernelConfig, dtype: str) -> Future[Compiled]:
        if (binary, dtype) not in self._futures:
            self._futures[binary, dtype] = self._threads.submit(self._compile, binary, dtype)
        return self._futures[binary, dtype]

    def _compile(self, binary: KernelConfig, dtype: str) -> Compiled:
        """Runs in a thread; there are as many threads as workers."""
        worker = self._idle.get()
        try:
            for _ in range(TRIES):
                with suppress(BrokenProcessPool):
                    return worker.submit(_compile, self._family, binary, dtype).result()
                worker = self._worker()
            return Compiled(0.0, "the compiler killed its process")
        finally:
            self._idle.put(worker)


def _start_worker(device: DeviceSpec) -> None:
    # Ctrl-C reaches every process of a terminal: the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A parent that was killed cannot say goodbye, and a worker would wait for it for ever.
    Thread(target=_end_with_parent, daemon=True).start()
    _worker.enter_context(stub_driver(device))


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _compile(family: Family, config: KernelConfig, dtype: str) -> Compiled:
    start = time.perf_counter()
    error = None
    try:
        family.compile(config, dtype)
    except Exception as failure:  # noqa: BLE001 - whatever the compiler raises is this config's outcome
        error = f"{type(failure).__name__}: {failure}"[:300]
    return Compiled((time.perf_counter() - start) * 1e3, error)
