"""The figures of single problems: measured time over two knobs, with the shortlist marked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...datasets import KernelConfig
from ...datasets.console import printable
from ...datasets.errors import abridged
from .canvas import Figure, draw
from .cells import paint_cells

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .findings import Findings

#: How many of the shortlist are marked, and how many places a cell has room for.
_SHORTLIST, _MOST_PLACES = 8, 3
#: More values of a knob leave no room for text.
_MOST_VALUES = 12
#: Colours end at so many times the best.
_SLOWEST = 4.0


def knob_figures(found: Findings, key: str) -> Iterator[Figure]:
    """A problem of typical regret, and the worst one; nothing where all configs of a problem are alike."""
    order = np.argsort(found.evaluation.regret[min(found.evaluation.regret)], kind="stable")
    rows = {"A typical problem": int(order[len(order) // 2]), "The worst first choice": int(order[-1])}
    for number, (what, row) in enumerate(rows.items()):
        if number and row in list(rows.values())[:number]:
            continue
        if (figure := _map(found, row, what, f"{key}-knobs-{number}")) is not None:
            yield figure


def _map(found: Findings, row: int, what: str, key: str) -> Figure | None:
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
        # Logarithmic, the fastest bright: twice and four times as slow are equally far apart.
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
        f"places {', '.join(map(str, sorted(numbers)))} at {_named(down, lines[i])}{across}={_tick(columns[j])}"
        for (i, j), numbers in sorted(places.items())
    )
    where = f"{_named(down, lines[best[0]])}{across}={_tick(columns[best[1]])}"
    return draw(
        key,
        printable(f"{what}: time by {across}" + (f" and {down}" if down else "")),
        paint,
        description=printable(f"The fastest, {fastest[best]:.4g} us, is at {where}. On the shortlist: {marked}."),
        caption=printable(
            f"{abridged(choice.problem, 200)} on {choice.device}: microseconds of the fastest config of each cell. "
            f"Red frames and # say where the shortlist of {_SHORTLIST} is, the dashed frame where the best config is. "
            f"The first choice is {100 * (choice.regret - 1):.1f} % slower than the best."
        ),
        height=1.0 + 0.4 * len(lines) if len(lines) <= _MOST_VALUES else 1.0 + 0.2 * min(len(lines), 40),
    )


def varying(knobs: Sequence[str], configs: Sequence[KernelConfig]) -> tuple[str, ...]:
    """At most two of the knobs that differ between the configs: blocks first, then as the family lists them.

    >>> configs = [KernelConfig.of(A=1, BLOCK_N=n, num_warps=w) for n in (16, 32) for w in (4, 8)]
    >>> varying(("A", "num_warps", "BLOCK_N"), configs)
    ('BLOCK_N', 'num_warps')
    """
    values = [config.to_json() for config in configs]
    differing = [knob for knob in knobs if len({str(one.get(knob)) for one in values}) > 1]
    return tuple(sorted(differing, key=lambda knob: not knob.startswith("BLOCK"))[:2])


def _values(given: Iterator[object]) -> list[object]:
    """Each once, numbers by size before words."""
    return sorted(
        set(given), key=lambda value: (0, value, "") if isinstance(value, (int, float)) else (1, 0, str(value))
    )


def _tick(value: object) -> str:
    return "-" if value is None else abridged(printable(str(value)), 12)


def _named(knob: str | None, value: object) -> str:
    return "" if knob is None else f"{knob}={_tick(value)} "


def _cell_text(time_us: float, places: Sequence[int]) -> str:
    if not np.isfinite(time_us):
        return ""
    time = f"{time_us:.3g}" if time_us < 1000 else f"{time_us:.0f}"
    listed = sorted(places)
    more = "+" if len(listed) > _MOST_PLACES else ""
    return time + ("\n#" + " ".join(map(str, listed[:_MOST_PLACES])) + more if listed else "")
