"""Draw heat maps: regret over two dimensions of the problems, and the times of one problem over two knobs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from ...datasets import KernelConfig
from ...datasets.console import printable
from ...datasets.errors import abridged
from ..metrics import geomean
from .canvas import Figure, draw, paint_cells

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

    from .findings import Findings

#: The most dimensions, those with the widest ranges, and the most bins of each. Four dimensions make six maps.
_MOST_DIMS, _MOST_BINS = 4, 7
#: The number of ranks that are marked, and the most that a cell has room for.
_SHORTLIST, _MOST_PLACES = 8, 3
#: The most values of a knob for which cells have room for text.
_MOST_VALUES = 12
#: The slowdown at the end of the color map.
_SLOWEST = 4.0


def shape_figures(found: Findings, key: str) -> Iterator[Figure]:
    """Draw a heat map of regret over each pair of dimensions that vary, or over the only one."""
    regret = found.evaluation.regret[min(found.evaluation.regret)]
    binned = _binned(found)
    pairs = list(combinations(binned, 2)) or [(one, _ALL) for one in binned]
    means = {pair: _means(*pair, regret) for pair in pairs}
    top = max((float(np.nanmax(mean)) for mean, _ in means.values()), default=0.0)
    for number, (across, down) in enumerate(pairs):
        yield _pair(across, down, *means[across, down], top, f"{key}-shape-{number}")


@dataclass(frozen=True, eq=False)
class _Binned:
    """A dimension of the problems, in bins of powers of two."""

    name: str
    number: NDArray[np.intp]  # (n_problems,) the bin of each problem, from 0
    labels: tuple[str, ...]  # (n_bins,) the smallest size in each bin


#: A second dimension with a single bin, for problems with only one dimension that varies.
_ALL = _Binned("", np.zeros(0, np.intp), ("",))


def _binned(found: Findings) -> list[_Binned]:
    """Return the dimensions whose sizes vary most among the problems, each divided into bins."""
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
    """Return a size in units of 2**10 or 2**20.

    >>> _short(512), _short(16384), _short(2**21)
    ('512', '16k', '2M')
    """
    for unit, letter in zip((1 << 20, 1 << 10), "Mk", strict=True):
        if size >= unit:
            return f"{size // unit}{letter}"
    return str(size)


def _means(across: _Binned, down: _Binned, regret: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.intp]]:
    """Return the mean regret of the first choice in each cell, in percent, and the number of problems in it.

    Cells are the pairs of a bin of `across` and one of `down`. Both arrays are (n_down, n_across). Means are geometric,
    and NaN in a cell without problems.
    """
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
    """Draw a map of mean regrets and problem counts over two dimensions; `top` is the largest mean of all maps."""

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
        caption=f"% slower than the best config, geometric mean by {printable(names)}. In brackets: problems.",
        height=1.0 + 0.34 * len(down.labels),
    )


def knob_figures(found: Findings, key: str) -> Iterator[Figure]:
    """Draw maps of the times over two knobs, for the problem of median and that of largest regret, if knobs vary."""
    order = np.argsort(found.evaluation.regret[min(found.evaluation.regret)], kind="stable")
    rows = {"A typical problem": int(order[len(order) // 2]), "The worst first choice": int(order[-1])}
    for number, (what, row) in enumerate(rows.items()):
        if number and row in list(rows.values())[:number]:
            continue
        if (figure := _map(found, row, what, f"{key}-knobs-{number}")) is not None:
            yield figure


def _map(found: Findings, row: int, what: str, key: str) -> Figure | None:
    """Draw a map of the times of one problem over two varying knobs, with the shortlist marked.

    Returns None if no knob varies. If only one varies, the map has a single line of cells.

    Args:
        found: The evaluation to draw from.
        row: The problem's row in it.
        what: The title, such as "A typical problem".
        key: The name of the figure in the report.
    """
    judged, grid = found.evaluation, found.evaluation.grid
    times = grid.times_us[row]
    ran = np.flatnonzero(np.isfinite(times) & np.isfinite(judged.predicted[0][row]))
    knobs = varying(found.knobs, [grid.configs[at] for at in ran])
    if not knobs:
        return None
    across, down = knobs[-1], (knobs[0] if len(knobs) > 1 else None)
    columns = _values(grid.configs[at].to_json().get(across) for at in ran)
    lines = _values(None if down is None else grid.configs[at].to_json().get(down) for at in ran)
    fastest = np.full((len(lines), len(columns)), np.inf)
    places: dict[tuple[int, int], list[int]] = {}
    place_of = {int(at): place for place, at in enumerate(found.places[row][:_SHORTLIST], 1)}
    for at in ran:
        knob = grid.configs[at].to_json()
        cell = lines.index(None if down is None else knob.get(down)), columns.index(knob.get(across))
        fastest[cell] = min(fastest[cell], times[at])
        if int(at) in place_of:
            places.setdefault(cell, []).append(place_of[int(at)])
    best = np.unravel_index(int(fastest.argmin()), fastest.shape)
    slowdowns = np.where(np.isfinite(fastest), fastest / fastest[best], np.nan)

    def paint(ax: Axes) -> None:
        from matplotlib.patches import Rectangle

        room = max(slowdowns.shape) <= _MOST_VALUES
        texts = [
            [_cell_text(time, places.get((i, j), ())) if room else "" for j, time in enumerate(line)]
            for i, line in enumerate(fastest)
        ]
        # On a logarithmic scale, the fastest brightest.
        paint_cells(ax, -np.log(np.minimum(slowdowns, _SLOWEST)), texts, (-float(np.log(_SLOWEST)), 0.0), "viridis")
        for i, j in places:
            ax.add_patch(Rectangle((j + 0.04, i + 0.04), 0.92, 0.92, fill=False, edgecolor="#ff3b6b", linewidth=2))
        ax.add_patch(Rectangle((best[1] + 0.11, best[0] + 0.11), 0.78, 0.78, fill=False, edgecolor="#000000",
                               linestyle=(0, (2, 1.5)), linewidth=1.2))  # fmt: skip
        ax.set_xticks(np.arange(len(columns)) + 0.5, [_tick(value) for value in columns])
        ax.set_yticks(np.arange(len(lines)) + 0.5, [_tick(value) for value in lines])
        ax.set_xlabel(abridged(printable(across), 40))
        if down is not None:
            ax.set_ylabel(abridged(printable(down), 30))

    choice = found.choice(row)
    marked = "; ".join(
        f"ranks {', '.join(map(str, sorted(numbers)))} at {_named(down, lines[i])}{across}={_tick(columns[j])}"
        for (i, j), numbers in sorted(places.items())
    )
    where = f"{_named(down, lines[best[0]])}{across}={_tick(columns[best[1]])}"
    return draw(
        key,
        printable(f"{what}: time by {across}" + (f" and {down}" if down else "")),
        paint,
        description=printable(f"The fastest, {fastest[best]:.4g} us, is at {where}. On the shortlist: {marked}."),
        caption=printable(
            f"{abridged(choice.problem, 200)} on {choice.device}: time in us of the fastest config in each cell. "
            f"Red frames and # mark the ranks of the {_SHORTLIST} predicted configs, the dashed frame the best config. "
            f"The first choice is {100 * (choice.regret - 1):.1f} % slower than the best."
        ),
        height=1.0 + 0.4 * len(lines) if len(lines) <= _MOST_VALUES else 1.0 + 0.2 * min(len(lines), 40),
    )


def varying(knobs: Sequence[str], configs: Sequence[KernelConfig]) -> tuple[str, ...]:
    """Return at most two knobs that differ between the configs: block sizes first, then in the family's order.

    >>> configs = [KernelConfig.of(A=1, BLOCK_N=n, num_warps=w) for n in (16, 32) for w in (4, 8)]
    >>> varying(("A", "num_warps", "BLOCK_N"), configs)
    ('BLOCK_N', 'num_warps')
    """
    values = [config.to_json() for config in configs]
    differing = [knob for knob in knobs if len({str(one.get(knob)) for one in values}) > 1]
    return tuple(sorted(differing, key=lambda knob: not knob.startswith("BLOCK"))[:2])


def _values(given: Iterator[object]) -> list[object]:
    """Return the distinct values: numbers in order, then other values by their text."""
    return sorted(
        set(given), key=lambda value: (0, value, "") if isinstance(value, (int, float)) else (1, 0, str(value))
    )


def _tick(value: object) -> str:
    return "-" if value is None else abridged(printable(str(value)), 12)


def _named(knob: str | None, value: object) -> str:
    return "" if knob is None else f"{knob}={_tick(value)} "


def _cell_text(time_us: float, places: Sequence[int]) -> str:
    """Return the text of a cell: the time in microseconds, and the shortlist places of the configs in it."""
    if not np.isfinite(time_us):
        return ""
    time = f"{time_us:.3g}" if time_us < 1000 else f"{time_us:.0f}"
    listed = sorted(places)
    more = "+" if len(listed) > _MOST_PLACES else ""
    return time + ("\n#" + " ".join(map(str, listed[:_MOST_PLACES])) + more if listed else "")
