"""The book of a run: which cases there are to do, what is known of them, and what came of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..datasets import Case, DeviceSpec, Family, KernelConfig, Measurement, Problem
from .compiling import Binary
from .known import Known, earlier
from .measuring import Kind, kind
from .promise import by_promise
from .recorder import Origin, Recorder

#: A case may be handed out ahead of so many others that come before it, to a GPU whose process has loaded and checked
#: the binaries of its kind: that takes longer than to time them. Four GPUs that measure the 516 problems of three
#: families do it 25 times instead of 62; more of a window would save no more. The first case in the queue waits for no
#: case outside of its window, so a run cut short has still measured all families, to within a few problems.
WINDOW = 32


@dataclass(frozen=True)
class Progress:
    """Where a run stands; `eta_s` is None until there is a rate."""

    done: int  # cases
    total: int
    case: Case  # the one begun last
    measurements: int
    rate_per_s: float
    eta_s: float | None


class Ledger:
    """One run over some cases. Devices of one name share the cases; each name gets all of them.

    What the dataset in `out` holds already counts as known. `clock` gives seconds; after `budget_s` of them no case is
    handed out any more. `origin`: see `Recorder`. Raises `ForetuneError` where `out` was measured with other kernels.
    """

    def __init__(
        self,
        families: Mapping[str, Family],
        cases: Sequence[Case],
        out: Path | str,
        *,
        budget_s: float | None = None,
        on_progress: Callable[[Progress], None] = lambda progress: None,
        clock: Callable[[], float] = time.monotonic,
        origin: Origin | None = None,
    ) -> None:
        self.families, self.out = families, Path(out)
        self.cases = list({case.problem: case for case in cases}.values())
        self.to_come = 0  # devices that are measured after those that took cases so far
        self.finished = 0  # cases of which all is known
        self.skipped: list[str] = []  # what was not measured, and why
        self._clock, self._on_progress = clock, on_progress
        self._start = clock()
        self._deadline = float("inf") if budget_s is None else self._start + budget_s
        self._earlier = earlier(out, families)
        self.recorder = Recorder(out, clock, origin)
        self._queues: dict[str, list[tuple[int, Case]]] = {}  # places and cases, by device name
        self._spaces: dict[tuple[str, str], tuple[KernelConfig, ...]] = {}  # by family and device name
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

    def take(self, device: DeviceSpec, met: Collection[Kind] = ()) -> Case | None:
        """The next case for this device, if may be of a kind that was `met`; None where there is none, or no time."""
        queue = self._queues.setdefault(device.name, list(enumerate(self.cases)))
        if not queue or self.time_is_over:
            return None
        first, _ = queue[0]
        near = (entry for entry in queue if entry[0] < first + WINDOW and kind(entry[1].problem) in met)
        entry = next(near, queue[0])
        queue.remove(entry)
        return entry[1]

    def family(self, case: Case) -> Family:
        return self.families[case.problem.family]

    def known(self, case: Case, device: DeviceSpec) -> Known:
        """What is known of the case on this device: to be kept up to date by whoever measures it."""
        return self._earlier.known.setdefault((device.name, case.problem), Known())

    def uncompilable(self, device: DeviceSpec) -> Iterator[tuple[Binary, str]]:
        """The binaries for this device that an earlier run could not compile, and why."""
        for one in self._earlier.uncompilable:
            if one.device == device.name and one.problem.family in self.families:
                yield Binary.of(self.families[one.problem.family], one.config, one.problem, device), one.error

    def is_known(self, case: Case, device: DeviceSpec) -> bool:
        """Whether nothing is left to do."""
        known = self.known(case, device)
        return all(config in known.scanned_us for config in self._space(case, device)) and not known.unconfirmed()

    def by_promise(self, case: Case, device: DeviceSpec) -> list[KernelConfig]:
        """The device's space, in the order to scan it for this case."""
        return by_promise(self.family(case), case.problem, device, self._space(case, device))

    def _space(self, case: Case, device: DeviceSpec) -> tuple[KernelConfig, ...]:
        family = self.family(case)
        if (family.name, device.name) not in self._spaces:
            self._spaces[family.name, device.name] = family.space(device)
        return self._spaces[family.name, device.name]

    def add(self, case: Case, device: DeviceSpec, rows: Sequence[Measurement]) -> None:
        """Takes rows that came about."""
        self.recorder.add(case, self.family(case), device, rows)

    def done(self, case: Case, *, was_idle: bool = False) -> None:
        """All of a case is known."""
        self.finished += 1
        self._idle += was_idle
        self.recorder.done(case)

    def given_up(self, case: Case, device: DeviceSpec, reason: str, *, deadly: bool) -> None:
        """A case was not measured to its end. A `deadly` one is handed out once more, after all others: was it the
        case, or the GPU? The next one tells."""
        self.recorder.done(case)
        if deadly and (device.name, case.problem) not in self._retried:
            self._retried.add((device.name, case.problem))
            last = len(self.cases) + len(self._retried) * WINDOW  # in no other case's window
            self._queues[device.name].append((last, case))
        else:
            self.skipped.append(f"{case.problem}: {reason}")

    def report(self, case: Case) -> None:
        """Says where the run stands, at the beginning of a case."""
        measurements = self.recorder.statuses.total()
        rate = measurements / self.seconds if self.seconds > 0 else 0.0
        done = self.finished + len(self.skipped)
        # Cases that an earlier run measured take no time, so they say nothing of the rest.
        fresh = done - self._idle
        eta_s = self.seconds / fresh * (self.total - done) if fresh > 0 else None
        self._on_progress(Progress(done, self.total, case, measurements, rate, eta_s))
