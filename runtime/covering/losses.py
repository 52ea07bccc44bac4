"""`SizeLosses`: the loss of each config at each size of one dimension: predicted, from a dataset, or timed here."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ...datasets import BundleError, DeviceSpec, Family, ForetuneError, KernelConfig, Measurable, Problem
from ...datasets.errors import abridged
from ...model.training_set import EXHAUSTIVE, TrainingSet
from ..launching.ahead import compile_ahead
from ..same_bits import unrestricted
from ..shortlist import bundle_in_force, predicted_slowdowns
from ..timing.timer import Timer, time_configs

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ...datasets.dataset import Dataset
    from ...model import Bundle


@dataclass(frozen=True)
class SizeLosses:
    """The log of each config's time over that of the best config at a size; inf if it cannot run or was not tried.

    The losses of two timing passes are kept, (n_sizes, n_configs) each: configs are chosen by `first`, and the loss of
    the choice is read from `second`, so that a config chosen because of noise has no advantage. For predicted times the
    two are the same.
    """

    sizes: tuple[int, ...]  # (n_sizes,) ascending
    configs: tuple[KernelConfig, ...]  # (n_configs,)
    first: NDArray[np.float64]  # (n_sizes, n_configs)
    second: NDArray[np.float64]  # (n_sizes, n_configs)
    tried: NDArray[np.bool_]  # (n_sizes, n_configs) True if it was measured or failed; all True for predicted times
    reason: str  # the source of the losses


def at_size(problem: Problem, dynamic: str, size: int) -> Problem:
    """Return the problem with `size` in the dimension `dynamic`, and with unknown sizes of its ragged segments."""
    dims = tuple((name, size if name == dynamic else own) for name, own in problem.dims)
    return replace(problem, dims=dims, ragged=None)


def predicted_losses(
    family: Family,
    problem: Problem,
    dynamic: str,
    sizes: Sequence[int],
    device: DeviceSpec,
    configs: Sequence[KernelConfig],
    bundle: Bundle | None,
) -> SizeLosses:
    """Return the losses that a bundle predicts.

    They are predicted for each size itself, not for its bucket at call time, because neighboring sizes differ in how
    tiles fill the last wave. Slowdowns compare within a problem only, which is enough here.

    Args:
        family: The kernel's family.
        problem: The problem; its size of the dimension `dynamic` does not matter.
        dynamic: The dimension.
        sizes: The sizes, ascending.
        device: The device.
        configs: The configs.
        bundle: The bundle that predicts; the shipped one if None.

    Raises:
        ForetuneError: The bundle lacks the family, nothing is predicted, or no config can run one of the sizes.
    """
    given, known = tuple(configs), bundle_in_force(bundle)
    try:
        known.trained_on(family.name)
    except BundleError as error:
        how = "(`foretune collect`, then `foretune train`), and pass it as --bundle or bundle="
        raise BundleError(f"a cover is not predicted from a kernel's source alone: {error} {how}") from None
    wrong = known.wrong_results(family.name, problem)
    problems = [at_size(problem, dynamic, size) for size in sizes]

    def refuses(config: KernelConfig, one: Problem) -> bool:
        return config in wrong or family.supports(config, one, device) is not None

    # A config that is refused (or supported) at both ends is assumed to be so in between, which saves a hundred
    # thousand calls of `supports`. The best config of each size is checked there, and a cover's choice at every size.
    at_ends = np.array([[refuses(config, one) for config in given] for one in (problems[0], problems[-1])])
    losses = np.empty((len(problems), len(given)))
    for row, one in enumerate(problems):
        slowdowns = predicted_slowdowns(family, one, device, given, bundle)
        slowdowns[at_ends.all(axis=0)] = np.inf
        for at in np.flatnonzero(at_ends.any(axis=0) & ~at_ends.all(axis=0)).tolist():
            if refuses(given[at], one):
                slowdowns[at] = np.inf
        while np.isfinite(least := slowdowns.min()) and refuses(given[best := int(slowdowns.argmin())], one):
            slowdowns[best] = np.inf
        if not np.isfinite(least):
            reason = family.supports(given[0], one, device) or "its measured results were wrong"
            raise ForetuneError(f"no config of {family.name} can run {one} on {device.name}: {reason}")
        losses[row] = np.log(slowdowns / least)
    reason = f"predicted by bundle {known.digest[:12]}"
    return SizeLosses(tuple(sizes), given, losses, losses, np.ones(losses.shape, dtype=np.bool_), reason)


def measured_losses(
    family: Family, problem: Problem, dynamic: str, low: int, high: int, device: DeviceSpec, data: Dataset
) -> SizeLosses:
    """Return the losses by a dataset's times of the problem on this device, at sizes of `dynamic` from `low` to `high`.

    If a size was measured several times, for example with different ragged sizes, its loss is the mean. Sizes with
    too few measured configs are left out, and `reason` lists them. Raises `ForetuneError` if fewer than two sizes
    were measured.
    """
    fixed = at_size(problem, dynamic, 0)

    def is_wanted(one: Problem, spec: DeviceSpec) -> bool:
        return spec == device and low <= one[dynamic] <= high and at_size(one, dynamic, 0) == fixed

    own = unrestricted(family)  # to which all times belong
    learned = TrainingSet.of(data, own, is_wanted)
    grid = learned.grid
    rows: dict[int, list[int]] = {}
    for row, one in enumerate(learned.problems):
        rows.setdefault(one[dynamic], []).append(row)
    tried_at: dict[int, NDArray[np.bool_]] = {
        size: np.all(learned.measured[rows[size]], axis=0) for size in sorted(rows)
    }
    cut = _cut_short(own, problem, dynamic, device, grid.configs, tried_at)
    sizes = [size for size in tried_at if size not in cut]
    if len(sizes) < 2:
        raise ForetuneError(
            f"{data.label} must have {problem} at two sizes of {dynamic} or more between {low} and {high}, measured on "
            f"{device.name}, but has {len(sizes)}"
        )
    able = np.ones((len(sizes), len(grid.configs)), np.bool_)
    if family is not own:
        for row, size in enumerate(sizes):
            one = at_size(problem, dynamic, size)
            able[row] = [family.supports(config, one, device) is None for config in grid.configs]
            if not able[row].any():
                raise ForetuneError(f"{data.name} has no config of {family.name} that keeps the same bits for {one}")
    first, second = (
        np.stack([_log_losses(np.where(can, times[rows[size]], np.nan)) for size, can in zip(sizes, able, strict=True)])
        for times in (grid.first_us, grid.second_us)
    )
    reason = f"measured in {data.label}"
    if cut:
        reason += f", without {dynamic} {abridged(', '.join(map(str, cut)))}, where too few configs were measured"
    return SizeLosses(tuple(sizes), grid.configs, first, second, np.stack([tried_at[size] for size in sizes]), reason)


def _cut_short(
    family: Family,
    problem: Problem,
    dynamic: str,
    device: DeviceSpec,
    configs: Sequence[KernelConfig],
    tried_at: Mapping[int, NDArray[np.bool_]],
) -> list[int]:
    """Return the sizes at which less than half as many configs were tried as at the size with the most.

    A collection that stops early leaves such sizes; the fastest of a few configs is not a good reference. `tried_at` is
    the mask of the configs tried at each size, (n_configs,).
    """
    counts = {size: int(tried.sum()) for size, tried in tried_at.items()}
    if not counts or min(counts.values()) >= EXHAUSTIVE * max(counts.values()):
        return []
    shares = {}
    for size, count in counts.items():
        one = at_size(problem, dynamic, size)
        shares[size] = count / max(sum(family.supports(config, one, device) is None for config in configs), 1)
    most = max(shares.values())
    return [size for size, share in shares.items() if share < EXHAUSTIVE * most]


def _log_losses(times_us: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the log of each config's slowdown over the best one, averaged over problems, (n_configs,).

    `times_us` is (n_problems, n_configs). The result is inf for a config without a time (NaN) on one of the problems.
    """
    losses = np.log(times_us / np.nanmin(times_us, axis=1, keepdims=True))
    result: NDArray[np.float64] = np.where(np.isnan(losses).any(axis=0), np.inf, losses.mean(axis=0))
    return result


#: How many of the best configs of each size are timed at all sizes. Neighboring sizes share their best configs, so over
#: 64 sizes these are 34 and 18 configs for two layers. `python tests/cover_replay.py` shows that more improve little,
#: and that with fewer a cover may lose more than `within` at some size.
CANDIDATES = 3


def timed_losses(
    family: Measurable, problem: Problem, dynamic: str, predicted: SizeLosses, device: DeviceSpec
) -> SizeLosses:
    """Return the losses by times that are measured now at the sizes in `predicted`, on the current device.

    The configs among the `CANDIDATES` predicted to be best at a size are timed at all sizes, in four passes. A time is
    the least of two passes, because some of thousands of timings are disturbed, and a cover is judged by its worst
    size. Binaries are compiled before, in parallel. A config that fails at a size counts as one that cannot run there.

    Raises `ForetuneError` for a size at which no config ran.
    """
    configs = _best_somewhere(predicted)
    problems = [at_size(problem, dynamic, size) for size in predicted.sizes]
    able = np.array([[family.supports(config, one, device) is None for config in configs] for one in problems])
    jobs: dict[Hashable, Any] = {}
    for row, column in np.argwhere(able).tolist():
        config, one = configs[column], problems[row]
        jobs.setdefault(family.binary_key(config, one), partial(family.compile, config, one))
    compile_ahead(list(jobs.values()))  # a config that does not compile fails again at its launch
    timer = Timer()
    passes = np.full((4, *able.shape), np.inf)
    for times_us in passes:
        for row, one in enumerate(problems):
            some = [configs[column] for column in np.flatnonzero(able[row])]
            times = time_configs(timer, family, one, family.inputs(one, device), some)
            times_us[row] = [times.get(config, math.inf) for config in configs]
    ran = np.isfinite(passes).all(axis=0)
    first, second = (_logs(np.where(ran, np.minimum(*passes[part::2]), np.inf), family, problems) for part in range(2))
    reason = (
        f"timed here: the {len(configs)} configs that are among the {CANDIDATES} best of a size as {predicted.reason}"
    )
    return SizeLosses(predicted.sizes, configs, first, second, np.ones(ran.shape, dtype=np.bool_), reason)


def _best_somewhere(predicted: SizeLosses) -> tuple[KernelConfig, ...]:
    """Return the configs that are among the `CANDIDATES` best ones at one or more sizes, in the given order."""
    best = np.argsort(predicted.first, axis=1, kind="stable")[:, :CANDIDATES]
    can_run = np.isfinite(np.take_along_axis(predicted.first, best, axis=1))
    return tuple(predicted.configs[column] for column in np.unique(best[can_run]).tolist())


def _logs(times_us: NDArray[np.float64], family: Measurable, problems: list[Problem]) -> NDArray[np.float64]:
    """Return log(time / least time at the same size), (n_sizes, n_configs); `times_us` has that shape.

    Raises `ForetuneError`, naming the size's problem, for a size at which no config ran in every pass.
    """
    least = times_us.min(axis=1, keepdims=True)
    if not np.isfinite(least).all():
        lost = problems[int(np.argmax(~np.isfinite(least[:, 0])))]
        raise ForetuneError(f"no config of {family.name} ran {lost} in every pass")
    logs: NDArray[np.float64] = np.log(times_us / least)
    return logs
