"""`python templates_held_out.py`: how well Inductor's templates other than mm's are ranked for models not seen before.

For each family, how much slower than the best config that was tried is, in percent: the best of the first k by a ranker
that learned from other models, by the analytic estimate, and in Inductor's own order (its default config, then its
list); and the best of Inductor's whole list. A few minutes on a CPU.
"""

from __future__ import annotations

import argparse

import numpy as np
from foretune.datasets import load
from foretune.datasets.merge import merge_datasets
from foretune.kernels import find_family
from foretune.kernels.inductor.contenders import BASELINES
from foretune.model import cross_validate, geomean
from foretune.model.baselines import choose_rivals
from foretune.model.splits import RANDOM

KS = (1, 2, 4, 8)


def listed_regret(grid, family, cases):
    """Return, for each case, the time of the best config of Inductor's list over that of the best one."""
    rows = {case.problem: row for row, case in enumerate(grid.cases)}
    regret = []
    for case in cases:
        row = rows[case.problem]
        times, device = grid.times_us[row], grid.devices[row]
        listed = set(family.usual(case.problem, device))
        places = [place for place, config in enumerate(grid.configs) if config in listed] or slice(None)
        regret.append(np.nanmin(times[places]) / np.nanmin(times))
    return np.array(regret)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", nargs="+", default=["h100_inductor_templates"], help="one or more datasets")
    parser.add_argument("--family", action="append")
    options = parser.parse_args()
    dataset = merge_datasets([load(name) for name in options.data], name="templates")
    rivals = choose_rivals(["estimate", "inductor", "static", "nearest"], own=BASELINES)
    print(f"{'best of the first':58}" + "".join(f"{k:>7}" for k in KS))
    for name in options.family or dataset.families:
        family = find_family(name)
        found = cross_validate(dataset, family, ks=KS, rivals=rivals)
        of_list = listed_regret(dataset.grid(family), family, found.cases)
        layers = np.array([RANDOM not in case.model_families for case in found.cases])
        for what, rows in (("layers", layers), ("random", ~layers)):
            for ranking, regret in {"learned": found.regret, **found.baselines}.items():
                shown = {k: np.asarray(regret[k]).reshape(-1, len(found.cases)).mean(axis=0)[rows] for k in KS}
                label = f"{name} {what} ({rows.sum()}), {ranking}"
                print(f"{label:58}" + "".join(f"{100 * (geomean(shown[k]) - 1):7.1f}" for k in KS), flush=True)
            print(f"{'':12}the best of Inductor's list: {100 * (geomean(of_list[rows]) - 1):.1f}")


if __name__ == "__main__":
    main()
