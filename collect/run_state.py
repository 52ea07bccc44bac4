"""The state of a run: which case comes next, what is known of the cases, and the folder that the run writes to."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from ..datasets import Case, DatasetError, DeviceSpec, ForetuneError, Measurable, Problem, roofline_us
from ..datasets.errors import check_path
from ..datasets.grid import Grid
from ..datasets.store import MANIFEST, continued, read
from .case_state import CaseState, earlier
from .cases import check_request
from .compiling import Binary, binary_if_able, signature_of
from .plan import Plan, Step, named
from .row_writer import RowWriter

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..datasets.dataset import Dataset

#: A case may be handed out ahead of so many others, to a GPU whose process has loaded and checked the binaries of its
#: signature: that takes longer than to time them. The first case in the queue waits for no case outside of its window,
#: so a run cut short has still measured all families, to within a few problems.
WINDOW = 32
#: So many cases for each of several GPUs are handed out by how long they are expected to take.
LAST = 4


class CaseQueue:
    """The cases of one device, the families alternating, each as its plan has it.

    A plan is called again when the last case of its batch is over, never earlier: it then knows the same whatever the
    number of GPUs, and a run that goes on after a kill asks for the same. Meanwhile the GPUs that are free measure the
    other families' batches; where there is no other family, they wait.

    Where GPUs share the cases, the last of them go out the longest first: else one begins with a long case when the
    others have nothing left.

    `measured` says what is known of the cases of a family beside these, `cost` how long a case will take, in any unit,
    and `signature` what is the same for cases that share their binaries.
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
        self._queue: list[tuple[int, Step]] = []  # by place
        self._signatures: dict[int, Hashable] = {}  # by place
        self._again: deque[Step] = deque()  # what is to come after all others
        self._out: dict[Case, Step] = {}  # handed out, and not over
        self._queued: Counter[str] = Counter()  # steps so far, by family
        self._open: Counter[str] = Counter()  # steps that are not over, by family
        self._ahead: set[int] = set()  # places that were looked at

    def take(self, met: Collection[Hashable] = (), gpus: int = 1) -> Step | None:
        """Return the next step for one of so many GPUs; None where there is none, or none yet.

        Prefers steps of a signature in `met`, whose binaries the GPU's process has loaded.
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

    def _chosen(self, met: Collection[Hashable], gpus: int) -> tuple[int, Step]:
        window = [entry for entry in self._queue if entry[0] < self._queue[0][0] + WINDOW]
        near = [entry for entry in window if self._signatures[entry[0]] in met] or window
        if gpus == 1 or len(self._queue) > LAST * gpus:
            return near[0]
        return max(near, key=lambda entry: self._cost(entry[1].case))

    def over(self, case: Case) -> None:
        """All that there will be of a case is known."""
        del self._out[case]
        self._open[case.problem.family] -= 1

    def again(self, case: Case) -> None:
        """A case is to be handed out once more, after all others that wait."""
        self._again.append(self._out.pop(case))

    def ahead(self) -> Step | None:
        """The first step that waits and was not looked at yet. Goes by place, not by case: it is called at every
        message, and hundreds of cases with hundreds of ragged sizes take milliseconds to hash."""
        place, step = next((entry for entry in self._queue if entry[0] not in self._ahead), (None, None))
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
                self._queue.append((place, step))
                self._signatures[place] = self._signature(step.case)
                self._queued[name] += 1
            taken = {step.case for step in steps}
            self._todo[name] = [case for case in todo if case not in taken]
            self._open[name] += len(steps)
            self._queue.sort(key=lambda entry: entry[0])


@dataclass(frozen=True)
class Progress:
    """Where a run stands; `eta_s` is None until there is a rate."""

    done: int  # cases
    total: int
    case: Case  # the one begun last
    measurements: int
    rate_per_s: float
    eta_s: float | None

    def __str__(self) -> str:
        """The current problem, the rate, and the time left."""
        eta = "?" if self.eta_s is None else f"{self.eta_s / 60:.0f} min"
        return f"{self.case.problem} · {self.rate_per_s:.0f} configs/s · {eta} left"


@contextmanager
def folder_of_run(out: Path | str, *, resume: bool = True) -> Iterator[None]:
    """The folder in which a run writes its dataset, for it alone while its block goes on (see `store.continued`).

    Raises `ForetuneError` where `out` holds a dataset and `resume` is False, where another run has it, and where no
    dataset can be written there.
    """
    with continued(check_path("out", out)):
        if (Path(out) / MANIFEST).exists() and not resume:
            raise ForetuneError(f"{out} already holds a dataset; resume it, or choose another folder")
        yield


class RunOptions(TypedDict, total=False):
    """Options of a run over some cases."""

    plan: str  # its name, see `plan.named`; "exhaustive" if left out
    known: Dataset | None  # see `plan.named`
    share: float | None  # see `plan.named`
    budget_s: float | None  # seconds after which no case is begun
    on_progress: Callable[[Progress], None]  # called at the beginning of each case


@contextmanager
def started_run(
    families: Sequence[Measurable],
    cases: Sequence[Case],
    out: Path | str,
    *,
    resume: bool = True,
    **options: Unpack[RunOptions],
) -> Iterator[RunState]:
    """Yield the state of a new run, which has the folder `out` for itself while the block goes on.

    Raises:
        ForetuneError: As `folder_of_run` and `RunState` do.
    """
    with folder_of_run(out, resume=resume):
        yield RunState({family.name: family for family in families}, cases, out, **options)


class RunState:
    """One run over some cases. Devices of one name share the cases; each name gets all of them.

    Which configs to try on them is up to the `plan`, one for each family and device. What the dataset in `out` holds
    already counts as known. `clock` gives seconds; after `budget_s` of them no case is handed out any more.

    Raises:
        ForetuneError: `out` was measured with other kernels, a plan cannot be made (see `plan.named`), or as
            `check_request` does.
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_request(families, cases, budget_s)
        self.families, self.out, self.plan = families, Path(out), plan
        self._make_plan = named(plan, known, share)
        self.cases = list({case.problem: case for case in cases}.values())
        self.to_come = 0  # devices that are measured after those that took cases so far
        self.finished = 0  # cases of which all is known
        self.skipped: list[str] = []  # what was not measured, and why
        self._clock, self._on_progress = clock, on_progress
        self._start = clock()
        self._deadline = float("inf") if budget_s is None else self._start + budget_s
        self._earlier = earlier(out, families)
        self.row_writer = RowWriter(out, families, clock, {"plan": plan} | ({} if share is None else {"share": share}))
        self._queues: dict[str, CaseQueue] = {}  # by device name
        self._retried: set[tuple[str, Problem]] = set()
        self._idle = 0  # cases where nothing was left to do

    @property
    def seconds(self) -> float:
        """Since the run began."""
        return self._clock() - self._start

    @property
    def seconds_left(self) -> float:
        """Of the budget; inf where there is none."""
        return self._deadline - self._clock()

    @property
    def time_is_over(self) -> bool:
        return self._clock() > self._deadline

    @property
    def total(self) -> int:
        """The cases of all devices together, as far as devices are known."""
        return len(self.cases) * max(len(self._queues) + self.to_come, 1)

    def take(self, device: DeviceSpec, met: Collection[Hashable] = (), gpus: int = 1) -> Step | None:
        """Return the next case for this device, one of so many `gpus`, with the configs to try.

        Prefers cases of a signature in `met`. None where there is none, or no time; there may be one again when a case
        is over.
        """
        while not self.time_is_over and (step := self._queue(device).take(met, gpus)):
            if (reason := _trouble(step)) is None:
                return step
            self.given_up(step.case, device, reason, deadly=False)
        return None

    def ahead(self, device: DeviceSpec) -> Step | None:
        """One that will be handed out later, each once: there may be something to compile."""
        step = self._queue(device).ahead()
        return None if step is None or _trouble(step) is not None else step

    def _queue(self, device: DeviceSpec) -> CaseQueue:
        if device.name not in self._queues:
            plans = {name: self._make_plan(family, device) for name, family in self.families.items()}
            self._queues[device.name] = CaseQueue(
                self.cases,
                plans,
                partial(self._measured, device),
                lambda case: self._roofline_us(case, device),
                lambda case: signature_of(self.family(case), case.problem, device),
            )
        return self._queues[device.name]

    def _roofline_us(self, case: Case, device: DeviceSpec) -> float:
        """What a case costs at least; 0 where its family fails to say."""
        try:
            return roofline_us(self.family(case), case.problem, device)
        except ForetuneError:
            return 0.0

    def _measured(self, device: DeviceSpec, family: str, todo: Collection[Case]) -> Grid | None:
        """What the dataset has of this family on this device, but for the cases in `todo`. From the disk, because an
        earlier run's rows are there too, and are so the same to the last bit."""
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
        return self.families[case.problem.family]

    def case_state(self, case: Case, device: DeviceSpec) -> CaseState:
        """Return what is known of the case on this device. The caller that measures it keeps it up to date."""
        return self._earlier.states.setdefault((device.name, case.problem), CaseState())

    def uncompilable(self, device: DeviceSpec) -> Iterator[tuple[Binary, str]]:
        """The binaries for this device that an earlier run could not compile, and why."""
        for name, problem, config, error in self._earlier.uncompilable:
            family = self.families.get(problem.family)
            if name == device.name and family and (binary := binary_if_able(family, config, problem, device)):
                yield binary, error

    def is_known(self, step: Step, device: DeviceSpec) -> bool:
        """Whether nothing is left to do."""
        known = self.case_state(step.case, device)
        return all(config in known.scanned_us for config in step.configs) and not known.unconfirmed()

    def done(self, case: Case, device: DeviceSpec, *, was_idle: bool = False) -> None:
        """All of a case is known."""
        self._queue(device).over(case)
        self.finished += 1
        self._idle += was_idle
        self.row_writer.done(case)

    def given_up(self, case: Case, device: DeviceSpec, reason: str, *, deadly: bool) -> None:
        """A case was not measured to its end. A `deadly` one is handed out once more, after all others: was it the
        case, or the GPU? The next one tells."""
        self.row_writer.done(case)
        if deadly and (device.name, case.problem) not in self._retried:
            self._retried.add((device.name, case.problem))
            self._queue(device).again(case)
        else:
            self._queue(device).over(case)
            self.skipped.append(f"{case.problem}: {reason}")

    def report(self, case: Case) -> None:
        """Says where the run stands, at the beginning of a case."""
        measurements = self.row_writer.statuses.total()
        rate = measurements / self.seconds if self.seconds > 0 else 0.0
        done = self.finished + len(self.skipped)
        # Cases that an earlier run measured take no time, so they say nothing of the rest.
        fresh = done - self._idle
        eta_s = self.seconds / fresh * (self.total - done) if fresh > 0 else None
        self._on_progress(Progress(done, self.total, case, measurements, rate, eta_s))


def _trouble(step: Step) -> str | None:
    """Why the configs of a step cannot be chosen; None where they can."""
    try:
        step.configs  # noqa: B018 - chosen when first asked for, and kept
    except ForetuneError as error:
        return str(error)
    return None
