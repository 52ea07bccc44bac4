"""`with_default_knobs`: data of before a knob came, in the words of now."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from .config import KernelConfig

if TYPE_CHECKING:
    from .dataset import Dataset
    from .family import Family


def with_default_knobs(dataset: Dataset, family: Family) -> Dataset:
    """The dataset with the family's configs as they would be named today: one that lacks a knob of
    `Family.default_knobs`, which came after it was measured, has the default. Nothing else changes, and a dataset that
    lacks none is returned as it is.

    >>> from foretune.datasets import load
    >>> from foretune.kernels import find_family
    >>> dataset = load("h100_kernels")
    >>> with_default_knobs(dataset, find_family("matmul")) is dataset
    True
    """
    if not family.default_knobs or family.name not in dataset.families:
        return dataset
    rows = dataset.rows(family.name)
    numbers = {config: number for number, config in enumerate(dataset.configs)}
    place = np.arange(len(dataset.configs), dtype=np.int32)
    for number in rows["config"].unique():
        knobs = dataset.configs[number].to_json()
        if missing := {knob: value for knob, value in family.default_knobs.items() if knob not in knobs}:
            place[number] = numbers.setdefault(KernelConfig.of(**knobs, **missing), len(numbers))
    if len(numbers) == len(dataset.configs) and (place == np.arange(len(place))).all():
        return dataset
    config = dataset.measurements["config"].to_numpy().copy()
    of_family = dataset.measurements.index.isin(rows.index)
    config[of_family] = place[config[of_family]]
    return replace(dataset, configs=tuple(numbers), measurements=dataset.measurements.assign(config=config))
