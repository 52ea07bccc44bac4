"""One case on one device: which tasks there are to do, in which order, and which rows their answers make.

Pass 1 scans the whole space. Passes 2 and 3 confirm the leading configs, several rounds each, the two passes and
all configs interleaved and shuffled: a heavy kernel's clock depends on what ran just before it (on an H200 at its
power limit the same config read 0-20 % slower one second later, 2026-11), and interleaving gives every config
the same share of it. A config is then chosen on pass 2 and its time reported from pass 3.

Nothing here knows of processes or pipes: tasks go out through `take`, answers come in through `answered`.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol, TypeAlias

import numpy as np

from ..datasets import Case, DeviceSpec, ForetuneError, KernelConfig, Measurable, Measurement, Status
from ..datasets.errors import abridged
from ..runtime.timing.timer import Timing
from .case_state import CONFIRMING, SCAN, CaseState
from .compiling import Binary, Compiled, signature_of
from .runner import Trial
from .worker import Confirm, Prepare, Probe, Scan, Task

#: Rounds of each confirming pass, at least and at most, and what they are the quotient of: see `rounds_of`.
ROUNDS, MOST_ROUNDS, _SURE_US = 4, 16, 40.0
#: A process that was killed may have been the system's victim: its task is tried so often in all.
TRIES = 3
#: A config that ended its process on this many cases is not run on others that give it the same binary.
FATAL_CASES = 2
#: A case at which this many processes have died is given up.
DEATHS = 20


#: How configs ended their process, each with one of its binaries, a case each.
Fatal: TypeAlias = dict[tuple[KernelConfig, Binary], list[Trial]]


class Pool(Protocol):
    """Compiles: see `CompilePool`."""

    def request(self, binary: Binary, rank: float) -> Compiled | None: ...


class CaseTasks:
    """The work that is left of a case. `space` are the configs in the order to scan them; with `confirm` the leading
    ones are confirmed thereafter.

    `on_rows` takes rows as they come about, those of the confirming passes all at once. `fatal` is what is known,
    and kept up to date, of the configs that end their process on the device.
    """

    def __init__(
        self,
        family: Measurable,
        case: Case,
        device: DeviceSpec,
        space: Iterable[KernelConfig],
        state: CaseState,
        pool: Pool,
        on_rows: Callable[[Sequence[Measurement]], None],
        probe: Probe | None = None,
        fatal: Fatal | None = None,
        *,
        confirm: bool = True,
    ) -> None:
        self.family, self.case, self.device = family, case, device
        self.refused: str | None = None  # why the case is given up
        self.deaths = 0  # of processes, at this case
        self._state, self._pool, self._on_rows = state, pool, on_rows
        self._probe, self._confirming = probe, confirm
        self._fatal: Fatal = {} if fatal is None else fatal
        self._waiting: dict[Binary, list[KernelConfig]] = {}  # for the compiler
        self._ready: deque[Task] = deque()
        self._out: deque[Task] = deque()  # sent, and not answered yet
        self._prepared = self._through = False
        self._tries: Counter[Task | None] = Counter()  # None: to prepare
        self._compile_ms: dict[KernelConfig, float] = {}
        self._leading: list[KernelConfig] | None = None  # None while the scan goes on
        self._samples: dict[tuple[int, KernelConfig], list[float]] = {}
        self._request(self._valid(space))
        self._advance()

    @property
    def over(self) -> bool:
        """Whether all is known now, or the case was given up."""
        return not (self._out or self._ready or self._waiting)

    @property
    def out(self) -> int:
        """How many tasks are out."""
        return len(self._out)

    @property
    def at_hand(self) -> Task | None:
        """The task that the process is at."""
        return self._out[0] if self._out else None

    def take(self, most: int) -> list[Task]:
        """The next tasks, at most so many; none while the compiler is waited for."""
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
        """See `compiling.signature_of`."""
        return signature_of(self.family, self.case.problem, self.device)

    def _doomed(self, config: KernelConfig) -> Trial | None:
        """What a config gets that has ended its process often enough."""
        ends = self._fatal.get((config, self._binary(config)), []) if self._fatal else []
        if len(ends) < FATAL_CASES:
            return None
        return replace(
            ends[-1], error=f"not run, as it ended its process on {len(ends)} other problems: {ends[-1].error}"
        )

    def compiled(self, binary: Binary, compiled: Compiled) -> None:
        """A binary, perhaps one that is waited for, is there."""
        configs = self._waiting.pop(binary, ())
        for config in configs:
            self._found(config, compiled)
        if configs:
            self._advance()

    def answered(self, trial: Trial) -> None:
        """Take the answer to the first task that is out."""
        task = self._out.popleft()
        if isinstance(task, Prepare):
            if trial.status is not None:
                self._refuse(trial)
        elif self.refused is None:
            self._settle(task, trial)
        self._advance()

    def died(self, trial: Trial, *, forgivable: bool) -> None:
        """The process died at the first task that is out, and knows nothing of the others.

        The config gets this trial and is not met again, unless the process may have been a victim (`forgivable`)
        and its task has tries left.
        """
        self._prepared = False
        if not self._out:
            return
        task = self._out[0]
        if isinstance(task, Prepare):
            self._probe = None  # perhaps it was that
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
            self._begin_confirming()  # anew: with a pause in their midst the passes would not be interleaved
        self._advance()

    def _valid(self, space: Iterable[KernelConfig]) -> list[KernelConfig]:
        """The configs to scan; those that cannot run the problem get their rows here."""
        valid, rows = [], []
        for config in space:
            if config in self._state.scanned_us:
                continue
            try:
                reason = self.family.supports(config, self.case.problem, self.device)
            except ForetuneError as error:  # the family's fault, and this config's row
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
        """What came of a config's compilation."""
        trial = Trial(Status.COMPILE_FAILED, error=compiled.error)
        if self._leading is not None:
            if compiled.error is None:
                self._leading.append(config)
            else:  # an earlier run could compile it
                self._record(self._row(config, timing_pass, trial) for timing_pass in CONFIRMING)
            return
        self._compile_ms[config] = compiled.compile_ms
        if compiled.error is None:
            self._ready.append(Scan(config))
        else:
            self._settle(Scan(config), trial)

    def _settle(self, task: Scan | Confirm, trial: Trial) -> None:
        """Make rows of a trial."""
        config = task.config
        if isinstance(task, Scan):
            self._record([self._row(config, SCAN, trial, self._compile_ms.pop(config, None))])
        elif trial.status is None:
            self._samples[task.timing_pass, config] += trial.times_us
        elif config not in self._state.unconfirmable:
            self._record([self._row(config, timing_pass, trial) for timing_pass in CONFIRMING])

    def _advance(self) -> None:
        """From the scan to the confirming passes, and to their end."""
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
        leading = [config for config in self._leading or () if config not in self._state.unconfirmable]
        self._samples = {(timing_pass, config): [] for timing_pass in CONFIRMING for config in leading}
        self._ready.clear()
        shuffle = np.random.default_rng(0)
        for number in range(rounds_of(self._state.best_us) * len(CONFIRMING)):
            timing_pass = CONFIRMING[number % len(CONFIRMING)]
            self._ready += (Confirm(leading[i], timing_pass) for i in shuffle.permutation(len(leading)))

    def _confirm(self) -> None:
        """Makes the rows of the confirming passes, all of them at once."""
        self._record(
            [
                self._row(config, timing_pass, Trial(Status.OK, **vars(Timing.of(times_us))))
                for (timing_pass, config), times_us in self._samples.items()
                if config not in self._state.unconfirmable
            ]
        )

    def _refuse(self, trial: Trial) -> None:
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


def rounds_of(best_us: float) -> int:
    """Rounds of each confirming pass of a case whose best config takes so long.

    A sample is a few tenths of a microsecond off, whatever the kernel takes, and those of one round share a part of it.
    So below 10 us there are more rounds: more samples in each of four did far less (H200, 2026-11; what that was worth
    is in datasets/h200_rms_norm_rope/CARD.md).

    >>> [rounds_of(us) for us in (2.0, 5.0, 10.0, 1000.0)]
    [16, 8, 4, 4]
    """
    return min(max(math.ceil(_SURE_US / best_us), ROUNDS), MOST_ROUNDS)
