"""`python diversifying.py FAMILY... [--data h200]...`: regret of shortlists in the order of the predictions, and as
`diversified_order` has them, from one cross-validation: the table in model/calibration/README.md. Not a test: it trains
five rankers."""

from __future__ import annotations

import argparse

import numpy as np
from foretune.datasets import load
from foretune.datasets.merge import merge_datasets
from foretune.kernels import find_family
from foretune.model import Evaluation, cross_validate, geomean, summarise, top_k_regret
from foretune.model.baselines import Rivals
from foretune.model.splits import RANDOM

KS = (1, 2, 4, 8, 16)


def regrets(found: Evaluation, scores: np.ndarray) -> dict[int, np.ndarray]:
    """Of each problem, by the length of the list."""
    return {k: top_k_regret(scores, found.grid.first_us, found.grid.second_us, k) for k in KS}


def tell(found: Evaluation) -> None:
    models = np.array([RANDOM not in case.model_families for case in found.cases])
    for view, known in enumerate(("sizes known", "sizes unknown")):
        orders = {"as predicted": found.predicted[view], "spread": found.places[view]}
        by_order = {name: regrets(found, scores) for name, scores in orders.items()}
        for name, of_it in by_order.items():
            parts = [("all", np.ones(len(models), bool)), *([("models", models)] if models.any() else [])]
            told = "; ".join(
                f"{part} " + " / ".join(f"{100 * (geomean(of_it[k][rows]) - 1):.2f}" for k in KS)
                for part, rows in parts
            )
            print(f"{found.family:24} {known:14} {name:13} {told}")
        ratio = summarise(by_order["spread"][4] / by_order["as predicted"][4], found.groups)
        low, high = (100 * (edge - 1) for edge in ratio.ci95)
        print(f"{'':40}difference at 4: {100 * (ratio.geomean - 1):.2f} [{low:.2f}, {high:.2f}]")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="+")
    parser.add_argument("--data", action="append")
    given = parser.parse_args()
    measured = [load(name) for name in given.data or ["h200"]]
    dataset = (
        measured[0] if len(measured) == 1 else merge_datasets(measured, name="+".join(one.name for one in measured))
    )
    for family in given.families:
        tell(cross_validate(dataset, find_family(family), ks=KS, rivals=Rivals({}, {})))
