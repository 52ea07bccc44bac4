"""`timed_losses`: the configs that are predicted to be best at some size, timed at all sizes on the current GPU."""

from __future__ import annotations

import math
from collections.abc import Hashable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ...datasets import DeviceSpec, ForetuneError, KernelConfig, Measurable, Problem
from ..timing.one_pass import time_configs
from ..timing.timer import Timer
from ..tuning.compiling import compile_ahead
from .losses import SizeLosses, at_size

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: So many of the best at each size are timed at all of them. Neighbours share their best ones, so that over 64 sizes
#: these are 34 and 18 configs of two layers; `python tests/cover_replay.py` says that more find little, and fewer may
#: leave a size at which the cover loses more than it was asked for.
CANDIDATES = 3


def timed_losses(
    family: Measurable, problem: Problem, dynamic: str, predicted: SizeLosses, device: DeviceSpec
) -> SizeLosses:
    """Four passes over all sizes, one after the other, on the current device, which `device` describes. A time is the
    least of two of them: of thousands some are disturbed, and a cover is judged by its worst size. Binaries are
    compiled before, in parallel; a config that fails where it is launched cannot run there.

    Raises `ForetuneError` for a size at which none of them ran.
    """
    configs = _best_somewhere(predicted)
    problems = [at_size(problem, dynamic, size) for size in predicted.sizes]
    able = np.array([[family.supports(config, one, device) is None for config in configs] for one in problems])
    jobs: dict[Hashable, Any] = {}
    for row, column in np.argwhere(able).tolist():
        config, one = configs[column], problems[row]
        jobs.setdefault(family.binary_key(config, one), partial(family.compile, config, one))
    compile_ahead(list(jobs.values()))  # what is wrong with one is said when it is launched
    timer = Timer()
    passes = [
        np.array([_times_us(timer, family, one, device, configs, can) for one, can in zip(problems, able, strict=True)])
        for _ in range(4)
    ]
    ran = np.isfinite(passes).all(axis=0)
    first, second = (_logs(np.where(ran, np.minimum(*passes[part::2]), np.inf), family, problems) for part in range(2))
    reason = (
        f"timed here, the {len(configs)} configs that are among the {CANDIDATES} best of a size as {predicted.reason}"
    )
    return SizeLosses(predicted.sizes, configs, first, second, np.ones(ran.shape, dtype=np.bool_), reason)


def _best_somewhere(predicted: SizeLosses) -> tuple[KernelConfig, ...]:
    """The configs that are among the best of a size, in the order of the list."""
    best = np.argsort(predicted.first, axis=1, kind="stable")[:, :CANDIDATES]
    there = np.isfinite(np.take_along_axis(predicted.first, best, axis=1))
    return tuple(predicted.configs[column] for column in np.unique(best[there]).tolist())


def _times_us(
    timer: Timer,
    family: Measurable,
    problem: Problem,
    device: DeviceSpec,
    configs: tuple[KernelConfig, ...],
    able: NDArray[np.bool_],
) -> list[float]:
    """(n_configs,) microseconds; inf for what cannot run. Raises `ForetuneError` where nothing did."""
    some = [config for config, can in zip(configs, able, strict=True) if can]
    times = time_configs(timer, family, problem, family.inputs(problem, device), some)
    return [times.get(config, math.inf) for config in configs]


def _logs(times_us: NDArray[np.float64], family: Measurable, problems: list[Problem]) -> NDArray[np.float64]:
    """Of each time over the least of its size. Raises `ForetuneError` where no config ran in every pass."""
    least = times_us.min(axis=1, keepdims=True)
    if not np.isfinite(least).all():
        lost = problems[int(np.argmax(~np.isfinite(least[:, 0])))]
        raise ForetuneError(f"no config of {family.name} ran {lost} in every pass")
    logs: NDArray[np.float64] = np.log(times_us / least)
    return logs
