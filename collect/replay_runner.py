"""`ReplayRunner`: a runner that answers with recorded times, so that collecting needs no GPU.

Importing this imports neither pandas nor torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ..datasets import DeviceSpec, KernelConfig, Measurable, Problem
from .compiling import Binary, Compiled
from .runner import LaunchFailedError, Trial


class Times(Protocol):
    """The interface of the source of a `ReplayRunner`'s times; `recording.RecordedTimes` reads them from a dataset."""

    def prepare(self, family: Measurable, problem: Problem) -> None:
        """Select the problem that the following calls are about.

        Raises:
            ForetuneError: No times of it are known.
        """

    def scan(self, config: KernelConfig, best_us: float) -> Trial:
        """Return the result of a config on the prepared problem in the scan: see `Runner.scan`."""

    def confirm(self, config: KernelConfig, number: int) -> list[float]:
        """Return the times of a config, in microseconds, in the round of that number, counted from 0.

        The rounds of the two confirming passes alternate. Raises `LaunchFailedError` if the config failed in that pass.
        """


class ReplayRunner:
    """A `Runner` without a GPU, which looks up the times of configs on the prepared problem.

    >>> from foretune.collect.recording import Recording
    >>> from foretune.datasets import load
    >>> from foretune.kernels import find_family
    >>> family, dataset = find_family("rms_norm_rope_bwd"), load("h200_rms_norm_rope")
    >>> recording = Recording(dataset, [family])
    >>> runner = ReplayRunner(recording.on(recording.devices[0]))
    >>> problem = recording.cases[0].problem
    >>> runner.prepare(family, problem)
    >>> trial = runner.scan(family.default(problem, recording.devices[0]), float("inf"))
    >>> trial.status.value, trial.time_us > 0
    ('ok', True)
    """

    def __init__(self, times: Times) -> None:
        self.times = times
        self._rounds: Counter[KernelConfig] = Counter()  # of the prepared problem's confirming passes

    def prepare(self, family: Measurable, problem: Problem) -> None:
        """Select the problem that the following calls are about.

        Raises:
            ForetuneError: No times of it are known.
        """
        self.times.prepare(family, problem)
        self._rounds.clear()

    def scan(self, config: KernelConfig, best_us: float) -> Trial:
        """Return the recorded result of a config's first run, even if it is much slower than `best_us` microseconds."""
        return self.times.scan(config, best_us)

    def confirm(self, config: KernelConfig, best_us: float) -> list[float]:
        """Return the recorded times of one more round, in microseconds, whatever `best_us` is.

        Raises:
            LaunchFailedError: The config failed in that pass.
        """
        self._rounds[config] += 1
        return self.times.confirm(config, self._rounds[config] - 1)

    def probe(self, family: Measurable, problem: Problem, config: KernelConfig) -> float:
        """Refuse to read the drift probe: a replay says nothing about the state of a GPU.

        Raises:
            LaunchFailedError: Always, so that no reading is stored.
        """
        raise LaunchFailedError("a replay has no drift probe")


@dataclass(frozen=True)
class ReplayGpu:
    """A device whose recorded times are replayed, in place of a real `worker.Gpu`."""

    device: DeviceSpec
    times: Times

    def open(self) -> tuple[DeviceSpec, ReplayRunner]:
        """Return the device, and a runner that replays its times."""
        return self.device, ReplayRunner(self.times)


class NoCompilePool:
    """Stands in for a `CompilePool` where nothing has to be compiled: it answers every request at once."""

    compile_s = 0.0
    is_hungry = False

    def __init__(self) -> None:
        self.on_finished: Callable[[Binary, Compiled], None] = lambda binary, compiled: None

    def start(self) -> None:
        """Start nothing."""

    def check(self) -> None:
        """Check nothing."""

    def know(self, binary: Binary, compiled: Compiled) -> None:
        """Ignore the result of an earlier compilation, because the recorded results include it."""

    def request(self, binary: Binary, rank: float) -> Compiled | None:
        """Return a compilation without error at once; those that failed are among the recorded results."""
        return Compiled(0.0)
