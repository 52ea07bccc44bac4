"""The study of engines' winners: ranks, distances from the default, times of both products, and what is left out."""

from __future__ import annotations

import numpy as np
import pytest
from foretune.datasets import DeviceSpec, KernelConfig, Problem, load
from foretune.kernels.fused_moe.engines import Layer, default_config, tuner_space
from foretune.kernels.fused_moe.launching import with_tma
from foretune.model.ranker import Ranker
from foretune.model.train import Winner
from foretune.model.training_set import TrainingSet
from studies.winners import FAMILIES, UP, Pair, distances, ranks_of, regret, times_of_both

H200 = DeviceSpec.named("h200")
SPACE = tuner_space("vllm", "bf16")


def pair(config=SPACE[0], device=H200):
    problems = [Layer(8, 2, 4096, 3584).problem(name, "vllm", 16) for name in FAMILIES]
    down = tuple(with_tma(one, 0) for one in SPACE)
    return Pair(Winner(problems[0], device, config, SPACE), Winner(problems[1], device, with_tma(config, 0), down))


def test_a_rank_counts_from_the_lowest_score():
    scores = np.arange(len(SPACE), 0, -1.0)  # the last config is first
    assert ranks_of(pair(SPACE[-1]), scores).config == 1
    first = ranks_of(pair(SPACE[0]), scores)
    assert first.config == len(SPACE)
    assert 1 < first.tile < first.config  # configs with other stages have the same tile


def test_the_engines_default_is_nearest_to_itself():
    given = pair()
    assert given.default == default_config("vllm", "bf16", 16, 8)
    assert SPACE[int(distances(given).argmin())] == given.default
    assert distances(given).min() == 0


def test_times_are_the_sum_of_both_products():
    times = times_of_both(["h200_fused_moe"])
    grids = [load("h200_fused_moe").grid(name) for name in FAMILIES]
    (device, problem), us = max(times.items(), key=lambda item: len(item[1]))
    config = next(iter(us))
    expected = np.zeros(2)
    for grid, one in zip(grids, (config, with_tma(config, 0)), strict=True):
        row = next(at for at, case in enumerate(grid.cases) if case.problem.dims == problem.dims)
        column = grid.configs.index(one)
        expected += grid.first_us[row, column], grid.second_us[row, column]
    assert device == H200
    assert len(us) > 1000
    assert us[config] == pytest.approx(expected)


class Oracle(Ranker):
    """Knows the times of one row, or their opposite."""

    def __init__(self, data, sign):
        self.data, self.sign = data, sign

    def fit(self, grid, family):
        return self

    def predict(self, family, problem: Problem, device, configs: tuple[KernelConfig, ...]):
        row = self.data.problems.index(problem)
        column_of = {config: column for column, config in enumerate(self.data.grid.configs)}
        us = self.data.grid.first_us[row, [column_of[config] for config in configs]]
        return us**self.sign


def test_regret_is_of_devices_that_were_not_learned():
    data = TrainingSet.of(load("h200_fused_moe"), FAMILIES[UP])
    data = data.select(np.flatnonzero(data.exhaustive)[:2])
    best, worst = (regret(data, Oracle(data, sign), [H200.with_sms(8)], True) for sign in (1, -1))
    assert best.endswith("(2 problems)")
    assert float(best.split(" / ")[0]) < 1 < float(worst.split(" / ")[0])
    assert regret(data, Oracle(data, 1), [H200], True) == "none"
    assert regret(data, Oracle(data, 1), [], False) == "none"
