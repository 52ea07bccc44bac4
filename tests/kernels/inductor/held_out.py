"""`python held_out.py`: what `foretune evaluate --data h200_inductor_mm` says of all products, apart for each kind of
them, of which some are rare: how much slower than the best config that was tried the best of the first k is, in
percent, by the analytic estimate and by a ranker that learned from the other models' products. A minute on a CPU."""

from __future__ import annotations

import argparse
from collections import defaultdict

from foretune.datasets import Case, load
from foretune.kernels import find_family
from foretune.kernels.inductor.matmul import TF32
from foretune.model import cross_validate, geomean
from foretune.model.splits import RANDOM

ALIGNED = 8  # elements: rows of 16 bytes


def kind_of(case: Case) -> str:
    origin, problem = "random shapes" if RANDOM in case.model_families else "layers of models", case.problem
    if TF32 in problem.flags:
        return f"{origin}, {TF32}"
    if problem.dtype in ("fp32", "fp8e4m3"):
        return f"{origin}, {problem.dtype}"
    is_aligned = problem["n"] % ALIGNED == problem["k"] % ALIGNED == 0
    return f"{origin}, 16 bits" + ("" if is_aligned else ", unaligned")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="h200_inductor_mm")
    found = cross_validate(load(parser.parse_args().data), find_family("inductor_mm"))
    kinds = defaultdict(list)
    for row, case in enumerate(found.cases):
        kinds[kind_of(case)].append(row)
    print(f"{'best of the first':48}" + "".join(f"{k:>8}" for k in found.regret))
    for kind, rows in sorted(kinds.items()):
        estimate = {k: regret.ravel() for k, regret in found.baselines["estimate"].items()}
        for name, regret in {"estimate": estimate, "learned": found.regret}.items():
            label = f"{kind} ({len(rows)}), {name}"
            print(f"{label:48}" + "".join(f"{100 * (geomean(regret[k][rows]) - 1):8.1f}" for k in regret))


if __name__ == "__main__":
    main()
