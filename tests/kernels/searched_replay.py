"""`python searched_replay.py`: how far what `tune_layer` chooses is from the best of the engine tuner's whole space, on
the layers of `h200_fused_moe` that were searched whole. No GPU is needed: both are looked up in what was measured.

It learns from the other problems there, none of which is of the same model families, and chooses by the first timing
pass; the second pass says what the choice and the search's best take. Needs the engine's default configs alone, so no
engine. Two minutes, most of them training."""

from __future__ import annotations

import argparse
from operator import itemgetter

import numpy as np
from foretune.datasets import DeviceSpec, load
from foretune.kernels import find_family
from foretune.kernels.fused_moe import FusedMoeDown, FusedMoeUp, tuning
from foretune.kernels.fused_moe.contenders import LAYERS
from foretune.kernels.fused_moe.engines import SGLANG
from foretune.kernels.fused_moe.workload import requested_layer
from foretune.model import geomean
from foretune.model.train import train_bundle

H200 = DeviceSpec.named("h200")
CANDIDATES = (4, 8, 16, 32)


def times_by_config(dataset, family):
    """Of each problem that was searched whole: the time of each config, in each of two passes."""
    grid = dataset.grid(family.name)
    able = [sum(family.supports(one, case.problem, H200) is None for one in grid.configs) for case in grid.cases]
    passes = [np.isfinite(us) for us in (grid.first_us, grid.second_us)]
    whole = np.count_nonzero(passes[0], axis=1) > 0.9 * np.array(able)
    return {
        grid.cases[row].problem: tuple(
            {grid.configs[at]: float(us[row, at]) for at in np.flatnonzero(is_timed[row]).tolist()}
            for us, is_timed in zip((grid.first_us, grid.second_us), passes, strict=True)
        )
        for row in np.flatnonzero(whole).tolist()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="h200_fused_moe")
    measured = load(parser.parse_args().data)
    searches = [name for name, run in measured.provenance["runs"].items() if run["plan"] == "exhaustive"]
    families = [find_family(name) for name in ("fused_moe", "fused_moe_down")]
    bundle = train_bundle(measured.without_runs(searches), {family.name: family for family in families})
    searched = [times_by_config(measured, family) for family in families]
    lost = []
    print(f"{'':20} {'tokens':>6} {'best us':>9}" + "".join(f"{f'of {count}':>8}" for count in CANDIDATES))
    for model, degree in LAYERS:
        layer = requested_layer(model, tp=degree)
        products = [tuning._Product(made, SGLANG, layer, H200) for made in (FusedMoeUp(), FusedMoeDown())]
        for tokens in sorted({problem["tokens"] for problem in searched[0]}):
            problems = [product.problem(tokens) for product in products]
            if any(problem not in times for problem, times in zip(problems, searched, strict=True)):
                continue
            first, second = zip(*map(itemgetter(0, 1), map(dict.__getitem__, searched, problems)), strict=True)

            def us(pair, second=second):
                return second[0][pair.up] + second[1][pair.down]

            best = us(tuning.best_pairs(SGLANG, *first)[0][1])
            engines = tuning._contenders(SGLANG, layer, tokens, {}, products)
            guesses = [
                tuning.predicted(product.family, problem, H200, product.configs((), tokens), bundle)
                for product, problem in zip(products, problems, strict=True)
            ]
            ours = []
            for count in CANDIDATES:
                timed = tuning._to_time(SGLANG, *guesses, engines, count)
                chosen = [
                    {config: by_config[config] for config in some if config in by_config}
                    for some, by_config in zip(timed, first, strict=True)
                ]
                ours.append(us(tuning.best_pairs(SGLANG, *chosen)[0][1]) / best)
            lost.append(ours)
            print(f"{model:20} {tokens:6} {best:9.1f}" + "".join(f"{ratio:8.3f}" for ratio in ours))
    table = np.array(lost)
    print(f"{'geometric mean':37}" + "".join(f"{geomean(table[:, at]):8.4f}" for at in range(len(CANDIDATES))))
    print(f"{'worst':37}" + "".join(f"{ratio:8.4f}" for ratio in table.max(axis=0)))


if __name__ == "__main__":
    main()
