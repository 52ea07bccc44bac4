"""`python thin_curve.py FAMILY... [--data NAME]... [--share 0]... [--seed 0]...`: what problems are worth of which few
configs were measured. Regret on the same problems, held out in the same folds, where a share of the thin ones is
learned from; a seed draws them, and trains. Figures in model/NOTES.md. Not a test: each share and seed trains five
rankers, in half a minute to two minutes a family."""

from __future__ import annotations

import argparse
from functools import partial
from unittest.mock import patch

import numpy as np
from foretune.datasets import load
from foretune.datasets.merge import merge_datasets
from foretune.kernels import find_family
from foretune.model import LightGBMRanker, cross_validate, cross_validation
from foretune.model.baselines import Rivals

KS = (1, 4, 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="+")
    parser.add_argument("--data", action="append", help="datasets; h200, h200_wide and h100 if left out")
    parser.add_argument("--share", type=float, action="append", help="0, 0.5 and 1 if left out")
    parser.add_argument("--seed", type=int, action="append", help="0 if left out")
    given = parser.parse_args()
    names = given.data or ["h200", "h200_wide", "h100"]
    dataset = merge_datasets([load(name) for name in names], name="+".join(names))
    learned_from = cross_validation._Split.learned_from
    seeds = given.seed or [0]
    print(f"{'best of the first':44}" + "".join(f"{k:7}" for k in KS))
    for name in given.families:
        for share in given.share or (0.0, 0.5, 1.0):
            lost = []
            for seed in seeds:

                def some(split, number, share=share, seed=seed):
                    rows = learned_from(split, number)
                    drawn = np.random.default_rng(seed).random(len(split.data)) < share
                    return rows[split.data.exhaustive[rows] | drawn[rows]]

                with patch.object(cross_validation._Split, "learned_from", some):
                    ranker = partial(LightGBMRanker, seed=seed)
                    found = cross_validate(dataset, find_family(name), ranker, ks=KS, rivals=Rivals({}, {}))
                lost.append(regrets(found))
                show(f"{name} share {share} seed {seed}", lost[-1])
            if len(seeds) > 1:
                show(f"{name} share {share} mean", {what: np.mean([one[what] for one in lost], 0) for what in lost[0]})


def regrets(found):
    """In percent by k, of models and of random shapes, with sizes known and, where a family has such, unknown."""
    views = {"": "regret"}
    if found.is_ragged:
        views[" sizes unknown"] = "regret_sizes_unknown"
    apart = found.to_json()["regret_by_origin"]
    return {
        origin + known: [100 * (one["geomean"] - 1) for one in part[view].values()]
        for known, view in views.items()
        for origin, part in apart.items()
    }


def show(title, lost):
    for what, by_k in lost.items():
        print(f"{title} {what:22}" + "".join(f"{one:7.2f}" for one in by_k), flush=True)


if __name__ == "__main__":
    main()
