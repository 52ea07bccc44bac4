"""`python tests/kernels/consumers_study.py FAMILY --data NAME ...`: of the problems on which configs with CONSUMERS
were measured, on how many is one of them the fastest, and how much longer does the fastest other take, by card and
size."""

from __future__ import annotations

import argparse

import numpy as np
import rich
from foretune.datasets.console import table
from foretune.kernels import find_measurable
from foretune.kernels.learning import datasets_merged
from foretune.model.rows import supported

#: Upper ends of the rows, in GFLOP.
ENDS = (1, 10, 50, 200, 1000, np.inf)


def gains(name: str, data: list[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The card, GFLOP, and how many times as long the others take, (n_problems,) each."""
    family = find_measurable(name)
    grid = datasets_merged(data).grid(family)
    times = np.where(supported(grid, family) & np.isfinite(grid.times_us), grid.times_us, np.inf)
    jobs = np.array([config["CONSUMERS"] > 0 for config in grid.configs])
    theirs, others = times[:, jobs].min(axis=1), times[:, ~jobs].min(axis=1)
    there = np.isfinite(theirs) & np.isfinite(others)
    gflop = np.array([family.flops(case.problem) / 1e9 for case in grid.cases])
    devices = np.array([device.name for device in grid.devices])
    return devices[there], gflop[there], others[there] / theirs[there]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("family", help="one whose space has CONSUMERS")
    parser.add_argument("--data", nargs="+", required=True, help="folders or shipped names of datasets")
    options = parser.parse_args()
    devices, gflop, ratio = gains(options.family, options.data)
    rows = []
    for device in sorted(set(devices)):
        for first, end in (*zip((0, *ENDS), ENDS, strict=False), (0, np.inf)):
            inside = (devices == device) & (first <= gflop) & (gflop < end)
            if inside.any():
                won = ratio[inside]
                gained = np.exp(np.log(np.maximum(won, 1)).mean())
                size = f"{first:.0f} to {end:.0f}"
                rows.append([device, size, inside.sum(), (won > 1).sum(), f"{gained:.3f}", f"{won.max():.2f}"])
    columns = ("device", "GFLOP", "problems", "fastest so", "time without, mean", "most")
    rich.print(table(f"{options.family}: CONSUMERS in {' and '.join(options.data)}", columns, rows))


if __name__ == "__main__":
    main()
