"""`Network`: a small network of two hidden layers as flat arrays. NumPy predicts with it, torch trains it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ...datasets import ForetuneError
from ...datasets.feature_groups import FeatureGroup
from .parts import OfLasting, combined, parts_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

#: No predicted logarithm of a slowdown is larger, nor its negative.
MOST_LOG = 20.0
#: Predictions are rounded to so many decimals: far below what they are right to, and far above float64's last bits.
_DECIMALS = 7
#: What a bundle may hold: far more than training makes.
MOST_INPUTS, MOST_UNITS = 4096, 1024
#: Standardised features stay within this, so that what is far outside the data says no more than what is at its edge.
LIMIT = 4.0
#: Rows scored at a time: 1,024 rows x 64 units x 8 bytes stay in a core's L2.
_BLOCK_ROWS = 1024
#: Products with fewer multiplications OpenBLAS starts no threads for, which on busy cores wait for each other: of two
#: matrices, and of a matrix and a vector.
_ALONE = {2: 1 << 18, 1: 9216}


@dataclass(frozen=True)
class Network:
    """Log slowdowns from features: standardised ones, and for those of configs that have few values, one input a value.

    All arrays are float32, but `which`, which has positions of features.
    """

    mean: NDArray[np.float32]  # (n_features,)
    scale: NDArray[np.float32]  # (n_features,) what a standardised feature was divided by
    which: NDArray[np.int32]  # (n_values,) the feature of each value
    value: NDArray[np.float32]  # (n_values,)
    weight1: NDArray[np.float32]  # (n_features + n_values, units1)
    bias1: NDArray[np.float32]  # (units1,)
    weight2: NDArray[np.float32]  # (units1, units2)
    bias2: NDArray[np.float32]  # (units2,)
    weight3: NDArray[np.float32]  # (units2,)
    bias3: NDArray[np.float32]  # (1,)

    def __post_init__(self) -> None:
        for field in fields(self):
            array, kind = getattr(self, field.name), np.int32 if field.name == "which" else np.float32
            if not isinstance(array, np.ndarray) or array.dtype != kind:
                raise ForetuneError(f"{field.name} of a network must be an array of {np.dtype(kind)}")
            if not np.isfinite(array).all():
                raise ForetuneError(f"{field.name} of a network must be finite")
        features, values, (units1, units2) = len(self.mean), len(self.which), self.weight2.shape
        if features + values > MOST_INPUTS or max(units1, units2) > MOST_UNITS:
            raise ForetuneError(
                f"a network has at most {MOST_INPUTS} inputs and {MOST_UNITS} units a layer, but one has "
                f"{features + values} and {max(units1, units2)}"
            )
        expected = {
            "mean": (features,),
            "scale": (features,),
            "which": (values,),
            "value": (values,),
            "weight1": (features + values, units1),
            "bias1": (units1,),
            "weight2": (units1, units2),
            "bias2": (units2,),
            "weight3": (units2,),
            "bias3": (1,),
        }
        for name, shape in expected.items():
            if getattr(self, name).shape != shape:
                raise ForetuneError(f"{name} of a network must be {shape} but is {getattr(self, name).shape}")
        if not (self.scale > 0).all():
            raise ForetuneError("scale of a network must be above 0")
        if values and not (self.which.min() >= 0 and self.which.max() < features):
            raise ForetuneError(f"which of a network must be positions of its {features} features")

    def arrays(self) -> dict[str, NDArray[Any]]:
        """All of it as flat arrays, by name: `Network.restored(**arrays)` is the same network."""
        return {field.name: getattr(self, field.name).ravel() for field in fields(self)}

    @classmethod
    def restored(cls, **arrays: NDArray[Any]) -> Network:
        """The inverse of `arrays`. Raises `ForetuneError` or `ValueError` for what is no network."""
        shapes = {"weight1": (-1, len(arrays["bias1"])), "weight2": (-1, len(arrays["bias2"]))}
        return cls(**{name: array.reshape(shapes.get(name, (-1,))) for name, array in arrays.items()})

    @property
    def n_features(self) -> int:
        """How many features it takes."""
        return len(self.mean)

    @property
    def reach(self) -> float:
        """What no prediction is larger than, nor its negative."""
        return MOST_LOG

    def affine(self, scale: float, offset: float = 0.0) -> Network:
        """The network that predicts `scale * this + offset`."""
        return replace(
            self,
            weight3=(self.weight3 * np.float32(scale)).astype(np.float32),
            bias3=(self.bias3 * np.float32(scale) + np.float32(offset)).astype(np.float32),
        )

    def inputs(self, features: NDArray[np.float32]) -> NDArray[np.float64]:
        """What the first layer gets, (n, n_features + n_values), for features, (n, n_features)."""
        return self._scorer.inputs(tuple(range(self.n_features)), features)

    def predict(self, features: NDArray[np.float32]) -> NDArray[np.float64]:
        """Log slowdowns, (n,), for features, (n, n_features).

        A product of matrices depends in its last bits on how many rows it has, and on the processor. So it is computed
        in float64 and rounded: a row has the same figure among any others, and on any rank.

        >>> zeros = [np.zeros(shape, np.float32) for shape in ((0,), (2, 3), (3,), (3, 2), (2,), (2,), (1,))]
        >>> net = Network(np.zeros(2, np.float32), np.ones(2, np.float32), np.zeros(0, np.int32), *zeros)
        >>> net.predict(np.ones((4, 2), np.float32)).tolist()
        [0.0, 0.0, 0.0, 0.0]
        """
        if not len(features):
            return np.empty(0)
        whole = FeatureGroup(tuple(range(self.n_features)), features[None], np.arange(len(features)))
        result: NDArray[np.float64] = self.predict_groups([whole])[0]
        return result

    def predict_groups(self, groups: Sequence[FeatureGroup]) -> NDArray[np.float64]:
        """Return what `predict` gives for the groups' tables, (n_problems, n_rows)."""
        clipped = np.minimum(np.maximum(self._scorer.logs(groups), -MOST_LOG), MOST_LOG)
        result: NDArray[np.float64] = clipped.round(_DECIMALS)
        return result

    @cached_property
    def _scorer(self) -> _Scorer:
        return _Scorer(self)


class _Scorer:
    """The layers of one network, in float64. Made once; `logs` is then a few vector operations."""

    def __init__(self, network: Network) -> None:
        self._network = network
        # relu(x + bias) is max(x, -bias) + bias, and what is added behind the product can as well be before the next.
        weight2, weight3 = network.weight2.astype(np.float64), network.weight3.astype(np.float64)
        bias2 = network.bias2 + network.bias1 @ weight2
        # A row for each: NumPy takes twice as long to spread one of 64 over all.
        least1, least2 = (np.tile(-bias, (_BLOCK_ROWS, 1)) for bias in (network.bias1.astype(np.float64), bias2))
        self._later: tuple[Floats, ...] = (least1, weight2, least2, weight3, network.bias3 + bias2 @ weight3)
        self._shares: dict[tuple[int, ...], _Share] = {}
        self._of_lasting: OfLasting[Floats] = OfLasting()

    def logs(self, groups: Sequence[FeatureGroup]) -> Floats:
        """Return log slowdowns, (n_problems, n_configs), right to the last bits but for these."""
        least1, weight2, least2, weight3, last = self._later
        parts = parts_of(groups, self._units_of, np.add)
        problems, configs = len(parts[0][0]), len(parts[0][1])
        size = max(1, min(configs, _BLOCK_ROWS // problems))
        buffers = np.empty((2, problems, size, len(weight2)))
        logs = np.empty((problems, configs))
        for start in range(0, configs, size):
            block = slice(start, start + size)
            sums = combined(parts, block, np.add, buffers)
            flat = sums.reshape(-1, len(weight2))
            hidden = _product(np.maximum(flat, least1[: len(flat)], out=flat), weight2)
            found = _product(np.maximum(hidden, least2[: len(flat)], out=hidden), weight3)
            logs[:, block] = found.reshape(sums.shape[:2])
        logs += last
        return logs

    def inputs(self, columns: tuple[int, ...], table: NDArray[np.float32]) -> Floats:
        """What the first layer gets, (n, n_columns + n_values), of a table of these columns, (n, n_columns)."""
        share = self._share_of(columns)
        inputs: Floats = table - share.mean
        inputs /= share.scale
        np.minimum(np.maximum(inputs, -LIMIT, out=inputs), LIMIT, out=inputs)
        if len(share.which):
            inputs = np.hstack([inputs, table[:, share.which] == share.value])
        return inputs

    def _units_of(self, group: FeatureGroup) -> Floats:
        """Return what each kind adds to the first layer's units, (n_problems, n_kinds, units1)."""
        if group.lasting:
            return self._of_lasting(group, lambda: self._of_each_kind(group))
        return self._of_each_kind(group)

    def _of_each_kind(self, group: FeatureGroup) -> Floats:
        inputs = self.inputs(group.columns, group.values.reshape(-1, len(group.columns)))
        return _product(inputs, self._share_of(group.columns).weight).reshape(*group.values.shape[:2], -1)

    def _share_of(self, columns: tuple[int, ...]) -> _Share:
        """What the first layer has for some of the features."""
        if columns not in self._shares:
            net, places = self._network, list(columns)
            there = np.flatnonzero(np.isin(net.which, places))
            self._shares[columns] = _Share(
                mean=net.mean[places].astype(np.float64),
                scale=net.scale[places].astype(np.float64),
                which=np.array([places.index(one) for one in net.which[there].tolist()], np.intp),
                value=net.value[there],
                weight=net.weight1[places + (len(net.mean) + there).tolist()].astype(np.float64),
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
