"""Print what one config loses when a layer's rows are routed in another way, from shipped measurements, without a GPU:
`python tests/studies/other_routings.py` (seconds)."""

from __future__ import annotations

import sys
from collections import defaultdict
from itertools import permutations

import numpy as np
from foretune.datasets import load
from foretune.model.metrics import geomean


def across_routings(name: str) -> str:
    """Describe the losses of one config for all measured routings of a layer, and of one routing's best on another."""
    grid = load("h200").grid(name)
    layers: dict[object, list[int]] = defaultdict(list)
    for place, (case, device) in enumerate(zip(grid.cases, grid.devices, strict=True)):
        layers[case.problem.without_sizes(), device.name].append(place)
    losses, elsewhere = list[float](), list[float]()
    several = [places for places in layers.values() if len(places) > 1]
    for places in several:
        times = grid.times_us[places]
        times = times[:, np.isfinite(times).all(axis=0)]
        slowdowns = times / np.nanmin(grid.times_us[places], axis=1, keepdims=True)
        losses += slowdowns[:, np.log(slowdowns).mean(axis=0).argmin()].tolist()
        best = slowdowns.argmin(axis=1)
        elsewhere += [slowdowns[other, best[one]] for one, other in permutations(range(len(places)), 2)]
    one_for_all, of_another = (
        f"{100 * (geomean(lost) - 1):.2f} % (worst {100 * (max(lost) - 1):.0f} %)" for lost in (losses, elsewhere)
    )
    return (
        f"{name}, {len(losses)} problems of {len(several)} layers: the best one config for all routings of a layer is "
        f"{one_for_all} slower than the best of each, and the best of one routing {of_another} on another"
    )


if __name__ == "__main__":
    for family in ("grouped_gemm_fwd", "grouped_gemm_dx", "grouped_gemm_dw"):
        sys.stdout.write(across_routings(family) + "\n")
