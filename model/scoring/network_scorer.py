"""`NetworkScorer`: a network's predictions for many rows at once, in one precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ...datasets.feature_groups import FeatureGroup
from .lasting import OfLasting
from .parts import combined, parts_of

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
        self._of_lasting: OfLasting[Floats] = OfLasting()

    def units(self, groups: Sequence[FeatureGroup]) -> list[FeatureGroup]:
        """The groups with what each kind adds to the first layer's units as their values, (n_problems, n_kinds,
        units1): what `logs` takes. Lasting groups stay as they are."""
        return [group if group.lasting else group.holding(self._of_each_kind(group)) for group in groups]

    def logs(self, units: Sequence[FeatureGroup], rows: NDArray[np.intp] | None = None) -> Floats:
        """Log slowdowns, (n_problems, n_configs), right to the last bits but for these; of the configs in some places,
        if any are given."""
        least1, weight2, least2, weight3, last = self._later
        parts = parts_of(units, self._units_of, np.add)
        if rows is not None:
            parts = [(table, kind.take(rows)) for table, kind in parts]
        problems, configs = len(parts[0][0]), len(parts[0][1])
        size = max(1, min(configs, _BLOCK_ROWS // problems))
        buffers = np.empty((2, problems, size, len(weight2)), self._dtype)
        logs = np.empty((problems, configs), self._dtype)
        for start in range(0, configs, size):
            block = slice(start, start + size)
            sums = combined(parts, block, np.add, buffers)
            flat = sums.reshape(-1, len(weight2))
            hidden = _product(np.maximum(flat, least1[: len(flat)], out=flat), weight2)
            rough = _product(np.maximum(hidden, least2[: len(flat)], out=hidden), weight3)
            logs[:, block] = rough.reshape(sums.shape[:2])
        logs += last
        return logs

    def inputs(self, columns: tuple[int, ...], table: NDArray[np.float32]) -> Floats:
        """What the first layer gets, (n, n_columns + n_values), of a table of these columns, (n, n_columns)."""
        share = self._share_of(columns)
        inputs: Floats = table - share.mean
        inputs /= share.scale
        np.minimum(np.maximum(inputs, -LIMIT, out=inputs), LIMIT, out=inputs)
        if len(share.which):
            inputs = np.hstack([inputs, table[:, share.which] == share.value]).astype(self._dtype, copy=False)
        return inputs

    def _units_of(self, group: FeatureGroup) -> Floats:
        """What `units` has of each kind, for a lasting group too."""
        if group.lasting:
            return self._of_lasting(group, lambda: self._of_each_kind(group))
        return group.values

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
    """rows @ weight, on one thread: of many rows so many at a time, as a stack of matrices, and then the others."""
    size = max(1, (_ALONE[weight.ndim] - 1) // max(weight.size, 1))
    if len(rows) <= size:
        product: Floats = rows @ weight
        return product
    whole = len(rows) // size * size
    stack = rows[:whole].reshape(-1, size, rows.shape[1])
    result = np.empty((len(rows), *weight.shape[1:]), rows.dtype)
    np.matmul(stack, weight, out=result[:whole].reshape(*stack.shape[:2], *weight.shape[1:]))
    np.matmul(rows[whole:], weight, out=result[whole:])
    return result
