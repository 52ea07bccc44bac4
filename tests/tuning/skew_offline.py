"""What it is worth to know how earlier calls were split, from measurements, without a GPU:
`python tests/tuning/skew_offline.py [--trees 200] [--only grouped_gemm_dx]`, some five minutes an operation.

Rankers are cross-validated on the layers of models that they never saw. Each row is the regret of the first choice in
percent, in the geometric mean, by how the rows were routed. What a choice is made from: sizes unknown; those of other
calls that are routed in the same way; the same with a change only where the predicted gain is worth it; the call's own.
"""

from __future__ import annotations

import argparse
import sys
import zlib
from collections import defaultdict
from functools import partial
from itertools import permutations

import numpy as np
from foretune.datasets import Problem, load
from foretune.datasets.console.tables import table
from foretune.kernels import find_family
from foretune.kernels.grouped_gemm.group_sizes import drawn_sizes
from foretune.model.evaluate import _Split
from foretune.model.gbdt import LightGBMRanker
from foretune.model.metrics import geomean
from foretune.runtime.tuning.skew.earlier_sizes import COPIES
from foretune.runtime.tuning.skew.skew import Skew
from rich.console import Console

#: What a layer goes by: `EarlierSizes`.
KEPT = f"of {COPIES} other calls"
GAINS = (0.01, 0.02, 0.03, 0.05, 0.08)


def configs_across_routings(name: str, data: str) -> str:
    """What the best single config loses to the best of each routing (chosen on these very times, of two or three
    routings a layer: over all that may come it loses more), and what the best of one loses on another."""
    grid = load(data).grid(name)
    layers: dict[object, list[int]] = defaultdict(list)
    for place, (case, device) in enumerate(zip(grid.cases, grid.devices, strict=True)):
        layers[case.problem.without_sizes(), device.name].append(place)
    losses, elsewhere = list[float](), list[float]()
    several = [places for places in layers.values() if len(places) > 1]
    for places in several:
        times = grid.times_us[places]
        times = times[:, np.isfinite(times).all(axis=0)]
        slowdowns = times / np.nanmin(grid.times_us[places], axis=1, keepdims=True)
        losses += slowdowns[:, np.log(slowdowns).mean(axis=0).argmin()].tolist()
        best = slowdowns.argmin(axis=1)
        elsewhere += [slowdowns[other, best[one]] for one, other in permutations(range(len(places)), 2)]
    one_for_all, of_another = (
        f"{100 * (geomean(lost) - 1):.2f} % (worst {100 * (max(lost) - 1):.0f} %)" for lost in (losses, elsewhere)
    )
    return (
        f"{name}, {len(losses)} problems of {len(several)} layers: the best one config for all routings of a layer is "
        f"{one_for_all} slower than the best of each, and the best of one routing {of_another} on another"
    )


def study(name: str, trees: int, data: str) -> None:
    family = find_family(name)
    split = _Split(load(data), family, (1,), 5, 1)
    routing = {case.problem: case.scenario for case in split.grid.cases}

    def others(count: int, problem) -> np.ndarray:
        """The sizes of so many other calls that are routed as the problem is, added up largest to largest."""
        rng = np.random.default_rng([4, zlib.crc32(repr(problem.to_json()).encode())])
        rows, groups = problem["rows"], problem["groups"]
        return sum(np.sort(drawn_sizes(routing[problem], rows, groups, rng)) for _ in range(count))

    def earlier(count: int, problem):
        return Skew.of("rows", others(count, problem)).split(problem)

    views = {
        "unknown": Problem.without_sizes,
        "of one other call": partial(earlier, 1),
        KEPT: partial(earlier, COPIES),
        "its own": lambda problem: problem,
    }
    scores = dict(zip(views, split.held_out(partial(LightGBMRanker, trees=trees), tuple(views.values())), strict=True))
    unknown, known = scores["unknown"], scores[KEPT]
    place = np.arange(len(unknown))
    first, best = np.nanargmin(unknown, 1), np.nanargmin(known, 1)
    gains = known[place, first] / known[place, best] - 1
    changed = {label: np.nanargmin(values, 1) != first for label, values in scores.items()}
    for gain in GAINS:
        label = f"... if the gain is {100 * gain:.0f} %"
        changed[label] = (gains >= gain) & (best != first)
        scores[label] = np.where(changed[label][:, None], known, unknown)
    scenarios = np.array([case.scenario for case in split.grid.cases])
    parts = {"all": np.ones(len(scenarios), bool)} | {kind: scenarios == kind for kind in np.unique(scenarios)}
    rows = []
    for label, values in scores.items():
        regret = split._regret(values, 1)
        figures = [f"{100 * (geomean(regret[part]) - 1):.2f}" for part in parts.values()]
        rows.append([label, *figures, f"{100 * changed[label].mean():.0f}"])
    columns = ("sizes", *(f"{kind} ({part.sum()})" for kind, part in parts.items()), "% changed")
    Console(file=sys.stdout, width=140).print(table(f"{name}: % slower than the best config", columns, rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trees", type=int, default=200)
    parser.add_argument("--data", default="h200")
    parser.add_argument("--only", nargs="*", default=["grouped_gemm_fwd", "grouped_gemm_dx", "grouped_gemm_dw"])
    given = parser.parse_args()
    for name in given.only:
        Console(file=sys.stdout, width=140).print(configs_across_routings(name, given.data))
        if given.trees:
            study(name, given.trees, given.data)


if __name__ == "__main__":
    main()
