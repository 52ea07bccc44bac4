"""From measurements to a bundle."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ..datasets import Family, ForetuneError
from ..datasets.grid import Grid
from ..datasets.progress import share_of
from .bundle import Bundle
from .gbdt import LightGBMRanker
from .sources import check_sources, source_of
from .trained_family import TrainedFamily

if TYPE_CHECKING:
    from ..datasets.dataset import Dataset


def train_bundle(
    dataset: Dataset, families: Mapping[str, Family], ranker: Callable[[], LightGBMRanker] = LightGBMRanker
) -> Bundle:
    """A bundle with one ranker for each of `families` (by name) that the dataset has, fitted on all its problems.

    `ranker` makes the unfitted ranker. The same dataset, families, parameters and LightGBM give the same bytes. Warns
    as `check_sources` does. Raises `ForetuneError` where the dataset has none of the families.

    >>> train_bundle(load("h200"), families).save("my-bundle")  # doctest: +SKIP
    """
    import lightgbm

    learnable = [name for name in dataset.families if name in families]
    if not learnable:
        wanted, there = (", ".join(sorted(names)) or "none" for names in (families, dataset.families))
        raise ForetuneError(f"{dataset.name}: families must be among {wanted} but are {there}")
    trained = {}
    for name in learnable:
        check_sources(dataset, families[name])
        grid = dataset.grid(name)
        with share_of(1 / len(learnable)):
            fitted = ranker().fit(grid, families[name])
        trained[name] = TrainedFamily(
            ranker=fitted,
            devices=tuple(dict.fromkeys(grid.devices)),
            origin={
                "dataset": dataset.name,
                "measurements_sha256": fingerprint(grid),
                "source_hash": source_of(families[name]),
                "problems": len(grid),
                "configs": len(grid.configs),
            },
            wrong_results=dataset.wrong_results(name),
        )
    return Bundle(trained, lightgbm.__version__)


def fingerprint(grid: Grid) -> str:
    """SHA-256 of what a ranker learns from: problems, devices, configs and both passes' times."""
    digest = hashlib.sha256()
    for part in (
        [case.problem.to_json() for case in grid.cases],
        [device.to_json() for device in grid.devices],
        [config.to_json() for config in grid.configs],
    ):
        digest.update(json.dumps(part, sort_keys=True).encode())
    for times in (grid.first_us, grid.second_us):
        digest.update(times.astype("<f8").tobytes())
    return digest.hexdigest()
