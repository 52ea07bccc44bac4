"""A campaign without a GPU: a runner that replays a fake family's times, and a pool that has compiled already.

The measuring "process" is a thread of this one, so that a test sees what its runner was asked for; `ReplayGpu` in a
`foretune.collect.processes.Child` makes it a real process, which can be killed.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fakes import DEVICE, FakeFamily, fake_cases
from foretune.collect import campaign, processes, worker
from foretune.collect.case_tasks import rounds_of
from foretune.collect.cases import LEADING_LEAST, LEADING_MOST, LEADING_SLOWDOWN
from foretune.collect.compiling import Compiled, CompilePool
from foretune.collect.processes import Watch
from foretune.collect.run_state import RunState
from foretune.datasets import KernelConfig, load
from replay_runner import ReplayRunner

FAMILY = FakeFamily()
FAMILIES = {FakeFamily.name: FAMILY}
SPACE = FAMILY.space()
#: A few cases, and what can run on them.
CASES = fake_cases(models=2, tokens=(64, 512), randoms=1)[:4]
CASE = CASES[0]
VALID = [config for config in SPACE if FAMILY.supports(config, CASE.problem, DEVICE) is None]


class EndOfProcess(BaseException):
    """Ends the thread that plays a process, with this exit code."""


def meeting(barrier, then=lambda problem: None):
    """For `prepare`: waits at the first problem until other runners have one, too."""
    first = [barrier]

    def prepare(problem):
        if first:
            first.pop().wait()
        then(problem)

    return prepare


class ReplayPool(CompilePool):
    """Every config is compiled, but for those in `errors`."""

    is_hungry = True

    def __init__(self, errors: Mapping[KernelConfig, str] = {}) -> None:
        super().__init__({}, None, 0)
        self.errors = errors
        self.asked: list[KernelConfig] = []  # for a case that is being measured
        self.known = {}

    def know(self, binary, compiled):
        self.known[binary] = compiled

    def request(self, binary, rank):
        if binary in self.known:
            return self.known[binary]
        if rank < campaign.AHEAD:
            self.asked.append(binary.config)
        return Compiled(2.0, self.errors.get(binary.config))


@dataclass
class ReplayGpu:
    """Opens as the runner it was given, or one of its own."""

    runner: ReplayRunner | None = None
    device: object = DEVICE

    def open(self):
        return self.device, self.runner or ReplayRunner()


class ThreadChild(processes.ThreadChild):
    """A thread that runs `serve`, and may end as a process does."""

    def _served(self, serve, *arguments):
        try:
            return super()._served(serve, *arguments)
        except EndOfProcess as end:
            return end.args[0]


def print_nothing(progress):
    pass


def run(cases, out: Path, *runners, phases=None, families=FAMILIES, pool=None, on_progress=print_nothing, **options):
    """One campaign over `cases`, from its start to its `Summary`, on a GPU for each runner, or on those of `phases`."""
    phases = phases or [[ReplayGpu(runner) for runner in runners or (ReplayRunner(),)]]
    with Watch() as watch:
        starts = [[partial(ThreadChild, worker.serve, gpu, families) for gpu in gpus] for gpus in phases]
        state = RunState(families, cases, out, on_progress=on_progress, **options)
        return campaign.Campaign(state, starts, pool or ReplayPool(), watch).measure()


def rows_of(out):
    """(problem, config) -> {timing_pass: row}; fails where a row comes twice."""
    dataset = load(out)
    found = {}
    for row in dataset.measurements.itertuples():
        passes = found.setdefault((dataset.cases[row.problem].problem, dataset.configs[row.config]), {})
        assert row.timing_pass not in passes, f"measured twice: {row}"
        passes[row.timing_pass] = row
    return found


def outcomes_of(out):
    """All that a dataset says of each (problem, config, pass), but for how and when it was measured."""
    return {
        (problem, config, timing_pass): (row.status, str(row.time_us), row.samples, row.error)
        for (problem, config), passes in rows_of(out).items()
        for timing_pass, row in passes.items()
    }


def check_complete(out, cases=CASES):
    """All rows are there, once each, and the leading configs have their three passes."""
    found = rows_of(out)
    assert set(found) == {(case.problem, config) for case in cases for config in SPACE}
    for case in cases:
        passes = {config: found[case.problem, config] for config in SPACE}
        times = sorted(row[1].time_us for row in passes.values() if row[1].time_us == row[1].time_us)
        near = sum(time_us <= LEADING_SLOWDOWN * times[0] for time_us in times)
        confirmed = [config for config in SPACE if len(passes[config]) == 3]
        assert len(confirmed) == min(max(near, LEADING_LEAST), LEADING_MOST)
        assert all(set(passes[config]) in ({1}, {1, 2, 3}) for config in SPACE)
        assert {passes[config][1].time_us for config in confirmed} <= set(times[: len(confirmed)])
    return found


def best_of(case):
    return min(VALID, key=lambda config: FAMILY.time_us(case.problem, config, timing_pass=1) or 1e9)


def confirming_rounds(problem):
    """Of each of the two passes."""
    times = (FAMILY.time_us(problem, config, timing_pass=1) for config in VALID)
    return rounds_of(min(us for us in times if us))


def interrupting(configs):
    """Faults that press Ctrl-C, which reaches the parent alone, at any of these configs; they are never over."""

    class Faults(dict):
        def __getitem__(self, config):
            os.kill(os.getpid(), signal.SIGINT)
            threading.Event().wait()

    return Faults.fromkeys(configs)


def ticking():
    """A clock that moves a second each time it is asked."""
    ticks = itertools.count()
    return lambda: float(next(ticks))
