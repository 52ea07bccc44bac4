"""A run on this machine: measure the cases on its GPUs, or replay recorded times, and write a dataset.

One process per GPU measures, and a pool of processes compiles for all of them. The parent hands out the cases (a free
GPU gets the next one), writes the rows and restarts processes that die. `case_tasks` has the tasks of one case.
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
from .compiling import Binary, Compiled, CompilePool, binary_if_able
from .processes import Child, Interrupt, ThreadChild, Watch
from .recording import Recording
from .row_writer import prepare
from .run_state import RunState, started_run
from .runner import DeviceLostError
from .summary import Effort, Summary
from .supervisor import Limits, Supervisor
from .worker import CudaGpu, Probe, ReplayGpu, choose_probe, serve

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..datasets.dataset import Dataset
    from .run_state import RunOptions

#: The rank of a binary that no GPU waits for yet: above the rank of any that one waits for.
AHEAD = 1e6
#: How often, in seconds, the parent checks for processes that take too long.
CHECK_SECONDS = 0.25


def collect_on_gpus(
    families: Sequence[Measurable],
    cases: Sequence[Case],
    out: Path | str,
    *,
    gpus: int | None = None,
    sms: Sequence[int] = (),
    compilers: int | None = None,
    resume: bool = True,
    **options: Unpack[RunOptions],
) -> Summary:
    """Measure cases on this machine's GPUs, and append the results to the dataset in `out`.

    What is already in `out` is not measured again. The run stops cleanly when its budget is spent, and at Ctrl-C.

    Args:
        families: The families to measure.
        cases: Problems of these families.
        out: The dataset's folder.
        gpus: How many GPUs to use; by default all that are visible.
        sms: Numbers of SMs to measure on, as devices of their own (see `runtime.sm_partition`). They are measured one
            after the other, because parts of one GPU share its bandwidth and L2.
        compilers: How many processes compile; by default one for each core that no GPU's process uses.
        resume: Whether `out` may hold a dataset already.
        options: See `RunOptions`.

    Raises:
        ForetuneError: An argument is wrong or `out` cannot be continued (see `run_state.started_run`); the machine has
            fewer GPUs or SMs; or all GPUs are lost. The measurements so far are kept, and the same call continues the
            run.

    >>> collect_on_gpus([family], family.cases(), "measured", budget_s=600)  # doctest: +SKIP
    Summary(plan='exhaustive', cases=74, ...)
    """
    if gpus is not None:
        check_integer("gpus", gpus, 1)
    with started_run(families, cases, out, resume=resume, **options) as state, Watch() as watch:
        indices = range(visible_gpus(gpus))
        for index in indices if sms else ():
            check_sms(sms, DeviceSpec.live(index))
        pool = CompilePool(state.families, watch, compilers or max(1, cores() - len(indices)))
        gpu_parts = [[CudaGpu(index, part) for index in indices] for part in sms or (None,)]
        phases = [[partial(Child, serve, gpu, state.families) for gpu in parts] for parts in gpu_parts]
        return Campaign(state, phases, pool, watch).measure()


def collect_replayed(
    families: Sequence[Measurable],
    cases: Sequence[Case] | None,
    out: Path | str,
    recorded: Dataset,
    *,
    resume: bool = True,
    **options: Unpack[RunOptions],
) -> Summary:
    """Replay the times of a dataset as if they were measured now, and append them to the dataset in `out`.

    Everything but the GPU is real: plans, the scan, the confirming passes, the budget and the store. It is for trying
    out and testing, on a CPU, what one does with a new GPU. Each device of `recorded` is replayed.

    Replayed times are never passed off as new ones. The rows have the recorded device, `out` says in its provenance
    (`replay_of`, and a plan that ends in "(replay)") where they come from, a later run that measures does not continue
    it, and it cannot be merged with other datasets. A config without a recorded result gets no row. Of a confirming
    pass every sample is the recorded median, so the spread is 0; compile times and readings of the drift probe are
    not replayed.

    Args:
        families: The families to replay.
        cases: Problems of these families that `recorded` has; all of them if None.
        out: The dataset's folder.
        recorded: The dataset to replay.
        resume: Whether `out` may hold a dataset already, which must be a replay of `recorded`.
        options: See `RunOptions`.

    Raises:
        ForetuneError: An argument is wrong or `out` cannot be continued (see `run_state.started_run`), or `recorded`
            has no times of a family or a case.

    >>> import tempfile
    >>> from foretune.datasets import load
    >>> from foretune.kernels import find_family
    >>> recorded, family = load("h200_rms_norm_rope"), find_family("rms_norm_rope_bwd")
    >>> cases = [case for case in recorded.cases if case.problem.family == family.name][:2]
    >>> with tempfile.TemporaryDirectory() as out:
    ...     summary = collect_replayed([family], cases, out, recorded)
    ...     load(out)  # doctest: +ELLIPSIS
    <Dataset ...: 1 device (NVIDIA H200), 1 family (rms_norm_rope_bwd), 2 problems, 598 rows>
    >>> summary.cases, summary.complete, summary.replay_of
    (2, True, 'h200_rms_norm_rope')
    """
    recording = Recording(recorded, families)
    cases = recording.cases if cases is None else cases
    recording.check_cases(cases)
    with started_run(families, cases, out, resume=resume, recording=recording, **options) as state, Watch() as watch:
        phases = [
            [partial(ThreadChild, serve, ReplayGpu(device, recording.on(device)), state.families)]
            for device in recording.devices
        ]
        return Campaign(state, phases, CompilePool({}, watch, 0), watch).measure()


def visible_gpus(wanted: int | None = None) -> int:
    """Return how many GPUs to use: `wanted`, or all that are visible.

    This makes no CUDA context: the processes that measure make those.

    Raises:
        ForetuneError: Fewer than `wanted` are visible.
    """
    import torch

    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found == 0:
        raise ForetuneError(
            "no GPU is visible here: collecting needs at least one. Recorded times can be replayed without one: "
            "--replay DATA (replay= in Python)"
        )
    if wanted is not None and not 1 <= wanted <= found:
        raise ForetuneError(f"gpus must be between 1 and {found}, which are visible here, but got {wanted}")
    return wanted or found


def check_sms(sms: Sequence[int], device: DeviceSpec) -> None:
    """Raise `ForetuneError` unless each of these numbers of SMs is at least 1 and at most the device's."""
    for number in sms:
        if not 1 <= number <= device.sm_count:
            raise ForetuneError(f"sms must be between 1 and {device.sm_count}, as {device.name} has, but got {number}")


class Campaign:
    """Measures the cases of one run (the problems and their sources) on GPUs of this machine.

    A `Supervisor` for each GPU gives the tasks of one case after another to the process that measures there. `measure`
    may be called once.

    Args:
        state: The run's state.
        phases: For each phase the functions that start the process of one GPU. A phase ends before the next one begins,
            because they may use the same GPUs.
        pool: Compiles for all GPUs.
        watch: Watches all processes.
        limits: When a process that sends nothing is killed.
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
        self._next: dict[Supervisor, CaseTasks] = {}  # prepared while the supervisor is busy
        self._fatal: dict[str, Fatal] = {}  # by device name
        pool.on_finished = self._compiled

    def measure(self) -> Summary:
        """Run all phases, and return what was done.

        Raises:
            DeviceLostError: No GPU is left.
            ForetuneError: The dataset cannot be written.
        """
        with Interrupt() as interrupt:
            try:
                for place, starts in enumerate(self._phases if self._state.cases else (), 1):
                    self._state.to_come = len(self._phases) - place
                    self._run(starts, interrupt)
                    if interrupt.requested or self._state.time_is_over:
                        break
            finally:
                self._state.row_writer.flush()
        if self._state.cases:
            self._state.report(self._state.cases[-1])
        return Summary.of(self._state, self._spent, interrupted=interrupt.requested)

    def _run(self, starts: Sequence[Callable[[], Child]], interrupt: Interrupt) -> None:
        """Run one phase: start a process for each GPU, and measure until no GPU has work left.

        The phase also ends when the budget is spent or the run is interrupted.
        """
        self._supervisors = [Supervisor(start, self._watch, self, self._limits) for start in starts]
        self._pool.start()  # after the supervisors: dozens of processes that import Triton would delay them
        if self._state.recording is None:
            prepare(self._state.families.values())  # while the GPUs are being opened
        next_check = 0.0
        while not (
            all(supervisor.idle or supervisor.retired for supervisor in self._supervisors)  # no GPU has work left
            or self._state.time_is_over
            or interrupt.requested
        ):
            self._watch.handle(CHECK_SECONDS)
            if (now := time.monotonic()) > next_check:
                next_check = now + CHECK_SECONDS
                self._pool.check()
                for supervisor in self._supervisors:
                    supervisor.check()
            # What takes milliseconds is done here, after each GPU got its next tasks.
            self._state.row_writer.flush_due()
            self._plan()
        self._spent += self._effort()
        if all(supervisor.retired for supervisor in self._supervisors):
            raise DeviceLostError(
                f"no GPU is left to measure on: {self._supervisors[0].trouble}. What was measured is kept in "
                f"{self._state.out}: run the same command again to continue"
            )
        for supervisor in self._supervisors:
            supervisor.close()

    def _plan(self) -> None:
        """Prepare the next case of each busy GPU, and request the compilation of later cases if the pool has room."""
        for supervisor in self._supervisors:
            if supervisor.work and supervisor not in self._next and (work := self._work(supervisor)):
                self._next[supervisor] = work
        if self._pool.is_hungry:
            for device in {
                supervisor.device.name: supervisor.device for supervisor in self._supervisors if supervisor.device
            }.values():
                self._compile_ahead(device)

    def _work(self, supervisor: Supervisor) -> CaseTasks | None:
        """Return the tasks of the next case for a supervisor's GPU; None if there is none, or none yet.

        Cases that are complete already are skipped.
        """
        state, device = self._state, supervisor.device
        assert device is not None
        while step := state.take(device, supervisor.met, len(self._supervisors)):
            case = step.case
            work = CaseTasks(
                state.family(case),
                case,
                device,
                step.configs,
                state.case_state(case, device),
                self._pool,
                partial(state.row_writer.add, case, device),
                self._probes[device.name],
                self._fatal.setdefault(device.name, {}),
                is_replay=state.recording is not None,
            )
            if not work.over:
                return work
            state.done(case, device, was_idle=True)
        return None

    def _left(self, device: DeviceSpec) -> CaseTasks | None:
        """Take away and return the tasks of a case prepared for another GPU of the same name; None if there is none.

        It is called when no other case is left.
        """
        owner = next((supervisor for supervisor, work in self._next.items() if work.device.name == device.name), None)
        return None if owner is None else self._next.pop(owner)

    # The methods of `supervisor.Owner`.

    def idle(self, supervisor: Supervisor) -> None:
        """Give the supervisor of an idle GPU its next case, if there is one."""
        device, state = supervisor.device, self._state
        assert device is not None
        is_new = device.name not in self._probes
        if is_new:
            self._probes[device.name] = None if state.recording else choose_probe(state.families, state.cases, device)
            for binary, error in state.uncompilable(device):
                self._pool.know(binary, Compiled(0.0, error))
        work = self._next.pop(supervisor, None) or self._work(supervisor) or self._left(device)
        if work is not None:
            state.report(work.case)
            supervisor.give(work)

    def done(self, supervisor: Supervisor, work: CaseTasks) -> None:
        """Record that the case of `work` is complete or given up, and give idle GPUs cases that had to wait for it."""
        if work.refused is None:
            self._state.done(work.case, work.device)
            self._wake_idle()  # the last case of a batch may be over
        else:
            self._give_up(work, work.refused)

    def read(self, supervisor: Supervisor, case: Case, probe_us: float) -> None:
        """Store a time of the drift probe, in microseconds, that was taken during `case`.

        The drift probe is a launch that is repeated to see whether the GPU gets slower.
        """
        assert supervisor.device is not None
        gpu = str(self._supervisors.index(supervisor))
        self._state.row_writer.read(case, supervisor.device, gpu, probe_us)

    def retired(self, supervisor: Supervisor, work: CaseTasks | None) -> None:
        """Record that the supervisor's GPU is no longer used, and give up the unfinished case of `work`, if any."""
        self._state.skipped.append(f"GPU {self._supervisors.index(supervisor)}: {supervisor.trouble}")
        if work is not None:
            self._give_up(work, supervisor.trouble)
        self._wake_idle()

    def _give_up(self, work: CaseTasks, reason: str) -> None:
        self._state.given_up(work.case, work.device, reason, deadly=work.deaths > 0)
        self._wake_idle()

    def _wake_idle(self) -> None:
        """Give idle GPUs their next cases; called when new ones may have become available."""
        for supervisor in self._supervisors:
            if supervisor.idle:
                self.idle(supervisor)

    def _compiled(self, binary: Binary, compiled: Compiled) -> None:
        """Pass the result of compiling a binary on to the cases that wait for it."""
        for work in [*self._next.values(), *(supervisor.work for supervisor in self._supervisors)]:
            if work is not None:
                work.compiled(binary, compiled)
        for supervisor in self._supervisors:
            supervisor.proceed()

    def _compile_ahead(self, device: DeviceSpec) -> None:
        """Request the compilation of a later case's binaries, at a lower priority than those that a GPU waits for."""
        if step := self._state.ahead(device):
            family, problem = self._state.family(step.case), step.case.problem
            for rank, config in enumerate(step.configs):
                if binary := binary_if_able(family, config, problem, device):
                    self._pool.request(binary, AHEAD + rank)

    def _effort(self) -> Effort:
        """Return the GPU and compile time that the current phase has taken so far."""
        began = [supervisor.began for supervisor in self._supervisors if supervisor.began is not None]
        return Effort(
            gpus=len(self._supervisors),
            gpu_s=len(self._supervisors) * (time.monotonic() - min(began)) if began else 0.0,
            busy_s=sum(supervisor.busy_s for supervisor in self._supervisors),
            lost_s=sum(supervisor.lost_s for supervisor in self._supervisors),
            compile_s=self._pool.compile_s - self._spent.compile_s,
        )
