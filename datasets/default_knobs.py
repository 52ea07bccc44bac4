"""`with_default_knobs`: data of before a knob came, in the words of now."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from .family import check_attributes, with_defaults

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
    check_attributes(family)  # who learns, adapts or evaluates begins here
    if not family.default_knobs or family.name not in dataset.families:
        return dataset
    rows = dataset.rows(family.name)
    configs = list(dataset.configs)
    number_of = {config: number for number, config in enumerate(configs)}
    place = np.arange(len(configs), dtype=np.int32)  # of each config, the number of what it is today
    older = {n: whole for n in rows["config"].unique() if (whole := with_defaults(family, configs[n])) != configs[n]}
    for number, whole in older.items():
        if whole not in number_of:
            number_of[whole] = len(configs)
            configs.append(whole)
        place[number] = number_of[whole]
    if not older:
        return dataset
    numbers = dataset.measurements["config"].to_numpy().copy()
    of_family = dataset.measurements.index.isin(rows.index)
    numbers[of_family] = place[numbers[of_family]]
    return replace(dataset, configs=tuple(configs), measurements=dataset.measurements.assign(config=numbers))
