"""`time_configs`: one pass over some configs of a problem, without those that do not run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ...datasets import ForetuneError, KernelConfig, Measurable, Problem
from ...datasets.errors import reason_of

if TYPE_CHECKING:
    from .timer import Timer


def time_configs(
    timer: Timer, family: Measurable, problem: Problem, inputs: Any, configs: Sequence[KernelConfig]
) -> dict[KernelConfig, float]:
    """The time in microseconds of each config that compiles and launches, on `inputs` of the problem, in their order.

    Raises `ForetuneError` where none does, with what was wrong with the last one.
    """
    times: dict[KernelConfig, float] = {}
    reason = "there are none"
    for config in configs:
        launch = partial(family.launch, inputs, config)
        try:
            launch()  # compiled, and loaded
            times[config] = timer.time(launch).time_us
        except Exception as error:  # noqa: BLE001 - one that does not compile or launch is none
            reason = reason_of(error)
    if not times:
        raise ForetuneError(f"none of {len(configs)} configs of {family.name} ran {problem}: {reason}")
    return times
