"""`HintMatrix`: how much the config that is best at one size loses at all other sizes, compared with covers.

Compilers tune a kernel with a dynamic size at one or a few sizes (hints), and run the result at every size; torch's
Inductor calls these multi-kernel hints. The matrix shows how much time that loses.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...datasets import DeviceSpec, Family, ForetuneError, Problem
from ...datasets.console import table
from ...datasets.errors import abridged
from .cover import Cover, make_cover, measured_cover
from .losses import SizeLosses, at_size, measured_losses

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ...datasets.dataset import Dataset
    from ...model import Bundle

#: Defines the rows and columns of the table.
_CAPTION = (
    "Rows: sizes. Columns: how much slower than the best config of that size is what each way runs: the config "
    "that is best at one hint, or a cover by predicted or measured times."
)
#: The largest loss of a size that counts as "within" in the line below the table.
GOAL = 0.02


@dataclass(frozen=True)
class HintMatrix:
    """The losses of several ways of choosing a config at each size, compared with the best config there (0.02 = 2 %).

    The losses come from the times of one dataset.

    Configs are chosen by the times of the first pass, and their losses are computed from the second pass. `noise` is
    the loss, by the second pass, of the config that is best at the same size by the first.
    """

    dynamic: str
    sizes: tuple[int, ...]  # (n_sizes,)
    # By the way of choosing a config, each (n_sizes,); inf where it cannot run, nan where it was not measured.
    losses: tuple[tuple[str, tuple[float, ...]], ...]
    noise: tuple[float, ...]  # (n_sizes,)
    partial: tuple[int, ...]  # sizes at which some configs were not measured, so that the best one may be unknown
    device: str
    measured: Cover
    predicted: Cover | None
    reason: str  # the source of the prediction, or why there is none

    def to_json(self) -> dict[str, Any]:
        """Return JSON values, as `foretune cover --hints ... --json` prints them."""
        return {
            "dynamic": self.dynamic,
            "device": self.device,
            "sizes": list(self.sizes),
            "losses": {way: [_rounded(loss) for loss in losses] for way, losses in self.losses},
            "not_measured": {
                way: [size for size, loss in zip(self.sizes, losses, strict=True) if math.isnan(loss)]
                for way, losses in self.losses
            },
            "noise": [_rounded(loss) for loss in self.noise],
            "partial": list(self.partial),
            "measured": self.measured.to_json(),
            "predicted": self.predicted and self.predicted.to_json(),
            "reason": self.reason,
        }

    def __rich__(self) -> Any:
        ways = [*self.losses, ("noise", self.noise)]
        rows = [[size, *(_percent(losses[at]) for _, losses in ways)] for at, size in enumerate(self.sizes)]
        rows.append(["mean", *(_percent(_mean(losses)) for _, losses in ways)])
        rows.append(["worst", *(_percent(max(_measured(losses), default=math.nan)) for _, losses in ways)])
        held = [
            f"{way}: {sum(loss <= GOAL for loss in losses)} of {len(_measured(losses))} sizes within {100 * GOAL:g} %"
            for way, losses in self.losses
        ]
        below = ["; ".join(held), f"cover: {self.reason}"]
        if self.partial:
            every = len(self.partial) == len(self.sizes)
            sizes = "any size" if every else f"{self.dynamic} {abridged(', '.join(map(str, self.partial)))}"
            below.append(f"Not all configs were measured at {sizes}, so the best may be faster there")
        return table(
            f"Percent lost by {self.dynamic} on {self.device}",
            (self.dynamic, *(way for way, _ in ways)),
            rows,
            below=[*below, _CAPTION],
        )


def make_hint_matrix(
    family: Family,
    problem: Problem,
    dynamic: str,
    span: Sequence[int],
    k: int | None,
    device: DeviceSpec | Path | str,
    data: Dataset,
    *,
    hints: Iterable[int],
    within: float | None = None,
    ranges: int | None = None,
    bundle: Bundle | Path | str | None = None,
) -> HintMatrix:
    """Return the losses of configs tuned at single sizes (the hints) and of covers, from a problem's measurements.

    Its columns are the config that is fastest at each hint, the config of the nearest hint, the predicted cover, and
    the cover chosen from the measurements. If the bundle cannot predict, that column is missing, and `reason` says why.

    Args:
        family: The kernel's family.
        problem: The problem; its size of the dimension `dynamic` does not matter.
        dynamic: The dimension.
        span: The smallest and the largest size.
        k: The number of configs of the covers, as for `make_cover`.
        device: A spec, the name of a shipped one, or a spec's JSON file.
        data: The measurements.
        hints: The hints, which must be measured sizes.
        within: The loss that the covers may have, as for `make_cover`.
        ranges: The maximum number of ranges of the covers, as for `make_cover`.
        bundle: The bundle that predicts, or its folder; the shipped one if None.

    Raises:
        ForetuneError: As `measured_cover` does, and for a hint that was not measured.
    """
    spec = DeviceSpec.find(device)
    of_data = measured_cover(family, problem, dynamic, span, k, spec, data, within=within, ranges=ranges)
    losses = measured_losses(family, problem, dynamic, int(span[0]), int(span[1]), spec, data)
    predicted: Cover | None = None
    try:
        predicted = make_cover(
            family,
            problem,
            dynamic,
            span,
            k,
            spec,
            within=within,
            ranges=ranges,
            configs=losses.configs,
            bundle=bundle,
        )
    except ForetuneError as error:  # the measurements are shown without a prediction
        reason = f"not predicted ({error})"
    else:
        reason = predicted.reason
    rows = np.arange(len(losses.sizes))
    best, hinted = losses.first.argmin(axis=1), {}
    for hint in hints:
        if hint not in losses.sizes:
            raise ForetuneError(f"a hint must be a size that {data.label} measured but is {hint}")
        hinted[hint] = int(best[losses.sizes.index(hint)])
    nearest = [hinted[min(hinted, key=lambda hint: abs(math.log(hint / size)))] for size in losses.sizes]
    ways = {f"hint {hint}": np.full(len(rows), column) for hint, column in hinted.items()}
    ways["nearest hint"] = np.array(nearest)
    if predicted is not None:
        ways["cover"] = np.array([losses.configs.index(predicted.config_for(size)) for size in losses.sizes])
    missing = _not_measured(family, problem, dynamic, spec, losses)
    found = {
        way: np.where(missing[rows, columns], np.nan, np.expm1(losses.second[rows, columns]))
        for way, columns in ways.items()
    }
    found["cover, measured"] = np.array(of_data.losses)
    return HintMatrix(
        dynamic=dynamic,
        sizes=losses.sizes,
        losses=tuple((way, tuple(one.tolist())) for way, one in found.items()),
        noise=tuple(np.expm1(losses.second[rows, best]).tolist()),
        partial=tuple(size for size, row in zip(losses.sizes, missing, strict=True) if row.any()),
        device=spec.name,
        measured=of_data,
        predicted=predicted,
        reason=reason,
    )


def _not_measured(
    family: Family, problem: Problem, dynamic: str, device: DeviceSpec, losses: SizeLosses
) -> NDArray[np.bool_]:
    """Return the mask of the supported configs in `losses` that were not measured, (n_sizes, n_configs)."""
    missing = ~losses.tried
    for row, column in np.argwhere(missing).tolist():
        one = at_size(problem, dynamic, losses.sizes[row])
        missing[row, column] = family.supports(losses.configs[column], one, device) is None
    return missing


def _rounded(loss: float) -> float | None:
    """Return a loss rounded to four digits for JSON; None for infinity and nan, which JSON lacks."""
    return round(loss, 4) if math.isfinite(loss) else None


def _percent(loss: float) -> str:
    """Return a loss as a text in percent, for the table."""
    if math.isnan(loss):
        return "not measured"
    return f"{100 * loss:.1f}" if math.isfinite(loss) else "cannot run"


def _measured(losses: Sequence[float]) -> list[float]:
    """Return the losses that are not nan."""
    return [loss for loss in losses if not math.isnan(loss)]


def _mean(losses: Sequence[float]) -> float:
    """Return the geometric mean slowdown minus 1 over the measured sizes (those that are not nan); nan without any."""
    known = _measured(losses)
    return math.expm1(statistics.fmean(map(math.log1p, known))) if known else math.nan
