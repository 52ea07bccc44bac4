"""`ConfigTable`: the features of a tiled product by what they depend on, so that what repeats is computed once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..datasets import DeviceSpec
from ..datasets.feature_groups import FeatureGroup
from .config_limits import Knobs, programs_that_fit

Floats: TypeAlias = NDArray[np.float64]

#: L2 delivers about this multiple of the copy bandwidth (H100/H200 microbenchmarks: 5.5-7 TB/s read against 3-4.3).
L2_OVER_DRAM = 1.6


class ConfigTable:
    """Features whose columns are, in this order, those of the call, those of the config alone, and those that the call
    and a few of the config's knobs decide.

    Args:
        first: how many columns the call has.
        columns: the features of the config alone, each (n_configs,).
        deciding: what all other features look at, each (n_configs,). Configs that have the same of it are of one kind.

    >>> table = ConfigTable(1, [np.array([4.0, 8.0, 8.0])], [np.array([2.0, 3.0, 2.0])])
    >>> table.kinds.tolist(), table.kind.tolist()
    ([[2.0, 3.0]], [0, 1, 0])
    >>> from foretune.datasets.feature_groups import joined
    >>> joined(table.groups([[7.0]], [10 * table.kinds[0]])).tolist()
    [[7.0, 4.0, 20.0], [7.0, 8.0, 30.0], [7.0, 8.0, 20.0]]
    """

    def __init__(self, first: int, columns: Sequence[Floats], deciding: Sequence[Floats]) -> None:
        self.own = FeatureGroup(
            columns=tuple(range(first, first + len(columns))),
            values=np.stack(columns, axis=1).astype(np.float32)[None],
            kind=np.arange(len(columns[0])),
            lasting=True,
        )
        self.kinds, self.kind = distinct(*deciding)  # (len(deciding), n_kinds), and the kind of each config
        #: The distinct values of the first that decides, and the place among them of each kind's.
        self.ms, self.m = np.unique(self.kinds[0], return_inverse=True)
        self.one_kind = np.zeros(len(self.kind), np.intp)

    def groups(self, of_calls: Sequence[Sequence[float]], of_kinds: Sequence[Floats]) -> tuple[FeatureGroup, ...]:
        """The features of several problems: those of each call, and those of each kind, each (n_problems, n_kinds) or
        what NumPy spreads over that."""
        first, last = len(of_calls[0]), len(of_calls[0]) + len(self.own.columns)
        calls = np.array(of_calls, dtype=np.float32)[:, None]
        values = np.empty((len(of_kinds), len(of_calls), self.kinds.shape[1]), np.float32)
        for column, figures in zip(values, of_kinds, strict=True):
            column[:] = figures
        mixed = np.ascontiguousarray(values.transpose(1, 2, 0))
        return (
            FeatureGroup(tuple(range(first)), calls, self.one_kind),
            self.own,
            FeatureGroup(tuple(range(last, last + len(values))), mixed, self.kind),
        )


def distinct(*columns: Floats) -> tuple[Floats, NDArray[np.intp]]:
    """The distinct combinations, (n_columns, n_kinds), and which of them each entry has."""
    kinds, kind = np.unique(np.stack(columns), axis=1, return_inverse=True)
    return kinds, kind.ravel()  # NumPy 2.0 gives it two axes


def resident_programs(
    configs: Sequence[Knobs], smem_bytes: Iterable[float], accumulators: Iterable[float], device: DeviceSpec
) -> Floats:
    """How many programs of each config run on one SM of the device at a time, (n_configs,): as many as fit, each with
    so much shared memory and so many accumulators a thread, and no more than PROGRAMS_PER_SM, unless that is 0, a
    program a tile.

    >>> configs = [{"num_warps": 4, "PROGRAMS_PER_SM": programs} for programs in (0, 1)]
    >>> resident_programs(configs, [100 * 1024] * 2, [64.0] * 2, DeviceSpec.named("h200")).tolist()
    [2.0, 1.0]
    """
    an_sm = device.smem_per_sm_bytes, device.registers_per_sm
    resident = []
    for config, smem, held in zip(configs, smem_bytes, accumulators, strict=True):
        fits = programs_that_fit(int(smem), float(held), config["num_warps"], *an_sm)
        resident.append(min(config["PROGRAMS_PER_SM"] or fits, fits))
    return np.array(resident, dtype=np.float64)


def alignment(size: int) -> int:
    """The largest power of two that divides a size, as its exponent, 9 at most: what loads and stores of rows depend
    on.

    >>> alignment(1000), alignment(4096), alignment(0)
    (3, 9, 9)
    """
    return min((size & -size).bit_length() - 1, 9) if size else 9
