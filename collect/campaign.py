"""A collection run: every case, every config, into a store that survives being killed.

One process per GPU measures, a pool of processes compiles for all of them, and the parent hands out the cases (a GPU
that is free takes the next one), writes the rows and replaces what dies. See `casework` for what a case takes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from ..datasets import Case, DeviceSpec, Family, ForetuneError, KernelConfig, Problem
from ..datasets.store import MANIFEST
from ..model import RooflineRanker
from .bench import Bench, Limits
from .casework import CaseWork
from .compiling import Binary, Compiled, CompilePool, cores
from .known import Known, earlier
from .measuring import DeviceLostError
from .processes import Child, Watch
from .recorder import Recorder
from .worker import CudaGpu, serve

#: Ranks behind those of any config that a GPU waits for.
AHEAD = 1e6
#: How often the parent looks after processes that say nothing.
CHECK_SECONDS = 0.25


@dataclass(frozen=True)
class Progress:
    """Where a run stands; `eta_s` is None until there is a rate."""

    done: int  # cases
    total: int
    case: Case  # the one begun last
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
    gpus: int
    configs_per_s: float
    gpu_busy_share: float  # of the time since the first binary was there, all GPUs together
    compile_s: float  # of all compiling processes together
    lost_s: float  # on configs without a time worth keeping: hopeless, failed, or fatal to their process
    skipped: tuple[str, ...]  # problems that could not be prepared, and why
    complete: bool  # False where the budget or a Ctrl-C came first, or a case was skipped: the same run again goes on
    interrupted: bool = False


def collect(
    families: Sequence[Family],
    cases: Sequence[Case],
    out: Path | str,
    *,
    gpus: int | None = None,
    budget_s: float | None = None,
    resume: bool = True,
    compilers: int | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Summary:
    """Measures `cases` over the whole valid spaces of their families on `gpus` of this machine's GPUs (all that
    are visible if left out), appending to the dataset in `out`.

    What is already in `out` is not measured again. Stops cleanly when `budget_s` seconds are over and at Ctrl-C.
    Raises `ForetuneError` where `out` holds a dataset and `resume` is False, where there are not so many GPUs,
    and where all GPUs are lost (what was measured is kept: run again to go on).
    """
    if (Path(out) / MANIFEST).exists() and not resume:
        raise ForetuneError(f"{out} already holds a dataset; resume it, or choose another folder")
    by_name = {family.name: family for family in families}
    indices = range(visible_gpus(gpus))
    with Watch() as watch:
        pool = CompilePool(by_name, watch, compilers or max(1, cores() - len(indices)))
        pool.start()
        starts = [partial(Child, serve, CudaGpu(index), by_name) for index in indices]
        return Campaign(by_name, starts, pool, watch, out, budget_s=budget_s).measure(cases, on_progress)


def visible_gpus(wanted: int | None = None) -> int:
    """How many GPUs to take: `wanted`, or all there are. Raises `ForetuneError` where there are fewer.

    Makes no CUDA context: those are made in the processes that measure.
    """
    import torch

    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found == 0:
        raise ForetuneError("no GPU is visible here: collecting needs at least one")
    if wanted is not None and not 1 <= wanted <= found:
        raise ForetuneError(f"gpus must be between 1 and {found}, which are visible here, but got {wanted}")
    return wanted or found


class Campaign:
    """One run on some GPUs. `measure` may be called once.

    `starts` start the process of one GPU each. GPUs of one name share the cases; each name measures all of them.
    """

    def __init__(
        self,
        families: Mapping[str, Family],
        starts: Sequence[Callable[[], Child]],
        pool: CompilePool,
        watch: Watch,
        out: Path | str,
        *,
        budget_s: float | None = None,
        limits: Limits = Limits(),  # noqa: B008 - frozen
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._families, self._starts, self._pool, self._watch = families, starts, pool, watch
        self._limits, self._clock = limits, clock
        self._start = clock()
        self._deadline = float("inf") if budget_s is None else self._start + budget_s
        self._out, self._known = Path(out), earlier(out, families)
        self._recorder = Recorder(out, clock)
        self._cases: list[Case] = []
        self._on_progress: Callable[[Progress], None] = lambda progress: None
        self._spaces: dict[tuple[str, str], tuple[KernelConfig, ...]] = {}  # by family and device
        self._queues: dict[str, deque[Case]] = {}  # by device
        self._benches: list[Bench] = []
        self._retried: set[Problem] = set()
        self._finished = self._idle = 0  # cases of which all is known, and those where nothing was left to do
        self._skipped: list[str] = []
        pool.on_finished = self._compiled

    def measure(self, cases: Sequence[Case], on_progress: Callable[[Progress], None]) -> Summary:
        self._cases = list({case.problem: case for case in cases}.values())
        self._on_progress = on_progress
        interrupted = False
        try:
            if cases:
                self._benches = [Bench(start, self._watch, self, self._limits) for start in self._starts]
            self._run()
        except KeyboardInterrupt:
            interrupted = True
        finally:
            self._recorder.flush_all()
        if self._cases:
            self._report(self._cases[-1])
        return self._summary(interrupted)

    def _run(self) -> None:
        next_check = 0.0
        while self._live() and self._clock() <= self._deadline:
            self._watch.handle(CHECK_SECONDS)
            if (now := time.monotonic()) > next_check:
                next_check = now + CHECK_SECONDS
                self._pool.check()
                for bench in self._benches:
                    bench.check()
                self._recorder.flush_old()
        if self._benches and all(bench.retired for bench in self._benches):
            raise DeviceLostError(
                f"no GPU is left to measure on: {self._benches[0].trouble}. What was measured is kept in {self._out}: "
                "run the same command again to go on"
            )

    def _live(self) -> bool:
        """Whether a bench has work, or may yet ask for some."""
        return any(not (bench.idle or bench.retired) for bench in self._benches)

    # What a bench tells its owner.

    def idle(self, bench: Bench) -> None:
        device = bench.device
        assert device is not None
        if device.name not in self._queues:
            self._queues[device.name] = deque(self._cases)
            self._compile_ahead(device)
        queue = self._queues[device.name]
        while queue and self._clock() <= self._deadline:
            case = queue.popleft()
            self._report(case)
            work = self._work(case, device)
            if not work.over:
                bench.give(work)
                return
            self._idle += 1
            self.done(bench, work)

    def done(self, bench: Bench, work: CaseWork) -> None:
        self._recorder.flush(work.case)
        if work.refused is None:
            self._finished += 1
        elif not (work.deaths and self._again(work)):
            self._skipped.append(f"{work.case.problem}: {work.refused}")

    def retired(self, bench: Bench, work: CaseWork | None) -> None:
        self._skipped.append(f"GPU {self._benches.index(bench)}: {bench.trouble}")
        if work is not None:
            self._recorder.flush(work.case)
            self._again(work)

    def _again(self, work: CaseWork) -> bool:
        """Puts a case back that lost its GPU: was it the case, or the GPU? The next GPU tells. Once only."""
        problem = work.case.problem
        if problem in self._retried:
            return False
        self._retried.add(problem)
        self._queues[work.device.name].append(work.case)
        for bench in self._benches:
            if bench.idle and bench.device == work.device:
                self.idle(bench)
        return True

    def _compiled(self, binary: Binary, compiled: Compiled) -> None:
        for bench in self._benches:
            if bench.work is not None:
                bench.work.compiled(binary, compiled)
                bench.proceed()

    def _work(self, case: Case, device: DeviceSpec) -> CaseWork:
        family = self._families[case.problem.family]
        known = self._known.setdefault((device.name, case.problem), Known())
        return CaseWork(
            family,
            case,
            device,
            self._by_promise(case, device),
            known,
            self._pool,
            partial(self._recorder.add, case, family, device),
        )

    def _space(self, family: Family, device: DeviceSpec) -> tuple[KernelConfig, ...]:
        key = (family.name, device.name)
        if key not in self._spaces:
            self._spaces[key] = family.space(device)
        return self._spaces[key]

    def _by_promise(self, case: Case, device: DeviceSpec) -> list[KernelConfig]:
        """The device's space, the analytically fastest first: the best is met early, and bounds the rest."""
        family = self._families[case.problem.family]
        space = self._space(family, device)
        estimate = RooflineRanker().predict(family, case.problem, device, space)
        return [space[i] for i in np.argsort(estimate, kind="stable")]

    def _compile_ahead(self, device: DeviceSpec) -> None:
        """Requests what the cases to come will need, behind all that a GPU waits for: a family's first case would
        else find no binary."""
        kinds = {(case.problem.family, case.problem.dtype, case.problem.flags): case for case in reversed(self._cases)}
        for case in kinds.values():
            family = self._families[case.problem.family]
            for rank, config in enumerate(self._by_promise(case, device)):
                if family.supports(config, case.problem, device) is None:
                    self._pool.request(Binary.of(family, config, case.problem, device), AHEAD + rank)

    def _report(self, case: Case) -> None:
        seconds = self._clock() - self._start
        measurements = self._recorder.statuses.total()
        rate = measurements / seconds if seconds > 0 else 0.0
        done, total = self._finished + len(self._skipped), self._total()
        # Cases that an earlier run measured take no time, so they say nothing of the rest.
        fresh = done - self._idle
        eta_s = seconds / fresh * (total - done) if fresh > 0 else None
        self._on_progress(Progress(done, total, case, measurements, rate, eta_s))

    def _total(self) -> int:
        return len(self._cases) * max(len(self._queues), 1)

    def _summary(self, interrupted: bool) -> Summary:
        seconds, measurements = self._clock() - self._start, self._recorder.statuses.total()
        began = [bench.began for bench in self._benches if bench.began is not None]
        bench_s = len(self._benches) * (time.monotonic() - min(began)) if began else 0.0
        return Summary(
            cases=self._finished,
            measurements=measurements,
            statuses=dict(self._recorder.statuses),
            seconds=seconds,
            gpus=len(self._benches),
            configs_per_s=measurements / seconds if seconds > 0 else 0.0,
            gpu_busy_share=sum(bench.busy_s for bench in self._benches) / bench_s if bench_s else 0.0,
            compile_s=self._pool.compile_s,
            lost_s=sum(bench.lost_s for bench in self._benches),
            skipped=tuple(self._skipped),
            complete=self._finished == self._total(),
            interrupted=interrupted,
        )
