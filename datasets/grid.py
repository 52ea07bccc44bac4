"""`Grid`: one family's measurements as dense arrays, which is what ranking and evaluation work on."""

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


#: The dtype and the flags of a problem: with the config they decide the binary, and results are checked for each.
BinarySignature: TypeAlias = tuple[Dtype, tuple[str, ...]]


@dataclass(frozen=True)
class Grid:
    """Times of every config on every problem of one family, measured twice.

    A choice is made on the first and reported from the second, so that nobody profits from his own noise. A
    config that failed, or was never tried, has NaN in both. Only the leading configs are really measured twice
    (the confirming passes); the others have their time of the scan in both, times the median ratio of confirmed
    to scanned times of that problem, because the card's clock was another one then.
    """

    family: str
    cases: tuple[Case, ...]  # (n_problems,)
    devices: tuple[DeviceSpec, ...]  # (n_problems,) where each problem was measured
    configs: tuple[KernelConfig, ...]  # (n_configs,)
    first_us: NDArray[np.float64]  # (n_problems, n_configs)
    second_us: NDArray[np.float64]  # (n_problems, n_configs)
    #: What the binaries say, by dtype and flags of the problem and by config.
    binaries: Mapping[BinarySignature, Mapping[KernelConfig, BinaryFacts]] = field(default_factory=dict)
    #: What a time counts for when a ranker learns, (n_problems, n_configs); None = all alike. See `Dataset.grid`.
    weights: NDArray[np.float64] | None = None
    #: Which configs were measured, failed ones included, (n_problems, n_configs); left out, those with a time.
    measured: NDArray[np.bool_] = None  # type: ignore[assignment]
    #: Which configs the family supports, (n_problems, n_configs); None = not known yet: it takes seconds.
    supported: NDArray[np.bool_] | None = None

    def __post_init__(self) -> None:
        if self.measured is None:
            object.__setattr__(self, "measured", np.isfinite(self.times_us))

    def __len__(self) -> int:
        return len(self.cases)

    @property
    def times_us(self) -> NDArray[np.float64]:
        """The best estimate: the mean of both passes, (n_problems, n_configs)."""
        return (self.first_us + self.second_us) / 2

    @property
    def slowdowns(self) -> NDArray[np.float64]:
        """Each time over its problem's best, (n_problems, n_configs); NaN where there is none."""
        times = self.times_us
        result: NDArray[np.float64] = times / np.nanmin(times, axis=1, keepdims=True)
        return result

    @property
    def noise(self) -> NDArray[np.float64]:
        """What the best config of the first pass takes in the second, over the best there, (n_problems,): how far off a
        search of everything is. No regret below its geometric mean says anything."""
        chosen = np.nanargmin(self.first_us, axis=1)
        result: NDArray[np.float64] = self.second_us[np.arange(len(self)), chosen] / np.nanmin(self.second_us, axis=1)
        return result

    def tidy(self) -> Grid:
        """The same, but for the order in which it was measured, and for configs of which nothing is known: who learns
        from it learns the same, whatever came first."""
        rows = sorted(
            range(len(self)), key=lambda row: (self.devices[row].name, json.dumps(self.cases[row].problem.to_json()))
        )
        known = np.flatnonzero(np.isfinite(self.times_us).any(axis=0))
        columns = sorted(known.tolist(), key=lambda column: json.dumps(self.configs[column].to_json()))
        return self.select(rows).select_configs(columns)

    def select(self, rows: Sequence[int] | NDArray[np.intp]) -> Grid:
        """The same grid with only these problems."""
        index = [int(row) for row in rows]
        cases, devices = tuple(self.cases[i] for i in index), tuple(self.devices[i] for i in index)
        return replace(self, cases=cases, devices=devices, **self._each(lambda array: array[index]))

    def select_configs(self, columns: Sequence[int] | NDArray[np.intp]) -> Grid:
        """The same grid with only these configs, in this order."""
        index = [int(column) for column in columns]
        configs = tuple(self.configs[i] for i in index)
        return replace(self, configs=configs, **self._each(lambda array: array[:, index]))

    def _each(self, take: Callable[[NDArray[Any]], NDArray[Any]]) -> dict[str, Any]:
        """Return a part of each (n_problems, n_configs) array that there is, by name."""
        arrays = {name: getattr(self, name) for name in ("first_us", "second_us", "weights", "measured", "supported")}
        return {name: take(array) for name, array in arrays.items() if array is not None}
