"""`python held_out.py`: what `foretune evaluate --data h200_inductor_mm` says of all products, apart for each kind of
them, of which some are rare: how much slower than the best config that was tried the best of the first k is, in
percent, by the analytic estimate and by a ranker that learned from the other models' products. A minute on a CPU."""

from __future__ import annotations

import argparse
from collections import defaultdict

import numpy as np
from foretune.datasets import Problem, load
from foretune.kernels import find_family
from foretune.kernels.inductor.matmul import TF32
from foretune.model import geomean, measured_grid
from foretune.model.gbdt import LightGBMRanker
from foretune.model.metrics import top_k_regret
from foretune.model.splits import RANDOM, split_folds, split_groups

KS = (1, 2, 4, 8, 16)
FOLDS = 5
ALIGNED = 8  # elements: rows of 16 bytes


def kind_of(problem: Problem) -> str:
    if TF32 in problem.flags:
        return TF32
    if problem.dtype in ("fp32", "fp8e4m3"):
        return str(problem.dtype)
    return "16 bits" + ("" if problem["n"] % ALIGNED == problem["k"] % ALIGNED == 0 else ", unaligned")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="h200_inductor_mm")
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    family = find_family("inductor_mm")
    grid = measured_grid(load(options.data), family).tidy()
    fold = split_folds(split_groups(grid.cases), FOLDS)
    lost = defaultdict(list)
    for seed in range(options.seeds):
        for number in range(FOLDS):
            learned = LightGBMRanker(seed=seed).fit(grid.select(np.flatnonzero(fold != number)), family)
            for row in np.flatnonzero(fold == number):
                case, device = grid.cases[row], grid.devices[row]
                tried = np.flatnonzero(np.isfinite(grid.first_us[row]))
                configs = [grid.configs[at] for at in tried]
                times = grid.first_us[row : row + 1, tried], grid.second_us[row : row + 1, tried]
                origin = "random shapes" if RANDOM in case.model_families else "layers of models"
                for name, score in {
                    "estimate": family.estimate_us(case.problem, device, configs),
                    "learned": learned.predict(family, case.problem, device, configs),
                }.items():
                    regret = [float(top_k_regret(score[None], *times, k)[0]) for k in KS]
                    lost[origin, kind_of(case.problem), name].append(regret)
    print(f"{'best of the first':48}" + "".join(f"{k:>8}" for k in KS))
    for (origin, kind, name), of_it in sorted(lost.items()):
        table = np.array(of_it)
        label = f"{origin}, {kind} ({len(of_it) // options.seeds}), {name}"
        print(f"{label:48}" + "".join(f"{100 * (geomean(one) - 1):8.1f}" for one in table.T))


if __name__ == "__main__":
    main()
