"""`python tests/model/two_stages.py [FAMILY...] [--every 1] [--able]`: whether the quick ranking
(`LightGBMRanker.fastest`) puts the same configs first as the predictions of the whole space do, or with `--able` of the
configs that can run the problem, on every problem of the shipped measurements as it is at call time, and what differs
in regret where it does not. About a CPU minute a family."""

from __future__ import annotations

import argparse

import numpy as np
from foretune.datasets import describe, load, names
from foretune.kernels import find_family
from foretune.model import load_bundle
from foretune.runtime.shortlist import supported

KS = (1, 4, 8, 16, 65)


def slowdown(times, configs):
    """Of the best of these configs over the best of all, where any of them was measured: else NaN."""
    known = [times[config] for config in configs if config in times]
    return min(known, default=np.nan) / min(times.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", help="those of the shipped bundle if left out")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--able", action="store_true")
    given = parser.parse_args()
    bundle = load_bundle()
    for name in given.families or bundle.families:
        family = find_family(name)
        ranker, spaces, asked = bundle.ranker(name), {}, {}
        for data in (data for data in names() if name in describe(data)["families"]):
            grid = load(data).grid(family.name)
            for case, device, times in zip(grid.cases, grid.devices, grid.times_us, strict=True):
                known = {config: us for config, us in zip(grid.configs, times.tolist(), strict=True) if np.isfinite(us)}
                asked.setdefault((family.at_call_time(case.problem), device), []).append(known)
        same, change = {k: [] for k in KS}, {k: [] for k in KS}
        for problem, device in list(asked)[:: given.every]:
            space = spaces.setdefault(device, family.space(device))
            if given.able:
                space = tuple(space[place] for place in supported(family, problem, device, space))
            slowdowns = ranker.predict(family, problem, device, space)
            order = np.argsort(slowdowns, kind="stable").tolist()
            for k in KS:
                quick = ranker.fastest(family, problem, device, space, k)[0].tolist()[:k]
                same[k].append(quick == order[:k])
                if not same[k][-1]:
                    told = [[space[place] for place in places] for places in (quick, order[:k])]
                    change[k] += [
                        slowdown(times, told[0]) - slowdown(times, told[1]) for times in asked[problem, device]
                    ]
        print(f"{family.name}: {len(same[1])} problems")
        for k in KS:
            gone = np.nan_to_num(change[k]) if change[k] else np.zeros(1)
            print(
                f"  first {k:2}: the same on {sum(same[k])}; elsewhere slower by {100 * gone.mean():.3f} % on average, "
                f"{100 * gone.max():.3f} at most",
                flush=True,
            )


if __name__ == "__main__":
    main()
