"""`RankerContract`: what every `Ranker` keeps to, as tests. Needs pytest, and only here.

A test class inherits it, says how to make a ranker, and knows:

    from foretune.model.testing import RankerContract

    class TestMine(RankerContract):
        def make(self):
            return MyRanker(depth=3)

It runs on a toy family and its analytic times; `family` and `grid` may give others.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from ..datasets import BinaryFacts, Case, DeviceSpec, Family, ForetuneError, KernelConfig, Problem
from ..datasets.grid import Grid
from .ranker import Ranker

if TYPE_CHECKING:
    from numpy.typing import NDArray


class ToyFamily(Family):
    """A row-wise reduction in blocks, timed by a formula: waves of programs, padding, and warps that fit the block."""

    name = "toy_row_sum"
    dims = ("columns", "rows")
    dtypes = ("bf16", "fp32")
    knobs = ("BLOCK", "ROWS", "num_warps")
    feature_names = ("log_columns", "log_rows", "sizes_known", "skew", "itemsize", "block", "rows_at_once", "warps",
                     "waves", "padding", "columns_a_thread")  # fmt: skip

    def space(self, device: DeviceSpec | None = None) -> tuple[KernelConfig, ...]:
        axes = itertools.product((256, 512, 1024, 2048), (1, 2, 4), (1, 2, 4, 8))
        return tuple(KernelConfig.of(BLOCK=block, ROWS=rows, num_warps=warps) for block, rows, warps in axes)

    def supports(self, config: KernelConfig, problem: Problem, device: DeviceSpec) -> str | None:
        if config["BLOCK"] * config["ROWS"] <= 4096:
            return None
        return f"ROWS={config['ROWS']} of BLOCK={config['BLOCK']} do not fit: at most {4096 // config['BLOCK']} do"

    def features(
        self,
        problem: Problem,
        device: DeviceSpec,
        configs: Sequence[KernelConfig],
        binaries: Mapping[KernelConfig, BinaryFacts] | None = None,
    ) -> NDArray[np.float32]:
        block, rows, warps = _knobs(configs)
        waves, padding = _waves_and_padding(problem, device, block, rows)
        of_problem = (
            np.log2(1 + problem["columns"]),
            np.log2(1 + problem["rows"]),
            problem.ragged is not None,
            1.0 if problem.ragged is None else problem.ragged.skew,
            problem.itemsize,
        )
        columns = [np.full(len(configs), float(value)) for value in of_problem]
        columns += [block, rows, warps, waves, padding, block * rows / (32 * warps)]
        return np.stack(columns, axis=1).astype(np.float32)

    def problem_from_call(self, arguments: Mapping[str, Any]) -> Problem:
        return Problem.of(self.name, columns=arguments["columns"], rows=arguments["rows"])

    def estimate_us(self, problem: Problem, device: DeviceSpec, configs: Sequence[KernelConfig]) -> NDArray[np.float64]:
        block, rows, warps = _knobs(configs)
        waves, padding = _waves_and_padding(problem, device, block, rows)
        balance = 1 + 0.2 * np.abs(np.log2(block * rows * problem.itemsize / 512 / warps))
        result: NDArray[np.float64] = 2 + np.ceil(waves) * padding * balance * block * rows / 2000
        return result


def _knobs(configs: Sequence[KernelConfig]) -> NDArray[np.float64]:
    """BLOCK, ROWS and num_warps, (3, n_configs)."""
    values = [[config["BLOCK"], config["ROWS"], config.num_warps] for config in configs]
    knobs: NDArray[np.float64] = np.array(values, np.float64).reshape(-1, 3).T
    return knobs


def _waves_and_padding(
    problem: Problem, device: DeviceSpec, block: NDArray[np.float64], rows: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    blocks = np.ceil(problem["columns"] / block)
    sizes = (problem["rows"],) if problem.ragged is None else problem.ragged.sizes
    programs: NDArray[np.float64] = sum((np.ceil(size / rows) for size in sizes), np.zeros(len(rows))) * blocks
    return programs / device.sm_count, blocks * block / problem["columns"]


@lru_cache(maxsize=1)
def toy_grid() -> Grid:
    """All configs of `ToyFamily` on 24 problems of four made-up models, with sizes and without, 1 % of noise, and NaN
    for what is not supported or failed."""
    family, device, random = ToyFamily(), DeviceSpec.named("h200"), np.random.default_rng(0)
    cases = []
    for model, columns in zip("ABCD", (640, 1500, 4096, 9000), strict=True):
        for rows, dtype in itertools.product((64, 700, 8192), family.dtypes):
            sizes = None if rows == 700 else {"rows": (rows // 8, rows - rows // 8)}
            problem = Problem.of(family.name, dtype=dtype, columns=columns, rows=rows, ragged=sizes)
            cases.append(Case(problem, (f"{model}-1B/norm",), "even" if sizes is None else "uneven"))
    configs = family.space()
    times = np.stack([family.estimate_us(case.problem, device, configs) for case in cases])
    fine = [[family.supports(config, case.problem, device) is None for config in configs] for case in cases]
    ran = np.array(fine) & (random.random(times.shape) > 0.01)
    first, second = (np.where(ran, times * random.normal(1, 0.01, times.shape), np.nan) for _ in range(2))
    return Grid(family.name, tuple(cases), (device,) * len(cases), configs, first, second)


class RankerContract:
    """Inherit it, and implement `make`."""

    def make(self) -> Ranker:
        """A new, unfitted ranker; every time the same."""
        raise NotImplementedError

    def family(self) -> Family:
        """Whose configs are ranked."""
        return ToyFamily()

    def grid(self) -> Grid:
        """What the ranker learns from: measurements of `family`, of at least eight problems and eight configs."""
        return toy_grid()

    @pytest.fixture(scope="class")
    @classmethod
    def fitted(cls) -> Ranker:
        """One that has learned the grid."""
        contract = cls()
        return contract.make().fit(contract.grid(), contract.family())

    def scores(
        self, ranker: Ranker, configs: Sequence[KernelConfig] | None = None, case: Case | None = None
    ) -> NDArray[np.float64]:
        """What a ranker says of configs (all, if left out) on a case (the first)."""
        grid = self.grid()
        configs, case = grid.configs if configs is None else configs, case or grid.cases[0]
        return ranker.predict(self.family(), case.problem, grid.devices[grid.cases.index(case)], configs)

    def test_fit_returns_the_ranker_itself(self) -> None:
        ranker = self.make()
        assert ranker.fit(self.grid().select(range(8)), self.family()) is ranker

    def test_fit_leaves_the_measurements_as_they_were(self) -> None:
        grid = self.grid()
        first, second = grid.first_us.copy(), grid.second_us.copy()
        self.make().fit(grid, self.family())
        np.testing.assert_array_equal(grid.first_us, first)
        np.testing.assert_array_equal(grid.second_us, second)

    def test_every_config_has_one_finite_positive_score_with_sizes_and_without(self, fitted: Ranker) -> None:
        grid = self.grid()
        for case, device in zip(grid.cases[::5], grid.devices[::5], strict=True):
            for problem in (case.problem, case.problem.without_sizes()):
                scores = fitted.predict(self.family(), problem, device, grid.configs)
                assert scores.shape == (len(grid.configs),)
                assert scores.dtype == np.float64
                assert np.isfinite(scores).all()
                assert (scores > 0).all()

    def test_the_same_call_gives_the_same_scores(self, fitted: Ranker) -> None:
        assert (self.scores(fitted) == self.scores(fitted)).all()

    def test_the_same_training_gives_the_same_scores(self, fitted: Ranker) -> None:
        assert (self.scores(fitted) == self.scores(self.make().fit(self.grid(), self.family()))).all()

    def test_a_score_does_not_depend_on_the_other_configs_nor_on_their_order(self, fitted: Ranker) -> None:
        configs = self.grid().configs
        order = np.random.default_rng(0).permutation(len(configs))[:50]
        assert (self.scores(fitted, [configs[i] for i in order]) == self.scores(fitted)[order]).all()

    def test_no_config_and_one_config_are_taken(self, fitted: Ranker) -> None:
        assert self.scores(fitted, ()).shape == (0,)
        assert self.scores(fitted, self.grid().configs[:1]).shape == (1,)

    def test_a_config_that_was_never_measured_is_taken(self) -> None:
        grid = self.grid()
        keep = [i for i in range(len(grid.configs)) if i != 7]
        known = tuple(grid.configs[i] for i in keep)
        without = replace(grid, configs=known, first_us=grid.first_us[:, keep], second_us=grid.second_us[:, keep])
        assert np.isfinite(self.scores(self.make().fit(without, self.family()))).all()

    def test_its_parameters_make_the_same_ranker(self, fitted: Ranker) -> None:
        ranker = self.make()
        assert type(ranker)(**ranker.get_params()).get_params() == ranker.get_params()
        assert fitted.get_params() == ranker.get_params()  # learning changes none of them

    def test_one_that_learns_says_so_when_it_has_not(self) -> None:
        ranker = self.make()
        if ranker.learns:
            with pytest.raises(ForetuneError, match="call fit first"):
                self.scores(ranker)
