"""The results of a refinement, times of an op's own calls, in the form that is stored and shown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ....datasets import ForetuneError, KernelConfig
from ....datasets.console import table
from ....datasets.errors import check_between, check_integer, shown
from ....datasets.measurement import LONGEST_US, SHORTEST_US

#: Half the width of a 95 % interval, in standard deviations.
_INTERVAL = 1.96
_COLUMNS = ("kernel", "problem", "state", "config", "calls", "mean_us", "interval_us", "saved_us")


class RefinedTime(NamedTuple):
    """The time of an op's calls with one config.

    Attributes:
        calls: The number of timed calls.
        mean_us: The estimated time of a call in microseconds.
        slowdown: The estimated time over that of the predicted config, under the same conditions.
        deviation: The standard deviation of the logarithm of the slowdown.
    """

    calls: int
    mean_us: float
    slowdown: float
    deviation: float

    @classmethod
    def from_json(cls, value: Any) -> RefinedTime:
        """Return the time that a cache file stores as a list; raise `ForetuneError` for anything else."""
        if not isinstance(value, list) or len(value) != len(cls._fields):
            raise ForetuneError(f"a refined time must be a list of {', '.join(cls._fields)} but is {shown(value)}")
        check_integer("calls", value[0], 0)
        check_between("mean_us", value[1], SHORTEST_US, LONGEST_US)
        check_between("slowdown", value[2], 1e-3, 1e3)
        check_between("deviation", value[3], 0.0, 1e3)
        return cls(*value)

    def row(self) -> dict[str, Any]:
        """Return the columns of this time in a table; a positive `saved_us` is time saved in each call."""
        half = _INTERVAL * self.deviation * self.mean_us
        return {
            "calls": self.calls,
            "mean_us": float(f"{self.mean_us:.5g}"),
            "interval_us": f"{self.mean_us - half:.5g}-{self.mean_us + half:.5g}",
            "saved_us": float(f"{self.mean_us * (1 / self.slowdown - 1):.3g}"),
        }


class Refined(NamedTuple):
    """The results of one problem: the times by config, and the chosen config; None while it is undecided."""

    times: Mapping[KernelConfig, RefinedTime]
    decided: KernelConfig | None

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each config, the chosen one marked."""
        state = {one: "chosen" if one == self.decided else "dropped" for one in self.times}
        return [
            {"state": "exploring" if self.decided is None else state[one], "config": str(one), **time.row()}
            for one, time in self.times.items()
        ]


@dataclass(frozen=True, repr=False)
class Refining:
    """The refinements of this process (`foretune.refining`) or of the cache (`foretune cache show --refining`).

    `rows` has a dict for each problem and config: kernel, problem, state ("exploring", "chosen" or "dropped"), config,
    calls, mean_us, interval_us (95 %, of the difference from the predicted config), and saved_us (per call, over the
    predicted config).
    """

    rows: Sequence[Mapping[str, Any]]

    def __repr__(self) -> str:
        problems = {(row["kernel"], row["problem"]) for row in self.rows}
        return f"<Refining of {len(problems)} problems, {len(self.rows)} configs>"

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return {"refining": [dict(row) for row in self.rows]}

    def __rich__(self) -> Any:
        below = () if self.rows else ("Nothing has been refined.",)
        rows = [[row[name] for name in _COLUMNS] for row in self.rows]
        return table("Refinement", _COLUMNS, rows, below=below, once=("kernel", "problem"), lead=3)

    def _repr_html_(self) -> str:
        return str(self.__rich__()._repr_html_())


def is_sound(time: RefinedTime) -> bool:
    """Return whether a time can be stored: finite and in the valid range."""
    return SHORTEST_US <= time.mean_us <= LONGEST_US and all(map(math.isfinite, time))
