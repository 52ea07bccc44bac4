"""A replay of a fake family's times, with faults; without pandas, because processes that play a GPU import it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from foretune.collect import runner
from foretune.collect.runner import EARLY_STOP_SLOWDOWN, LaunchFailedError, Trial
from foretune.datasets import KernelConfig, Status

#: A fault is raised in place of the outcome.
Faults = Mapping[KernelConfig, BaseException]


class FakeTimes:
    """Serves `FakeFamily.time_us`: no two samples of a config are alike, and every campaign gets the same ones."""

    def prepare(self, family, problem):
        self.family, self.problem = family, problem

    def scan(self, config, best_us):
        time_us = self.family.time_us(self.problem, config, timing_pass=1)
        if time_us is None:
            return Trial(Status.LAUNCH_FAILED, error="invalid argument")
        if time_us > EARLY_STOP_SLOWDOWN * best_us:
            return Trial(Status.EARLY_STOPPED, time_us, 0.0, 1)
        return Trial(Status.OK, time_us, 0.01, 7, registers=64)

    def confirm(self, config, number):
        us = self.family.time_us(self.problem, config, timing_pass=1001 + number)
        if us is None:
            raise LaunchFailedError("invalid argument")
        return [us, us]


class ReplayRunner(runner.ReplayRunner):
    """Replays `FakeTimes`, but for faults; `calls` has what was asked of it, in order."""

    def __init__(
        self,
        scan_faults: Faults = {},  # noqa: B006 - only read
        confirm_faults: Faults = {},  # noqa: B006
        *,
        outcomes: Mapping[KernelConfig, Trial] = {},
        prepare: Callable[[object], None] = lambda problem: None,
        seconds: float = 0.0,
    ) -> None:
        super().__init__(FakeTimes())
        self.scan_faults, self.confirm_faults, self.outcomes = scan_faults, confirm_faults, outcomes
        self.on_prepare, self.seconds = prepare, seconds
        self.calls: list[tuple[str, object]] = []
        self.clean: list[bool] = []  # the state of the L2 in each call of confirm

    def asked(self, what: str) -> list[object]:
        return [value for name, value in self.calls if name == what]

    def prepare(self, family, problem):
        self.calls.append(("prepare", problem))
        self.on_prepare(problem)
        super().prepare(family, problem)

    def scan(self, config, best_us):
        self.calls.append(("scan", config))
        time.sleep(self.seconds)
        if config in self.scan_faults:
            raise self.scan_faults[config]
        if config in self.outcomes:
            return self.outcomes[config]
        return super().scan(config, best_us)

    def probe(self, family, problem, config):
        return family.time_us(problem, config, timing_pass=1) or 100.0

    def confirm(self, config, best_us, is_clean=False):
        self.calls.append(("confirm", config))
        self.clean.append(is_clean)
        time.sleep(self.seconds / 10)
        if config in self.confirm_faults:
            raise self.confirm_faults[config]
        return super().confirm(config, best_us, is_clean)
