"""What more measurements would buy: regret by the number of problems that a ranker learned from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ...datasets import DeviceSpec, Family, KernelConfig, Problem
from ...datasets.errors import check_between
from ...datasets.grid import Grid
from ...datasets.progress import share_of
from ..baselines import Rivals
from ..cross_validation import cross_validate
from ..gbdt import LightGBMRanker
from ..metrics import Summary, summarise
from ..ranker import Ranker

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Self

    from ...datasets.dataset import Dataset

#: Fewer trees than a bundle has, so that the curve takes less time: what counts is how it falls.
TREES = 150
SHARES = (0.125, 0.25, 0.5, 1.0)
#: Of five, the one with the most families.
_FOLDS_TESTED = 1
#: What fewer problems teach is chance.
_FEWEST = 4


@dataclass(frozen=True)
class Point:
    """Regret on held-out problems of a ranker that learned from so many others."""

    problems: int  # learned from
    trees: int
    regret: dict[int, Summary]  # by k

    def to_json(self) -> dict[str, Any]:
        return {
            "problems": self.problems,
            "trees": self.trees,
            "regret": {str(k): one.to_json() for k, one in self.regret.items()},
        }


def learning_curve(
    dataset: Dataset,
    family: Family,
    ranker: Callable[[], LightGBMRanker] = LightGBMRanker,
    *,
    shares: Sequence[float] = SHARES,
) -> list[Point]:
    """A point for each share of the training problems, drawn at random, the smaller draws within the larger ones.

    `ranker` makes the unfitted rankers, which learn with at most `TREES` trees. All are judged on the same held-out
    model families. Raises as `cross_validate`.

    >>> [point.problems for point in learning_curve(load("h200"), family)]  # doctest: +SKIP
    [36, 73, 146, 291]
    """
    parameters = ranker().get_params()
    parameters["trees"] = min(parameters["trees"], TREES)
    points = []
    for share in shares:
        learned: list[int] = []
        with share_of(share / sum(shares)):
            judged = cross_validate(
                dataset,
                family,
                partial(_Thinned, share, parameters, learned),
                ks=(1, 8),
                tested=_FOLDS_TESTED,
                rivals=Rivals({}, {}),
            )
        regret = {k: summarise(values, judged.groups) for k, values in judged.regret.items()}
        points.append(Point(max(learned), parameters["trees"], regret))
    # Of a few problems, several shares are the same draw.
    return list({point.problems: point for point in points}.values())


class _Thinned(Ranker):
    """Learns from a share of the problems that it is given, and notes how many that were."""

    ranker_: LightGBMRanker

    def __init__(self, share: float, parameters: Mapping[str, Any], learned: list[int]) -> None:
        check_between("share", share, 0.0, 1.0)
        self.share, self.parameters, self.learned = share, parameters, learned

    def fit(self, grid: Grid, family: Family) -> Self:
        order = np.random.default_rng(0).permutation(len(grid))
        chosen = np.sort(order[: max(round(self.share * len(grid)), _FEWEST)])
        self.learned.append(len(chosen))
        self.ranker_ = LightGBMRanker(**self.parameters).fit(grid.select(chosen), family)
        return self

    def predict(
        self, family: Family, problem: Problem, device: DeviceSpec, configs: Sequence[KernelConfig]
    ) -> NDArray[np.float64]:
        return self.ranker_.predict(family, problem, device, configs)
