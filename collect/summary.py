"""What a run did, in figures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from ..datasets.console import percent, printable
from .run_state import RunState


@dataclass(frozen=True)
class Effort:
    """What the processes of a run spent, in seconds, those of all GPUs together."""

    gpus: int = 0
    gpu_s: float = 0.0  # since the first task was there
    busy_s: float = 0.0  # of which a GPU had a task at hand
    lost_s: float = 0.0  # on configs that failed or were fatal to their process
    compile_s: float = 0.0

    def __add__(self, later: Effort) -> Effort:
        """Of two phases on the same GPUs."""
        return Effort(
            max(self.gpus, later.gpus),
            self.gpu_s + later.gpu_s,
            self.busy_s + later.busy_s,
            self.lost_s + later.lost_s,
            self.compile_s + later.compile_s,
        )


@dataclass(frozen=True)
class Summary:
    """What a run did."""

    plan: str  # its name: which configs were tried
    cases: int  # of which all is known now, those of earlier runs included
    measurements: int  # of this run
    statuses: dict[str, int]
    seconds: float
    gpus: int
    configs_per_s: float
    gpu_busy_share: float  # of the time since the first config was compiled
    compile_s: float  # of all compiling processes together
    lost_s: float  # to aborts: on configs that failed, or ended their process
    drifted: dict[str, float]  # problems during which the drift probe was slower than usual, and how much
    skipped: tuple[str, ...]  # what was not measured, and why
    complete: bool  # False where the budget or a Ctrl-C came first, or a case was skipped: the same run again goes on
    interrupted: bool

    @classmethod
    def of(cls, state: RunState, effort: Effort, *, interrupted: bool) -> Summary:
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
        )

    def to_json(self) -> dict[str, Any]:
        """What `foretune collect --json` prints."""
        return asdict(self) | {"skipped": list(self.skipped)}

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        return Group(*(Text(printable(line)) for line in self._lines()))

    def _lines(self) -> Iterator[str]:
        statuses = ", ".join(f"{count} {status}" for status, count in self.statuses.items()) or "none"
        yield f"{self.cases} problems in {self.seconds:.0f} s, {self.plan} plan; measurements: {statuses}"
        yield (
            f"{self.configs_per_s:.0f} configs/s; GPUs: {self.gpus}, busy {100 * self.gpu_busy_share:.0f} % of the "
            f"time; {self.compile_s:.0f} s of compiling, {self.lost_s:.0f} s lost to aborts"
        )
        yield from (f"Skipped {what}" for what in self.skipped)
        for problem, slowdown in self.drifted.items():
            yield f"The GPU was up to {percent(slowdown)} % slower than usual during {problem}"
        if self.interrupted:
            yield "Interrupted."
        if not self.complete:
            yield "Some problems are not measured yet: run the same command again to go on."
