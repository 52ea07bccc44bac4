"""What a device is still to measure, and which of it comes next."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence

from ..datasets import Case
from ..datasets.grid import Grid
from .plan import Plan, Step

#: A case may be handed out ahead of so many others that come before it, to a GPU whose process has loaded and checked
#: the binaries of its kind: that takes longer than to time them. The first case in the queue waits for no case outside
#: of its window, so a run cut short has still measured all families, to within a few problems.
WINDOW = 32
#: So many cases for each of several GPUs are handed out by how long they are expected to take.
LAST = 4


class CaseQueue:
    """The cases of one device, the families alternating, each as its plan has it.

    A plan is asked again when the last case of its batch is over, never earlier: it then knows the same whatever the
    number of GPUs, and a run that goes on after a kill asks for the same. Meanwhile the GPUs that are free measure the
    other families' batches; where there is no other family, they wait.

    Where GPUs share the cases, the last of them go out the longest first: else one begins with a long case when the
    others have nothing left.

    `measured` says what is known of the cases of a family beside these, `cost` how long a case will take, in any unit,
    and `kind` what is the same for cases that share their binaries.
    """

    def __init__(
        self,
        cases: Sequence[Case],
        plans: Mapping[str, Plan],
        measured: Callable[[str, Collection[Case]], Grid | None],
        cost: Callable[[Case], float],
        kind: Callable[[Case], Hashable],
    ) -> None:
        self._plans, self._measured, self._cost, self._kind = plans, measured, cost, kind
        self._todo = {name: [case for case in cases if case.problem.family == name] for name in plans}
        self._queue: list[tuple[int, Step]] = []  # by place
        self._kinds: dict[int, Hashable] = {}  # by place
        self._again: deque[Step] = deque()  # what is to come after all others
        self._out: dict[Case, Step] = {}  # handed out, and not over
        self._queued: Counter[str] = Counter()  # steps so far, by family
        self._open: Counter[str] = Counter()  # steps that are not over, by family
        self._ahead: set[int] = set()  # places that were looked at

    def take(self, met: Collection[Hashable] = (), gpus: int = 1) -> Step | None:
        """The next step for one of so many GPUs, rather of a kind that was `met`; None where there is none, or none
        yet."""
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
        near = [entry for entry in window if self._kinds[entry[0]] in met] or window
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
        """The first step that waits and was not looked at yet. Goes by place, not by case: it is asked for at every
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
                self._kinds[place] = self._kind(step.case)
                self._queued[name] += 1
            asked = {step.case for step in steps}
            self._todo[name] = [case for case in todo if case not in asked]
            self._open[name] += len(steps)
            self._queue.sort(key=lambda entry: entry[0])
