"""Build the training table: one row of features and one target for each measured config of each problem."""

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
    """Return the mask of the configs that the family supports on each problem, (n_problems, n_configs)."""
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
    """Return a family's features, (n_configs, n_features), from `binaries` too if the family reads them."""
    if family.reads_binaries:
        return family.features(problem, device, configs, binaries or {})
    return family.features(problem, device, configs)


@dataclass(frozen=True)
class TrainingRows:
    """The training data of a ranker: features and targets, one row for each measured config of a problem.

    The rows of one problem, with its ragged sizes known or unknown, are consecutive and form a query.
    """

    features: NDArray[np.float32]  # (n_rows, n_features)
    log_slowdown: NDArray[np.float64]  # (n_rows,) natural log of time over the problem's best
    query_sizes: NDArray[np.int64]  # (n_queries,)
    query_rows: NDArray[np.int64]  # (n_queries,) the problem of each query, as a row of the grid
    weights: NDArray[np.float64] | None = None  # (n_rows,) weights in the loss; None = all equal


def training_rows(grid: Grid, family: Family, *, slow: float, keep_slow: float, seed: int) -> TrainingRows:
    """Return the training rows of all problems of a grid.

    A problem with known ragged sizes has one query (its configs, compared with each other) with these sizes. It has a
    second query without the sizes, as the host sees the problem at call time, unless the family marginalizes over
    plausible sizes (`Family.plausible`): such a family never predicts from the features of a problem without sizes.

    Configs that failed or were not tried have no row. Most slow configs are dropped, because they would take much of
    the training, and nobody needs to tell 20x slower from 30x slower.

    Args:
        grid: The measurements.
        family: The family of the grid's problems.
        slow: A config is slow if it takes more than this many times the best config's time.
        keep_slow: The share of slow configs that is kept, relative to an exhaustive measurement: where only a part of
            the supported configs was tried, the share is larger by that factor, up to all of them.
        seed: Random seed for choosing the slow configs that are kept.

    Raises:
        FamilyError: The family returns features that are not finite.
        ForetuneError: The grid has no measurements, or one per problem.
    """
    random = np.random.default_rng(seed)
    slowdowns = grid.slowdowns
    ran = np.isfinite(slowdowns)
    could = ran if ran.all() else supported(grid, family)
    share = keep_slow * (could.sum(axis=1) / np.maximum(ran.sum(axis=1), 1))[:, None]
    keep = ran & ((slowdowns <= slow) | (random.random(slowdowns.shape) < share))
    weights = np.ones(slowdowns.shape) if grid.weights is None else grid.weights
    features, targets, sizes, rows, row_weights = [], [], [], [], []
    measured = zip(keep, slowdowns, weights, grid.cases, grid.devices, strict=True)
    for row, (kept, slowdown, weight, case, device) in enumerate(measured):
        advance(1 / len(grid))
        hidden = case.problem.without_sizes()
        needs_hidden = any(plausible == hidden for _, plausible in family.plausible(hidden))
        views = (case.problem, hidden) if needs_hidden else (case.problem,)
        for problem in dict.fromkeys(views):
            # Features of all configs, because families cache what depends only on the tuple of configs.
            binaries = grid.binaries.get((problem.dtype, problem.flags))
            table = features_of(family, problem, device, grid.configs, binaries)[kept]
            if not np.isfinite(table).all():
                raise FamilyError(f"family {family.name}: features() must be finite but are not for {problem}")
            features.append(table)
            targets.append(np.log(slowdown[kept]))
            sizes.append(int(kept.sum()))
            rows.append(row)
            row_weights.append(weight[kept])
    if not features:
        raise ForetuneError(f"no measurements of {family.name} to learn from")
    if max(sizes) < 2:
        raise ForetuneError(
            f"no problem of {family.name} has times of two configs or more, so there is nothing to compare"
        )
    return TrainingRows(
        np.concatenate(features),
        np.concatenate(targets),
        np.array(sizes),
        np.array(rows),
        None if grid.weights is None else np.concatenate(row_weights),
    )
