"""Learn from winners as well as from times: configs that a search found to be the best of a space.

Others publish winners for cards that cannot be measured here. `WinnerRanker` is trained on measurements first, and then
corrects its order with trees that also learn from winners. Predictions are made by a plain `LightGBMRanker`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..datasets import DeviceSpec, Family, KernelConfig, Problem
from ..datasets.grid import Grid
from ..datasets.progress import share_of
from .gbdt import RANKS_PER_LOG, LightGBMRanker
from .rows import TrainingRows, features_of, training_rows

if TYPE_CHECKING:
    from typing_extensions import Self

#: Configs of a space that a winner is compared with, drawn at random. Configs that are predicted to be fast are not
#: preferred: they may be as fast as the winner, and with them rankers learned the noise of searches (kernels/NOTES.md).
_OTHERS = 32
#: The log slowdown that these configs are taken to have; only that it is not among the best grades matters.
_SLOWER = float(np.log(1.15))
#: The weight of a winner's rows relative to measured ones. Winners are many and noisy: with a weight of 1, the first
#: choices for a measured card became slower.
_WEIGHT = 0.2
_TREES = 50


@dataclass(frozen=True)
class Winner:
    """The config that a search found to be the fastest of its space, on a problem and a device.

    >>> space = tuple(KernelConfig.of(BLOCK=size) for size in (16, 32, 64))
    >>> Winner(Problem.of("toy"), DeviceSpec.named("h200"), space[1], space).config["BLOCK"]
    32
    """

    problem: Problem
    device: DeviceSpec
    config: KernelConfig
    space: tuple[KernelConfig, ...]  # with `config`; all can run on the device


class WinnerRanker(LightGBMRanker):
    """A `LightGBMRanker` that also learns from winners.

    Args:
        winners: The winners of each family, by its name. Families without any are trained as usual.
        **params: The parameters of `LightGBMRanker`.

    >>> WinnerRanker({}, trees=100).trees
    100
    """

    def __init__(self, winners: Mapping[str, Sequence[Winner]], **params: Any) -> None:
        super().__init__(**params)
        self.winners_ = winners  # the underscore keeps them out of `get_params` and so out of bundles

    def fit(self, grid: Grid, family: Family) -> Self:
        """Train on a grid of measurements and then on the family's winners, and return this ranker."""
        with share_of(0.8):
            super().fit(grid, family)
        with share_of(0.2):
            return self.learn_winners(grid, family)

    def learn_winners(self, grid: Grid, family: Family) -> Self:
        """Train further trees on the family's winners, after the measurements, and return this ranker.

        The measurements are trained on again together with the winners, so that the order of measured configs is kept.
        """
        if not (winners := self.winners_.get(family.name, ())):
            return self
        with share_of(0.5):
            measured = training_rows(grid, family, slow=self.slow, keep_slow=self.keep_slow, seed=self.seed)
        rows = _joined(measured, winner_rows(winners, family, seed=self.seed))
        known = -RANKS_PER_LOG * self._logs(rows.features)
        new, *_ = self._training(rows).lambdarank(_TREES, share=0.5, known=known)
        self.forest_ = (self.forest_ + new.affine(-1 / RANKS_PER_LOG)).compact()
        self._check_reach()
        return self


def winner_rows(winners: Sequence[Winner], family: Family, *, seed: int) -> TrainingRows:
    """Return the training rows of winners: each with a few other configs of its space, which are taken to be slower.

    Args:
        winners: The winners.
        family: Their family.
        seed: Random seed for drawing the other configs.
    """
    random = np.random.default_rng(seed)
    features, sizes = [], []
    for winner in winners:
        drawn = random.choice(len(winner.space), min(_OTHERS + 1, len(winner.space)), replace=False).tolist()
        others = [winner.space[place] for place in drawn if winner.space[place] != winner.config][:_OTHERS]
        features.append(features_of(family, winner.problem, winner.device, (winner.config, *others), None))
        sizes.append(1 + len(others))
    log_slowdown = np.concatenate([np.repeat([0.0, _SLOWER], [1, size - 1]) for size in sizes])
    return TrainingRows(np.concatenate(features), log_slowdown, np.array(sizes), np.arange(len(sizes)))


def _joined(measured: TrainingRows, won: TrainingRows) -> TrainingRows:
    """Return both tables of rows as one; rows of winners get the weight `_WEIGHT`."""
    weights = np.ones(len(measured.features)) if measured.weights is None else measured.weights
    return TrainingRows(
        np.concatenate([measured.features, won.features]),
        np.concatenate([measured.log_slowdown, won.log_slowdown]),
        np.concatenate([measured.query_sizes, won.query_sizes]),
        np.concatenate([measured.query_rows, won.query_rows + measured.query_rows.max() + 1]),
        np.concatenate([weights, np.full(len(won.features), _WEIGHT)]),
    )
