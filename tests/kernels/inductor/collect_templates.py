"""`python collect_templates.py OUT`: measure Inductor's templates other than mm's on all visible GPUs, in one run.

The families' problems alternate, the most important first, so that a run that is cut off has a fair sample of each.
Continues what is in OUT. Each family has its own share of configs: all that Inductor lists for grouped_mm and
convolution; for attention those of max-autotune's default list, and some of the exhaustive one.
"""

from __future__ import annotations

import argparse
from itertools import chain, zip_longest

from foretune.collect import plan
from foretune.collect.campaign import collect_on_gpus
from foretune.kernels import find_family

#: The share of the configs, by family.
SHARES = {
    "inductor_grouped_mm": 1.0,
    "inductor_flex_attention": 0.12,
    "inductor_flex_decoding": 0.5,
    "inductor_convolution": 1.0,
    "inductor_flex_backward": 0.005,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out")
    parser.add_argument("--budget", type=float, default=300.0, help="seconds")
    parser.add_argument("--problems", type=int, default=60, help="of each family")
    parser.add_argument("--compilers", type=int)
    parser.add_argument("--thinner", type=float, default=1.0, help="factor of all shares")
    parser.add_argument("--max-tflop", type=float, default=0.4)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    plan.PLANS["thin"] = lambda family, device, **more: plan.Sparse(
        family, device, share=max(SHARES[family.name] * options.thinner, 0.001), **more
    )
    families = [find_family(name) for name in SHARES]
    drawn = [
        family.cases(max_tflop=options.max_tflop, random=8, per_layer=2, seed=options.seed)[: options.problems]
        for family in families
    ]
    cases = [case for case in chain.from_iterable(zip_longest(*drawn)) if case is not None]
    collect_on_gpus(
        families,
        cases,
        options.out,
        compilers=options.compilers,
        plan="thin",
        budget_s=options.budget,
    )


if __name__ == "__main__":
    main()
