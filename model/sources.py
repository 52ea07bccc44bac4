"""What of a dataset is of a family, and of its kernel as it is now: asked where the two meet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..datasets import (
    DatasetError,
    Family,
    FamilyError,
    ForetuneError,
    Measurable,
    check_problem_of,
    not_empty,
    wrong_knobs,
)
from ..datasets.contents import kernel_sources, other_sources
from ..datasets.errors import warn
from .rows import supported

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..datasets.dataset import Dataset
    from ..datasets.grid import Grid


#: What counts as measured whole: so large a share of the configs that could run.
WHOLE = 0.5


def check_measured(dataset: Dataset, family: Family) -> None:
    """Raises `DatasetError` for a problem or a config of the dataset that cannot be the family's, and warns as
    `check_sources` does."""
    for case in dataset.cases:
        if case.problem.family == family.name:
            try:
                check_problem_of(family, not_empty(family, case.problem))
            except ForetuneError as error:
                raise DatasetError(f"{dataset.name}: {error}") from None
    for number in dataset.rows(family.name)["config"].unique():
        if why := wrong_knobs(family, dataset.configs[number]):
            raise DatasetError(f"{dataset.name}: {why}")
    check_sources(dataset.name, dataset.provenance, family)


def measured_grid(dataset: Dataset, family: Family) -> Grid:
    """What a ranker may learn from; it knows where the family lets a config through (`supported`).

    Times of configs that the family does not support on their problem are left out, with a `ForetuneWarning` that says
    how many and why: no shortlist has them, and their features may be anything. So are configs that it supports on none
    of the problems: of those it may have no features at all. Raises as `check_measured` does, and `DatasetError` where
    nothing is left.
    """
    check_measured(dataset, family)
    grid = dataset.grid(family.name)
    idle = np.array([not_empty(family, case.problem) != case.problem for case in grid.cases])
    if idle.any():
        example = grid.cases[int(idle.argmax())].problem
        warn(f"{dataset.name}: {idle.sum()} problems without work are left out, such as {example}")
        if idle.all():
            raise DatasetError(f"{dataset.name}: no problem of {family.name} has work")
        grid = grid.select(np.flatnonzero(~idle))
    possible = supported(grid, family)
    grid = replace(grid, possible=possible)
    times = grid.times_us
    if len(wrong := np.argwhere(np.isfinite(times) & ~possible)):
        row, column = (int(place) for place in wrong[0])
        problem, config = grid.cases[row].problem, grid.configs[column]
        warn(
            f"{dataset.name}: {len(wrong)} times are left out, of configs that {family.name} does not support on their "
            f"problem, such as {config} on {problem}: {family.supports(config, problem, grid.devices[row])}"
        )
        first, second = (np.where(possible, passed, np.nan) for passed in (grid.first_us, grid.second_us))
        left = np.flatnonzero((np.isfinite(times) & possible).any(axis=1))
        if not len(left):
            raise DatasetError(f"{dataset.name}: {family.name} supports none of the configs on their problems")
        grid = replace(grid, first_us=first, second_us=second).select(left)
    return grid.select_configs(np.flatnonzero(supported(grid, family).any(axis=0)))


def eligible_of(dataset: Dataset, grid: Grid, family: Family) -> NDArray[np.bool_]:
    """What may be on a shortlist of each problem of `measured_grid`, (n_problems, n_configs): the family lets it
    through, and it computed no wrong result with the problem's dtype and flags."""
    wrong = dataset.wrong_results(grid.family)
    eligible: NDArray[np.bool_] = supported(grid, family).copy()
    for row, case in zip(eligible, grid.cases, strict=True):
        if configs := wrong.get((case.problem.dtype, case.problem.flags)):
            row &= np.array([config not in configs for config in grid.configs])
    return eligible


def candidates_of(dataset: Dataset, grid: Grid, eligible: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """What a ranker may be judged by: what is eligible and was tried. A run cut short by its budget, or guided by a
    plan, says nothing about what it did not try."""
    return eligible & (dataset.counts(grid) > 0)


def measured_whole(candidates: NDArray[np.bool_], possible: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Whether the candidates of each problem are at least `WHOLE` of what the family lets through, (n_problems,)."""
    result: NDArray[np.bool_] = candidates.sum(axis=1) >= WHOLE * np.maximum(possible.sum(axis=1), 1)
    return result


def check_sources(name: str, provenance: Mapping[str, Any], family: Family) -> None:
    """Warns (`ForetuneWarning`) where a dataset, of this name and provenance, was measured with other sources of the
    family's kernel.

    What is learned from it may still be good: a new feature that is off by default changes the sources too. Where
    runs recorded no sources there is nothing to compare, nor where the family's are not known here.
    """
    now = source_of(family)
    if now is not None and (others := other_sources(kernel_sources(provenance, family.name), now)):
        warn(
            f"{name} was measured with other sources of {family.name} ({', '.join(sorted(others))}) than there "
            f"are now ({now}): its times are another kernel's. Collect again where that matters"
        )


def source_of(family: Family) -> str | None:
    """The hash of the family's kernel as it is now; None where it is not known: a family that only predicts has no
    kernel, and a laptop ranks without Triton."""
    if not isinstance(family, Measurable):
        return None
    try:
        return family.source_hash()
    except FamilyError as error:
        if isinstance(error.__cause__, ImportError):
            return None
        raise
