"""How far two cards of one kind agree on the best config: `python tests/model/two_runs.py DIR [--known h200]`.

DIR is what another such card measured, as `foretune collect grouped_gemm_dw --like h200 --per-layer 0 --random 0
--limit 34 --out DIR` does. Of each problem that both have measured, the config that is best on one is looked up on the
other: no ranker that learned on the one can be expected to do better.
"""

from __future__ import annotations

import argparse

import numpy as np
from foretune.datasets import load
from foretune.datasets.console import table
from foretune.datasets.grid import Grid
from foretune.kernels import find_family
from foretune.model import TrainingSet, geomean
from rich.console import Console


def times_of_both(new: Grid, old: Grid) -> list[tuple[np.ndarray, np.ndarray]]:
    """The times of each problem that both grids have, on one and the other, of the configs that ran on both."""
    rows = {
        (case.problem, device.name): row for row, (case, device) in enumerate(zip(old.cases, old.devices, strict=True))
    }
    shared = [config for config in new.configs if config in set(old.configs)]
    columns = [[grid.configs.index(config) for config in shared] for grid in (new, old)]
    found = []
    for row, (case, device) in enumerate(zip(new.cases, new.devices, strict=True)):
        if (there := rows.get((case.problem, device.name))) is not None:
            times = np.stack([new.times_us[row, columns[0]], old.times_us[there, columns[1]]])
            times = times[:, np.isfinite(times).all(axis=0)]
            found.append((times[0], times[1]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("again")
    parser.add_argument("--known", default="h200")
    options = parser.parse_args()
    again, known = load(options.again), load(options.known)
    shown = []
    for name in sorted(set(again.families) & set(known.families)):
        new, old = (TrainingSet.of(dataset, find_family(name)).grid for dataset in (again, known))
        both = times_of_both(new, old)
        for one, other, way in ((0, 1, "best of the other, here"), (1, 0, "best here, on the other")):
            off = [times[one][times[other].argmin()] / times[one].min() for times in both]
            figures = [f"{100 * (figure - 1):.2f}" for figure in (geomean(off), max(off))]
            shown.append([name, len(both), way, *figures, f"{np.mean(np.array(off) < 1.01):.0%}"])
    columns = ("family", "problems", "what is chosen", "% slower", "worst", "within 1 %")
    Console(width=120).print(table(f"{options.again} next to {options.known}", columns, shown))


if __name__ == "__main__":
    main()
