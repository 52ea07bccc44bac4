"""`bucket`: the problem that stands for all problems near it."""

from __future__ import annotations

import math
from dataclasses import replace

from ..datasets import Problem

#: Every token count is a new number of rows, and neighbours want the same config: predictions are made on a
#: grid of this many points an octave (steps of 9 %, so no problem is more than 4.5 % from the one that stands for it).
POINTS_PER_OCTAVE = 8
_ROWS = "rows"


def bucket(problem: Problem) -> Problem:
    """The same call without group sizes and with its `rows`, if it has them, rounded to the grid.

    All other dimensions stay as they are. Powers of two and numbers up to 11 stand for themselves.

    >>> bucket(Problem.of("toy", rows=1100, n=96))["rows"], bucket(Problem.of("toy", rows=4096, n=96))["rows"]
    (1117, 4096)
    """
    problem = problem.without_sizes()
    dims = dict(problem.dims)
    if _ROWS not in dims:
        return problem
    dims[_ROWS] = _round(dims[_ROWS])
    return replace(problem, dims=tuple(sorted(dims.items())))


def _round(rows: int) -> int:
    if rows < 1:
        return rows
    return round(2 ** (round(math.log2(rows) * POINTS_PER_OCTAVE) / POINTS_PER_OCTAVE))
