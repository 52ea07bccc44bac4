"""`Network`: a neural network with two hidden layers, stored as flat arrays. NumPy predicts, torch trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ...datasets import ForetuneError
from ...datasets.feature_groups import FeatureGroup
from .parts import GroupMemo, combined, parts_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

#: The largest absolute log slowdown that a network predicts.
MOST_LOG = 20.0
#: Predictions are rounded to this many decimals: far finer than their accuracy, and far coarser than float64.
_DECIMALS = 7
#: The most inputs and units per layer in a file: far more than training creates.
MOST_INPUTS, MOST_UNITS = 4096, 1024
#: Standardized features are clipped to plus or minus this value, so that a value far outside of the training data has
#: the effect of one at its edge.
LIMIT = 4.0
#: Rows that are scored at a time: 1,024 rows x 64 units x 8 bytes fit in a core's L2 cache.
_BLOCK_ROWS = 1024
#: OpenBLAS starts threads, which wait for each other on busy cores, for products of this many multiplications and more:
#: of two matrices (2), and of a matrix and a vector (1).
_THREADED_FROM = {2: 1 << 18, 1: 9216}


@dataclass(frozen=True)
class Network:
    """A network that predicts log slowdowns from features.

    Its inputs are the standardized features, and indicators of single values for config features with few values. All
    arrays are float32 except `which`, the int32 index of each indicator's feature.

    Raises:
        ForetuneError: An array has a wrong dtype, shape or value.
    """

    mean: NDArray[np.float32]  # (n_features,)
    scale: NDArray[np.float32]  # (n_features,) the divisor of each standardized feature
    which: NDArray[np.int32]  # (n_values,) the feature of each indicator
    value: NDArray[np.float32]  # (n_values,) the value of each indicator
    weight1: NDArray[np.float32]  # (n_features + n_values, units1)
    bias1: NDArray[np.float32]  # (units1,)
    weight2: NDArray[np.float32]  # (units1, units2)
    bias2: NDArray[np.float32]  # (units2,)
    weight3: NDArray[np.float32]  # (units2,)
    bias3: NDArray[np.float32]  # (1,)

    def __post_init__(self) -> None:
        for field in fields(self):
            array, dtype = getattr(self, field.name), np.int32 if field.name == "which" else np.float32
            if not isinstance(array, np.ndarray) or array.dtype != dtype:
                raise ForetuneError(f"{field.name} of a network must be an array of {np.dtype(dtype)}")
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
            raise ForetuneError("scale of a network must be positive")
        if values and not (self.which.min() >= 0 and self.which.max() < features):
            raise ForetuneError(f"which of a network must be positions of its {features} features")

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the arrays, flattened, by name; `Network.restored(**arrays)` gives an equal network."""
        return {field.name: getattr(self, field.name).ravel() for field in fields(self)}

    @classmethod
    def restored(cls, **arrays: NDArray[Any]) -> Network:
        """Return the network with these weights, named as by `arrays`, which may be flat.

        Raises `ForetuneError` or `ValueError` for invalid arrays.
        """
        shapes = {"weight1": (-1, len(arrays["bias1"])), "weight2": (-1, len(arrays["bias2"]))}
        return cls(**{name: array.reshape(shapes.get(name, (-1,))) for name, array in arrays.items()})

    @property
    def n_features(self) -> int:
        """The number of features."""
        return len(self.mean)

    @property
    def reach(self) -> float:
        """An upper bound on the absolute value of predictions."""
        return MOST_LOG

    def affine(self, scale: float, offset: float = 0.0) -> Network:
        """Return a network that predicts `scale` times this one's prediction plus `offset`."""
        return replace(
            self,
            weight3=(self.weight3 * np.float32(scale)).astype(np.float32),
            bias3=(self.bias3 * np.float32(scale) + np.float32(offset)).astype(np.float32),
        )

    def inputs(self, features: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return the inputs of the first layer, (n_rows, n_features + n_values), for features, (n_rows, n_features)."""
        return self._scorer.inputs(tuple(range(self.n_features)), features)

    def predict(self, features: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return predicted log slowdowns, (n_rows,), for features, (n_rows, n_features).

        The last bits of a matrix product depend on the number of rows and on the processor. Products are therefore
        computed in float64 and rounded, so that a row's prediction is the same among any other rows and on any rank.

        >>> zeros = [np.zeros(shape, np.float32) for shape in ((0,), (2, 3), (3,), (3, 2), (2,), (2,), (1,))]
        >>> net = Network(np.zeros(2, np.float32), np.ones(2, np.float32), np.zeros(0, np.int32), *zeros)
        >>> net.predict(np.ones((4, 2), np.float32)).tolist()
        [0.0, 0.0, 0.0, 0.0]
        """
        if not len(features):
            return np.empty(0)
        group = FeatureGroup(tuple(range(self.n_features)), features[None], np.arange(len(features)))
        result: NDArray[np.float64] = self.predict_groups([group])[0]
        return result

    def predict_groups(self, groups: Sequence[FeatureGroup]) -> NDArray[np.float64]:
        """Return the predictions for features in groups, (n_problems, n_configs); see `predict`."""
        clipped = np.minimum(np.maximum(self._scorer.logs(groups), -MOST_LOG), MOST_LOG)
        result: NDArray[np.float64] = clipped.round(_DECIMALS)
        return result

    @cached_property
    def _scorer(self) -> _Scorer:
        return _Scorer(self)


class _Scorer:
    """The layers of a network, converted to float64 once, so that `logs` takes few vector operations."""

    def __init__(self, network: Network) -> None:
        self._network = network
        # relu(x + bias) equals max(x, -bias) + bias, and that last bias can be added after the next product.
        weight2, weight3 = network.weight2.astype(np.float64), network.weight3.astype(np.float64)
        bias2 = network.bias2 + network.bias1 @ weight2
        # Repeated for each row: broadcasting one row of 64 takes NumPy twice as long.
        least1, least2 = (np.tile(-bias, (_BLOCK_ROWS, 1)) for bias in (network.bias1.astype(np.float64), bias2))
        self._later: tuple[Floats, ...] = (least1, weight2, least2, weight3, network.bias3 + bias2 @ weight3)
        self._shares: dict[tuple[int, ...], _Share] = {}
        self._lasting: GroupMemo[Floats] = GroupMemo()

    def logs(self, groups: Sequence[FeatureGroup]) -> Floats:
        """Return log slowdowns, (n_problems, n_configs), from feature groups, before rounding."""
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
        """Return the first layer's inputs, (n_rows, n_columns + n_values), for a table of the features in `columns`."""
        share = self._share_of(columns)
        inputs: Floats = table - share.mean
        inputs /= share.scale
        np.minimum(np.maximum(inputs, -LIMIT, out=inputs), LIMIT, out=inputs)
        if len(share.which):
            inputs = np.hstack([inputs, table[:, share.which] == share.value])
        return inputs

    def _units_of(self, group: FeatureGroup) -> Floats:
        """Return the first layer's partial sums for each distinct row of a group, (n_problems, n_kinds, units1)."""
        if group.lasting:
            return self._lasting(group, lambda: self._partial_sums(group))
        return self._partial_sums(group)

    def _partial_sums(self, group: FeatureGroup) -> Floats:
        """Compute the partial sums of the first layer that `_units_of` returns, without its cache."""
        inputs = self.inputs(group.columns, group.values.reshape(-1, len(group.columns)))
        return _product(inputs, self._share_of(group.columns).weight).reshape(*group.values.shape[:2], -1)

    def _share_of(self, columns: tuple[int, ...]) -> _Share:
        """Return the parameters of the first layer that apply to the features in some columns; cached."""
        if columns not in self._shares:
            net, places = self._network, list(columns)
            indicators = np.flatnonzero(np.isin(net.which, places))
            self._shares[columns] = _Share(
                mean=net.mean[places].astype(np.float64),
                scale=net.scale[places].astype(np.float64),
                which=np.array([places.index(one) for one in net.which[indicators].tolist()], np.intp),
                value=net.value[indicators],
                weight=net.weight1[places + (len(net.mean) + indicators).tolist()].astype(np.float64),
            )
        return self._shares[columns]


@dataclass(frozen=True)
class _Share:
    """The parameters of the first layer for a group's columns: standardization, indicators and weights."""

    mean: Floats  # (n_columns,)
    scale: Floats  # (n_columns,)
    which: NDArray[np.intp]  # (n_values,) the column of each indicator
    value: NDArray[np.float32]  # (n_values,)
    weight: Floats  # (n_columns + n_values, units1)


def _product(rows: Floats, weight: Floats) -> Floats:
    """Return rows @ weight, computed in batches that are small enough for OpenBLAS to use one thread."""
    size = max(1, (_THREADED_FROM[weight.ndim] - 1) // max(weight.size, 1))
    if len(rows) <= size:
        product: Floats = rows @ weight
        return product
    batched = len(rows) // size * size
    stack = rows[:batched].reshape(-1, size, rows.shape[1])
    result = np.empty((len(rows), *weight.shape[1:]), rows.dtype)
    np.matmul(stack, weight, out=result[:batched].reshape(*stack.shape[:2], *weight.shape[1:]))
    np.matmul(rows[batched:], weight, out=result[batched:])
    return result
