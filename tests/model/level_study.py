"""`python level_study.py FAMILY [--trees 450] [--epochs 24] [--data h200]`: which score makes the shortest shortlists
at 95 % coverage, the table in model/calibration/README.md. Not a test: it trains ten rankers."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
from foretune.datasets import load
from foretune.kernels import find_family
from foretune.model import LightGBMRanker, TrainingSet, split_folds
from foretune.model.calibration.conformal import COVERAGE, MOST_TRIED, excess, needed_length

#: (places from 1, log slowdowns, disagreement of the halves), each by place -> the score of each config, ascending.
SCORES: dict[str, Callable[..., np.ndarray]] = {
    "the place": lambda place, log, apart: np.log(place),
    "log slowdown": lambda place, log, apart: log,
    "... over the spread of the best 16": lambda place, log, apart: log / (log[1:16].mean() + 1e-3),
    "... over the disagreement": lambda place, log, apart: log / (apart[:16].mean() + 1e-2),
    **{
        f"log place + {steep} x log slowdown": lambda place, log, apart, steep=steep: np.log(place) + steep * log
        for steep in (5, 10, 20, 40)
    },
}


def predicted(data: str, name: str, trees: int, epochs: int) -> list[tuple]:
    """Of each problem its group, log slowdowns and disagreement by place, and the length that it needs."""
    family = find_family(name)
    learned = TrainingSet.of(load(data), family)
    grid, candidates, groups = learned.grid, learned.judged, learned.groups
    fold, found = split_folds(groups, 5), []
    for number in np.unique(fold).tolist():
        known = grid.select(np.flatnonzero(fold != number))
        # Each with the same network, so that their mean is what ships.
        kinds = (LightGBMRanker(kind, trees=trees // 2, epochs=epochs) for kind in ("regression", "lambdarank"))
        halves = [half.fit(known, family) for half in kinds]
        for row in np.flatnonzero(fold == number).tolist():
            mask, problem = candidates[row], family.at_call_time(grid.cases[row].problem)
            configs = learned.configs(mask)
            logs = [np.log(half.predict(family, problem, grid.devices[row], configs)) for half in halves]
            both, apart = (logs[0] + logs[1]) / 2, np.abs(logs[0] - logs[1])
            order = np.argsort(both, kind="stable")
            loss = excess(grid.first_us[row, mask][order], grid.second_us[row, mask][order])
            found.append((groups[row], both[order] - both[order[0]], apart[order], needed_length(loss)))
    return found


def mean_length(problems: list[tuple], score: Callable[..., np.ndarray], draws: int = 60) -> tuple[float, float]:
    """Coverage and mean k, calibrated on a random half of the groups and tested on the other."""
    levels = [score(np.arange(1, len(log) + 1), log, apart) for _, log, apart, _ in problems]
    needed, groups = np.array([one[3] for one in problems]), np.array([one[0] for one in problems])
    own = [level[n - 1] if n <= MOST_TRIED else np.inf for level, n in zip(levels, needed, strict=True)]
    own, there, random, told = np.array(own), np.unique(groups), np.random.default_rng(0), []
    for _ in range(draws):
        half = np.isin(groups, random.permutation(there)[: len(there) // 2])
        place = int(np.ceil((half.sum() + 1) * COVERAGE)) - 1
        if place >= half.sum() or half.all():
            continue
        threshold = np.sort(own[half])[place]
        length = [max(1, min(int(np.searchsorted(level, threshold, side="right")), MOST_TRIED)) for level in levels]
        told.append(((np.array(length) >= needed)[~half].mean(), np.array(length)[~half].mean()))
    coverage, mean = np.mean(told, axis=0)
    return float(coverage), float(mean)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("family")
    parser.add_argument("--trees", type=int, default=450)
    parser.add_argument("--epochs", type=int, default=24)
    parser.add_argument("--data", default="h200")
    given = parser.parse_args()
    judged = predicted(given.data, given.family, given.trees, given.epochs)
    for label, of_it in SCORES.items():
        coverage, mean = mean_length(judged, of_it)
        print(f"{label:36} covers {coverage:.3f}, mean k {mean:.1f}")  # noqa: T201
