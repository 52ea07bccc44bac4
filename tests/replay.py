"""A campaign without a GPU: a runner that replays a fake family's times, and a pool that has compiled already.

The measuring "process" is a thread of this one, so that a test sees what its runner was asked for; `ReplayGpu` in a
`foretune.collect.processes.Child` makes it a real process, which can be killed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from threading import Thread

from fakes import DEVICE, FakeFamily
from foretune.collect import campaign, worker
from foretune.collect.compiling import Compiled
from foretune.collect.processes import Watch
from foretune.collect.run_state import RunState
from foretune.collect.runner import HOPELESS_SLOWDOWN, LaunchFailedError, Outcome
from foretune.datasets import KernelConfig, Status, load

FAMILIES = {FakeFamily.name: FakeFamily()}
#: A fault is raised in place of the outcome.
Faults = Mapping[KernelConfig, BaseException]


class EndOfProcess(BaseException):
    """Ends the thread that plays a process, with this exit code."""


class ReplayRunner:
    """Serves `FakeFamily.time_us`; `calls` has what was asked of it, in order."""

    def __init__(
        self,
        scan_faults: Faults = {},  # noqa: B006 - only read
        confirm_faults: Faults = {},  # noqa: B006
        *,
        outcomes: Mapping[KernelConfig, Outcome] = {},
        prepare: Callable[[object], None] = lambda problem: None,
        seconds: float = 0.0,
    ) -> None:
        self.scan_faults, self.confirm_faults, self.outcomes = scan_faults, confirm_faults, outcomes
        self.on_prepare, self.seconds = prepare, seconds
        self.calls: list[tuple[str, object]] = []

    def asked(self, what: str) -> list[object]:
        return [value for name, value in self.calls if name == what]

    def prepare(self, family, problem):
        self.calls.append(("prepare", problem))
        self.on_prepare(problem)
        self.family, self.problem = family, problem
        self.rounds = Counter()  # no two samples of a config are alike, and every campaign gets the same ones

    def scan(self, config, best_us):
        self.calls.append(("scan", config))
        time.sleep(self.seconds)
        if config in self.scan_faults:
            raise self.scan_faults[config]
        if config in self.outcomes:
            return self.outcomes[config]
        time_us = self.family.time_us(self.problem, config, timing_pass=1)
        if time_us is None:
            return Outcome(Status.LAUNCH_FAILED, error="invalid argument")
        if time_us > HOPELESS_SLOWDOWN * best_us:
            return Outcome(Status.HOPELESS, time_us, 0.0, 1)
        return Outcome(Status.OK, time_us, 0.01, 7, registers=64)

    def probe(self, family, problem, config):
        return family.time_us(problem, config, timing_pass=1) or 100.0

    def confirm(self, config, best_us):
        self.calls.append(("confirm", config))
        time.sleep(self.seconds / 10)
        if config in self.confirm_faults:
            raise self.confirm_faults[config]
        self.rounds[config] += 1
        us = self.family.time_us(self.problem, config, timing_pass=1000 + self.rounds[config])
        if us is None:
            raise LaunchFailedError("invalid argument")
        return [us, us]


def meeting(barrier, then=lambda problem: None):
    """For `prepare`: waits at the first problem until other runners have one, too."""
    first = [barrier]

    def prepare(problem):
        if first:
            first.pop().wait()
        then(problem)

    return prepare


class ReplayPool:
    """Every config is compiled, but for those in `errors`."""

    compile_s = 0.0
    is_hungry = True

    def __init__(self, errors: Mapping[KernelConfig, str] = {}) -> None:
        self.errors = errors
        self.asked: list[KernelConfig] = []  # for a case that is being measured
        self.known = {}

    def start(self):
        pass

    def know(self, binary, compiled):
        self.known[binary] = compiled

    def request(self, binary, rank):
        if binary in self.known:
            return self.known[binary]
        if rank < campaign.AHEAD:
            self.asked.append(binary.config)
        return Compiled(2.0, self.errors.get(binary.config))

    def check(self):
        pass


@dataclass
class ReplayGpu:
    """Opens as the runner it was given, or one of its own."""

    runner: ReplayRunner | None = None
    device: object = DEVICE

    def open(self):
        return self.device, self.runner or ReplayRunner()


class ThreadChild:
    """Stands in for `foretune.collect.processes.Child`: a thread that runs `serve`."""

    def __init__(self, serve, *arguments):
        self.connection, self._theirs = Pipe()
        self.exitcode = None
        Thread(target=self._run, args=(serve, *arguments), daemon=True).start()

    def _run(self, serve, *arguments):
        exitcode = 1
        try:
            serve(self._theirs, *arguments)
            exitcode = 0
        except (EOFError, OSError):  # killed
            exitcode = -9
        except EndOfProcess as end:
            exitcode = end.args[0]
        finally:
            self.exitcode = exitcode
            self._theirs.close()

    def send(self, message):
        self.connection.send(message)

    def kill(self):
        self.connection.close()  # a thread cannot be killed: it ends when it next listens


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
