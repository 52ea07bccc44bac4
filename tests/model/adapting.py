"""`python tests/model/adapting.py [fwd dx dw] [--problems 60] [--folds 0,1] [--trees 300] [--epochs 24]`: what five
minutes of an adaptive collection on the H100 are worth to a bundle that knows the H200 only. Needs no GPU; about 15 CPU
minutes a family."""

from __future__ import annotations

import argparse
from functools import partial

import numpy as np
from foretune.collect.plan import Adaptive
from foretune.collect.replay import only
from foretune.datasets import load
from foretune.datasets.merge import merge_datasets
from foretune.kernels import find_family
from foretune.model import (
    LightGBMRanker,
    TrainingSet,
    UnseenCardRanker,
    geomean,
    split_folds,
    split_groups,
    top_k_regret,
)

KS = (1, 2, 4, 8)
TARGET = "NVIDIA H100 80GB HBM3"


def measured_in_time(grid, family, ranker, problems, epochs):
    """What the adaptive plan takes of a grid of one card: so many problems, the bundle's `ranker` ranks the first."""
    column_of = {config: column for column, config in enumerate(grid.configs)}
    row_of = {case: row for row, case in enumerate(grid.cases)}
    cells, done = np.zeros(grid.times_us.shape, bool), []
    plan = Adaptive(family, grid.devices[0], prior=ranker, ranker=partial(LightGBMRanker, trees=100, epochs=epochs))
    while row_of and len(done) < problems:
        for step in plan.next(tuple(row_of), only(grid, cells, done) if done else None)[: problems - len(done)]:
            done.append(row_of.pop(step.case))
            cells[done[-1], [column_of[config] for config in step.configs if config in column_of]] = True
    return only(grid, cells)


def print_regret(label, ranker, grid, family):
    scores = np.full(grid.times_us.shape, np.nan)
    for row, case in enumerate(grid.cases):
        able = np.isfinite(grid.times_us[row])
        configs = tuple(config for config, ran in zip(grid.configs, able, strict=True) if ran)
        scores[row, able] = ranker.predict(family, case.problem, grid.devices[row], configs)
    regrets = [100 * (geomean(top_k_regret(scores, grid.first_us, grid.second_us, k)) - 1) for k in KS]
    print(f"{label:40s}", " / ".join(f"{regret:.1f}" for regret in regrets), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", default=["fwd", "dx", "dw"])
    parser.add_argument("--problems", type=int, default=60)
    parser.add_argument("--folds", default="0,1")
    parser.add_argument("--trees", type=int, default=300)
    parser.add_argument("--epochs", type=int, default=24)
    given = parser.parse_args()
    dataset = merge_datasets([load("h200"), load("h100")], name="both")
    for short in given.families:
        family = find_family(f"grouped_gemm_{short}")
        grid = TrainingSet.of(dataset, family).grid
        there = np.array([device.name == TARGET for device in grid.devices])
        held_out = np.isin(split_folds(split_groups(grid.cases), 5), [int(fold) for fold in given.folds.split(",")])
        elsewhere, known, tested = (np.flatnonzero(rows) for rows in (~there, there & ~held_out, there & held_out))
        print(f"{family.name}: {len(tested)} problems tested, {len(known)} to measure")
        make = partial(LightGBMRanker, trees=given.trees, epochs=given.epochs)
        test, ranker = grid.select(tested), make().fit(grid.select(elsewhere), family)
        small = measured_in_time(grid.select(known), family, ranker, given.problems, given.epochs)
        print(f"measured: {int(np.isfinite(small.times_us).sum())} configs on {len(small)} problems")
        print_regret("the bundle as it is", ranker, test, family)
        print_regret("... as on a card it never saw", UnseenCardRanker(ranker), test, family)
        print_regret("adapted", ranker.adapted(small.tidy(), family), test, family)
        everything = grid.select(np.concatenate([elsewhere, known]))
        print_regret("trained on all of both", make().fit(everything, family), test, family)


if __name__ == "__main__":
    main()
