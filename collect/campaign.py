"""A collection run: every case, every config that the plan asks for, into a store that survives being killed.

One process per GPU measures, a pool of processes compiles for all of them, and the parent hands out the cases (a GPU
that is free takes the next one), writes the rows and replaces what dies. See `casework` for what a case takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from ..datasets import Case, DeviceSpec, Family, ForetuneError
from ..datasets.store import MANIFEST
from .bench import Bench, Limits
from .casework import CaseWork, Fatal
from .compiling import Binary, Compiled, CompilePool, cores
from .ledger import Ledger, Progress
from .measuring import DeviceLostError, kind
from .processes import Child, Watch
from .provenance import prepare
from .reference import choose
from .stopping import Stopping
from .summary import Effort, Summary
from .worker import CudaGpu, Reference, serve

#: Ranks behind those of any config that a GPU waits for.
AHEAD = 1e6
#: How often the parent looks after processes that say nothing.
CHECK_SECONDS = 0.25


def collect(
    families: Sequence[Family],
    cases: Sequence[Case],
    out: Path | str,
    *,
    gpus: int | None = None,
    sms: Sequence[int] = (),
    plan: str = "exhaustive",
    budget_s: float | None = None,
    resume: bool = True,
    compilers: int | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Summary:
    """Measures `cases` on `gpus` of this machine's GPUs (all that are visible if left out), appending to the dataset in
    `out`: the whole valid spaces of their families, or what another plan chooses of them (see `plan.PLANS`). With
    `sms`, on so many of each card's SMs (see `runtime.partition`), which are devices of their own: one number after the
    other, because what runs beside it on the same card would share its bandwidth and L2.

    What is already in `out` is not measured again. Stops cleanly when `budget_s` seconds are over and at Ctrl-C.
    Raises `ForetuneError` where `out` holds a dataset and `resume` is False, where there are not so many GPUs or SMs,
    and where all GPUs are lost (what was measured is kept: run again to go on).
    """
    if (Path(out) / MANIFEST).exists() and not resume:
        raise ForetuneError(f"{out} already holds a dataset; resume it, or choose another folder")
    by_name = {family.name: family for family in families}
    indices = range(visible_gpus(gpus))
    for index in indices if sms else ():
        check_sms(sms, DeviceSpec.live(index))
    ledger = Ledger(by_name, cases, out, plan=plan, budget_s=budget_s, on_progress=on_progress)
    with Watch() as watch:
        pool = CompilePool(by_name, watch, compilers or max(1, cores() - len(indices)))
        rounds = [
            [partial(Child, serve, CudaGpu(index, part), by_name) for index in indices] for part in sms or (None,)
        ]
        return Campaign(ledger, rounds, pool, watch).measure()


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


def check_sms(sms: Sequence[int], device: DeviceSpec) -> None:
    """Raises `ForetuneError` for a number of SMs that a device does not have."""
    for number in sms:
        if not 1 <= number <= device.sm_count:
            raise ForetuneError(f"sms must be between 1 and {device.sm_count}, as {device.name} has, but got {number}")


class Campaign:
    """One run on some GPUs. `measure` may be called once.

    In each of the `rounds`, what starts the process of one GPU each. A round that has measured all ends before the next
    begins: they may be on the same cards.
    """

    def __init__(
        self,
        ledger: Ledger,
        rounds: Sequence[Sequence[Callable[[], Child]]],
        pool: CompilePool,
        watch: Watch,
        limits: Limits = Limits(),  # noqa: B008 - frozen
    ) -> None:
        self._ledger, self._rounds, self._pool, self._watch, self._limits = ledger, rounds, pool, watch, limits
        self._benches: list[Bench] = []  # of this round
        self._spent = Effort()  # in the rounds before
        self._references: dict[str, Reference | None] = {}  # by device name
        self._next: dict[Bench, CaseWork] = {}  # made ready while they are busy
        self._fatal: dict[tuple[object, ...], Fatal] = {}  # by device name and kind of problem
        pool.on_finished = self._compiled

    def measure(self) -> Summary:
        """Raises `DeviceLostError` where no GPU is left, and `ForetuneError` where the disk takes no more."""
        with Stopping() as stopping:
            try:
                for place, starts in enumerate(self._rounds if self._ledger.cases else (), 1):
                    self._ledger.to_come = len(self._rounds) - place
                    self._run(starts, stopping)
                    if stopping.asked or self._ledger.time_is_over:
                        break
            finally:
                self._ledger.recorder.flush()
        if self._ledger.cases:
            self._ledger.report(self._ledger.cases[-1])
        return Summary.of(self._ledger, self._spent, interrupted=stopping.asked)

    def _run(self, starts: Sequence[Callable[[], Child]], stopping: Stopping) -> None:
        """One round."""
        self._benches = [Bench(start, self._watch, self, self._limits) for start in starts]
        self._pool.start()  # after them: dozens of processes that import Triton would delay what the GPUs wait for
        prepare(self._ledger.families.values())  # while those open their GPUs
        next_check = 0.0
        while self._live() and not (self._ledger.time_is_over or stopping.asked):
            self._watch.handle(CHECK_SECONDS)
            if (now := time.monotonic()) > next_check:
                next_check = now + CHECK_SECONDS
                self._pool.check()
                for bench in self._benches:
                    bench.check()
            # What takes milliseconds is done here, when each GPU has had its next tasks.
            self._ledger.recorder.flush_due()
            self._plan()
        self._spent += self._effort()
        if all(bench.retired for bench in self._benches):
            raise DeviceLostError(
                f"no GPU is left to measure on: {self._benches[0].trouble}. What was measured is kept in "
                f"{self._ledger.out}: run the same command again to go on"
            )
        for bench in self._benches:
            bench.close()

    def _live(self) -> bool:
        """Whether a bench has work, or may yet ask for some."""
        return any(not (bench.idle or bench.retired) for bench in self._benches)

    def _plan(self) -> None:
        for bench in self._benches:
            if bench.work and bench not in self._next and (work := self._work(bench)):
                self._next[bench] = work
        if self._pool.is_hungry:
            for device in {bench.device.name: bench.device for bench in self._benches if bench.device}.values():
                self._compile_ahead(device)

    def _work(self, bench: Bench) -> CaseWork | None:
        """The next case for this GPU in which there is something to do."""
        ledger, device = self._ledger, bench.device
        assert device is not None
        while step := ledger.take(device, bench.met, len(self._benches)):
            case = step.case
            work = CaseWork(
                ledger.family(case),
                case,
                device,
                step.configs,
                ledger.known(case, device),
                self._pool,
                partial(ledger.add, case, device),
                self._references[device.name],
                self._fatal.setdefault((device.name, *kind(case.problem)), {}),
            )
            if not work.over:
                return work
            ledger.done(case, device, was_idle=True)
        return None

    def _left(self, device: DeviceSpec) -> CaseWork | None:
        """What was made ready for another GPU of this kind: when there is nothing else left."""
        owner = next((bench for bench, work in self._next.items() if work.device.name == device.name), None)
        return None if owner is None else self._next.pop(owner)

    # What a bench tells its owner.

    def idle(self, bench: Bench) -> None:
        device = bench.device
        assert device is not None
        is_new = device.name not in self._references
        if is_new:
            self._references[device.name] = choose(self._ledger.families, self._ledger.cases, device)
            for binary, error in self._ledger.uncompilable(device):
                self._pool.know(binary, Compiled(0.0, error))
        work = self._next.pop(bench, None) or self._work(bench) or self._left(device)
        if work is not None:
            self._ledger.report(work.case)
            bench.give(work)

    def done(self, bench: Bench, work: CaseWork) -> None:
        if work.refused is None:
            self._ledger.done(work.case, work.device)
            self._ask_again()  # it may have been the last of a batch
        else:
            self._give_up(work, work.refused)

    def read(self, bench: Bench, case: Case, reference_us: float) -> None:
        assert bench.device is not None
        gpu = str(self._benches.index(bench))
        self._ledger.recorder.read(case, self._ledger.family(case), bench.device, gpu, reference_us)

    def retired(self, bench: Bench, work: CaseWork | None) -> None:
        self._ledger.skipped.append(f"GPU {self._benches.index(bench)}: {bench.trouble}")
        if work is not None:
            self._give_up(work, bench.trouble)
        self._ask_again()

    def _give_up(self, work: CaseWork, reason: str) -> None:
        self._ledger.given_up(work.case, work.device, reason, deadly=work.deaths > 0)
        self._ask_again()

    def _ask_again(self) -> None:
        """There may be something to do again."""
        for bench in self._benches:
            if bench.idle:
                self.idle(bench)

    def _compiled(self, binary: Binary, compiled: Compiled) -> None:
        for work in [*self._next.values(), *(bench.work for bench in self._benches)]:
            if work is not None:
                work.compiled(binary, compiled)
        for bench in self._benches:
            bench.proceed()

    def _compile_ahead(self, device: DeviceSpec) -> None:
        """Requests what one of the cases to come will need, behind all that a GPU waits for: it would else find no
        binary."""
        if step := self._ledger.ahead(device):
            family, problem = self._ledger.family(step.case), step.case.problem
            for rank, config in enumerate(step.configs):
                if family.supports(config, problem, device) is None:
                    self._pool.request(Binary.of(family, config, problem, device), AHEAD + rank)

    def _effort(self) -> Effort:
        """Of this round."""
        began = [bench.began for bench in self._benches if bench.began is not None]
        return Effort(
            gpus=len(self._benches),
            gpu_s=len(self._benches) * (time.monotonic() - min(began)) if began else 0.0,
            busy_s=sum(bench.busy_s for bench in self._benches),
            lost_s=sum(bench.lost_s for bench in self._benches),
            compile_s=self._pool.compile_s - self._spent.compile_s,
        )
