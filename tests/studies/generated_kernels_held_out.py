"""`python tests/studies/generated_kernels_held_out.py MEASURED DATA`: how well configs of reductions are ranked.

DATA is what generated_kernels_dataset.py wrote from MEASURED. Rankers learn from other models than they are tested on.
For each family and way of choosing: the geometric mean of how much slower the config is than the best measured one, the
worst, and the ratio of the sums of all times. The ways are Inductor's first config, which its default mode runs if it
lists no other; the best of its default list, and of max-autotune's; the best of the first k that were predicted; and
what `foretune.use("inductor")` does with k=1 and k="auto".
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from foretune.datasets import KernelConfig, Problem
from foretune.datasets.store import read
from foretune.kernels import find_family
from foretune.kernels.inductor.reduction import DOUBT, MOST_TIMED, ReductionSource
from foretune.model.gbdt import LightGBMRanker
from foretune.model.splits import split_folds
from foretune.model.training_set import TrainingSet
from generated_kernels_on_gpu import lines

KS = (1, 4, 8)


def lists_of(folder: Path) -> dict[Problem, dict[str, list[KernelConfig]]]:
    """Return Inductor's lists of configs for each problem that was measured."""
    found: dict[Problem, dict[str, list[KernelConfig]]] = {}
    for one in lines(folder / "kernels.jsonl"):
        source = (folder / "kernels" / f"{one['kernel']}.py").read_text()
        kernel = ReductionSource.read(source, partial(round, 1e9 * one["num_gb"]))
        if kernel is not None:
            lists = {label: [KernelConfig.of(**config) for config in one["lists"][label]] for label in one["lists"]}
            found.setdefault(kernel.problem, lists)
    return found


def ways(data: TrainingSet, row: int, ranker: Any, lists: dict[str, list[KernelConfig]]) -> dict[str, float]:
    """Return the time of a problem by way of choosing."""
    chosen = data.candidate[row] & np.isfinite(data.grid.times_us[row])
    configs, times = data.configs(chosen), data.grid.times_us[row][chosen]
    places = {config: place for place, config in enumerate(configs)}
    problem, device = data.grid.cases[row].problem, data.grid.devices[row]
    slowdowns = ranker.predict(data.family, problem, device, configs)
    order = np.argsort(slowdowns, kind="stable")
    default = [places[config] for config in lists["default"] if config in places]
    tuned = [places[config] for config in lists["list"] if config in places]
    found = {"best": times.min(), "first": times[default[0]], "default": times[default].min()}
    found["max-autotune"] = times[default + tuned].min()
    for k in KS:
        found[f"best of {k}"] = times[order[:k]].min()
    theirs = min(default, key=slowdowns.__getitem__)
    in_doubt = slowdowns[theirs] < DOUBT * slowdowns[order[0]]
    found["k=1"] = times[theirs if in_doubt else order[0]]
    found["auto"] = times[[*order[:MOST_TIMED], theirs]].min()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("measured", type=Path)
    parser.add_argument("data", type=Path)
    given = parser.parse_args()
    dataset, lists = read(given.data), lists_of(given.measured)
    for name in dataset.families:
        data = TrainingSet.of(dataset, find_family(name)).ordered()
        fold, rows = split_folds(data.groups, 5), []
        for number in np.unique(fold):
            ranker = LightGBMRanker().fit(data.select(np.flatnonzero(fold != number)).grid, data.family)
            tested = np.flatnonzero(fold == number)
            rows += [ways(data, row, ranker, lists[data.grid.cases[row].problem]) for row in tested]
        print(f"{name}, {len(rows)} problems")
        for way in rows[0]:
            ratios = np.array([row[way] / row["best"] for row in rows])
            total = sum(row[way] for row in rows) / sum(row["best"] for row in rows)
            mean = np.exp(np.log(ratios).mean())
            print(f"  {way:14} {100 * (mean - 1):6.1f} %, worst {ratios.max():6.2f}, of the sums {total:6.3f}")


if __name__ == "__main__":
    main()
