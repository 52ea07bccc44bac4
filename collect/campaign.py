"""A collection run: every case, every config, two passes, into a store that survives being killed."""

from __future__ import annotations

import datetime
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..datasets import TIMED, Case, DeviceSpec, Family, ForetuneError, KernelConfig, Measurement, Problem, Status
from ..datasets.store import MANIFEST, Writer, read
from .compiling import Compiled, CompilePool
from .measuring import DeviceLostError, GpuRunner, Outcome, Runner
from .provenance import provenance

#: The second pass re-measures the configs within this of the first pass's best, at least and at most so many.
LEADING_SLOWDOWN = 1.12
LEADING_LEAST, LEADING_MOST = 16, 64
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
    """What a run did. `complete` is False where the budget ran out first."""

    cases: int
    measurements: int
    statuses: dict[str, int]
    seconds: float
    complete: bool


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

    times_us: dict[int, dict[KernelConfig, float]] = field(default_factory=lambda: {1: {}, 2: {}})
    tried: dict[int, set[KernelConfig]] = field(default_factory=lambda: {1: set(), 2: set()})

    def add(self, config: KernelConfig, timing_pass: int, time_us: float | None) -> None:
        self.tried[timing_pass].add(config)
        if time_us is not None:
            self.times_us[timing_pass][config] = time_us

    @property
    def best_us(self) -> float:
        return min(self.times_us[1].values(), default=float("inf"))


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
        self._known = _earlier(out, device)
        run_id = f"{datetime.datetime.now(datetime.timezone.utc):%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:4]}"
        self._writer = Writer(out, Path(out).name, [device], provenance(family, device), run_id=run_id)
        self._pending: list[Measurement] = []
        self._statuses: Counter[str] = Counter()

    def measure(self, cases: Sequence[Case], on_progress: Callable[[Progress], None]) -> Summary:
        done = 0
        for done, case in enumerate(cases):
            if self._clock() > self._deadline:
                break
            on_progress(self._progress(done, len(cases), case))
            self._measure_case(case)
        else:
            done = len(cases)
        seconds = self._clock() - self._start
        complete = done == len(cases) and self._clock() <= self._deadline
        return Summary(done, self._statuses.total(), dict(self._statuses), seconds, complete)

    def _measure_case(self, case: Case) -> None:
        known = self._known.setdefault(case.problem, _Known())
        configs = self._by_promise(case)
        todo = [config for config in configs if config not in known.tried[1]]
        prepared = False
        try:
            for config, compiled in self._pool.finished(todo, case.problem.dtype):
                if self._clock() > self._deadline:
                    return
                if not prepared:
                    self._runner.prepare(case.problem)
                    prepared = True
                self._one(case, known, config, compiled, 1)
            again = [config for config in self._leading(known) if config not in known.tried[2]]
            if again and not prepared:
                self._runner.prepare(case.problem)
            for config in again:
                if self._clock() > self._deadline:
                    return
                self._one(case, known, config, Compiled(0.0), 2)
        finally:
            self._flush(case)

    def _by_promise(self, case: Case) -> list[KernelConfig]:
        """The device's space, the analytically fastest first: the best is met early, and bounds the rest."""
        space = self._family.space(self._device)
        estimate = self._family.features(case.problem, self._device, space)[
            :, self._family.feature_names.index("roofline_us")
        ]
        return [space[i] for i in np.argsort(estimate, kind="stable")]

    def _leading(self, known: _Known) -> list[KernelConfig]:
        """The second pass's configs, shuffled: an order of merit would turn drift into a bias."""
        times = known.times_us[1]
        ranked = sorted(times, key=lambda config: times[config])
        near = sum(time_us <= LEADING_SLOWDOWN * known.best_us for time_us in times.values())
        leading = ranked[: min(max(near, LEADING_LEAST), LEADING_MOST)]
        order = np.random.default_rng(0).permutation(len(leading))
        return [leading[i] for i in order]

    def _one(self, case: Case, known: _Known, config: KernelConfig, compiled: Compiled, timing_pass: int) -> None:
        reason = self._family.supports(config, case.problem, self._device)
        if reason is not None:
            outcome = Outcome(Status.INVALID, error=reason)
        elif compiled.error is not None:
            outcome = Outcome(Status.COMPILE_FAILED, error=compiled.error)
        else:
            try:
                outcome = self._runner.run(config, timing_pass=timing_pass, best_us=known.best_us)
            except DeviceLostError as error:
                # The row says which config did it, so that a resumed run does not meet it again.
                self._record(
                    case, known, config, compiled, timing_pass, Outcome(Status.LAUNCH_FAILED, error=str(error))
                )
                raise
        self._record(case, known, config, compiled, timing_pass, outcome)
        if self._clock() - self._flushed > FLUSH_SECONDS:
            self._flush(case)

    def _record(
        self, case: Case, known: _Known, config: KernelConfig, compiled: Compiled, timing_pass: int, outcome: Outcome
    ) -> None:
        known.add(config, timing_pass, outcome.time_us)
        self._statuses[outcome.status.value] += 1
        self._pending.append(
            Measurement(
                problem=case.problem,
                device=self._device.name,
                config=config,
                timing_pass=timing_pass,
                compile_ms=compiled.compile_ms or None,
                run_id=self._writer.run_id,
                **vars(outcome),
            )
        )

    def _flush(self, case: Case) -> None:
        self._writer.append(case, self._pending)
        self._pending.clear()
        self._flushed = self._clock()

    def _progress(self, done: int, total: int, case: Case) -> Progress:
        seconds = self._clock() - self._start
        measurements = self._statuses.total()
        rate = measurements / seconds if seconds > 0 else 0.0
        eta_s = seconds / done * (total - done) if done else None
        return Progress(done, total, case, measurements, rate, eta_s)


def _earlier(out: Path | str, device: DeviceSpec) -> dict[Problem, _Known]:
    """What a dataset already holds of this device's measurements."""
    known: dict[Problem, _Known] = {}
    if not (Path(out) / MANIFEST).exists():
        return known
    dataset = read(out)
    rows = dataset.measurements[dataset.measurements["device"] == device.name]
    columns = rows[["problem", "config", "timing_pass", "status", "time_us"]]
    timed = {status.value for status in TIMED}
    for problem, config, timing_pass, status, time_us in columns.itertuples(index=False):
        entry = known.setdefault(dataset.cases[problem].problem, _Known())
        entry.add(dataset.configs[config], timing_pass, time_us if status in timed else None)
    return known
