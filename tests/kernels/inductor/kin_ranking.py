"""`python kin_ranking.py`: how much slower than the best config that was tried the best of the first k is, in percent,
where Inductor's choices are ranked by an analytic estimate, and where they are by what the shipped bundle learned of
the kernel of ours that does the same (`InductorTemplate.kin`). On `h200_inductor_mm`, of which neither knows anything,
but that three of its four problems in exact float32 said what spills; half a minute on a CPU."""

from __future__ import annotations

import argparse
from collections import defaultdict

import numpy as np
from foretune.datasets import load
from foretune.kernels import find_family
from foretune.model import geomean, load_bundle, measured_grid
from foretune.model.metrics import top_k_regret
from foretune.model.splits import RANDOM

KS = (1, 2, 4, 8, 16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="h200_inductor_mm")
    family, bundle = find_family("inductor_mm"), load_bundle()
    grid = measured_grid(load(parser.parse_args().data), family)
    lost = defaultdict(list)
    for row, case in enumerate(grid.cases):
        tried = np.flatnonzero(np.isfinite(grid.first_us[row]))
        configs, device = [grid.configs[at] for at in tried], grid.devices[row]
        scores = {"estimate": family.estimate_us(case.problem, device, configs)}
        kin = family.kin(case.problem, configs)
        if kin is not None:
            same, as_ours = kin
            scores["kin"] = bundle.ranker(same.family).predict(find_family(same.family), same, device, as_ours)
        of_models = "random shapes" if RANDOM in case.model_families else "layers of models"
        kind = f"{of_models} with kin" if kin is not None else f"without kin, {case.problem.dtype}"
        for name, score in scores.items():
            times = grid.first_us[row : row + 1, tried], grid.second_us[row : row + 1, tried]
            lost[kind, name].append([float(top_k_regret(score[None], *times, k)[0]) for k in KS])
    print(f"{'best of the first':48}" + "".join(f"{k:>8}" for k in KS))
    for (kind, name), of_it in sorted(lost.items()):
        table = np.array(of_it)
        print(
            f"{kind} ({len(of_it)}), {name}".ljust(48) + "".join(f"{100 * (geomean(one) - 1):8.1f}" for one in table.T)
        )


if __name__ == "__main__":
    main()
