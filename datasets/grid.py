"""`Grid`: one family's measurements as dense arrays, for training and evaluation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from .config import KernelConfig
from .device import DeviceSpec
from .measurement import BinaryFacts, Case
from .problem import Dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray


#: (dtype, flags) of a problem. Together with the config they decide the binary; results are checked once for each.
BinarySignature: TypeAlias = tuple[Dtype, tuple[str, ...]]


@dataclass(frozen=True)
class Grid:
    """The times of all configs on all problems of one family, from two independent timing passes.

    A config is chosen by the first pass and its time is reported from the second, so that lucky samples do not make a
    choice look better than it is. Only the leading configs of a problem were timed in both passes (the confirming
    passes). For the others both arrays have the time of the scan of all configs, multiplied by the problem's median
    ratio of confirmed to scanned times, because the GPU's clock differed between the scan and those passes. A config
    that failed or was not measured has NaN in both.

    Attributes:
        family: The family's name.
        cases: The problem of each row, (n_problems,).
        devices: The device that each row was measured on, (n_problems,).
        configs: The config of each column, (n_configs,).
        first_us: Times of the first pass in microseconds, (n_problems, n_configs).
        second_us: Times of the second pass, (n_problems, n_configs).
        binaries: The compiler's facts about binaries, by (dtype, flags) of the problem and by config.
        weights: Sample weights for training, (n_problems, n_configs); None if all are equal. See `Dataset.grid`.
        measured: Mask of the measured configs, failed ones included, (n_problems, n_configs). If it is left out, those
            with a time.
        supported: Mask of the configs that the family supports, (n_problems, n_configs); None until it is computed,
            which takes seconds.
    """

    family: str
    cases: tuple[Case, ...]
    devices: tuple[DeviceSpec, ...]
    configs: tuple[KernelConfig, ...]
    first_us: NDArray[np.float64]
    second_us: NDArray[np.float64]
    binaries: Mapping[BinarySignature, Mapping[KernelConfig, BinaryFacts]] = field(default_factory=dict)
    weights: NDArray[np.float64] | None = None
    measured: NDArray[np.bool_] = None  # type: ignore[assignment]
    supported: NDArray[np.bool_] | None = None

    def __post_init__(self) -> None:
        if self.measured is None:
            object.__setattr__(self, "measured", np.isfinite(self.times_us))

    def __len__(self) -> int:
        """Return the number of rows: pairs of a problem and a device."""
        return len(self.cases)

    @property
    def times_us(self) -> NDArray[np.float64]:
        """The mean of both passes in microseconds, (n_problems, n_configs)."""
        return (self.first_us + self.second_us) / 2

    @property
    def slowdowns(self) -> NDArray[np.float64]:
        """Each time divided by its problem's best, (n_problems, n_configs); NaN for configs without a time."""
        times = self.times_us
        result: NDArray[np.float64] = times / np.nanmin(times, axis=1, keepdims=True)
        return result

    @property
    def noise(self) -> NDArray[np.float64]:
        """The slowdown of an exhaustive search, (n_problems,).

        It is the second-pass time of the first pass's best config, divided by the best time of the second pass. A
        regret below its geometric mean, the noise floor, is not meaningful.
        """
        chosen = np.nanargmin(self.first_us, axis=1)
        result: NDArray[np.float64] = self.second_us[np.arange(len(self)), chosen] / np.nanmin(self.second_us, axis=1)
        return result

    def tidy(self) -> Grid:
        """Return the grid in a canonical order and without configs that have no times.

        Training on it gives the same result whatever the order of the measurements was.
        """
        return self.select(self.row_order()).select_configs(self.column_order())

    def column_order(self) -> list[int]:
        """Return the indices of the columns with at least one time, sorted by the JSON of their configs."""
        known = np.flatnonzero(np.isfinite(self.times_us).any(axis=0)).tolist()
        return sorted(known, key=lambda column: json.dumps(self.configs[column].to_json()))

    def row_order(self) -> list[int]:
        """Return the indices of the rows in a canonical order: by device, problem, its sources and scenario."""

        def values(row: int) -> tuple[str, str, tuple[str, ...], str]:
            case = self.cases[row]
            return self.devices[row].name, json.dumps(case.problem.to_json()), case.sources, case.scenario

        return sorted(range(len(self)), key=values)

    def select(self, rows: Sequence[int] | NDArray[np.intp]) -> Grid:
        """Return the grid with only these rows, in this order."""
        index = [int(row) for row in rows]
        cases, devices = tuple(self.cases[i] for i in index), tuple(self.devices[i] for i in index)
        return replace(self, cases=cases, devices=devices, **self._each(lambda array: array[index]))

    def select_configs(self, columns: Sequence[int] | NDArray[np.intp]) -> Grid:
        """Return the grid with only these columns, in this order."""
        index = [int(column) for column in columns]
        configs = tuple(self.configs[i] for i in index)
        return replace(self, configs=configs, **self._each(lambda array: array[:, index]))

    def _each(self, take: Callable[[NDArray[Any]], NDArray[Any]]) -> dict[str, Any]:
        """Apply `take` to each (n_problems, n_configs) array that is not None and return the results by name."""
        arrays = {name: getattr(self, name) for name in ("first_us", "second_us", "weights", "measured", "supported")}
        return {name: take(array) for name, array in arrays.items() if array is not None}
