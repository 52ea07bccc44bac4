"""`python thin_curve.py FAMILY... [--share 0]... [--seed 0]...`: what more problems are worth of which few configs were
measured: regret on models that were held out where a share of those of `h200_wide` was learned from, drawn anew with
each seed: a table in model/README.md. Not a test: each share and seed trains five rankers, two minutes a family."""

from __future__ import annotations

import argparse
from unittest.mock import patch

import numpy as np
from foretune.datasets import load
from foretune.datasets.merge import merge_datasets
from foretune.kernels import find_family
from foretune.model import cross_validate, evaluate, geomean, measured_grid, top_k_regret
from foretune.model.baselines import Rivals
from foretune.model.splits import RANDOM

KS = (1, 4, 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="+")
    parser.add_argument("--share", type=float, action="append")
    parser.add_argument("--seed", type=int, action="append")
    given = parser.parse_args()
    whole, wide, other = (load(name) for name in ("h200", "h200_wide", "h100"))
    dataset = merge_datasets([whole, wide, other], name="h200+h200_wide+h100")
    thin = {case.problem for case in wide.cases} - {case.problem for case in whole.cases}
    for name in given.families:
        for share in given.share or (0.0, 0.5, 1.0):
            for seed in given.seed or (0,):
                drawn = np.random.default_rng(seed)

                def some(dataset, family, drawn=drawn, share=share):
                    grid = measured_grid(dataset, family)
                    kept = [case.problem not in thin or drawn.random() < share for case in grid.cases]
                    return grid.select(np.flatnonzero(kept))

                with patch.object(evaluate, "measured_grid", some):
                    found = cross_validate(dataset, find_family(name), ks=KS, rivals=Rivals({}, {}))
                models = np.array([RANDOM not in case.model_families for case in found.cases])
                for view, known in enumerate(("sizes known", "sizes unknown")):
                    times = found.grid.first_us[models], found.grid.second_us[models]
                    lost = [100 * (geomean(top_k_regret(found.places[view][models], *times, k)) - 1) for k in KS]
                    print(f"{name:18} share {share:4} seed {seed} {known:14}" + "".join(f"{one:7.2f}" for one in lost))


if __name__ == "__main__":
    main()
