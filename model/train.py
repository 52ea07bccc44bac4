"""From measurements to a bundle."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ..datasets import Family, ForetuneError
from ..datasets.progress import share_of
from .bundle import Bundle
from .gbdt import LightGBMRanker
from .origin import origin_of
from .sources import measured_grid
from .trained_family import TrainedFamily

if TYPE_CHECKING:
    from ..datasets.dataset import Dataset


def train_bundle(
    dataset: Dataset, families: Mapping[str, Family], ranker: Callable[[], LightGBMRanker] = LightGBMRanker
) -> Bundle:
    """A bundle with one ranker for each of `families` (by name) that the dataset has, fitted on all its problems.

    `ranker` makes the unfitted ranker. The same dataset, families, parameters and LightGBM give the same bytes. Warns
    as `measured_grid` does. Raises `ForetuneError` where the dataset has none of the families.

    >>> train_bundle(load("h200"), families).save("my-bundle")  # doctest: +SKIP
    """
    import lightgbm

    learnable = [name for name in dataset.families if name in families]
    if not learnable:
        wanted, there = (", ".join(sorted(names)) or "none" for names in (families, dataset.families))
        raise ForetuneError(f"{dataset.name}: families must be among {wanted} but are {there}")
    trained = {}
    for name in learnable:
        grid, _ = measured_grid(dataset, families[name])
        with share_of(1 / len(learnable)):
            fitted = ranker().fit(grid, families[name])
        trained[name] = TrainedFamily(
            ranker=fitted,
            devices=tuple(dict.fromkeys(grid.devices)),
            origin=origin_of(dataset, grid, families[name]),
            wrong_results=dataset.wrong_results(name),
        )
    return Bundle(trained, lightgbm.__version__)
