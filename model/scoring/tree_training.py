"""Train a `Forest` with LightGBM on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ...datasets.progress import advance
from .trees import Forest

if TYPE_CHECKING:
    import lightgbm
    from numpy.typing import NDArray

    from ..rows import TrainingRows

#: Upper bounds of log slowdown for lambdarank's relevance grades: the best configs (within the noise) have grade 9.
_GRADE_EDGES = np.log([1.01, 1.02, 1.04, 1.07, 1.12, 1.2, 1.35, 1.7, 3.0])
#: The most rows of a query that LightGBM ranks.
MOST_ROWS = 10_000
_LAMBDARANK = {
    "objective": "lambdarank",
    "label_gain": [float(2**grade - 1) for grade in range(len(_GRADE_EDGES) + 1)],
    "lambdarank_truncation_level": 20,
}
_ALWAYS = {
    "bagging_freq": 1,
    "use_missing": False,  # features are finite; every split is then a plain x <= threshold
    "deterministic": True,
    "force_row_wise": True,
    "num_threads": 1,  # see `LightGBMRanker.fit`
    "verbosity": -1,
}


def dealt(query_sizes: NDArray[np.int64]) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
    """Split each query that is too long for LightGBM into several of nearly equal size, assigning its rows in turn.

    Neighboring configs are similar, so that every piece gets a sample of all of them.

    Args:
        query_sizes: The number of rows of each query, which are consecutive, (n_queries,).

    Returns:
        The order of the rows, (n_rows,), and the sizes of the resulting queries, (n_pieces,).
    """
    order, sizes, start = [], [], 0
    for size in query_sizes.tolist():
        pieces = -(-size // MOST_ROWS) or 1
        order += [np.arange(start + first, start + size, pieces) for first in range(pieces)]
        sizes += [len(range(first, size, pieces)) for first in range(pieces)]
        start += size
    return np.concatenate(order), np.array(sizes)


class TreeTraining:
    """Trains forests with different objectives on one table, also concurrently in threads.

    The features are binned once for all forests, which takes a tenth of a forest's training time. The same rows,
    parameters and number of trees give the same trees.

    Args:
        rows: The training rows.
        target: The clipped log slowdown of each row, (n_rows,).
        parameters: LightGBM parameters that do not depend on the objective.
    """

    def __init__(self, rows: TrainingRows, target: NDArray[np.float64], parameters: Mapping[str, Any]) -> None:
        import lightgbm

        self._order, self._pieces = dealt(rows.query_sizes)
        if len(self._pieces) > len(rows.query_sizes):
            features, weights = rows.features[self._order], None if rows.weights is None else rows.weights[self._order]
            rows, target = replace(rows, features=features, weights=weights), target[self._order]
        self._rows, self._target, self._parameters = rows, target, {**_ALWAYS, **parameters}
        self._binned = lightgbm.Dataset(rows.features, params=self._parameters).construct()

    def regression(self, trees: int, *, emphasis: float, share: float) -> Forest:
        """Train with least squares and a row weight of slowdown ** -emphasis.

        Args:
            trees: The number of trees.
            emphasis: See `LightGBMRanker`.
            share: The share of the current task's progress that this training is.
        """
        weight = np.exp(-emphasis * self._target) if emphasis else None
        if self._rows.weights is not None:
            weight = self._rows.weights if weight is None else weight * self._rows.weights
        booster = self._train({"objective": "regression"}, trees, share, self._target, weight)
        return Forest.from_lightgbm(booster.dump_model())

    def lambdarank(
        self, trees: int, *, share: float, known: NDArray[np.float64] | None = None
    ) -> tuple[Forest, float, float]:
        """Train trees that order the configs of each problem.

        Args:
            trees: The number of trees.
            share: The share of the current task's progress that this training is.
            known: Scores that training starts from, (n_rows,); 0 if left out.

        Returns:
            The forest, and the slope and offset that convert its scores plus the known ones to log slowdowns.
        """
        rows, target = self._rows, self._target
        grade = len(_GRADE_EDGES) - np.searchsorted(_GRADE_EDGES, target)
        known = None if known is None else known[self._order]
        booster = self._train(_LAMBDARANK, trees, share, grade, rows.weights, self._pieces, known)
        # Ranking scores have no scale or zero point. A line fitted to log slowdowns within problems determines both.
        score = _scores(booster)
        query = np.repeat(np.arange(len(rows.query_sizes)), rows.query_sizes)
        centred = score - (np.bincount(query, score) / rows.query_sizes)[query]
        slope = float(centred @ target) / max(float(centred @ centred), 1e-12)
        return Forest.from_lightgbm(booster.dump_model()), slope, float(target.mean() - slope * score.mean())

    def _train(
        self,
        objective: Mapping[str, Any],
        trees: int,
        share: float,
        label: NDArray[Any],
        weight: NDArray[np.float64] | None,
        group: NDArray[np.int64] | None = None,
        init_score: NDArray[np.float64] | None = None,
    ) -> lightgbm.Booster:
        """Train a booster of `trees` trees with the parameters in `objective`, on the shared bins.

        See LightGBM for `label`, `weight`, `group` and `init_score`; `share` is that of the task's progress.
        """
        import lightgbm

        # A copy with labels of its own, because another objective may be trained at the same time.
        data = self._binned.subset(list(range(len(label)))).construct()
        data.set_label(label).set_weight(weight).set_group(group).set_init_score(init_score)
        callbacks = [lambda _: advance(share / trees)]
        parameters = {**objective, **self._parameters}
        return lightgbm.train(parameters, data, num_boost_round=trees, callbacks=callbacks, keep_training_booster=True)


def _scores(booster: lightgbm.Booster) -> NDArray[np.float64]:
    """Return a booster's scores of its training rows, (n_rows,), including the known scores.

    LightGBM has computed them already, but gives them only to a metric.
    """
    scores_seen: list[NDArray[np.float64]] = []

    def metric(scores: NDArray[np.float64], _: lightgbm.Dataset) -> tuple[str, float, bool]:
        scores_seen.append(scores.copy())
        return "none", 0.0, True

    booster.eval_train(metric)
    return scores_seen[0]
