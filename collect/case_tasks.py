"""`CaseTasks`: the tasks of one case on one device, their order, and the rows that their answers make.

Pass 1 scans the space. Passes 2 and 3 confirm the leading configs in several rounds. The rounds of both passes are
interleaved, and the configs of a round are shuffled, because the GPU's clock depends on what ran just before (on an
H200 at its power limit the same config took 0-20 % longer one second later, 2026-11). In this way every config gets the
same share of that effect. Half of each pass's rounds begin with a clean L2. Later, a config is chosen on pass 2, and
its time is reported from pass 3.

This module uses no processes or pipes: tasks are taken with `take`, and answers are passed to `answered`.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from ..datasets import Case, DeviceSpec, ForetuneError, KernelConfig, Measurable, Measurement, Status
from ..datasets.errors import abridged
from ..runtime.timing.timer import Timing
from .cases import CONFIRMING, SCAN, CaseState
from .compiling import Binary, Compiled, CompilePool, signature_of
from .runner import Trial
from .worker import Confirm, Prepare, Probe, Scan, Task

#: The fewest and the most rounds of each confirming pass, and the microseconds whose quotient by the best time is their
#: number in between: see `rounds_of`.
ROUNDS, MOST_ROUNDS, _SURE_US = 4, 16, 40.0
#: How often a task is tried in all if its process was killed, which may be the system's fault.
TRIES = 3
#: A config that ended its process on this many cases is not run on other cases with the same binary.
FATAL_CASES = 2
#: A case is given up after this many processes died at it.
DEATHS = 20


#: The trials that ended their process, one for each case, by config and binary.
Fatal: TypeAlias = dict[tuple[KernelConfig, Binary], list[Trial]]


class CaseTasks:
    """The tasks that remain for one case on one device: scanning its configs, then confirming the fastest ones.

    The measuring process works on the tasks in the order that they were taken in, and answers in the same order.

    Args:
        family: The family of the case.
        case: The case.
        device: The device to measure on.
        space: The configs to scan, in this order.
        state: The measurements of the case so far; new ones are added.
        pool: Compiles the configs.
        on_rows: Called with new measurements; with those of the confirming passes all at once.
        probe: The drift probe.
        fatal: The configs that ended their process on this device; new ones are added.
        confirm: Whether to confirm the leading configs after the scan.
        is_replay: Whether the results are recorded ones. They say which configs are invalid or do not compile, so that
            neither the family nor the compiler is asked.

    Attributes:
        refused: Why the case was given up; None if it was not.
        deaths: How many processes died at this case.
    """

    def __init__(
        self,
        family: Measurable,
        case: Case,
        device: DeviceSpec,
        space: Iterable[KernelConfig],
        state: CaseState,
        pool: CompilePool,
        on_rows: Callable[[Sequence[Measurement]], None],
        probe: Probe | None = None,
        fatal: Fatal | None = None,
        *,
        confirm: bool = True,
        is_replay: bool = False,
    ) -> None:
        self.family, self.case, self.device = family, case, device
        self.refused: str | None = None
        self.deaths = 0
        self._state, self._pool, self._on_rows = state, pool, on_rows
        self._probe, self._confirming, self._is_replay = probe, confirm, is_replay
        self._fatal: Fatal = {} if fatal is None else fatal
        self._waiting: dict[Binary, list[KernelConfig]] = {}  # until they are compiled
        self._ready: deque[Task] = deque()
        self._out: deque[Task] = deque()  # taken and not answered yet
        self._prepared = self._through = False
        self._tries: Counter[Task | None] = Counter()  # None stands for `Prepare`
        self._compile_ms: dict[KernelConfig, float] = {}
        self._leading: list[KernelConfig] | None = None  # None while the scan goes on
        # By whether the L2 was clean; empty before the confirming passes.
        self._samples: dict[tuple[int, KernelConfig], tuple[list[float], list[float]]] = {}
        self._request(self._valid(space))
        self._advance()

    @property
    def over(self) -> bool:
        """Whether the case is complete or given up."""
        return not (self._out or self._ready or self._waiting)

    @property
    def out(self) -> int:
        """The number of tasks that were taken and not answered yet."""
        return len(self._out)

    @property
    def at_hand(self) -> Task | None:
        """The task that the process works on: the oldest unanswered one; None if all tasks are answered."""
        return self._out[0] if self._out else None

    def take(self, most: int) -> list[Task]:
        """Remove and return the next tasks, at most `most`; none while all configs wait for the compiler.

        If the process does not have the problem's inputs yet, the first task is a `Prepare`.
        """
        tasks: list[Task] = []
        if self._ready and not self._prepared:
            self._prepared = True
            tasks.append(Prepare(self.case.problem, self._state.best_us, self._probe))
        while self._ready and len(tasks) < most:
            task = self._ready.popleft()
            if isinstance(task, Scan) and (trial := self._doomed(task.config)):
                self._settle(task, trial)
            else:
                tasks.append(task)
        self._out += tasks
        self._advance()
        return tasks

    @property
    def signature(self) -> Hashable:
        """A value that is equal for cases whose problems share their binaries: see `compiling.signature_of`."""
        return signature_of(self.family, self.case.problem, self.device)

    def _doomed(self, config: KernelConfig) -> Trial | None:
        """Return the failed trial of a config that must not be run, because it ended its process on other cases.

        Return None if the config may run.
        """
        ends = self._fatal.get((config, self._binary(config)), []) if self._fatal else []
        if len(ends) < FATAL_CASES:
            return None
        return replace(
            ends[-1], error=f"not run because it ended its process on {len(ends)} other problems: {ends[-1].error}"
        )

    def compiled(self, binary: Binary, compiled: Compiled) -> None:
        """Process the result of compiling a binary: configs of this case that waited for it can run, or have failed."""
        configs = self._waiting.pop(binary, ())
        for config in configs:
            self._found(config, compiled)
        if configs:
            self._advance()

    def answered(self, trial: Trial) -> None:
        """Record `trial`, the result of the oldest unanswered task, and queue the tasks that it makes possible."""
        task = self._out.popleft()
        if isinstance(task, Prepare):
            if trial.status is not None:
                self._refuse(trial)
        elif self.refused is None:
            self._settle(task, trial)
        self._advance()

    def died(self, trial: Trial, *, forgivable: bool) -> None:
        """Record that the process died at the oldest unanswered task, and queue the other unanswered tasks again.

        Args:
            trial: The result that the config of that task gets. The config is then not run again on this case.
            forgivable: Whether the system may have killed the process. The task is then tried again, at most `TRIES`
                times in all.
        """
        self._prepared = False
        if not self._out:
            return
        task = self._out[0]
        if isinstance(task, Prepare):
            self._probe = None  # the probe may be the cause
        self._ready.extendleft(task for task in reversed(self._out) if not isinstance(task, Prepare))
        self._out.clear()
        self.deaths += 1
        tried = None if isinstance(task, Prepare) else task
        self._tries[tried] += 1
        if self._tries[tried] == TRIES or not (forgivable or tried is None):
            if tried is None:
                self._refuse(trial)
            else:
                self._ready.popleft()
                self._fatal.setdefault((tried.config, self._binary(tried.config)), []).append(trial)
                self._settle(tried, trial)
        if self.deaths == DEATHS:
            self._refuse(trial)
        if self._leading is not None and self.refused is None:
            self._begin_confirming()  # again from the start: an interruption would not affect all configs alike
        self._advance()

    def _valid(self, space: Iterable[KernelConfig]) -> list[KernelConfig]:
        """Return the configs of `space` that can run the problem and are not scanned yet; record invalid ones."""
        valid, rows = [], []
        for config in space:
            if config in self._state.scanned_us:
                continue
            if self._is_replay:
                valid.append(config)
                continue
            try:
                reason = self.family.supports(config, self.case.problem, self.device)
            except ForetuneError as error:  # the family has a bug; the row says so
                reason = abridged(str(error))
            if reason is None:
                valid.append(config)
            else:
                rows.append(self._row(config, SCAN, Trial(Status.INVALID, error=reason)))
        self._record(rows)
        return valid

    def _binary(self, config: KernelConfig) -> Binary:
        return Binary.of(self.family, config, self.case.problem, self.device)

    def _request(self, configs: Iterable[KernelConfig]) -> None:
        for rank, config in enumerate(configs):
            if self._is_replay:
                self._found(config, Compiled(0.0))
                continue
            try:
                binary = self._binary(config)
            except ForetuneError as error:  # as above
                self._found(config, Compiled(0.0, abridged(str(error))))
                continue
            compiled = self._pool.request(binary, rank)
            if compiled is None:
                self._waiting.setdefault(binary, []).append(config)
            else:
                self._found(config, compiled)

    def _found(self, config: KernelConfig, compiled: Compiled) -> None:
        """Process the result of compiling a config: queue it for the scan or for confirming, or record the failure."""
        trial = Trial(Status.COMPILE_FAILED, error=compiled.error)
        if self._leading is not None:
            if compiled.error is None:
                self._leading.append(config)
            else:  # although an earlier run could compile it
                self._record(self._row(config, timing_pass, trial) for timing_pass in CONFIRMING)
            return
        self._compile_ms[config] = compiled.compile_ms
        if compiled.error is None:
            self._ready.append(Scan(config))
        else:
            self._settle(Scan(config), trial)

    def _settle(self, task: Scan | Confirm, trial: Trial) -> None:
        """Record a task's result: as measurements, or, if it is times of one confirming round, as samples for later."""
        config = task.config
        if isinstance(task, Scan):
            self._record([self._row(config, SCAN, trial, self._compile_ms.pop(config, None))])
        elif trial.status is None:
            self._samples[task.timing_pass, config][task.is_clean].extend(trial.times_us)
        elif config not in self._state.unconfirmable:
            self._record([self._row(config, timing_pass, trial) for timing_pass in CONFIRMING])

    def _advance(self) -> None:
        """Queue the confirming passes once the scan is complete; record their rows once these passes are complete."""
        if not self.over or self._through or self.refused is not None:
            return
        if not self._confirming:
            self._through = True
            return
        if self._leading is None:
            self._leading = []
            self._request(self._state.unconfirmed())
        if not self._waiting and not self._samples:
            self._begin_confirming()
        if self.over:
            self._confirm()
            self._through = True

    def _begin_confirming(self) -> None:
        """Replace the queued tasks by those of the confirming passes, which time the leading configs again."""
        leading = [config for config in self._leading or () if config not in self._state.unconfirmable]
        self._samples = {(timing_pass, config): ([], []) for timing_pass in CONFIRMING for config in leading}
        self._ready.clear()
        shuffle = np.random.default_rng(0)
        for number in range(rounds_of(self._state.best_us) * len(CONFIRMING)):
            turn, place = divmod(number, len(CONFIRMING))
            timing_pass, is_clean = CONFIRMING[place], turn % 2 == 1
            self._ready += (Confirm(leading[i], timing_pass, is_clean) for i in shuffle.permutation(len(leading)))

    def _confirm(self) -> None:
        """Record one row for each leading config and confirming pass, computed from the samples of all rounds."""
        self._record(
            [
                self._row(config, timing_pass, Trial(Status.OK, **vars(timing_of_both(*times_us))))
                for (timing_pass, config), times_us in self._samples.items()
                if config not in self._state.unconfirmable
            ]
        )

    def _refuse(self, trial: Trial) -> None:
        """Give the case up, for the reason in a failed trial."""
        assert trial.status is not None
        self.refused = trial.error or trial.status.value
        self._ready.clear()
        self._waiting.clear()

    def _row(
        self, config: KernelConfig, timing_pass: int, trial: Trial, compile_ms: float | None = None
    ) -> Measurement:
        return Measurement(
            problem=self.case.problem,
            device=self.device.name,
            config=config,
            timing_pass=timing_pass,
            compile_ms=compile_ms or None,
            **trial.measured(),
        )

    def _record(self, rows: Iterable[Measurement]) -> None:
        rows = list(rows)
        for row in rows:
            self._state.add(row.config, row.timing_pass, row.time_us)
        if rows:
            self._on_rows(rows)


def timing_of_both(dirty_us: Sequence[float], clean_us: Sequence[float]) -> Timing:
    """Return the timing of a config from its samples, in microseconds, in both states of the L2.

    The time is the mean of both medians: the median of all samples would be an outlier of one of the states.

    >>> timing_of_both([14.0, 13.0, 19.0], [10.0, 10.0, 11.0])
    Timing(time_us=12.0, spread=0.2916666666666667, samples=6)
    """
    time_us = statistics.fmean(map(statistics.median, (dirty_us, clean_us)))
    return replace(Timing.of([*dirty_us, *clean_us]), time_us=time_us)


def rounds_of(best_us: float) -> int:
    """Return how many rounds of timings each confirming pass over a case's leading configs has, an even number.

    Half of them begin with dirty lines in the L2, and half without, because some configs are slow in one of these
    states only ("Two speeds of one kernel" in kernels/NOTES.md). There are more of them below 10 us: samples of one
    round share a part of their error, which is a few tenths of a microsecond, however long the kernel takes
    (datasets/h200_rms_norm_rope/CARD.md has the effect).

    Args:
        best_us: The time of the case's best config in microseconds.

    >>> [rounds_of(us) for us in (2.0, 5.0, 10.0, 1000.0)]
    [16, 8, 4, 4]
    """
    return min(max(2 * math.ceil(_SURE_US / best_us / 2), ROUNDS), MOST_ROUNDS)
