"""The figures on where regret is large: by the problems' dimensions, two at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from ...datasets.console import printable
from ...datasets.errors import abridged
from ..metrics import geomean
from .canvas import Figure, draw
from .cells import paint_cells

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

    from .findings import Findings

#: Of those with the widest ranges: four make six pairs.
_MOST_DIMS, _MOST_BINS = 4, 7


def shape_figures(found: Findings, key: str) -> Iterator[Figure]:
    """One for each pair of dimensions that differ; one alone where there is no second."""
    regret = found.evaluation.regret[min(found.evaluation.regret)]
    binned = _binned(found)
    pairs = list(combinations(binned, 2)) or [(one, _ALL) for one in binned]
    means = {pair: _means(*pair, regret) for pair in pairs}
    top = max((float(np.nanmax(mean)) for mean, _ in means.values()), default=0.0)
    for number, (across, down) in enumerate(pairs):
        yield _pair(across, down, *means[across, down], top, f"{key}-shape-{number}")


@dataclass(frozen=True, eq=False)
class _Binned:
    """A dimension in steps of powers of two."""

    name: str
    number: NDArray[np.intp]  # (n_problems,) the bin of each problem
    labels: tuple[str, ...]  # (n_bins,) what each begins at


_ALL = _Binned("", np.zeros(0, np.intp), ("",))


def _binned(found: Findings) -> list[_Binned]:
    problems = [case.problem for case in found.evaluation.cases]
    octaves = {
        name: np.log2([max(problem[name], 1) for problem in problems])
        for name, _ in (problems[0].dims if problems else ())
    }
    spread = {name: float(np.ptp(values)) for name, values in octaves.items()}
    widest = sorted((name for name in spread if spread[name] > 0), key=lambda name: -spread[name])[:_MOST_DIMS]
    found_bins = []
    for name in (name for name in octaves if name in widest):
        low = int(np.floor(octaves[name].min()))
        step = -(-(int(np.floor(octaves[name].max())) - low + 1) // _MOST_BINS)
        number = (np.floor(octaves[name]).astype(np.intp) - low) // step
        labels = tuple(_short(2 ** (low + step * place)) for place in range(int(number.max()) + 1))
        found_bins.append(_Binned(name, number, labels))
    return [one for one in found_bins if len(one.labels) > 1]


def _short(size: int) -> str:
    """
    >>> _short(512), _short(16384), _short(2**21)
    ('512', '16k', '2M')
    """
    for unit, letter in zip((1 << 20, 1 << 10), "Mk", strict=True):
        if size >= unit:
            return f"{size // unit}{letter}"
    return str(size)


def _means(across: _Binned, down: _Binned, regret: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.intp]]:
    """Geometric mean of the first choice's percent in each cell, NaN where there is no problem, and how many there
    are: both (n_down, n_across)."""
    shape = len(down.labels), len(across.labels)
    cell = across.number + (shape[1] * down.number if len(down.number) else 0)
    counts = np.bincount(cell, minlength=shape[0] * shape[1])
    means = np.full(len(counts), np.nan)
    for number in np.flatnonzero(counts):
        means[number] = 100 * (geomean(regret[cell == number]) - 1)
    return means.reshape(shape), counts.reshape(shape)


def _pair(
    across: _Binned, down: _Binned, means: NDArray[np.float64], counts: NDArray[np.intp], top: float, key: str
) -> Figure:
    def paint(ax: Axes) -> None:
        texts = [
            [f"{mean:.1f}\n({count})" if count else "" for mean, count in zip(*rows, strict=True)]
            for rows in zip(means, counts, strict=True)
        ]
        paint_cells(ax, means, texts, (0.0, max(top, 1.0)), "YlOrRd")
        ax.set_xticks(np.arange(len(across.labels)) + 0.5, across.labels)
        ax.set_yticks(np.arange(len(down.labels)) + 0.5, down.labels)
        ax.set_xlabel(f"{abridged(printable(across.name), 40)}, from")
        if down.name:
            ax.set_ylabel(f"{abridged(printable(down.name), 30)}, from")

    worst = np.unravel_index(int(np.nanargmax(means)), means.shape)
    where = f"{across.name} from {across.labels[worst[1]]}"
    names = across.name
    if down.name:
        where, names = f"{where}, {down.name} from {down.labels[worst[0]]}", f"{across.name} and {down.name}"
    return draw(
        key,
        f"Regret of the first choice by {printable(names)}",
        paint,
        description=f"The largest is {means[worst]:.1f} %, over {counts[worst]} problems with {printable(where)}.",
        caption=f"% slower than the best config by {printable(names)}: geometric means (and problems).",
        height=1.0 + 0.34 * len(down.labels),
    )
