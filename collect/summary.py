"""`Summary`: what a run did, in figures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, astuple, dataclass
from typing import Any

from ..datasets import Status
from ..datasets.console import percent, printable
from .run_state import RunState


@dataclass(frozen=True)
class Effort:
    """The time that the processes of a run took, in seconds, summed over GPUs or processes.

    Attributes:
        gpus: How many GPUs were used.
        gpu_s: The time since the first task was sent, summed over the GPUs.
        busy_s: The part of `gpu_s` that the GPUs spent on tasks.
        lost_s: The part of `busy_s` for configs that failed or ended their process.
        compile_s: The time of all compiling processes.
    """

    gpus: int = 0
    gpu_s: float = 0.0
    busy_s: float = 0.0
    lost_s: float = 0.0
    compile_s: float = 0.0

    def __add__(self, later: Effort) -> Effort:
        """Return the sum of this effort and that of a later phase on the same GPUs."""
        times = zip(astuple(self)[1:], astuple(later)[1:], strict=True)
        return Effort(max(self.gpus, later.gpus), *map(sum, times))


@dataclass(frozen=True)
class Summary:
    """The result of a run, in figures.

    Attributes:
        plan: The name of the plan, which decided which configs were tried.
        cases: How many cases are complete now, including those of earlier runs.
        measurements: How many rows this run has.
        statuses: How many of them have each status.
        seconds: How long the run took.
        gpus: How many GPUs were used; in a replay, how many devices were replayed at once.
        configs_per_s: Rows per second.
        gpu_busy_share: The share of time that the GPUs worked, since the first config was compiled.
        compile_s: Seconds in all compiling processes together.
        lost_s: Seconds for configs that failed or ended their process.
        drifted: Problems during which the drift probe was slower than usual, with the slowdown.
        skipped: What was not measured, with the reason.
        complete: False if the budget was spent, the run was interrupted or a case was skipped; the same call then
            continues the run.
        interrupted: Whether Ctrl-C or SIGTERM ended the run.
        replay_of: The dataset whose times were replayed, by its name or folder; None if a GPU measured.
    """

    plan: str
    cases: int
    measurements: int
    statuses: dict[str, int]
    seconds: float
    gpus: int
    configs_per_s: float
    gpu_busy_share: float
    compile_s: float
    lost_s: float
    drifted: dict[str, float]
    skipped: tuple[str, ...]
    complete: bool
    interrupted: bool
    replay_of: str | None = None

    @classmethod
    def of(cls, state: RunState, effort: Effort, *, interrupted: bool) -> Summary:
        """Return the summary of a run that has ended, from its final state and the time of its processes (`effort`)."""
        seconds, measurements = state.seconds, state.row_writer.statuses.total()
        return cls(
            plan=state.plan,
            cases=state.finished,
            measurements=measurements,
            statuses=dict(state.row_writer.statuses),
            seconds=seconds,
            gpus=effort.gpus,
            configs_per_s=measurements / seconds if seconds > 0 else 0.0,
            gpu_busy_share=effort.busy_s / effort.gpu_s if effort.gpu_s > 0 else 0.0,
            compile_s=effort.compile_s,
            lost_s=effort.lost_s,
            drifted=state.row_writer.drifted(),
            skipped=tuple(state.skipped),
            complete=state.finished == state.total,
            interrupted=interrupted,
            replay_of=None if state.recording is None else state.recording.label,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the attributes as a dict for `json.dumps`, as `foretune collect --json` prints them."""
        return asdict(self) | {"skipped": list(self.skipped)}

    def __rich__(self) -> Any:
        """Return the figures as lines of text for `rich.print`, as `foretune collect` prints them."""
        from rich.console import Group
        from rich.text import Text

        return Group(*(Text(printable(line)) for line in self._lines()))

    def _lines(self) -> Iterator[str]:
        statuses = ", ".join(f"{count} {Status(name).text}" for name, count in self.statuses.items()) or "none"
        yield f"{self.cases} problems in {self.seconds:.0f} s, {self.plan} plan; measurements: {statuses}"
        if self.replay_of is not None:
            yield f"The times were replayed from {self.replay_of}: no GPU was used, and they are no new measurements."
        else:
            yield (
                f"{self.configs_per_s:.0f} configs/s; GPUs: {self.gpus}, busy {100 * self.gpu_busy_share:.0f} % of "
                f"the time; {self.compile_s:.0f} s of compiling, {self.lost_s:.0f} s lost to aborts"
            )
        yield from (f"Skipped {what}" for what in self.skipped)
        for problem, slowdown in self.drifted.items():
            yield f"The GPU was up to {percent(slowdown)} % slower than usual during {problem}"
        if self.interrupted:
            yield "Interrupted."
        if not self.complete:
            yield "Some problems are not measured yet: run the same command again to continue."
