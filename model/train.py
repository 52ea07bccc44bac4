"""From measurements to a bundle."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from ..datasets import Family, ForetuneError
from ..datasets.default_knobs import with_default_knobs
from ..datasets.progress import share_of, side_by_side
from .bundle import Bundle
from .calibration.cross_fit import calibrated_on
from .calibration.extent import Extent
from .gbdt import LightGBMRanker
from .origin import origin_of
from .sources import measured_grid
from .trained_family import TrainedFamily

if TYPE_CHECKING:
    from ..datasets.dataset import Dataset


def train_bundle(
    dataset: Dataset, families: Mapping[str, Family], ranker: Callable[[], LightGBMRanker] = LightGBMRanker
) -> Bundle:
    """A bundle with one ranker for each of `families` (by name) that the dataset has, fitted on all its problems, and
    calibrated on models that were held out, where the dataset has enough.

    `ranker` makes the unfitted ranker. The same dataset, families, parameters and LightGBM give the same bytes. Warns
    as `measured_grid` does. Raises `ForetuneError` where the dataset has none of the families.

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
            family = families[name]
            measured = with_default_knobs(dataset, family)
            grid = measured_grid(measured, family)
            with share_of(0.4):
                fitted = ranker().fit(grid, family)
            with share_of(0.6):
                calibration = calibrated_on(measured, grid, family, ranker)
        return TrainedFamily(
            ranker=fitted,
            devices=tuple(dict.fromkeys(grid.devices)),
            origin=origin_of(measured, grid, family),
            wrong_results=measured.wrong_results(name),
            calibration=calibration,
            extent=Extent.of([case.problem for case in grid.cases]),
        )

    # One family's two halves do not take equally long (see `LightGBMRanker.fit`), and beside another no core idles. The
    # longest first, so that none is left for the end.
    learnable.sort(key=lambda name: -rows[name])
    trained = side_by_side([partial(train, name) for name in learnable], jobs=2)
    return Bundle(dict(zip(learnable, trained, strict=True)), lightgbm.__version__)
