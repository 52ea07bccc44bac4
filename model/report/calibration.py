"""The figures on whether a prediction means what it says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ..metrics import geomean
from .canvas import BLUE, MUTED, ORANGE, RULE, Figure, draw
from .findings import WITHIN, Findings

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: More points than anybody sees apart.
_MOST_POINTS = 1000
#: Of so many problems each mean is taken, at least.
_FEWEST_IN_A_BIN, _MOST_BINS = 8, 10
_NOMINAL = 0.95


def calibration_figures(found: Findings, key: str) -> Iterator[Figure]:
    """Each of a key of its own that begins with `key`."""
    yield _reliability(found, f"{key}-reliability")
    yield _coverage(found, f"{key}-coverage")


def _reliability(found: Findings, key: str) -> Figure:
    predicted = 100 * (found.first_predicted - 1)
    measured = 100 * (found.evaluation.regret[min(found.evaluation.regret)] - 1)
    order = np.argsort(predicted, kind="stable")
    bins = np.array_split(order, max(min(len(order) // _FEWEST_IN_A_BIN, _MOST_BINS), 1))
    means = np.array([[predicted[some].mean(), measured[some].mean()] for some in bins])
    errors = np.array([measured[some].std() / np.sqrt(len(some)) for some in bins])
    means_of = [100 * (geomean(1 + values / 100) - 1) for values in (predicted, measured)]
    some = order[:: -(-len(order) // _MOST_POINTS)]
    top = max(float(np.quantile(measured, 0.99)), float(predicted.max()), 1.0)

    def paint(ax: Axes) -> None:
        low = min(float(predicted.min()), 0.0)
        ax.plot([low, top], [low, top], color=MUTED, linestyle="--", linewidth=1, label="as predicted")
        ax.plot(predicted[some], np.minimum(measured[some], top), "o", color=ORANGE, alpha=0.45, markersize=3.5,
                markeredgewidth=0, label="a problem")  # fmt: skip
        ax.errorbar(
            means[:, 0],
            means[:, 1],
            yerr=1.96 * errors,
            color=BLUE,
            marker="o",
            markersize=5,
            linewidth=1.6,
            label="mean",
        )
        across = float(predicted.max()) - low
        ax.set(xlim=(low - 0.05 * across - 0.1, low + 1.05 * across + 0.1), ylim=(-0.03 * top, 1.05 * top))
        ax.set(xlabel="predicted: % slower than the best", ylabel="measured: % slower")
        ax.figure.legend(loc="outside upper left", ncols=3)

    return draw(
        key,
        "Predicted and measured slowdown of the first choice",
        paint,
        description="; ".join(f"predicted {x:.1f} %, measured {y:.1f} % in the mean" for x, y in means) + ".",
        caption="On the dashed line a prediction means what it says. In the geometric mean "
        f"{means_of[0]:.1f} % are predicted, {means_of[1]:.1f} % measured. "
        "Bars are 95 % intervals of the means; the slowest 1 % are drawn at the upper edge.",
    )


def _coverage(found: Findings, key: str) -> Figure:
    known, unknown = found.served(), found.served(sizes_known=False)
    ragged = any(case.problem.ragged for case in found.evaluation.cases)
    ks = np.arange(1, len(known) + 1)
    enough = ks[known >= _NOMINAL]
    autos = {where: coverage.to_json() for where, coverage in found.evaluation.coverage.items()}

    def paint(ax: Axes) -> None:
        ax.plot(
            ks, 100 * known, color=BLUE, linewidth=2, drawstyle="steps-post", label="sizes known" if ragged else None
        )
        if ragged:
            ax.plot(ks, 100 * unknown, color=ORANGE, linestyle="--", drawstyle="steps-post", label="sizes unknown")
        for mark, told in zip("D^s", autos.values(), strict=False):
            label = 'k="auto"' if mark == "D" else None
            ax.plot(told["mean_k"], 100 * told["coverage"], mark, color=BLUE, markersize=7, label=label)
        if autos or ragged:
            ax.figure.legend(loc="outside upper left", ncols=3)
        ax.axhline(100 * _NOMINAL, color=MUTED, linestyle=":", linewidth=1)
        ax.set_xscale("log", base=2)
        ticks = [k for k in (1, 2, 4, 8, 16, 32) if k <= len(ks)]
        ax.set_xticks(ticks, [str(k) for k in ticks])
        ax.minorticks_off()
        ax.set_ylim(min(0.0, 100 * known[0]), 102)
        ax.set(xlabel="length of the shortlist, k", ylabel="% of problems served")
        ax.grid(True, color=RULE)

    reached = (
        f"k = {enough[0]} serves {100 * _NOMINAL:.0f} % of the problems"
        if len(enough)
        else f"no k up to {len(ks)} serves {100 * _NOMINAL:.0f} % of the problems"
    )
    shares = ", ".join(f"k = {k}: {100 * known[k - 1]:.0f} %" for k in (1, 2, 4, 8, 16, 32) if k <= len(ks))
    return draw(
        key,
        "How many to try",
        paint,
        description=f"{shares}; {reached}.",
        caption=f"A shortlist serves a problem where it holds a config within {100 * (WITHIN - 1):.0f} % of the best: "
        f"{reached}." + "".join(f' Of k="auto", {where}: {one}.' for where, one in found.evaluation.coverage.items()),
    )
