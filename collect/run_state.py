"""The state of a run: the queue of cases, the measurements so far, and the folder that the run writes to."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from ..datasets import Case, DatasetError, DeviceSpec, ForetuneError, Measurable, Problem, roofline_us
from ..datasets.errors import check_path
from ..datasets.grid import Grid
from ..datasets.progress import in_words
from ..datasets.store import MANIFEST, continued, read
from ..model import EstimateRanker
from .cases import CaseState, check_request, earlier
from .compiling import Binary, binary_if_able, signature_of
from .plan import Plan, Step, named
from .recording import RecordedPlan, Recording
from .row_writer import RowWriter

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..datasets.dataset import Dataset

#: How many cases from the front of the queue a GPU may choose from, and are compiled ahead. A GPU prefers a case whose
#: signature it has met, because loading and checking binaries takes longer than timing them. The limit keeps the
#: families in step, so that a run that is stopped early has measured about as many cases of each.
WINDOW = 32
#: With several GPUs, this many cases for each of them at the end of the queue are handed out longest first.
LAST = 4


class CaseQueue:
    """The queue of cases of one device, which takes them from each family's plan in turn.

    A plan is called again when the last case of its batch is over, and not earlier. It then sees the same measurements
    for any number of GPUs, and in a run that was killed and continued. Meanwhile, free GPUs measure other families'
    batches; if there is no other family, they wait.

    If several GPUs share the cases, the last cases are handed out longest first, so that no GPU starts a long case when
    the others have nothing left to do.

    Args:
        cases: The cases of all families.
        plans: The plan of each family, by name.
        measured: Returns what is measured of a family, except for the given cases.
        cost: Returns how long a case will take, in any unit.
        signature: Returns a value that is equal for cases that share their binaries.
    """

    def __init__(
        self,
        cases: Sequence[Case],
        plans: Mapping[str, Plan],
        measured: Callable[[str, Collection[Case]], Grid | None],
        cost: Callable[[Case], float],
        signature: Callable[[Case], Hashable],
    ) -> None:
        self._plans, self._measured, self._cost, self._signature = plans, measured, cost, signature
        self._todo = {name: [case for case in cases if case.problem.family == name] for name in plans}
        self._queue: list[tuple[int, Step, Hashable]] = []  # (place, step, signature)
        self._again: deque[Step] = deque()  # to be handed out after all others
        self._out: dict[Case, Step] = {}  # handed out and not over
        self._queued: Counter[str] = Counter()  # steps so far, by family
        self._open: Counter[str] = Counter()  # steps that are not over, by family
        self._ahead: set[int] = set()  # places that `ahead` has returned

    def take(self, met: Collection[Hashable] = (), gpus: int = 1) -> Step | None:
        """Return the next step, or None if there is none, or none yet.

        Args:
            met: Signatures whose binaries the GPU's process has loaded. Their steps are preferred.
            gpus: How many GPUs share the cases.
        """
        self._refill()
        if self._queue:
            entry = self._chosen(met, gpus)
            self._queue.remove(entry)
            step = entry[1]
        elif self._again:
            step = self._again.popleft()
        else:
            return None
        self._out[step.case] = step
        return step

    def _chosen(self, met: Collection[Hashable], gpus: int) -> tuple[int, Step, Hashable]:
        window = self._window()
        near = [entry for entry in window if entry[2] in met] or window
        if gpus == 1 or len(self._queue) > LAST * gpus:
            return near[0]
        return max(near, key=lambda entry: self._cost(entry[1].case))

    def _window(self) -> list[tuple[int, Step, Hashable]]:
        """Return the entries at the front of the queue, whose places are less than `WINDOW` behind the first one's."""
        return list(takewhile(lambda entry: entry[0] < self._queue[0][0] + WINDOW, self._queue))

    def over(self, case: Case) -> None:
        """Record that a case is complete or given up, so that its plan can choose the next batch."""
        del self._out[case]
        self._open[case.problem.family] -= 1

    def again(self, case: Case) -> None:
        """Put a case that was handed out back in the queue, behind all others."""
        self._again.append(self._out.pop(case))

    def ahead(self) -> Step | None:
        """Return a step near the front of the queue that this method has not returned before, or None.

        It stays in the queue. No others are considered, because the caller chooses a step's configs, which takes
        milliseconds in the process that also sends the GPUs their tasks. Returned steps are remembered by their place
        in the queue and not by their case: the method is called for every message, and hashing hundreds of cases with
        hundreds of ragged sizes takes milliseconds.
        """
        place, step = next((entry[:2] for entry in self._window() if entry[0] not in self._ahead), (None, None))
        if place is not None:
            self._ahead.add(place)
        return step

    def _refill(self) -> None:
        for which, (name, plan) in enumerate(self._plans.items()):
            todo = self._todo[name]
            if self._open[name] or not todo:
                continue
            steps = plan.next(todo, self._measured(name, todo) if plan.learns else None)
            for step in steps:
                place = self._queued[name] * len(self._plans) + which
                self._queue.append((place, step, self._signature(step.case)))
                self._queued[name] += 1
            taken = {step.case for step in steps}
            self._todo[name] = [case for case in todo if case not in taken]
            self._open[name] += len(steps)
            self._queue.sort(key=lambda entry: entry[0])


@dataclass(frozen=True)
class Progress:
    """The progress of a run.

    Attributes:
        done: How many cases are over.
        total: How many cases there are, on all devices.
        case: The case that was started last.
        measurements: How many rows this run has.
        rate_per_s: Rows per second.
        eta_s: How many seconds are left; None while no case is over.
    """

    done: int
    total: int
    case: Case
    measurements: int
    rate_per_s: float
    eta_s: float | None

    def __str__(self) -> str:
        """Return the current problem, the rate and the time left."""
        eta = "?" if self.eta_s is None else in_words(self.eta_s)
        return f"{self.case.problem} · {self.rate_per_s:.0f} configs/s · {eta} left"


@contextmanager
def folder_of_run(out: Path | str, *, resume: bool = True) -> Iterator[None]:
    """Lock the folder of a run's dataset while the `with` block lasts: see `store.continued`.

    Args:
        out: The folder.
        resume: Whether it may hold a dataset already.

    Raises:
        ForetuneError: It holds a dataset and `resume` is False, another run has locked it, or it cannot be written.
    """
    with continued(check_path("out", out)):
        if (Path(out) / MANIFEST).exists() and not resume:
            raise ForetuneError(f"{out} already holds a dataset: continue it (resume), or choose another folder")
        yield


class RunOptions(TypedDict, total=False):
    """Options of a run.

    Attributes:
        plan: The name of the plan; "exhaustive" by default. See `plan.named`, also for `known` and `share`.
        known: The dataset that the plan "missing" or "outdated" adds to.
        share: The share of each problem's configs that the plan tries.
        budget_s: After this many seconds no case is started.
        on_progress: Called at the start of each case.
    """

    plan: str
    known: Dataset | None
    share: float | None
    budget_s: float | None
    on_progress: Callable[[Progress], None]


@contextmanager
def started_run(
    families: Sequence[Measurable],
    cases: Sequence[Case],
    out: Path | str,
    *,
    resume: bool = True,
    recording: Recording | None = None,
    **options: Unpack[RunOptions],
) -> Iterator[RunState]:
    """Yield the state of a new run, and lock the folder `out` while the `with` block lasts.

    The arguments are those of `RunState`, except `resume`: whether `out` may hold a dataset already.

    Raises:
        ForetuneError: A family, a case or an option is not valid; or `out` cannot be written, is locked by another run,
            or holds a dataset that this run may not continue (`resume` is False, or the kernels have changed).
    """
    with folder_of_run(out, resume=resume):
        yield RunState({family.name: family for family in families}, cases, out, recording=recording, **options)


class RunState:
    """The state of one run. GPUs of one name share the cases; each name measures all cases.

    What the dataset in `out` holds already is not measured again.

    Args:
        families: The families by name.
        cases: Problems of these families.
        out: The dataset's folder.
        recording: The measurements to replay; None to measure.
        clock: Returns the time in seconds.
        plan: See `RunOptions`, also for the other arguments.

    Raises:
        ForetuneError: `out` was measured with other kernels, or has replayed times and this run measures, or the other
            way round; a plan cannot be made (see `plan.named`); or a family, a case or the budget is not valid.
    """

    def __init__(
        self,
        families: Mapping[str, Measurable],
        cases: Sequence[Case],
        out: Path | str,
        *,
        plan: str = "exhaustive",
        known: Dataset | None = None,
        share: float | None = None,
        budget_s: float | None = None,
        on_progress: Callable[[Progress], None] = lambda progress: None,
        recording: Recording | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_request(families, cases, budget_s)
        self.families, self.out, self.plan = families, Path(out), plan
        self._make_plan = named(plan, known, share)
        self.cases = list({case.problem: case for case in cases}.values())
        self.recording = recording
        self.to_come = 0  # devices that are measured after those that took cases so far
        self.finished = 0  # how many cases are complete
        self.skipped: list[str] = []  # what was not measured, with the reason
        self._clock, self._on_progress = clock, on_progress
        self._start = clock()
        self._deadline = float("inf") if budget_s is None else self._start + budget_s
        self._earlier = earlier(out, families, recording)
        noted: dict[str, Any] = {"plan": plan if recording is None else f"{plan} (replay)"}
        noted |= {} if share is None else {"share": share}
        self.row_writer = RowWriter(out, families, clock, noted)
        if recording is not None:
            self.row_writer.origin = recording.provenance
        self._queues: dict[str, CaseQueue] = {}  # by device name
        self._retried: set[tuple[str, Problem]] = set()
        self._idle = 0  # how many cases had nothing left to do

    @property
    def seconds(self) -> float:
        """Seconds since the run began."""
        return self._clock() - self._start

    @property
    def seconds_left(self) -> float:
        """Seconds of the budget that are left; inf without a budget."""
        return self._deadline - self._clock()

    @property
    def time_is_over(self) -> bool:
        """Whether the budget is spent."""
        return self._clock() > self._deadline

    @property
    def total(self) -> int:
        """The number of cases that this run measures: each case counts once for each device known so far."""
        return len(self.cases) * max(len(self._queues) + self.to_come, 1)

    def take(self, device: DeviceSpec, met: Collection[Hashable] = (), gpus: int = 1) -> Step | None:
        """Return the next case for a device, with the configs to try.

        Args:
            device: The device.
            met: Signatures whose binaries the GPU's process has loaded. Their cases are preferred.
            gpus: How many GPUs share the device's cases.

        Returns:
            The step; None if there is none, none yet, or the budget is spent. Call again after a case is over.
        """
        while not self.time_is_over and (step := self._queue(device).take(met, gpus)):
            if (reason := _trouble(step)) is None:
                return step
            self.given_up(step.case, device, reason, deadly=False)
        return None

    def ahead(self, device: DeviceSpec) -> Step | None:
        """Return a step that `take` will return later, so that its configs can be compiled now; None if there is none.

        Each step is returned only once, and only shortly before its turn.
        """
        step = self._queue(device).ahead()
        return None if step is None or _trouble(step) is not None else step

    def _queue(self, device: DeviceSpec) -> CaseQueue:
        if device.name not in self._queues:
            plans = {name: self._plan(family, device) for name, family in self.families.items()}
            self._queues[device.name] = CaseQueue(
                self.cases,
                plans,
                partial(self._measured, device),
                lambda case: self._roofline_us(case, device),
                lambda case: signature_of(self.family(case), case.problem, device),
            )
        return self._queues[device.name]

    def _plan(self, family: Measurable, device: DeviceSpec) -> Plan:
        """Return the plan of a family on a device.

        In a replay the prior is the family's estimate: the shipped bundle may have learned from the recorded times.
        """
        if self.recording is None:
            return self._make_plan(family, device)
        return RecordedPlan(self._make_plan(family, device, prior=EstimateRanker()), self.recording, device)

    def _roofline_us(self, case: Case, device: DeviceSpec) -> float:
        """Return the roofline time of a case in microseconds; 0 if its family fails to compute it."""
        try:
            return roofline_us(self.family(case), case.problem, device)
        except ForetuneError:
            return 0.0

    def _measured(self, device: DeviceSpec, family: str, todo: Collection[Case]) -> Grid | None:
        """Return the measurements of a family on a device, except those of the cases in `todo`; None if there are none.

        They are read from the disk, so that rows of this run and of earlier ones are rounded in the same way.
        """
        self.row_writer.flush()
        if not (self.out / MANIFEST).exists():
            return None
        try:
            grid = read(self.out).grid(family)
        except DatasetError:  # it has nothing of it
            return None
        left = {case.problem for case in todo}
        places = enumerate(zip(grid.cases, grid.devices, strict=True))
        rows = [row for row, (case, spec) in places if spec.name == device.name and case.problem not in left]
        return grid.select(rows) if rows else None

    def family(self, case: Case) -> Measurable:
        """Return the family of a case."""
        return self.families[case.problem.family]

    def case_state(self, case: Case, device: DeviceSpec) -> CaseState:
        """Return the measurements of a case on a device. The caller that measures the case adds to them."""
        return self._earlier.states.setdefault((device.name, case.problem), CaseState())

    def uncompilable(self, device: DeviceSpec) -> Iterator[tuple[Binary, str]]:
        """Yield the binaries for a device that an earlier run could not compile, with the error."""
        for name, problem, config, error in self._earlier.uncompilable:
            family = self.families.get(problem.family)
            if name == device.name and family and (binary := binary_if_able(family, config, problem, device)):
                yield binary, error

    def is_known(self, step: Step, device: DeviceSpec) -> bool:
        """Return whether a step has nothing left to measure: all configs are scanned, and leading ones confirmed."""
        known = self.case_state(step.case, device)
        return all(config in known.scanned_us for config in step.configs) and not known.unconfirmed()

    def done(self, case: Case, device: DeviceSpec, *, was_idle: bool = False) -> None:
        """Record that a case is complete.

        Args:
            case: The case.
            device: The device.
            was_idle: Whether it was complete already, so that nothing had to be measured.
        """
        self._queue(device).over(case)
        self.finished += 1
        self._idle += was_idle
        self.row_writer.done(case)

    def given_up(self, case: Case, device: DeviceSpec, reason: str, *, deadly: bool) -> None:
        """Record that a case was given up, for this reason.

        A `deadly` case, at which processes died, is handed out once more after all others, because the GPU and not the
        case may have been the cause.
        """
        self.row_writer.done(case)
        if deadly and (device.name, case.problem) not in self._retried:
            self._retried.add((device.name, case.problem))
            self._queue(device).again(case)
        else:
            self._queue(device).over(case)
            self.skipped.append(f"{case.problem}: {reason}")

    def report(self, case: Case) -> None:
        """Call `on_progress` with the progress of the run, at the start of a case."""
        measurements = self.row_writer.statuses.total()
        rate = measurements / self.seconds if self.seconds > 0 else 0.0
        done = self.finished + len(self.skipped)
        # Cases that an earlier run measured take no time, so they are left out of the estimate.
        fresh = done - self._idle
        eta_s = self.seconds / fresh * (self.total - done) if fresh > 0 else None
        self._on_progress(Progress(done, self.total, case, measurements, rate, eta_s))


def _trouble(step: Step) -> str | None:
    """Return the message of the error that a plan raises while it chooses a step's configs; None if it raises none."""
    try:
        step.configs  # noqa: B018 - chosen at the first access, and kept
    except ForetuneError as error:
        return str(error)
    return None
