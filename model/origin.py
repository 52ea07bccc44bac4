"""Where a trained family comes from, as a bundle records it, and whether it has seen other data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..datasets import Family
from ..datasets.grid import Grid
from .sources import source_of

if TYPE_CHECKING:
    from ..datasets.dataset import Dataset


def origin_of(dataset: Dataset, grid: Grid, family: Family) -> dict[str, Any]:
    """What `TrainedFamily.origin` has of a family trained on this grid of the dataset: JSON values.

    >>> origin_of(dataset, dataset.grid(family.name), family)["problems"]  # doctest: +SKIP
    454
    """
    return {
        "dataset": dataset.name,
        "measurements_sha256": fingerprint(grid),
        "runs": sorted(map(str, dataset.rows(family.name)["run_id"].unique())),
        "source_hash": source_of(family),
        "problems": len(grid),
        "configs": len(grid.configs),
    }


def seen_in_training(dataset: Dataset, grid: Grid, origin: Mapping[str, Any]) -> float | None:
    """The share of the dataset's measurements of the grid's family that were trained on: those of the same runs. None
    where that cannot be told, of a bundle that recorded no runs.

    >>> seen_in_training(load("h200"), grid, bundle.trained["row_softmax"].origin)  # doctest: +SKIP
    1.0
    """
    if origin.get("measurements_sha256") == fingerprint(grid):
        return 1.0
    runs = origin.get("runs")
    if not isinstance(runs, list):  # trained before they were recorded
        return None
    return float(dataset.rows(grid.family)["run_id"].isin([run for run in runs if isinstance(run, str)]).mean())


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
