"""What a run did, in figures."""

from __future__ import annotations

from dataclasses import dataclass

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
        """Of two rounds on the same GPUs."""
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

    plan: str  # what said which configs to try
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
