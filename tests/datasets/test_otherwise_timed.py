"""Times logged in production are rescaled, and have a smaller weight than collected ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fakes import FakeFamily, fake_cases, fake_dataset
from foretune.datasets.dataset import OTHERWISE_TIMED, Dataset
from foretune.datasets.grid import Grid
from foretune.model import LightGBMRanker
from foretune.model.rows import training_rows

CASES = fake_cases(models=2, randoms=0)[:4]


def with_production(times: dict[tuple[int, int], float], dropped: tuple[tuple[int, int], ...] = ()) -> Dataset:
    """Return the fake dataset without some cells, and with logged times of these (problem, config)."""
    dataset = fake_dataset(CASES)
    rows = dataset.measurements
    kept = rows[[cell not in dropped for cell in zip(rows["problem"], rows["config"], strict=True)]]
    row = rows.iloc[0].to_dict() | {"status": "ok", "timing_pass": 1, "run_id": "log"}
    logged = [row | {"problem": at, "config": config, "time_us": time_us} for (at, config), time_us in times.items()]
    runs = {"log": {"family": "fake", "timed": "autotuner"}, "fake-run": {"family": "fake"}}
    return replace(
        dataset,
        measurements=type(rows)([*kept.to_dict("records"), *logged]),
        provenance={"runs": runs},
    )


def cold_us(dataset: Dataset, problem: int, config: int) -> Any:
    rows = dataset.measurements
    cell = rows[(rows["problem"] == problem) & (rows["config"] == config) & (rows["timing_pass"] == 1)]
    return cell["time_us"].iloc[0]


def test_a_time_that_was_collected_is_not_replaced() -> None:
    plain = fake_dataset(CASES).grid("fake")
    grid = with_production({(0, 0): 1e-2, (0, 1): 1e-2}).grid("fake")
    np.testing.assert_array_equal(grid.times_us, plain.times_us)
    assert grid.weights is not None
    assert (grid.weights == 1).all()
    assert plain.weights is None


def test_a_gap_is_filled_on_the_scale_of_what_both_timed() -> None:
    """Logged times are 3 times too long where both exist, so they are in the gap."""
    before = fake_dataset(CASES)
    plain = before.grid("fake")
    (gap, *others) = (at for at in range(60) if np.isfinite(plain.times_us[0, at]))
    times = {(0, at): 3 * cold_us(before, 0, at) for at in others[:5]} | {(0, gap): 3 * cold_us(before, 0, gap)}
    dataset = with_production(times, dropped=((0, gap),))
    grid = dataset.grid("fake")
    assert grid.times_us[0, gap] == pytest.approx(plain.times_us[0, gap], rel=0.05)  # but for the passes' noise
    assert grid.weights is not None
    assert grid.weights[0, gap] == OTHERWISE_TIMED
    assert (np.delete(grid.weights[0], gap) == 1).all()
    assert (grid.weights[1:] == 1).all()


def test_a_problem_that_only_production_met_keeps_its_times() -> None:
    dropped = tuple((3, config) for config in range(len(FakeFamily().space())))
    grid = with_production({(3, 0): 7.0, (3, 5): 9.0}, dropped=dropped).grid("fake")
    (row,) = (at for at, case in enumerate(grid.cases) if case == CASES[3])
    known = np.isfinite(grid.times_us[row])
    assert np.flatnonzero(known).tolist() == [0, 5]
    assert grid.times_us[row, known].tolist() == [7.0, 9.0]
    assert grid.weights is not None
    assert (grid.weights[row, known] == OTHERWISE_TIMED).all()


def test_a_part_of_a_grid_keeps_its_weights() -> None:
    grid = Grid("fake", CASES, (fake_dataset(CASES).devices[0],) * 4, FakeFamily().space()[:3], *np.ones((2, 4, 3)),
                weights=np.arange(12.0).reshape(4, 3))  # fmt: skip
    assert grid.select([2, 0]).select_configs([1]).weights is not None
    np.testing.assert_array_equal(grid.select([2, 0]).select_configs([1]).weights, [[7.0], [1.0]])  # type: ignore[arg-type]


def test_rows_are_learned_from_with_their_weights() -> None:
    grid, family = fake_dataset(CASES).grid("fake"), FakeFamily()
    weights = np.random.default_rng(0).choice([OTHERWISE_TIMED, 1.0], grid.times_us.shape)
    all_alike = training_rows(grid, family, slow=1.4, keep_slow=0.1, seed=0)
    rows = training_rows(replace(grid, weights=weights), family, slow=1.4, keep_slow=0.1, seed=0)
    assert all_alike.weights is None
    assert rows.weights is not None
    assert rows.weights.shape == rows.log_slowdown.shape
    np.testing.assert_array_equal(rows.log_slowdown, all_alike.log_slowdown)
    # Each row with its own: where the slowdown of a row is found in the grid, so is its weight.
    first = np.isfinite(grid.slowdowns[0])
    size = int(rows.query_sizes[0])
    pairs = set(zip(np.log(grid.slowdowns[0][first]).round(9), weights[0][first], strict=True))
    assert set(zip(rows.log_slowdown[:size].round(9), rows.weights[:size], strict=True)) <= pairs


@pytest.mark.parametrize("objective", ["regression", "lambdarank"])
def test_both_halves_of_the_ranker_weigh_them(objective: str) -> None:
    """Half of the configs look slow in logged times, so their weight decides what is learned."""
    grid, family = fake_dataset(CASES).grid("fake"), FakeFamily()
    fooled = grid.times_us * np.where(np.arange(len(grid.configs)) % 2, 1.0, 1.3)
    views = [replace(grid, first_us=fooled, second_us=fooled, weights=weights)
             for weights in (None, np.ones(fooled.shape), np.where(np.arange(len(grid.configs)) % 2, 1.0, 0.01)
                             * np.ones(fooled.shape))]  # fmt: skip
    alike, ones, less = (
        LightGBMRanker(objective, trees=8, epochs=0, min_rows=2, keep_slow=1.0)
        .fit(view, family)
        .predict(family, CASES[0].problem, grid.devices[0], grid.configs)
        for view in views
    )
    np.testing.assert_array_equal(alike, ones)
    assert not np.allclose(alike, less)
