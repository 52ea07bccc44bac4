"""The training table of other projects' recipes: everything that was measured, hopeless configs too."""

from __future__ import annotations

from ...datasets import Family
from ...datasets.grid import Grid
from ..rows import TrainingRows, training_rows


def all_rows(grid: Grid, family: Family) -> TrainingRows:
    """`training_rows` without leaving any out: each problem twice where its ragged sizes are known, since these
    recipes rank a call as it is, and not by what it is likely to be."""
    return training_rows(grid, family, slow=float("inf"), keep_slow=1.0, seed=0, both_ways=True)
