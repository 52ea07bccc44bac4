"""`python tests/model/outdated_times.py FAMILY --old DATA... --new DATA`: what it costs to learn outdated times.

A family declares changes of its kernels (`Family.kernel_changes`). This prints how long the configs that changed last
take over their old times, and the regret in percent on models that were not learned from, judged on the new times: of a
ranker that learned these configs' old times, and of one that learned the new ones. Three minutes for each.
"""

from __future__ import annotations

import argparse
from collections import defaultdict

import numpy as np
import rich
from foretune.datasets.console import table
from foretune.kernels import find_measurable
from foretune.kernels.learning import datasets_merged
from foretune.model import LightGBMRanker, TrainingSet, geomean
from foretune.model.calibration.conformal import diversified_places
from foretune.model.cross_validation import _Split
from foretune.model.metrics import top_k_regret

KS = (1, 2, 4, 8)


def split_of(data: TrainingSet) -> _Split:
    return _Split(data, data.family, KS, 5, 2)


def keys(data: TrainingSet) -> list[tuple]:
    return [(device.name, case.problem) for case, device in zip(data.grid.cases, data.grid.devices, strict=True)]


def on(new: TrainingSet, old: TrainingSet, values: np.ndarray) -> np.ndarray:
    """Values of `old`, (..., n_problems, n_configs), in the order of `new`; NaN where it has none."""
    row_of = {key: row for row, key in enumerate(keys(old))}
    column_of = {config: column for column, config in enumerate(old.grid.configs)}
    rows = np.array([row_of.get(key, -1) for key in keys(new)])
    columns = np.array([column_of.get(config, -1) for config in new.grid.configs])
    known = (rows >= 0)[:, None] & (columns >= 0)
    return np.where(known, values[..., rows, :][..., columns], np.nan)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("family")
    parser.add_argument("--old", nargs="+", required=True)
    parser.add_argument("--new", required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    family = find_measurable(options.family)
    new = split_of(TrainingSet.of(datasets_merged([*options.old, options.new]), family))
    *earlier, last = family.kernel_changes
    type(family).kernel_changes = (*earlier, last._replace(knobs=None))
    old = split_of(TrainingSet.of(datasets_merged(options.old), family))
    grid, rows = new.data.grid, new.rows
    changed = np.array([(last.knobs or {}).items() <= config.to_json().items() for config in grid.configs])
    ratios = (grid.times_us / on(new.data, old.data, old.data.grid.times_us))[:, changed]
    places = defaultdict(list)
    for row, (case, device) in enumerate(zip(grid.cases, grid.devices, strict=True)):
        places[device.name, case.scenario].append(row)
    lines = []
    for (device, scenario), here in sorted(places.items()):
        if len(found := ratios[here][np.isfinite(ratios[here])]):
            low, high = np.quantile(found, (0.05, 0.95))
            lines.append([device, scenario, len(found), f"{geomean(found):.3f}", f"{low:.2f} to {high:.2f}"])
    rich.print(table("New times over old", ("device", "scenario", "times", "mean", "nine in ten"), lines))

    seeded = lambda: LightGBMRanker(seed=options.seed)  # noqa: E731
    scores = {"old": on(new.data, old.data, old.held_out(seeded)), "new": new.held_out(seeded)}
    lines = []
    for learned, both in scores.items():
        judged = np.where(new.data.judged, both, np.nan)
        for view, scored in zip(("known", "unknown"), judged, strict=True):
            order = np.where(new.data.judged, diversified_places(scored, grid.configs), np.nan)[rows]
            of = {k: top_k_regret(order, grid.first_us[rows], grid.second_us[rows], k) for k in KS}
            parts = {"all": np.ones(len(rows), bool)}
            parts |= {name: np.array([grid.devices[row].name == name for row in rows]) for name, _ in sorted(places)}
            for part, here in parts.items():
                values = " / ".join(f"{100 * (geomean(of[k][here]) - 1):.2f}" for k in KS)
                lines.append([part, f"{here.sum()}", f"sizes {view}", learned, values])
    lines.sort(key=lambda line: (line[0] != "all", *line[:3]))
    columns = ("device", "problems", "view", "learned times", f"percent, best of the first {' / '.join(map(str, KS))}")
    rich.print(table("Regret on models that were not learned from", columns, lines))


if __name__ == "__main__":
    main()
