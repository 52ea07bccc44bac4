"""A collection run: every case, every config that the plan asks for, into a store that survives being killed.

One process per GPU measures, a pool of processes compiles for all of them, and the parent hands out the cases (a GPU
that is free takes the next one), writes the rows and replaces what dies. See `case_tasks` for what a case takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..datasets import Case, DeviceSpec, ForetuneError, Measurable
from ..datasets.errors import check_integer
from ..runtime.launching.ahead import cores
from .case_tasks import CaseTasks, Fatal
from .cases import check_request
from .compiling import Binary, Compiled, CompilePool, binary_if_able
from .drift_probe import choose_probe
from .processes import Child, Interrupt, Watch
from .provenance import prepare
from .run_state import Progress, RunState, folder_of_run
from .runner import DeviceLostError
from .summary import Effort, Summary
from .supervisor import Limits, Supervisor
from .worker import CudaGpu, Probe, serve

if TYPE_CHECKING:
    from ..datasets.dataset import Dataset

#: Ranks behind those of any config that a GPU waits for.
AHEAD = 1e6
#: How often the parent looks after processes that say nothing.
CHECK_SECONDS = 0.25


def collect_on_gpus(
    families: Sequence[Measurable],
    cases: Sequence[Case],
    out: Path | str,
    *,
    gpus: int | None = None,
    sms: Sequence[int] = (),
    plan: str = "exhaustive",
    known: Dataset | None = None,
    share: float | None = None,
    budget_s: float | None = None,
    resume: bool = True,
    compilers: int | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Summary:
    """Measures `cases` on `gpus` of this machine's GPUs (all that are visible if left out), appending to the dataset in
    `out`: the whole valid spaces of their families, or what another plan chooses of them (see `plan.named`, also for
    `known` and `share`). With `sms`, on so many of each card's SMs (see `timing/partition.py`), which are devices of
    their own: one number after the other, because what runs beside it on the same card would share its bandwidth and
    L2.

    What is already in `out` is not measured again. Stops cleanly when `budget_s` seconds are over and at Ctrl-C.
    Raises `ForetuneError` as `folder_of_run` does, where there are not so many GPUs or SMs, and where all GPUs are lost
    (what was measured is kept: run again to go on).
    """
    by_name = {family.name: family for family in families}
    check_request(by_name, cases, out, plan, known, share, budget_s)
    if gpus is not None:
        check_integer("gpus", gpus, 1)
    with folder_of_run(out, resume=resume), Watch() as watch:
        indices = range(visible_gpus(gpus))
        for index in indices if sms else ():
            check_sms(sms, DeviceSpec.live(index))
        state = RunState(
            by_name, cases, out, plan=plan, known=known, share=share, budget_s=budget_s, on_progress=on_progress
        )
        pool = CompilePool(by_name, watch, compilers or max(1, cores() - len(indices)))
        phases = [
            [partial(Child, serve, CudaGpu(index, part), by_name) for index in indices] for part in sms or (None,)
        ]
        return Campaign(state, phases, pool, watch).measure()


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

    In each of the `phases`, what starts the process of one GPU each. A phase that has measured all ends before the next
    begins: they may be on the same cards.
    """

    def __init__(
        self,
        state: RunState,
        phases: Sequence[Sequence[Callable[[], Child]]],
        pool: CompilePool,
        watch: Watch,
        limits: Limits = Limits(),  # noqa: B008 - frozen
    ) -> None:
        self._state, self._phases, self._pool, self._watch, self._limits = state, phases, pool, watch, limits
        self._supervisors: list[Supervisor] = []  # of this phase
        self._spent = Effort()  # in the phases before
        self._probes: dict[str, Probe | None] = {}  # by device name
        self._next: dict[Supervisor, CaseTasks] = {}  # made ready while they are busy
        self._fatal: dict[str, Fatal] = {}  # by device name
        pool.on_finished = self._compiled

    def measure(self) -> Summary:
        """Raises `DeviceLostError` where no GPU is left, and `ForetuneError` where the disk takes no more."""
        with Interrupt() as interrupt:
            try:
                for place, starts in enumerate(self._phases if self._state.cases else (), 1):
                    self._state.to_come = len(self._phases) - place
                    self._run(starts, interrupt)
                    if interrupt.asked or self._state.time_is_over:
                        break
            finally:
                self._state.row_writer.flush()
        if self._state.cases:
            self._state.report(self._state.cases[-1])
        return Summary.of(self._state, self._spent, interrupted=interrupt.asked)

    def _run(self, starts: Sequence[Callable[[], Child]], interrupt: Interrupt) -> None:
        """One phase."""
        self._supervisors = [Supervisor(start, self._watch, self, self._limits) for start in starts]
        self._pool.start()  # after them: dozens of processes that import Triton would delay what the GPUs wait for
        prepare(self._state.families.values())  # while those open their GPUs
        next_check = 0.0
        while self._live() and not (self._state.time_is_over or interrupt.asked):
            self._watch.handle(CHECK_SECONDS)
            if (now := time.monotonic()) > next_check:
                next_check = now + CHECK_SECONDS
                self._pool.check()
                for supervisor in self._supervisors:
                    supervisor.check()
            # What takes milliseconds is done here, when each GPU has had its next tasks.
            self._state.row_writer.flush_due()
            self._plan()
        self._spent += self._effort()
        if all(supervisor.retired for supervisor in self._supervisors):
            raise DeviceLostError(
                f"no GPU is left to measure on: {self._supervisors[0].trouble}. What was measured is kept in "
                f"{self._state.out}: run the same command again to go on"
            )
        for supervisor in self._supervisors:
            supervisor.close()

    def _live(self) -> bool:
        """Whether a supervisor has work, or may yet ask for some."""
        return any(not (supervisor.idle or supervisor.retired) for supervisor in self._supervisors)

    def _plan(self) -> None:
        for supervisor in self._supervisors:
            if supervisor.work and supervisor not in self._next and (work := self._work(supervisor)):
                self._next[supervisor] = work
        if self._pool.is_hungry:
            for device in {
                supervisor.device.name: supervisor.device for supervisor in self._supervisors if supervisor.device
            }.values():
                self._compile_ahead(device)

    def _work(self, supervisor: Supervisor) -> CaseTasks | None:
        """The next case for this GPU in which there is something to do."""
        state, device = self._state, supervisor.device
        assert device is not None
        while step := state.take(device, supervisor.met, len(self._supervisors)):
            case = step.case
            work = CaseTasks(
                state.family(case),
                case,
                device,
                step.configs,
                state.outcomes(case, device),
                self._pool,
                partial(state.add, case, device),
                self._probes[device.name],
                self._fatal.setdefault(device.name, {}),
            )
            if not work.over:
                return work
            state.done(case, device, was_idle=True)
        return None

    def _left(self, device: DeviceSpec) -> CaseTasks | None:
        """What was made ready for another GPU of this kind: when there is nothing else left."""
        owner = next((supervisor for supervisor, work in self._next.items() if work.device.name == device.name), None)
        return None if owner is None else self._next.pop(owner)

    # What a supervisor tells its owner.

    def idle(self, supervisor: Supervisor) -> None:
        device = supervisor.device
        assert device is not None
        is_new = device.name not in self._probes
        if is_new:
            self._probes[device.name] = choose_probe(self._state.families, self._state.cases, device)
            for binary, error in self._state.uncompilable(device):
                self._pool.know(binary, Compiled(0.0, error))
        work = self._next.pop(supervisor, None) or self._work(supervisor) or self._left(device)
        if work is not None:
            self._state.report(work.case)
            supervisor.give(work)

    def done(self, supervisor: Supervisor, work: CaseTasks) -> None:
        if work.refused is None:
            self._state.done(work.case, work.device)
            self._ask_again()  # it may have been the last of a batch
        else:
            self._give_up(work, work.refused)

    def read(self, supervisor: Supervisor, case: Case, probe_us: float) -> None:
        assert supervisor.device is not None
        gpu = str(self._supervisors.index(supervisor))
        self._state.row_writer.read(case, self._state.family(case), supervisor.device, gpu, probe_us)

    def retired(self, supervisor: Supervisor, work: CaseTasks | None) -> None:
        self._state.skipped.append(f"GPU {self._supervisors.index(supervisor)}: {supervisor.trouble}")
        if work is not None:
            self._give_up(work, supervisor.trouble)
        self._ask_again()

    def _give_up(self, work: CaseTasks, reason: str) -> None:
        self._state.given_up(work.case, work.device, reason, deadly=work.deaths > 0)
        self._ask_again()

    def _ask_again(self) -> None:
        """There may be something to do again."""
        for supervisor in self._supervisors:
            if supervisor.idle:
                self.idle(supervisor)

    def _compiled(self, binary: Binary, compiled: Compiled) -> None:
        for work in [*self._next.values(), *(supervisor.work for supervisor in self._supervisors)]:
            if work is not None:
                work.compiled(binary, compiled)
        for supervisor in self._supervisors:
            supervisor.proceed()

    def _compile_ahead(self, device: DeviceSpec) -> None:
        """Requests what one of the cases to come will need, behind all that a GPU waits for: it would else find no
        binary."""
        if step := self._state.ahead(device):
            family, problem = self._state.family(step.case), step.case.problem
            for rank, config in enumerate(step.configs):
                if binary := binary_if_able(family, config, problem, device):
                    self._pool.request(binary, AHEAD + rank)

    def _effort(self) -> Effort:
        """Of this phase."""
        began = [supervisor.began for supervisor in self._supervisors if supervisor.began is not None]
        return Effort(
            gpus=len(self._supervisors),
            gpu_s=len(self._supervisors) * (time.monotonic() - min(began)) if began else 0.0,
            busy_s=sum(supervisor.busy_s for supervisor in self._supervisors),
            lost_s=sum(supervisor.lost_s for supervisor in self._supervisors),
            compile_s=self._pool.compile_s - self._spent.compile_s,
        )
