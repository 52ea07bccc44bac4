"""A campaign without a GPU: a runner that replays a fake family's times, and a pool that has compiled already."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from fakes import DEVICE, FakeFamily
from foretune.collect import campaign
from foretune.collect.compiling import Compiled
from foretune.collect.measuring import HOPELESS_SLOWDOWN, LaunchFailedError, Outcome
from foretune.datasets import KernelConfig, Status

#: A fault is raised in place of the outcome.
Faults = Mapping[KernelConfig, BaseException]


class ReplayRunner:
    """Serves `FakeFamily.time_us`; `calls` has what was asked of it, in order."""

    def __init__(
        self,
        scan_faults: Faults = {},  # noqa: B006 - only read
        turn_faults: Faults = {},  # noqa: B006
        *,
        outcomes: Mapping[KernelConfig, Outcome] = {},
        prepare: Callable[[object], None] = lambda problem: None,
        seconds: float = 0.0,
    ) -> None:
        self.scan_faults, self.turn_faults, self.outcomes = scan_faults, turn_faults, outcomes
        self.on_prepare, self.seconds = prepare, seconds
        self.calls: list[tuple[str, object]] = []
        self.samples = itertools.count(1000)  # no two samples are alike

    def asked(self, what: str) -> list[object]:
        return [value for name, value in self.calls if name == what]

    def prepare(self, problem):
        self.calls.append(("prepare", problem))
        self.on_prepare(problem)
        self.problem = problem

    def scan(self, config, best_us):
        self.calls.append(("scan", config))
        time.sleep(self.seconds)
        if config in self.scan_faults:
            raise self.scan_faults[config]
        if config in self.outcomes:
            return self.outcomes[config]
        time_us = FakeFamily().time_us(self.problem, config, timing_pass=1)
        if time_us is None:
            return Outcome(Status.LAUNCH_FAILED, error="invalid argument")
        if time_us > HOPELESS_SLOWDOWN * best_us:
            return Outcome(Status.HOPELESS, time_us, 0.0, 1)
        return Outcome(Status.OK, time_us, 0.01, 7, registers=64)

    def turn(self, config, best_us):
        self.calls.append(("turn", config))
        time.sleep(self.seconds / 10)
        if config in self.turn_faults:
            raise self.turn_faults[config]
        us = FakeFamily().time_us(self.problem, config, timing_pass=next(self.samples))
        if us is None:
            raise LaunchFailedError("invalid argument")
        return [us, us]


class ReplayPool:
    """Every config is compiled, but for those in `errors`."""

    def __init__(self, errors: Mapping[KernelConfig, str] = {}) -> None:
        self.errors = errors
        self.asked: list[KernelConfig] = []

    def finished(self, configs, dtype):
        self.asked += configs
        for config in configs:
            yield config, Compiled(2.0, self.errors.get(config))


def run(cases, out: Path, runner=None, pool=None, *, on_progress=lambda progress: None, **options):
    """One campaign over `cases`, from its start to its `Summary`."""
    return campaign.Campaign(
        FakeFamily(), DEVICE, runner or ReplayRunner(), pool or ReplayPool(), out, **options
    ).measure(cases, on_progress)
