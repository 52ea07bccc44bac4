"""`python tests/model/sparse_lists.py FAMILY [--data h200] [--share 0.09]`: print the lengths of k="auto" shortlists.

It also prints how often these contain a good config. They are calibrated on problems that were measured
exhaustively, and on the same ones as if a sparse plan had tried a share of their configs. This is the table in
model/calibration/README.md. It trains six rankers.
"""

from __future__ import annotations

import argparse

import numpy as np
from foretune.collect.plan import Sparse
from foretune.datasets import load
from foretune.kernels import find_family
from foretune.model import LightGBMRanker, TrainingSet, split_folds
from foretune.model.calibration.conformal import Judged, calibrate
from foretune.model.calibration.cross_fit import FOLDS, TREES, Coverage


def problems_of(name: str, data: str, share: float) -> tuple[list[Judged], list[Judged]]:
    """Each problem predicted by a ranker that never saw its model, whole and thin; what is tried of the thin one was
    chosen by another ranker that never did, of trees alone, as collecting adaptively has it."""
    family = find_family(name)
    learned = TrainingSet.of(load(data), family)
    grid, fold = learned.grid, split_folds(learned.groups, FOLDS)
    whole: list[Judged] = []
    thin: list[Judged] = []
    for number in range(FOLDS):
        known = grid.select(np.flatnonzero(fold != number))
        ranker = LightGBMRanker(trees=TREES).fit(known, family)
        prior = LightGBMRanker(trees=TREES, epochs=0, seed=1).fit(known, family)
        for row in np.flatnonzero((fold == number) & learned.exhaustive).tolist():
            case, device, mask = grid.cases[row], grid.devices[row], learned.candidate[row]
            configs = learned.configs(mask)
            logs = np.log(ranker.predict(family, family.at_call_time(case.problem), device, configs))
            (step,) = Sparse(family, device, share=share, prior=prior).next([case], None)
            tried = [config in step.configs for config in configs]
            passes = grid.first_us[row, mask], grid.second_us[row, mask]
            few = [np.where(tried, times, np.nan) for times in passes]
            if np.isfinite(few).all(axis=0).any():
                whole.append((logs, *passes))
                thin.append((logs, *few))
    return whole, thin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("family")
    parser.add_argument("--data", default="h200")
    parser.add_argument("--share", type=float, default=0.09)
    given = parser.parse_args()
    whole, thin = problems_of(given.family, given.data, given.share)
    for name, calibrating in (("measured whole", whole), (f"{given.share:.0%} of the configs", thin)):
        found = Coverage.of(whole, [calibrate(calibrating)] * len(whole), [1.0] * len(whole))
        print(f"{given.family}, {len(whole)} problems, {name}: {found}")


if __name__ == "__main__":
    main()
