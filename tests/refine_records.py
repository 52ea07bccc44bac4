"""What `refine_on_gpu.py` keeps of a refinement, to explain a miss: its calls, its plans and its predictions."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from foretune.runtime.tuning import known_times
from foretune.runtime.tuning.refine import calls, refinement
from foretune.runtime.tuning.refine.race import Race

#: An item for each time that a refinement planned.
planned: list[int] = []


class HostClock:
    """A stopwatch for a machine without a GPU, where launches have ended when they return."""

    def __init__(self) -> None:
        self.ended: list[tuple[Any, float]] = []

    def begin(self) -> float:
        return time.perf_counter()

    def end(self, mark: float, about: Any) -> None:
        self.ended.append((about, 1e6 * (time.perf_counter() - mark)))

    def cancel(self, mark: float) -> None:
        pass

    def read(self) -> Any:
        while self.ended:
            yield self.ended.pop(0)


class Recorded:
    """A stopwatch that keeps the config of each timed call and, once it is read, its time, in the order of calls."""

    def __init__(self, watch: Any) -> None:
        self.watch, self.configs, self.times = watch, [], []
        self.begin, self.cancel = watch.begin, watch.cancel

    def end(self, mark: Any, about: Any) -> None:
        self.configs.append(about[0])
        self.watch.end(mark, about)

    def read(self) -> Any:
        for about, time_us in self.watch.read():
            self.times.append(round(time_us, 2))
            yield about, time_us


class PredictedRace(Race):
    """A race that keeps what was predicted."""

    def __init__(self, slowdowns: Sequence[float], **limit: float) -> None:
        super().__init__(slowdowns, **limit)
        self.predicted = list(slowdowns)


def record() -> None:
    """Let all refinements from now on keep their calls and predictions."""
    timed = calls.stopwatch if torch.cuda.is_available() else HostClock
    calls.stopwatch = known_times.stopwatch = lambda: Recorded(timed())
    refinement.Race = PredictedRace
    review = refinement.Refinement._review
    refinement.Refinement._review = lambda self, *given: (planned.append(1), review(self, *given))[1]


def explained(chooses: refinement.Refinement[Any], means: dict[Any, float]) -> dict[str, Any]:
    """What a refinement saw and decided, next to the times of its candidates that were measured side by side."""
    race, watch = chooses.race, chooses._watch
    first = chooses.candidates[0]
    candidates = []
    for at, config in enumerate(chooses.candidates):
        estimated, deviation = race.slowdown(at)
        candidates.append(
            {
                "config": str(config),
                "predicted": round(race.predicted[at], 4),
                "estimated": round(estimated, 4),
                "deviation": round(deviation, 4),
                "measured": round(means[config] / means[first], 4) if config in means else None,
                "calls": int(race.calls[at]),
                "timed": int(race.seen[at]),
                "alive": bool(race.alive[at]),
                "joined": at in chooses._joined,
            }
        )
    state = "undecided" if chooses.final is None else f"decided on {chooses.candidates.index(chooses.final)}"
    return {
        "kernel": chooses.name,
        "problem": str(chooses.problem),
        "why": f"{state}, the best now is {race.best}, {race._since_joined} calls since the last one joined",
        "noise": round(math.sqrt(race._noise), 4),
        "estimated_cost": round(race.cost(), 4),
        "candidates": candidates,
        "order": watch.configs,
        "times_us": watch.times,
    }


def events_us(many: int) -> float:
    """The host time to time a call with two events, without what `Refinement` does."""
    watch = calls.stopwatch()
    began = time.perf_counter()
    for _ in range(many):
        watch.end(watch.begin(), (0, 1.0))
    took = 1e6 * (time.perf_counter() - began) / many
    time.sleep(0.01)
    list(watch.read())
    return took


def settle(chooses: refinement.Refinement[Any]) -> None:
    """Wait for compiles and times, so that 200 calls are not over before there is anything to compare.

    It waits for the device only before a call that plans, which is not timed, because the device is idle then.
    """
    while any(not job.done() for jobs in list(chooses._compiling.values()) for job in jobs):
        time.sleep(0.002)
    if chooses._unread and not (chooses._planned or chooses._resting) and torch.cuda.is_available():
        torch.cuda.synchronize()
