"""A collection run: every case, every config, into a store that survives being killed.

Pass 1 scans the whole space. Passes 2 and 3 confirm the leading configs, several turns each, the two passes and
all configs interleaved and shuffled: a heavy kernel's clock depends on what ran just before it (on an H200 at its
power limit the same config read 0-20 % slower one second later, 2026-11), and interleaving gives every config
the same share of it. A config is then chosen on pass 2 and its time reported from pass 3.
"""

from __future__ import annotations

import datetime
import itertools
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..datasets import TIMED, Case, DeviceSpec, Family, ForetuneError, KernelConfig, Measurement, Problem, Status
from ..datasets.store import MANIFEST, Writer, read
from ..model import RooflineRanker
from ..runtime.timing import Timing
from .compiling import Compiled, CompilePool
from .measuring import DeviceLostError, GpuRunner, LaunchFailedError, Outcome, OutOfMemoryError, Runner
from .provenance import provenance

SCAN, CONFIRMING = 1, (2, 3)
#: Configs within this of the scan's best are confirmed, at least and at most so many.
LEADING_SLOWDOWN = 1.15
LEADING_LEAST, LEADING_MOST = 20, 64
#: Turns of each confirming pass.
TURNS = 4
#: Rows reach the disk at least this often.
FLUSH_SECONDS = 10.0


@dataclass(frozen=True)
class Progress:
    """Where a run stands; `eta_s` is None until there is a rate."""

    done: int  # cases
    total: int
    case: Case
    measurements: int
    rate_per_s: float
    eta_s: float | None


@dataclass(frozen=True)
class Summary:
    """What a run did."""

    cases: int  # of which all is known now, those of earlier runs included
    measurements: int  # of this run
    statuses: dict[str, int]
    seconds: float
    skipped: tuple[str, ...]  # problems that were too big for the GPU's free memory, and how
    complete: bool  # False where the budget ran out first or a case was skipped: the same run again goes on


def collect(
    family: Family,
    cases: Sequence[Case],
    out: Path | str,
    *,
    device: DeviceSpec | None = None,
    budget_s: float | None = None,
    resume: bool = True,
    workers: int | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Summary:
    """Measures `cases` over the whole valid space on the live device, appending to the dataset in `out`.

    What is already in `out` is not measured again. Stops cleanly when `budget_s` seconds are over. Raises
    `ForetuneError` where `out` holds a dataset and `resume` is False, and where the GPU is lost (what was
    measured is kept: run again to go on).
    """
    device = device or DeviceSpec.live()
    if (Path(out) / MANIFEST).exists() and not resume:
        raise ForetuneError(f"{out} already holds a dataset; resume it, or choose another folder")
    with CompilePool(family, device, workers) as pool:
        run = Campaign(family, device, GpuRunner(family, device), pool, out, budget_s=budget_s)
        return run.measure(cases, on_progress)


@dataclass
class _Known:
    """What is already known of one case: outcomes by pass, from this run and earlier ones."""

    scanned_us: dict[KernelConfig, float | None] = field(default_factory=dict)  # None where it failed
    best_us: float = float("inf")  # of the scan
    confirmed: bool = False
    unconfirmable: set[KernelConfig] = field(default_factory=set)  # ran in the scan, failed afterwards

    def add(self, config: KernelConfig, timing_pass: int, time_us: float | None) -> None:
        if timing_pass == SCAN:
            # As the store will give it back, or a resumed run would see other configs leading.
            self.scanned_us[config] = time_us = None if time_us is None else float(np.float32(time_us))
            self.best_us = min(self.best_us, time_us or self.best_us)
        elif time_us is None:
            self.unconfirmable.add(config)
        else:
            self.confirmed = True

    def leading(self) -> list[KernelConfig]:
        """The configs to confirm, fastest first. Depends on the times alone, not on the order they came in."""
        times = {config: time_us for config, time_us in self.scanned_us.items() if time_us is not None}
        near = sum(time_us <= LEADING_SLOWDOWN * self.best_us for time_us in times.values())
        ranked = sorted(times, key=lambda config: (times[config], str(config)))
        return ranked[: min(max(near, LEADING_LEAST), LEADING_MOST)]

    def unconfirmed(self) -> list[KernelConfig]:
        """What is left to confirm. One confirmed config says that all were: their rows are written together."""
        return [] if self.confirmed else [c for c in self.leading() if c not in self.unconfirmable]


class Campaign:
    """One run on one device. `measure` may be called once."""

    def __init__(
        self,
        family: Family,
        device: DeviceSpec,
        runner: Runner,
        pool: CompilePool,
        out: Path | str,
        *,
        budget_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._family, self._device, self._runner, self._pool, self._clock = family, device, runner, pool, clock
        self._start = self._flushed = clock()
        self._deadline = float("inf") if budget_s is None else self._start + budget_s
        self._space = family.space(device)
        self._known = _earlier(out, family, device)
        run_id = f"{datetime.datetime.now(datetime.timezone.utc):%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:4]}"
        self._writer = Writer(out, Path(out).name, [device], provenance(family, device), run_id=run_id)
        self._pending: list[Measurement] = []
        self._statuses: Counter[str] = Counter()
        self._idle = 0  # cases with nothing left to do

    def measure(self, cases: Sequence[Case], on_progress: Callable[[Progress], None]) -> Summary:
        finished, skipped = 0, []
        for done, case in enumerate(cases):
            if self._over():
                break
            on_progress(self._progress(done, len(cases), case))
            before = self._statuses.total()
            try:
                finished += self._measure_case(case)
            except OutOfMemoryError as error:
                skipped.append(f"{case.problem}: {error}")
            except DeviceLostError as error:
                raise DeviceLostError(
                    f"the GPU was lost ({error}). What was measured is kept in {self._writer.directory}: run the "
                    "same command again to go on without the config that did it"
                ) from error
            self._idle += self._statuses.total() == before
        if cases:
            on_progress(self._progress(finished + len(skipped), len(cases), cases[-1]))
        return Summary(
            cases=finished,
            measurements=self._statuses.total(),
            statuses=dict(self._statuses),
            seconds=self._clock() - self._start,
            skipped=tuple(skipped),
            complete=finished == len(cases),
        )

    def _over(self) -> bool:
        return self._clock() > self._deadline

    def _measure_case(self, case: Case) -> bool:
        """Whether all of the case is known now: not so where the time is over."""
        known = self._known.setdefault(case.problem, _Known())
        try:
            todo = self._valid(case, known)
            if not todo and not known.unconfirmed():
                return True
            self._runner.prepare(case.problem)
            for config, compiled in self._pool.finished(todo, case.problem.dtype):
                if self._over():
                    return False
                self._scan(case, known, config, compiled)
            if self._over():
                return not known.unconfirmed()
            self._confirm(case, known)
            return True
        finally:
            self._flush(case)

    def _valid(self, case: Case, known: _Known) -> list[KernelConfig]:
        """The configs to scan, most promising first; those that cannot run the problem get their rows here."""
        todo = []
        for config in self._by_promise(case):
            if config in known.scanned_us:
                continue
            reason = self._family.supports(config, case.problem, self._device)
            if reason is None:
                todo.append(config)
            else:
                self._record(known, self._row(case, config, SCAN, Outcome(Status.INVALID, error=reason)))
        return todo

    def _by_promise(self, case: Case) -> list[KernelConfig]:
        """The device's space, the analytically fastest first: the best is met early, and bounds the rest."""
        estimate = RooflineRanker().predict(self._family, case.problem, self._device, self._space)
        return [self._space[i] for i in np.argsort(estimate, kind="stable")]

    def _scan(self, case: Case, known: _Known, config: KernelConfig, compiled: Compiled) -> None:
        if compiled.error is not None:
            outcome = Outcome(Status.COMPILE_FAILED, error=compiled.error)
        else:
            try:
                outcome = self._runner.scan(config, known.best_us)
            except DeviceLostError as error:
                # The row says which config did it, so that a resumed run does not meet it again.
                lost = Outcome(Status.LAUNCH_FAILED, error=str(error))
                self._record(known, self._row(case, config, SCAN, lost, compiled.compile_ms))
                raise
        self._record(known, self._row(case, config, SCAN, outcome, compiled.compile_ms))
        if self._clock() - self._flushed > FLUSH_SECONDS:
            self._flush(case)

    def _confirm(self, case: Case, known: _Known) -> None:
        # Compiled already, unless an earlier run did the scan.
        compiled = self._pool.finished(known.unconfirmed(), case.problem.dtype)
        leading = [config for config, binary in compiled if binary.error is None]
        samples: dict[int, dict[KernelConfig, list[float]]] = {p: {c: [] for c in leading} for p in CONFIRMING}
        failures: dict[KernelConfig, str] = {}
        shuffle = np.random.default_rng(0)
        for turn in range(TURNS * len(CONFIRMING)):
            timing_pass = CONFIRMING[turn % len(CONFIRMING)]
            for i in shuffle.permutation(len(leading)):
                if leading[i] in failures:
                    continue
                try:
                    samples[timing_pass][leading[i]] += self._runner.turn(leading[i], known.best_us)
                except LaunchFailedError as error:
                    failures[leading[i]] = str(error)
                except DeviceLostError as error:
                    lost = Outcome(Status.LAUNCH_FAILED, error=str(error))
                    self._record(known, *(self._row(case, leading[i], p, lost) for p in CONFIRMING))
                    raise
        rows = []
        for timing_pass, config in itertools.product(CONFIRMING, leading):
            if config in failures:
                outcome = Outcome(Status.LAUNCH_FAILED, error=failures[config])
            else:
                outcome = Outcome(Status.OK, **vars(Timing.of(samples[timing_pass][config])))
            rows.append(self._row(case, config, timing_pass, outcome))
        self._record(known, *rows)

    def _row(
        self, case: Case, config: KernelConfig, timing_pass: int, outcome: Outcome, compile_ms: float = 0.0
    ) -> Measurement:
        return Measurement(
            problem=case.problem,
            device=self._device.name,
            config=config,
            timing_pass=timing_pass,
            compile_ms=compile_ms or None,
            run_id=self._writer.run_id,
            **vars(outcome),
        )

    def _record(self, known: _Known, *rows: Measurement) -> None:
        self._pending += rows  # all or none, whenever Ctrl-C comes
        for row in rows:
            known.add(row.config, row.timing_pass, row.time_us)
            self._statuses[row.status.value] += 1

    def _flush(self, case: Case) -> None:
        # Emptied first: rows that an interrupted write left behind are measured again, never written twice.
        rows, self._pending = self._pending, []
        self._writer.append(case, rows)
        self._flushed = self._clock()

    def _progress(self, done: int, total: int, case: Case) -> Progress:
        seconds = self._clock() - self._start
        measurements = self._statuses.total()
        rate = measurements / seconds if seconds > 0 else 0.0
        # Cases that an earlier run measured take no time, so they say nothing of the rest.
        fresh = done - self._idle
        eta_s = seconds / fresh * (total - done) if fresh else None
        return Progress(done, total, case, measurements, rate, eta_s)


def _earlier(out: Path | str, family: Family, device: DeviceSpec) -> dict[Problem, _Known]:
    """What a dataset already holds of this device's measurements. Raises `ForetuneError` where the kernel was
    another one then: its times say nothing of today's."""
    known: dict[Problem, _Known] = {}
    if not (Path(out) / MANIFEST).exists():
        return known
    dataset = read(out)
    sources = {run["kernel_source"] for run in dataset.provenance["runs"].values() if run.get("family") == family.name}
    if sources - {family.source_hash()}:
        raise ForetuneError(
            f"{out} was measured with other sources of {family.name} ({', '.join(sorted(sources))}; they are "
            f"{family.source_hash()} now): collect into another folder"
        )
    rows = dataset.measurements[dataset.measurements["device"] == device.name]
    columns = rows[["problem", "config", "timing_pass", "status", "time_us"]]
    timed = {status.value for status in TIMED}
    for problem, config, timing_pass, status, time_us in columns.itertuples(index=False):
        entry = known.setdefault(dataset.cases[problem].problem, _Known())
        entry.add(dataset.configs[config], timing_pass, time_us if status in timed else None)
    return known
