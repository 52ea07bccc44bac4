"""The training table: every measured config of every problem, seen as the ranker will see it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..datasets import BinaryFacts, DeviceSpec, Family, FamilyError, ForetuneError, KernelConfig, Problem
from ..datasets.grid import Grid
from ..datasets.progress import advance

if TYPE_CHECKING:
    from numpy.typing import NDArray


def supported(grid: Grid, family: Family) -> NDArray[np.bool_]:
    """Return where the family supports a config, (n_problems, n_configs): the others reach no shortlist."""
    if grid.supported is not None:
        return grid.supported
    known: dict[Hashable, list[bool]] = {}
    rows = []
    for case, device in zip(grid.cases, grid.devices, strict=True):
        by = family.supports_by(case.problem), device
        if by not in known:
            known[by] = [family.supports(config, case.problem, device) is None for config in grid.configs]
        rows.append(known[by])
    return np.array(rows, np.bool_).reshape(len(grid), len(grid.configs))


def features_of(
    family: Family,
    problem: Problem,
    device: DeviceSpec,
    configs: Sequence[KernelConfig],
    binaries: Mapping[KernelConfig, BinaryFacts] | None,
) -> NDArray[np.float32]:
    """A family's features, with what is known of the binaries if it wants to know."""
    if family.reads_binaries:
        return family.features(problem, device, configs, binaries or {})
    return family.features(problem, device, configs)


@dataclass(frozen=True)
class TrainingRows:
    """Features and targets; the rows of one problem in one view are one query, and lie together."""

    features: NDArray[np.float32]  # (n_rows, n_features)
    log_slowdown: NDArray[np.float64]  # (n_rows,) natural log of time over the problem's best
    query_sizes: NDArray[np.int64]  # (n_queries,)
    query_rows: NDArray[np.int64]  # (n_queries,) which problem of the grid each is of
    weights: NDArray[np.float64] | None = None  # (n_rows,) what each counts for; None = all alike


def training_rows(grid: Grid, family: Family, *, slow: float, keep_slow: float, seed: int) -> TrainingRows:
    """Return the rows of each problem; where its ragged sizes are known perhaps once more, as the host sees it at call
    time, without them: unless the family marginalizes over what such a problem is likely to be (`Family.likely`), so
    that its features are not needed.

    Configs that failed, or were never tried, are left out. Of those slower than `slow` times the best only a share
    `keep_slow` of all that there would be stays, drawn by `seed`: a third of a wide space is of no use, and telling
    20x from 30x apart helps nobody. So where few of the supported configs were tried, all of them stay.
    """
    random = np.random.default_rng(seed)
    slowdowns = grid.slowdowns
    ran = np.isfinite(slowdowns)
    could = ran if ran.all() else supported(grid, family)
    share = keep_slow * (could.sum(axis=1) / np.maximum(ran.sum(axis=1), 1))[:, None]
    keep = ran & ((slowdowns <= slow) | (random.random(slowdowns.shape) < share))
    weights = np.ones(slowdowns.shape) if grid.weights is None else grid.weights
    features, targets, sizes, rows, counted = [], [], [], [], []
    measured = zip(keep, slowdowns, weights, grid.cases, grid.devices, strict=True)
    for row, (kept, slowdown, weight, case, device) in enumerate(measured):
        advance(1 / len(grid))
        hidden = case.problem.without_sizes()
        is_asked = any(likely == hidden for _, likely in family.likely(hidden))
        asked = (hidden,) if is_asked else ()
        for problem in dict.fromkeys((case.problem, *asked)):
            # Of all configs, always the same tuple: families remember what depends on the list alone.
            binaries = grid.binaries.get((problem.dtype, problem.flags))
            table = features_of(family, problem, device, grid.configs, binaries)[kept]
            if not np.isfinite(table).all():
                raise FamilyError(f"family {family.name}: features() must be finite but are not for {problem}")
            features.append(table)
            targets.append(np.log(slowdown[kept]))
            sizes.append(int(kept.sum()))
            rows.append(row)
            counted.append(weight[kept])
    if not features:
        raise ForetuneError(f"no measurements of {family.name} to learn from")
    return TrainingRows(
        np.concatenate(features),
        np.concatenate(targets),
        np.array(sizes),
        np.array(rows),
        None if grid.weights is None else np.concatenate(counted),
    )
