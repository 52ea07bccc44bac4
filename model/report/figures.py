"""Draw the figures on the accuracy of a family's shortlists and on the calibration of its predictions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...datasets.console import percent, printable
from ...datasets.errors import abridged
from ..metrics import geomean
from .canvas import BLUE, GREEN, HEIGHT, INK, MUTED, ORANGE, OTHERS, RULE, Figure, draw
from .findings import WITHIN, Findings

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Percent; lower values are drawn here, because a logarithmic axis has no zero.
_LEAST = 0.05
_MARKERS = "osD^vP*X<>"
#: The most points in a scatter plot; more cannot be told apart.
_MOST_POINTS = 1000
#: The smallest number of problems in a bin of the calibration plot, and the largest number of bins.
_FEWEST_IN_A_BIN, _MOST_BINS = 8, 10
#: The coverage that shortlists with k="auto" aim at.
_NOMINAL = 0.95
_DASHES = ("-", "--", "-.", ":")


def accuracy_figures(found: Findings, key: str) -> Iterator[Figure]:
    """Draw the figures on accuracy for which there are results. Their keys begin with `key`."""
    yield _regret(found, f"{key}-regret")
    if len(found.curve) > 1:
        yield _learning(found, f"{key}-learning")
    if any(factor > 1.0 for factor in found.contributions.values()):
        yield _contributions(found, f"{key}-features")
    if len(found.summary["regret_by_device"]) > 1:
        yield _devices(found, f"{key}-devices")


def curves(found: Findings) -> dict[str, Mapping[str, Any]]:
    """Return the regrets by k of the ranker and of the baselines, as in `Evaluation.to_json`, the ranker first."""
    summary = found.summary
    ours: dict[str, Any] = {"foretune": summary["regret"]}
    if found.evaluation.is_ragged:
        ours["foretune, sizes unknown"] = summary["regret_sizes_unknown"]
    ours |= summary["baselines"]
    return ours


def percents(axis: Any) -> None:
    """Label a logarithmic axis with plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _over(ratio: float, floor: float = 1.0) -> float:
    """Return how far a ratio is above 1 in percent, at least `_LEAST`; a ratio below `floor` counts as `floor`."""
    return max(100 * (max(ratio, floor) - 1), _LEAST)


def _band(
    ax: Axes,
    at: Sequence[float],
    summaries: Sequence[Mapping[str, Any]],
    floor: float,
    *,
    alpha: float = 0.16,
    **style: Any,
) -> None:
    """Draw a line through the means of `summaries` at the x-values `at`, and their 95 % interval as a band.

    Values below `floor`, a noise floor, are drawn at it.
    """
    low, high = ([_over(one["ci95"][edge], floor) for one in summaries] for edge in (0, 1))
    ax.fill_between(at, low, high, color=style["color"], alpha=alpha, linewidth=0)
    ax.plot(at, [_over(one["geomean"], floor) for one in summaries], markersize=4, **style)


def _whole_numbers(ax: Axes, values: Sequence[float]) -> None:
    """Make the x-axis logarithmic, with ticks at these values, labeled as integers."""
    ax.set_xscale("log", base=2)
    ax.set_xticks(list(values), [f"{value:.0f}" for value in values])
    ax.minorticks_off()


def _regret(found: Findings, key: str) -> Figure:
    compared, noise = curves(found), found.summary["noise_floor"]
    ks = [int(k) for k in found.summary["regret"]]

    def paint(ax: Axes) -> None:
        ax.set_yscale("log")
        for number, (name, by_k) in enumerate(compared.items()):
            ours = name == "foretune"
            style: dict[str, Any] = {"linestyle": _DASHES[number % 4], "marker": _MARKERS[number % 10]}
            style |= {"color": BLUE if ours else OTHERS[(number - 1) % len(OTHERS)], "linewidth": 2.2 if ours else 1.2}
            style |= {"alpha": 0.2 if ours else 0.08, "label": abridged(printable(name), 30)}
            _band(ax, ks, list(by_k.values()), noise, **style)
        ax.axhline(_over(noise), color=MUTED, linestyle=":", linewidth=1, label="noise floor")
        _whole_numbers(ax, ks)
        _from_noise(ax, noise)
        ax.set(xlabel="k: best of the first k configs", ylabel="% slower than the best config")
        _legend(ax)

    first = ", ".join(f"{name} {percent(by_k[str(ks[0])]['geomean'])} %" for name, by_k in compared.items())
    last = ", ".join(f"{name} {percent(by_k[str(ks[-1])]['geomean'])} %" for name, by_k in compared.items())
    return draw(
        key,
        "Regret by the length of the shortlist",
        paint,
        description=f"At k = {ks[0]}: {first}. At k = {ks[-1]}: {last}. Noise floor: {percent(noise)} %.",
        caption="Geometric means over all problems; bands are 95 % intervals, bootstrapped over groups of models. "
        "Values below the noise floor are drawn at the floor, because they are timing noise.",
        height=HEIGHT + 0.17 * max(0, len(compared) - 3),
    )


def _from_noise(ax: Axes, noise: float) -> None:
    """Let a logarithmic y-axis in percent begin a little below the noise floor."""
    percents(ax.yaxis)
    ax.set_ylim(bottom=0.85 * _over(noise))


def _legend(ax: Axes) -> None:
    """Put a legend of two columns above the axes."""
    ax.figure.legend(loc="outside upper left", ncols=2, handlelength=2.4, columnspacing=1.2)


def _learning(found: Findings, key: str) -> Figure:
    at, noise = [point.problems for point in found.curve], found.summary["noise_floor"]

    def paint(ax: Axes) -> None:
        ax.set_yscale("log")
        for k, colour, marker in ((1, BLUE, "o"), (8, GREEN, "s")):
            summaries = [point.regret[k].to_json() for point in found.curve]
            label = "first choice" if k == 1 else f"best of {k}"
            _band(ax, at, summaries, noise, color=colour, marker=marker, label=label)
        _whole_numbers(ax, at)
        _from_noise(ax, noise)
        ax.set(xlabel="problems in training", ylabel="% slower than the best config")
        _legend(ax)

    described = "; ".join(
        f"{point.problems:.0f} problems: first choice {percent(point.regret[1].geomean)} %, "
        f"best of 8 {percent(point.regret[8].geomean)} %"
        for point in found.curve
    )
    return draw(
        key,
        "Learning curve",
        paint,
        description=described + ".",
        caption=f"How regret falls with more measured problems, for rankers of {found.curve[0].trees} trees, on one "
        "held-out fold; bands are 95 % intervals. Look at the slope: the other figures are of rankers with more trees.",
    )


def _contributions(found: Findings, key: str, most: int = 12) -> Figure:
    leading = {name: factor for name, factor in list(found.contributions.items())[:most] if factor > 1.0}
    names = [abridged(printable(name), 26) for name in leading]
    moved = [100 * (factor - 1) for factor in leading.values()]

    def paint(ax: Axes) -> None:
        ax.barh(range(len(moved)), moved, color=BLUE, height=0.7)
        ax.set_yticks(range(len(moved)), names)
        ax.invert_yaxis()
        ax.grid(False, axis="y")
        ax.tick_params(axis="y", length=0)
        ax.set_xlabel("average change of a predicted slowdown, %")

    described = ", ".join(f"{name} {value:.1f} %" for name, value in zip(names, moved, strict=True))
    return draw(
        key,
        "Feature contributions",
        paint,
        description=described + ".",
        caption="Mean absolute Shapley value of each feature (path-dependent TreeSHAP, LightGBM's pred_contrib), over "
        "configs and problems sampled as in training.",
        height=1.0 + 0.19 * len(moved),
    )


def _devices(found: Findings, key: str, most: int = 12) -> Figure:
    parts = dict(list(found.summary["regret_by_device"].items())[:most])
    names = np.array([device.name for device in found.evaluation.devices])
    ks = [k for k in ("1", "8") if k in found.summary["regret"]]
    rivals: dict[tuple[str, str], float] = {}
    for name in parts:
        for k in ks if "static" in found.evaluation.baselines else ():
            values = found.evaluation.baselines["static"][int(k)][:, names == name]
            rivals[name, k] = geomean(values)

    def paint(ax: Axes) -> None:
        ax.set_xscale("log")
        for place, (name, part) in enumerate(parts.items()):
            for k, colour, marker, lower in zip(ks, (BLUE, GREEN), "os", (0.0, 0.22), strict=False):
                one, y = part["regret"][k], place + lower
                label = f"first {'choice' if k == '1' else k}"
                ax.plot([_over(edge) for edge in one["ci95"]], [y, y], color=colour, linewidth=1.6)
                ax.plot(_over(one["geomean"]), y, marker, color=colour, markersize=5, label=None if place else label)
                if (name, k) in rivals:
                    label = f"static list, {'first' if k == '1' else k}"
                    ax.plot(
                        _over(rivals[name, k]),
                        y,
                        marker,
                        color=ORANGE,
                        fillstyle="none",
                        label=None if place else label,
                    )
            text = f"{abridged(printable(name), 34)} ({part['problems']})"
            ax.annotate(text, (0, place - 0.3), xycoords=("axes fraction", "data"), xytext=(4, 0),
                        textcoords="offset points", va="center", fontsize=8, color=INK)  # fmt: skip
        ax.set_ylim(len(parts) - 0.45, -0.6)
        ax.set_yticks([])
        percents(ax.xaxis)
        ax.set_xlabel("% slower than the best config")
        _legend(ax)

    described = "; ".join(
        f"{name}: " + ", ".join(f"best of {k} {percent(part['regret'][k]['geomean'])} %" for k in ks)
        for name, part in parts.items()
    )
    return draw(
        key,
        "Regret by device",
        paint,
        description=described + ".",
        caption="With 95 % intervals. In brackets: the number of problems measured on the device.",
        height=1.25 + 0.55 * len(parts),
    )


def calibration_figures(found: Findings, key: str) -> Iterator[Figure]:
    """Draw the figures on the calibration of predictions. Their keys begin with `key`."""
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
                markeredgewidth=0, label="one problem")  # fmt: skip
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
        caption="On the dashed line, the measured slowdown equals the predicted one. Geometric means: "
        f"{means_of[0]:.1f} % predicted, {means_of[1]:.1f} % measured. "
        "Bars are 95 % intervals of the means; the slowest 1 % of the problems are drawn at the upper edge.",
    )


def _coverage(found: Findings, key: str) -> Figure:
    known, unknown = found.coverage_by_k(), found.coverage_by_k(sizes_known=False)
    ragged = found.evaluation.is_ragged
    ks = np.arange(1, len(known) + 1)
    enough = ks[known >= _NOMINAL]
    autos = {where: coverage.to_json() for where, coverage in found.evaluation.coverage.items()}

    def paint(ax: Axes) -> None:
        ax.plot(
            ks, 100 * known, color=BLUE, linewidth=2, drawstyle="steps-post", label="sizes known" if ragged else None
        )
        if ragged:
            ax.plot(ks, 100 * unknown, color=ORANGE, linestyle="--", drawstyle="steps-post", label="sizes unknown")
        for mark, auto in zip("D^s", autos.values(), strict=False):
            label = 'k="auto"' if mark == "D" else None
            ax.plot(auto["mean_k"], 100 * auto["coverage"], mark, color=BLUE, markersize=7, label=label)
        if autos or ragged:
            ax.figure.legend(loc="outside upper left", ncols=3)
        ax.axhline(100 * _NOMINAL, color=MUTED, linestyle=":", linewidth=1)
        ax.set_xscale("log", base=2)
        ticks = [k for k in (1, 2, 4, 8, 16, 32) if k <= len(ks)]
        ax.set_xticks(ticks, [str(k) for k in ticks])
        ax.minorticks_off()
        ax.set_ylim(min(0.0, 100 * known[0]), 102)
        ax.set(xlabel="length of the shortlist, k", ylabel="% of problems covered")
        ax.grid(True, color=RULE)

    reached = (
        f"k = {enough[0]} covers {100 * _NOMINAL:.0f} % of the problems"
        if len(enough)
        else f"no k up to {len(ks)} covers {100 * _NOMINAL:.0f} % of the problems"
    )
    shares = ", ".join(f"k = {k}: {100 * known[k - 1]:.0f} %" for k in (1, 2, 4, 8, 16, 32) if k <= len(ks))
    return draw(
        key,
        "Coverage by the length of the shortlist",
        paint,
        description=f"{shares}; {reached}.",
        caption=f"A shortlist covers a problem if it has a config within {100 * (WITHIN - 1):.0f} % of the best: "
        f"{reached}." + "".join(f' With k="auto", {where}: {one}.' for where, one in found.evaluation.coverage.items()),
    )
