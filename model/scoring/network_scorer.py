"""`NetworkScorer`: a network's predictions for many rows at once, in one precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ...datasets.feature_groups import FeatureGroup, problems_in
from .lasting import OfLasting
from .parts import parts_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.floating[Any]]

#: Standardised features stay within this, so that what is far outside the data says no more than what is at its edge.
LIMIT = 4.0
#: Rows scored at a time: 1,024 rows x 64 units x 8 bytes stay in a core's L2.
_BLOCK_ROWS = 1024
#: Products with fewer multiplications OpenBLAS starts no threads for, which on busy cores wait for each other: of two
#: matrices, and of a matrix and a vector.
_ALONE = {2: 1 << 18, 1: 9216}


class Weights(Protocol):
    """What the layers are made of: the flat arrays of a `Network`."""

    @property
    def mean(self) -> NDArray[np.float32]: ...
    @property
    def scale(self) -> NDArray[np.float32]: ...
    @property
    def which(self) -> NDArray[np.int32]: ...
    @property
    def value(self) -> NDArray[np.float32]: ...
    @property
    def weight1(self) -> NDArray[np.float32]: ...
    @property
    def bias1(self) -> NDArray[np.float32]: ...
    @property
    def weight2(self) -> NDArray[np.float32]: ...
    @property
    def bias2(self) -> NDArray[np.float32]: ...
    @property
    def weight3(self) -> NDArray[np.float32]: ...
    @property
    def bias3(self) -> NDArray[np.float32]: ...


class NetworkScorer:
    """The layers of one network. Made once; `logs` is then a few vector operations."""

    def __init__(self, network: Weights, dtype: type[np.floating[Any]]) -> None:
        self._network, self._dtype = network, dtype
        # relu(x + bias) is max(x, -bias) + bias, and what is added behind the product can as well be before the next.
        weight2, weight3 = network.weight2.astype(np.float64), network.weight3.astype(np.float64)
        bias2 = network.bias2 + network.bias1 @ weight2
        # A row for each: NumPy takes twice as long to spread one of 64 over all.
        least1, least2 = (np.tile(-bias, (_BLOCK_ROWS, 1)) for bias in (network.bias1, bias2))
        later = least1, weight2, least2, weight3, network.bias3 + bias2 @ weight3
        self._later: tuple[Floats, ...] = tuple(one.astype(dtype) for one in later)
        self._shares: dict[tuple[int, ...], _Share] = {}
        self._of_group = OfLasting(self._of_each_kind)

    def logs(self, groups: Sequence[FeatureGroup]) -> Floats:
        """Log slowdowns, (n_problems, n_rows), right to the last bits but for these."""
        least1, weight2, least2, weight3, last = self._later
        parts = parts_of(groups, self._of_group, np.add)
        logs = np.empty(len(parts[0][1]), self._dtype)
        for start in range(0, len(logs), _BLOCK_ROWS):
            block = slice(start, start + _BLOCK_ROWS)
            units, *others = (table.take(row[block], axis=0) for table, row in parts)
            for other in others:
                units += other
            hidden = _product(np.maximum(units, least1[: len(units)], out=units), weight2)
            logs[block] = _product(np.maximum(hidden, least2[: len(units)], out=hidden), weight3)
        logs += last
        return logs.reshape(problems_in(groups), -1)

    def inputs(self, columns: tuple[int, ...], table: NDArray[np.float32]) -> Floats:
        """What the first layer gets, (n, n_columns + n_values), of a table of these columns, (n, n_columns)."""
        share = self._share_of(columns)
        inputs = np.empty((len(table), len(share.weight)), self._dtype)
        standard = inputs[:, : len(columns)]
        np.subtract(table, share.mean, out=standard)
        standard /= share.scale
        np.minimum(np.maximum(standard, -LIMIT, out=standard), LIMIT, out=standard)
        inputs[:, len(columns) :] = table[:, share.which] == share.value
        return inputs

    def _of_each_kind(self, group: FeatureGroup) -> Floats:
        """What each kind adds to the first layer's units, (n_problems, n_kinds, units1)."""
        inputs = self.inputs(group.columns, group.values.reshape(-1, len(group.columns)))
        return _product(inputs, self._share_of(group.columns).weight).reshape(*group.values.shape[:2], -1)

    def _share_of(self, columns: tuple[int, ...]) -> _Share:
        """What the first layer has for some of the features."""
        if columns not in self._shares:
            net, places = self._network, list(columns)
            there = np.flatnonzero(np.isin(net.which, places))
            self._shares[columns] = _Share(
                mean=net.mean[places].astype(self._dtype),
                scale=net.scale[places].astype(self._dtype),
                which=np.array([places.index(one) for one in net.which[there].tolist()], np.intp),
                value=net.value[there],
                weight=net.weight1[places + (len(net.mean) + there).tolist()].astype(self._dtype),
            )
        return self._shares[columns]


@dataclass(frozen=True)
class _Share:
    """What the first layer has for a group's columns."""

    mean: Floats  # (n_columns,)
    scale: Floats  # (n_columns,)
    which: NDArray[np.intp]  # (n_values,) the column of each value
    value: NDArray[np.float32]  # (n_values,)
    weight: Floats  # (n_columns + n_values, units1)


def _product(rows: Floats, weight: Floats) -> Floats:
    """rows @ weight, on one thread."""
    result = np.empty((len(rows), *weight.shape[1:]), rows.dtype)
    size = max(1, (_ALONE[weight.ndim] - 1) // max(weight.size, 1))
    for start in range(0, len(rows), size):
        block = slice(start, start + size)
        np.matmul(rows[block], weight, out=result[block])
    return result
