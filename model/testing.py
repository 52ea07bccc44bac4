"""`RankerContract`: tests that every `Ranker` must pass. Only this module needs pytest.

Inherit it in a test class and implement `make`:

    from foretune.model.testing import RankerContract

    class TestMine(RankerContract):
        def make(self):
            return MyRanker(depth=3)

The tests use a toy family with times from a formula; override `family` and `grid` to use others.
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
    """A row-wise reduction in blocks, whose times follow from waves of programs, padding, and warps for each block."""

    name = "toy_row_sum"
    dims = ("columns", "rows")
    dtypes = ("bf16", "fp32")
    knobs = ("BLOCK", "ROWS", "num_warps")
    feature_names = ("log_columns", "log_rows", "sizes_known", "skew", "itemsize", "block", "rows_at_once", "warps",
                     "waves", "padding", "columns_a_thread")  # fmt: skip

    def space(self, device: DeviceSpec | None = None) -> tuple[KernelConfig, ...]:
        """Return the 48 configs."""
        axes = itertools.product((256, 512, 1024, 2048), (1, 2, 4), (1, 2, 4, 8))
        return tuple(KernelConfig.of(BLOCK=block, ROWS=rows, num_warps=warps) for block, rows, warps in axes)

    def supports(self, config: KernelConfig, problem: Problem, device: DeviceSpec) -> str | None:
        """Return None, or the reason if a program has too many elements."""
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
        """Return features of the problem and of the formula's terms, (n_configs, 11)."""
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
        """Return the problem from the arguments `columns` and `rows`."""
        return Problem.of(self.name, columns=arguments["columns"], rows=arguments["rows"])

    def estimate_us(self, problem: Problem, device: DeviceSpec, configs: Sequence[KernelConfig]) -> NDArray[np.float64]:
        """Return the times of the formula, (n_configs,), in microseconds."""
        block, rows, warps = _knobs(configs)
        waves, padding = _waves_and_padding(problem, device, block, rows)
        balance = 1 + 0.2 * np.abs(np.log2(block * rows * problem.itemsize / 512 / warps))
        result: NDArray[np.float64] = 2 + np.ceil(waves) * padding * balance * block * rows / 2000
        return result


def _knobs(configs: Sequence[KernelConfig]) -> NDArray[np.float64]:
    """Return BLOCK, ROWS and num_warps of the configs, (3, n_configs)."""
    values = [[config["BLOCK"], config["ROWS"], config.num_warps] for config in configs]
    knobs: NDArray[np.float64] = np.array(values, np.float64).reshape(-1, 3).T
    return knobs


def _waves_and_padding(
    problem: Problem, device: DeviceSpec, block: NDArray[np.float64], rows: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the number of waves of programs and the ratio of padded to actual columns, (n_configs,) each."""
    blocks = np.ceil(problem["columns"] / block)
    sizes = (problem["rows"],) if problem.ragged is None else problem.ragged.sizes
    programs: NDArray[np.float64] = sum((np.ceil(size / rows) for size in sizes), np.zeros(len(rows))) * blocks
    return programs / device.sm_count, blocks * block / problem["columns"]


@lru_cache(maxsize=1)
def toy_grid() -> Grid:
    """Return times of all configs of `ToyFamily` on 24 problems of four invented models, with 1 % of noise.

    Some problems have ragged sizes. Unsupported and failed configs are NaN.
    """
    family, device, random = ToyFamily(), DeviceSpec.named("h200"), np.random.default_rng(0)
    cases = []
    for model, columns in zip("ABCD", (640, 1500, 4096, 9000), strict=True):
        for rows, dtype in itertools.product((64, 700, 8192), family.dtypes):
            sizes = None if rows == 700 else {"rows": (rows // 8, rows - rows // 8)}
            problem = Problem.of(family.name, dtype=dtype, columns=columns, rows=rows, ragged=sizes)
            cases.append(Case(problem, (f"{model}-1B/norm",), "even" if sizes is None else "uneven"))
    configs = family.space()
    times = np.stack([family.estimate_us(case.problem, device, configs) for case in cases])
    is_supported = [[family.supports(config, case.problem, device) is None for config in configs] for case in cases]
    ran = np.array(is_supported) & (random.random(times.shape) > 0.01)
    first, second = (np.where(ran, times * random.normal(1, 0.01, times.shape), np.nan) for _ in range(2))
    return Grid(family.name, tuple(cases), (device,) * len(cases), configs, first, second)


class RankerContract:
    """Tests for a `Ranker`: inherit from it and implement `make`."""

    def make(self) -> Ranker:
        """Return a new, unfitted ranker, the same every time."""
        raise NotImplementedError

    def family(self) -> Family:
        """Return the family whose configs are ranked."""
        return ToyFamily()

    def grid(self) -> Grid:
        """Return the training measurements of `family`: at least eight problems and eight configs."""
        return toy_grid()

    @pytest.fixture(scope="class")
    @classmethod
    def fitted(cls) -> Ranker:
        """Return a ranker fitted on the grid."""
        contract = cls()
        return contract.make().fit(contract.grid(), contract.family())

    def scores(
        self, ranker: Ranker, configs: Sequence[KernelConfig] | None = None, case: Case | None = None
    ) -> NDArray[np.float64]:
        """Return a ranker's scores of configs (default: all) on a case (default: the first), (n_configs,)."""
        grid = self.grid()
        configs, case = grid.configs if configs is None else configs, case or grid.cases[0]
        return ranker.predict(self.family(), case.problem, grid.devices[grid.cases.index(case)], configs)

    def test_fit_returns_the_ranker_itself(self) -> None:
        """`fit` returns the ranker itself."""
        ranker = self.make()
        assert ranker.fit(self.grid().select(range(8)), self.family()) is ranker

    def test_fit_leaves_the_measurements_as_they_were(self) -> None:
        """`fit` does not modify the grid."""
        grid = self.grid()
        first, second = grid.first_us.copy(), grid.second_us.copy()
        self.make().fit(grid, self.family())
        np.testing.assert_array_equal(grid.first_us, first)
        np.testing.assert_array_equal(grid.second_us, second)

    def test_every_config_has_one_finite_positive_score_with_sizes_and_without(self, fitted: Ranker) -> None:
        """`predict` returns a finite positive float64 for each config, with known and unknown sizes."""
        grid = self.grid()
        for case, device in zip(grid.cases[::5], grid.devices[::5], strict=True):
            for problem in (case.problem, case.problem.without_sizes()):
                scores = fitted.predict(self.family(), problem, device, grid.configs)
                assert scores.shape == (len(grid.configs),)
                assert scores.dtype == np.float64
                assert np.isfinite(scores).all()
                assert (scores > 0).all()

    def test_the_same_call_gives_the_same_scores(self, fitted: Ranker) -> None:
        """Predicting twice gives equal scores."""
        assert (self.scores(fitted) == self.scores(fitted)).all()

    def test_the_same_training_gives_the_same_scores(self, fitted: Ranker) -> None:
        """Training twice gives equal scores."""
        assert (self.scores(fitted) == self.scores(self.make().fit(self.grid(), self.family()))).all()

    def test_a_score_does_not_depend_on_the_other_configs_nor_on_their_order(self, fitted: Ranker) -> None:
        """A config has the same score in any list."""
        configs = self.grid().configs
        order = np.random.default_rng(0).permutation(len(configs))[:50]
        assert (self.scores(fitted, [configs[i] for i in order]) == self.scores(fitted)[order]).all()

    def test_no_config_and_one_config_are_accepted(self, fitted: Ranker) -> None:
        """`predict` accepts an empty list and a single config."""
        assert self.scores(fitted, ()).shape == (0,)
        assert self.scores(fitted, self.grid().configs[:1]).shape == (1,)

    def test_a_config_that_was_never_measured_gets_a_score(self) -> None:
        """`predict` scores configs that are not in the training data."""
        grid = self.grid()
        keep = [i for i in range(len(grid.configs)) if i != 7]
        known = tuple(grid.configs[i] for i in keep)
        without = replace(grid, configs=known, first_us=grid.first_us[:, keep], second_us=grid.second_us[:, keep])
        assert np.isfinite(self.scores(self.make().fit(without, self.family()))).all()

    def test_the_parameters_make_the_same_ranker(self, fitted: Ranker) -> None:
        """`get_params` returns the arguments of the constructor, and `fit` does not change them."""
        ranker = self.make()
        assert type(ranker)(**ranker.get_params()).get_params() == ranker.get_params()
        assert fitted.get_params() == ranker.get_params()  # fitting changes no parameter

    def test_an_unfitted_ranker_that_learns_raises_an_error(self) -> None:
        """`predict` before `fit` raises `ForetuneError` if the ranker learns."""
        ranker = self.make()
        if ranker.learns:
            with pytest.raises(ForetuneError, match="call fit first"):
                self.scores(ranker)
