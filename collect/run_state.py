"""The state of a run: which cases there are to do, what is known of them, and what came of them; and the folder that it
writes to."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..datasets import Case, DatasetError, DeviceSpec, ForetuneError, Measurable, Measurement, Problem, roofline_us
from ..datasets.grid import Grid
from ..datasets.store import MANIFEST, continued, read
from ..model.folders import check_dataset_folder
from .case_queue import CaseQueue
from .cases import check_cases
from .compiling import Binary, binary_if_able, kind_of
from .outcomes import Outcomes, earlier
from .plan import Step, named
from .row_writer import Origin, RowWriter

if TYPE_CHECKING:
    from ..datasets.dataset import Dataset


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
    check_dataset_folder(out)
    with continued(out):
        if (Path(out) / MANIFEST).exists() and not resume:
            raise ForetuneError(f"{out} already holds a dataset; resume it, or choose another folder")
        yield


class RunState:
    """One run over some cases. Devices of one name share the cases; each name gets all of them.

    Which configs to try on them is up to the `plan`, one for each family and device. What the dataset in `out` holds
    already counts as known. `clock` gives seconds; after `budget_s` of them no case is handed out any more. `origin`:
    see `RowWriter`. Raises `ForetuneError` where `out` was measured with other kernels, and for a plan that cannot be
    made (see `plan.named`).
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
        origin: Origin | None = None,
    ) -> None:
        check_cases(families, cases)
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
        self.row_writer = RowWriter(out, clock, {"plan": plan} | ({} if share is None else {"share": share}), origin)
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
        """The next case for this device, one of so many `gpus`, rather of a kind that was `met`, with the configs to
        try; None where there is none, or no time. There may be one again when a case is over."""
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
                lambda case: kind_of(self.family(case), case.problem, device),
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

    def outcomes(self, case: Case, device: DeviceSpec) -> Outcomes:
        """What is known of the case on this device: to be kept up to date by whoever measures it."""
        return self._earlier.outcomes.setdefault((device.name, case.problem), Outcomes())

    def uncompilable(self, device: DeviceSpec) -> Iterator[tuple[Binary, str]]:
        """The binaries for this device that an earlier run could not compile, and why."""
        for one in self._earlier.uncompilable:
            if one.device == device.name and one.problem.family in self.families:
                family = self.families[one.problem.family]
                if binary := binary_if_able(family, one.config, one.problem, device):
                    yield binary, one.error

    def is_known(self, step: Step, device: DeviceSpec) -> bool:
        """Whether nothing is left to do."""
        outcomes = self.outcomes(step.case, device)
        return all(config in outcomes.scanned_us for config in step.configs) and not outcomes.unconfirmed()

    def add(self, case: Case, device: DeviceSpec, rows: Sequence[Measurement]) -> None:
        """Takes rows that came about."""
        self.row_writer.add(case, self.family(case), device, rows)

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
