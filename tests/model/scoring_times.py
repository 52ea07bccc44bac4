"""`python scoring_times.py`: what a forest of our own takes on one thread to score a thousand configs of a problem, all
of them anew and with what it remembers of the configs, and what LightGBM takes for the same trees."""

from __future__ import annotations

import time
from functools import partial

import lightgbm
import numpy as np
from foretune.datasets.feature_groups import FeatureGroup
from foretune.model import Forest
from numpy.typing import NDArray

KNOBS = ([16, 32, 64, 128], [32, 64, 128, 256], [32, 64], [4, 8], [2, 3, 4, 5])
SIZES = 12  # of a problem
TREES, LEAVES, CONFIGS, ROUNDS = 300, 31, 1000, 50


def configs_of(problem: NDArray[np.float64], rows: int, random: np.random.Generator) -> NDArray[np.float32]:
    """(rows, 40) features of the kinds that there are: the problem's, the config's, and of what both make."""
    m, n, k, warps, stages = (random.choice(values, rows) for values in KNOBS)
    tiles = [np.ceil(size / m) * np.ceil(size / n) for size in problem[:6]]
    of_config = [m, n, k, warps, stages, m * n, m * k, n * k, (m + n) * k * stages, m / n, stages * k]
    of_both = [*tiles, *(np.ceil(np.log2(tile)) + stages for tile in tiles), *(tile * stages * k for tile in tiles[:5])]
    of_problem = [np.full(rows, size) for size in problem]
    return np.stack([*of_problem, *of_config, *of_both], axis=1).astype(np.float32)


def main() -> None:
    random = np.random.default_rng(0)
    known = np.concatenate([configs_of(random.uniform(100, 5000, SIZES), 300, random) for _ in range(20)])
    target = np.sin(known @ random.normal(size=known.shape[1])) + random.normal(0, 0.1, len(known))
    parameters = {"num_leaves": LEAVES, "use_missing": False, "verbosity": -1, "num_threads": 1}
    booster = lightgbm.train(parameters, lightgbm.Dataset(known, target), num_boost_round=TREES)
    forest = Forest.from_lightgbm(booster.dump_model())

    rows = configs_of(random.uniform(100, 5000, SIZES), CONFIGS, random)
    of_configs = tuple(range(SIZES, SIZES + 11))
    others = tuple(column for column in range(rows.shape[1]) if column not in of_configs)
    groups = [
        FeatureGroup(columns, rows[None, :, list(columns)], np.arange(CONFIGS), lasting=columns is of_configs)
        for columns in (of_configs, others)
    ]
    ways = {
        "LightGBM": partial(booster.predict, rows, num_threads=1),
        "all of a table": partial(forest.predict, rows),
        "configs remembered": partial(forest.predict_groups, groups),
    }
    least = dict.fromkeys(ways, float("inf"))
    for _ in range(ROUNDS):
        for name, predict in ways.items():
            start = time.thread_time()
            predict()
            least[name] = min(least[name], time.thread_time() - start)
    for name, seconds in least.items():
        print(f"{name:20} {seconds * 1e3:6.2f} ms, {seconds / least['LightGBM']:.2f} of LightGBM's")


if __name__ == "__main__":
    main()
