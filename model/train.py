"""From measurements to a bundle."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from ..datasets import Family, ForetuneError
from ..datasets.progress import share_of, side_by_side
from .bundle import Bundle
from .calibration.cross_fit import cross_fitted
from .calibration.extent import Extent
from .gbdt import LightGBMRanker
from .trained_family import TrainedFamily
from .training_set import TrainingSet

if TYPE_CHECKING:
    from ..datasets.dataset import Dataset


def train_bundle(
    dataset: Dataset, families: Mapping[str, Family], ranker: Callable[[], LightGBMRanker] = LightGBMRanker
) -> Bundle:
    """A bundle with one ranker for each of `families` (by name) that the dataset has, fitted on all its problems, and
    calibrated on models that were held out, where the dataset has enough.

    `ranker` makes the unfitted ranker. The same dataset, families, parameters and LightGBM give the same bytes. Warns
    as `TrainingSet.of` does. Raises `ForetuneError` where the dataset has none of the families.

    >>> train_bundle(load("h200"), families).save("my-bundle")  # doctest: +SKIP
    """
    import lightgbm

    learnable = [name for name in dataset.families if name in families]
    if not learnable:
        wanted, there = (", ".join(sorted(names)) or "none" for names in (families, dataset.families))
        raise ForetuneError(f"{dataset.name}: families must be among {wanted} but are {there}")

    rows = {name: len(dataset.rows(name)) for name in learnable}

    def train(name: str) -> TrainedFamily:
        with share_of(rows[name] / sum(rows.values())):
            data = TrainingSet.of(dataset, families[name])
            with share_of(0.4):
                fitted = ranker().fit(data.grid, data.family)
            with share_of(0.6):
                calibration = cross_fitted(data, ranker)
        return TrainedFamily(
            ranker=fitted,
            devices=data.devices,
            origin=data.origin,
            wrong_results=data.wrong_results,
            calibration=calibration,
            extent=Extent.of(data.problems),
        )

    # One family's two halves do not take equally long (see `LightGBMRanker.fit`), and beside another no core idles. The
    # longest first, so that none is left for the end.
    learnable.sort(key=lambda name: -rows[name])
    trained = side_by_side([partial(train, name) for name in learnable], jobs=2)
    return Bundle(dict(zip(learnable, trained, strict=True)), lightgbm.__version__)
