"""Compiles configs in a pool of processes while the GPU measures.

The workers never touch the GPU: a stub driver gives Triton the target, and the binaries land in Triton's disk
cache under the key that the real driver looks up.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import get_context

from ..datasets import DeviceSpec, Family, KernelConfig

# Holds a worker process's stub driver until the process ends.
_worker = ExitStack()


@dataclass(frozen=True)
class Compiled:
    """The outcome of compiling one config in a worker; `error` is None where it worked."""

    compile_ms: float
    error: str | None = None


class CompilePool:
    """Compiles each (config, dtype) once, in the order asked; results are taken as they come.

    A worker that dies (a compiler crash) takes down the executor: the configs then unfinished are compiled
    one at a time in fresh workers, and only the one that kills its own worker fails.
    """

    def __init__(self, family: Family, device: DeviceSpec, workers: int | None = None) -> None:
        self._family, self._device = family, device
        self._workers = workers or max(1, (os.cpu_count() or 2) - 1)
        self._pool = self._start(self._workers)
        self._futures: dict[tuple[KernelConfig, str], Future[Compiled]] = {}

    def _start(self, workers: int) -> ProcessPoolExecutor:
        # Spawned, not forked: the parent holds a CUDA context and threads.
        return ProcessPoolExecutor(
            workers, mp_context=get_context("spawn"), initializer=_start_worker, initargs=(self._device,)
        )

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(self, *exc: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def finished(self, configs: Sequence[KernelConfig], dtype: str) -> Iterator[tuple[KernelConfig, Compiled]]:
        """Every config with its outcome: the ones already compiled in the order given, others as they finish."""
        for config in configs:
            binary = self._family.binary_of(config)
            if (binary, dtype) not in self._futures:
                self._futures[binary, dtype] = self._pool.submit(_compile, self._family, binary, dtype)
        waiting = list(configs)
        while waiting:
            done = [c for c in waiting if self._future(c, dtype).done()]
            if not done:
                wait([self._future(c, dtype) for c in waiting], return_when=FIRST_COMPLETED)
                continue
            for config in done:
                yield config, self._outcome(config, dtype)
            waiting = [c for c in waiting if c not in set(done)]

    def _future(self, config: KernelConfig, dtype: str) -> Future[Compiled]:
        return self._futures[self._family.binary_of(config), dtype]

    def _outcome(self, config: KernelConfig, dtype: str) -> Compiled:
        try:
            return self._future(config, dtype).result()
        except BrokenProcessPool:
            outcome = self._compile_alone(self._family.binary_of(config), dtype)
            settled: Future[Compiled] = Future()
            settled.set_result(outcome)
            self._futures[self._family.binary_of(config), dtype] = settled
            return outcome

    def _compile_alone(self, config: KernelConfig, dtype: str) -> Compiled:
        with self._start(1) as alone:
            try:
                return alone.submit(_compile, self._family, config, dtype).result()
            except BrokenProcessPool:
                return Compiled(0.0, "the compiler killed its process")


def _start_worker(device: DeviceSpec) -> None:
    from ..runtime.stub import stub_driver

    _worker.enter_context(stub_driver(device))


def _compile(family: Family, config: KernelConfig, dtype: str) -> Compiled:
    start = time.perf_counter()
    error = None
    try:
        family.compile(config, dtype)
    except Exception as failure:  # noqa: BLE001 - whatever the compiler raises is this config's outcome
        error = f"{type(failure).__name__}: {failure}"[:300]
    return Compiled((time.perf_counter() - start) * 1e3, error)
