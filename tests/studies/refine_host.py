"""Print the host time that mode `refine` adds to a call: `python tests/studies/refine_host.py` (seconds; no GPU).

Calls do nothing, and their times are made up, so that only the bookkeeping counts: without the two CUDA events of a
call, which `refine_on_gpu.py` includes. The least and the median of several problems, until each is decided, and then.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
from foretune.datasets import KernelConfig, Problem
from foretune.runtime.tuning.refine.refinement import Refinement

PROBLEMS, DECIDED = 20, 10_000


class MadeUp:
    """A stopwatch whose calls have completed at once."""

    def __init__(self, seed: int) -> None:
        self._times = iter(np.random.default_rng(seed).normal(100.0, 2.0, 10_000).tolist())
        self._ended: list[tuple[Any, float]] = []

    def begin(self) -> Any:
        return self

    def end(self, mark: Any, about: Any) -> None:
        self._ended.append((about, next(self._times)))

    def cancel(self, mark: Any) -> None:
        pass

    def read(self) -> Iterator[tuple[Any, float]]:
        ended, self._ended = self._ended, []
        return iter(ended)


def main() -> None:
    compiled: Future[None] = Future()
    compiled.set_result(None)
    configs = [KernelConfig.of(BLOCK=16 * (1 + place)) for place in range(16)]
    spent: dict[str, list[float]] = {"undecided": [], "decided": [], "a bare call": []}
    count = 0

    def launch(config: KernelConfig) -> None:
        pass

    def compile_one(config: KernelConfig) -> list[Future[None]]:
        return [compiled]

    for seed in range(PROBLEMS):
        slowdowns = [1 + 0.002 * place for place in range(16)]
        problem = Problem.of("made_up", rows=64)
        refinement = Refinement("made_up", problem, configs, slowdowns, watch=MadeUp(seed), limit={"max_cost": 0.01})
        began, calls = time.perf_counter(), 0
        while refinement.final is None:
            refinement.run(launch, compile_one)
            calls += 1
        spent["undecided"].append((time.perf_counter() - began) / calls * 1e6)
        count += calls
        began = time.perf_counter()
        for _ in range(DECIDED):
            refinement.run(launch, compile_one)
        spent["decided"].append((time.perf_counter() - began) / DECIDED * 1e6)
        began = time.perf_counter()
        for _ in range(DECIDED):
            launch(configs[0])
        spent["a bare call"].append((time.perf_counter() - began) / DECIDED * 1e6)
    for state, times in spent.items():
        sys.stdout.write(f"{state:12} least {min(times):6.2f} us, median {statistics.median(times):6.2f} us\n")
    sys.stdout.write(f"{count / PROBLEMS:.0f} calls until a problem is decided\n")


if __name__ == "__main__":
    main()
