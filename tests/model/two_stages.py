"""`python tests/model/two_stages.py [FAMILY...] [--every 2]`: print what the two-stage prediction costs in regret.

A shortlist is predicted in two stages (`LightGBMRanker.fastest`): the network predicts all configs, and the trees only
its first 192 + 5 k. For each family of the shipped bundle this prints the regret of such shortlists next to those with
the trees on all configs, on the shipped problems that were measured exhaustively, and on how many of all shipped
problems the first k configs differ. Problems are predicted as at call time. The bundle was trained on most of
them, so both regrets are lower than on new problems; their difference is what counts. It needs no GPU and takes
about half a minute for each family.
"""

from __future__ import annotations

import argparse

import numpy as np
from foretune.datasets import describe, load, names
from foretune.kernels import find_family
from foretune.model import Ranker, TrainingSet, geomean, load_bundle, top_k_regret
from foretune.model.calibration.conformal import AMONG, MOST_TRIED, diversified_order, knob_table

KS = (1, 2, 4, 8, 16, "auto")
#: How many configs `make_shortlist` requests from a ranker for each k.
REQUESTED = {1: 8, 2: AMONG, 4: AMONG, 8: AMONG, 16: AMONG, "auto": MOST_TRIED + 1}


def shortlist(ranking, measured, table, k, calibration):
    """Return the positions on a shortlist of the measured configs, from a ranking's positions and slowdowns."""
    order, slowdowns = ranking
    there = measured[order]
    order, slowdowns = order[there], slowdowns[there]
    if not len(order):
        return order
    logs = np.log(slowdowns / slowdowns[0])
    if k == "auto":
        return order[: calibration.length(logs)]
    return order[diversified_order(logs, table[order])][:k] if k > 1 else order[:1]


def compare(name, bundle, every):
    """Print the lines of one family."""
    family, ranker, calibration = find_family(name), bundle.ranker(name), bundle.calibration(name)
    differ, compared = dict.fromkeys(KS, 0), 0
    regrets, rankings, spaces = {k: [] for k in KS}, {}, {}
    for dataset in (dataset for dataset in names() if name in describe(dataset)["families"]):
        learned = TrainingSet.of(load(dataset), family)
        grid = learned.grid
        for row in range(0, len(grid), every):
            near, device = family.at_call_time(grid.cases[row].problem), grid.devices[row]
            space = spaces.setdefault(device, family.space(device))
            if (near, device) not in rankings:
                one = Ranker.fastest(ranker, family, near, device, space, len(space))
                stages = {n: ranker.fastest(family, near, device, space, n) for n in set(REQUESTED.values())}
                rankings[near, device] = one, stages
                compared += 1
                for k in KS:
                    count = REQUESTED[k] if k == "auto" else k
                    differ[k] += one[0][:count].tolist() != stages[REQUESTED[k]][0][:count].tolist()
            if not learned.exhaustive[row]:
                continue
            one, stages = rankings[near, device]
            column_of = {config: column for column, config in enumerate(grid.configs)}
            columns = np.array([column_of.get(config, -1) for config in space])
            measured = (columns >= 0) & learned.judged[row][columns]
            times = [np.where(measured, us[row][columns], np.nan) for us in (grid.first_us, grid.second_us)]
            if not np.isfinite(times[0]).any():
                continue
            for k in KS:
                pair = []
                for ranking in (stages[REQUESTED[k]], one):
                    chosen = shortlist(ranking, measured, knob_table(space), k, calibration)
                    scores = np.full(len(space), np.nan)
                    scores[chosen] = np.arange(len(chosen))
                    pair.append(float(top_k_regret(scores, *times, max(len(chosen), 1))))
                regrets[k].append(pair)
    print(f"{name}: % slower than the best config, geometric mean over {len(regrets[1])} problems")
    for k in KS:
        two, one = np.array(regrets[k]).T
        print(
            f"  k={k:<4}  two stages {100 * (geomean(two) - 1):.3f}  "
            f"trees on all configs {100 * (geomean(one) - 1):.3f}  (at most {100 * (two / one - 1).max():.2f} % "
            f"slower; first {REQUESTED[k] if k == 'auto' else k} differ on {differ[k]} of {compared} problems)",
            flush=True,
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="Families to compare; those of the shipped bundle if left out.")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="Use only every N-th problem.")
    given = parser.parse_args()
    bundle = load_bundle()
    for name in given.families or bundle.families:
        compare(name, bundle, given.every)


if __name__ == "__main__":
    main()
