"""Whether the device stayed the same while it was measured: one launch, repeated through the run.

Every run has a drift probe: one config of one problem, timed again every few seconds on each GPU. Another process on
the card, or a clock that sinks, shows in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .problem import Problem

if TYPE_CHECKING:
    import pandas as pd

#: A case is flagged when the drift probe was slower than usual by more than this while it was measured. A clock that
#: follows the power limit moves it by some percent; a second process on the card, by 50 % or more.
FLAGGED = 1.15


@dataclass(frozen=True)
class Reading:
    """The drift probe's time on one GPU of a run, while a problem was measured there."""

    problem: Problem  # the one that was measured
    gpu: str  # which one of the run's
    at_s: float  # since the run began
    time_us: float


def slowdowns(drift: pd.DataFrame) -> pd.Series[float]:
    """The time of each reading over the median of its run and GPU, (n_readings,): 1.0 = as usual.

    `drift` has the columns of `schema.DRIFT`.

    >>> import pandas as pd
    >>> readings = pd.DataFrame({"run_id": "r1", "gpu": "0", "problem": [0, 0, 1], "time_us": [100.0, 100.0, 150.0]})
    >>> slowdowns(readings).tolist()
    [1.0, 1.0, 1.5]
    """
    usual = drift.groupby(["run_id", "gpu"])["time_us"].transform("median")
    return drift["time_us"] / usual


def flagged(drift: pd.DataFrame) -> pd.Series[float]:
    """Of the problems that were measured while the drift probe was off: its worst slowdown, by problem.

    >>> import pandas as pd
    >>> readings = pd.DataFrame({"run_id": "r1", "gpu": "0", "problem": [0, 0, 1], "time_us": [100.0, 100.0, 150.0]})
    >>> flagged(readings).to_dict()
    {1: 1.5}
    """
    worst: pd.Series[float] = slowdowns(drift).groupby(drift["problem"]).max()
    return worst[worst > FLAGGED]


def flagged_names(drift: pd.DataFrame) -> dict[str, float]:
    """`flagged` for people, where `drift` has the problems by name: those that differ in their ragged sizes alone
    share one, and the worst counts.

    >>> import pandas as pd
    >>> readings = pd.DataFrame({"run_id": "r1", "gpu": "0", "problem": [*"aab"], "time_us": [100.0, 100.0, 150.0]})
    >>> flagged_names(readings)
    {'b': 1.5}
    """
    return {str(name): round(float(worst), 3) for name, worst in flagged(drift).items()}
