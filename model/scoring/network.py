"""`Network`: a small network of two hidden layers as flat arrays. NumPy predicts with it, torch trains it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ...datasets import ForetuneError
from ...datasets.feature_groups import FeatureGroup, problems_in
from .lasting import OfLasting

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Standardised features stay within this, so that what is far outside the data says no more than what is at its edge.
LIMIT = 4.0
#: No predicted logarithm of a slowdown is larger, nor its negative.
MOST_LOG = 20.0
#: Predictions are rounded to so many decimals: far below what they are right to, and far above float64's last bits.
_DECIMALS = 7
#: Groups, and what the kinds of each add to the first layer's units, (n_problems, n_kinds, units1).
FirstLayer: TypeAlias = "list[tuple[FeatureGroup, NDArray[np.float64]]]"
#: What a bundle may hold: far more than training makes.
MOST_INPUTS, MOST_UNITS = 4096, 1024


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
        return self._share_of(tuple(range(self.n_features))).inputs(features)

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
        result: NDArray[np.float64] = self.logs(self.first_layer([whole]))[0]
        return result

    def first_layer(self, groups: Sequence[FeatureGroup]) -> FirstLayer:
        """What each group adds to the first layer's units: for `logs`."""
        return [(group, self._of_group(group)) for group in groups]

    def logs(
        self, layer: FirstLayer, problems: slice = slice(None), rows: NDArray[np.intp] | None = None
    ) -> NDArray[np.float64]:
        """What `predict` gives for the groups' tables, (n_problems, n_rows): of these problems, on the configs in these
        places."""
        kinds = [group.kind if rows is None else group.kind[rows] for group, _ in layer]
        logs = np.empty((problems_in([group for group, _ in layer], problems), len(kinds[0])))
        for place, of_one in enumerate(logs):
            units = [added[0] if group.lasting else added[problems][place] for group, added in layer]
            of_one[:] = self._logs(list(zip(units, kinds, strict=True)))
        clipped: NDArray[np.float64] = np.clip(logs + float(self.bias3[0]), -MOST_LOG, MOST_LOG)
        return np.round(clipped, _DECIMALS)

    def _logs(self, parts: Sequence[tuple[NDArray[np.float64], NDArray[np.intp]]]) -> NDArray[np.float64]:
        """Log slowdowns but for the last bias, (n_rows,), from what the kinds of each part add to the first layer's
        units, (n_kinds, units1), and the kind of each row, (n_rows,)."""
        bias1, weight, bias2, last = self._later
        # What has the fewest kinds takes in what is the same for all rows.
        *several, (few, few_kind) = sorted(parts, key=lambda part: -len(part[0]))
        while several and len(few) == 1:
            bias1 = bias1 + few[0]
            few, few_kind = several.pop()
        several.append((few + bias1, few_kind))
        logs = np.empty(len(few_kind))
        size = _rows_at_a_time(weight)
        for start in range(0, len(logs), size):
            block = slice(start, start + size)
            (units, kind), *others = several
            total = units.take(kind[block], axis=0)
            for units, kind in others:
                total += units.take(kind[block], axis=0)
            hidden = np.maximum(total, 0.0, out=total) @ weight
            hidden += bias2
            logs[block] = np.maximum(hidden, 0.0, out=hidden) @ last
        return logs

    def _of_each_kind(self, group: FeatureGroup) -> NDArray[np.float64]:
        """What each kind adds to the first layer's units, (n_problems, n_kinds, units1)."""
        table, share = group.values.reshape(-1, len(group.columns)), self._share_of(group.columns)
        inputs = share.inputs(table)
        size = _rows_at_a_time(share.weight)
        units = [inputs[start : start + size] @ share.weight for start in range(0, len(inputs), size)]
        return np.concatenate(units).reshape(*group.values.shape[:2], -1)

    def _share_of(self, columns: tuple[int, ...]) -> _Share:
        """What the first layer has for some of the features."""
        if columns not in self._shares:
            there, places = np.isin(self.which, columns), list(columns)
            self._shares[columns] = _Share(
                mean=self.mean[places].astype(np.float64),
                scale=self.scale[places].astype(np.float64),
                which=np.array([places.index(one) for one in self.which[there].tolist()], np.intp),
                value=self.value[there],
                weight=self.weight1[places + (self.n_features + np.flatnonzero(there)).tolist()].astype(np.float64),
            )
        return self._shares[columns]

    @cached_property
    def _shares(self) -> dict[tuple[int, ...], _Share]:
        return {}

    @cached_property
    def _of_group(self) -> OfLasting[NDArray[np.float64]]:
        return OfLasting(self._of_each_kind)

    @cached_property
    def _later(self) -> tuple[NDArray[np.float64], ...]:
        """Biases and weights behind the first product."""
        return tuple(one.astype(np.float64) for one in (self.bias1, self.weight2, self.bias2, self.weight3))


@dataclass(frozen=True)
class _Share:
    """What the first layer has for a group's columns; see `Network`."""

    mean: NDArray[np.float64]  # (n_columns,)
    scale: NDArray[np.float64]  # (n_columns,)
    which: NDArray[np.intp]  # (n_values,) the column of each value
    value: NDArray[np.float32]  # (n_values,)
    weight: NDArray[np.float64]  # (n_columns + n_values, units1)

    def inputs(self, table: NDArray[np.float32]) -> NDArray[np.float64]:
        """What the first layer gets, (n, n_columns + n_values), of a table of the columns, (n, n_columns)."""
        inputs = np.empty((len(table), len(self.mean) + len(self.which)))
        standard = inputs[:, : len(self.mean)]
        np.subtract(table, self.mean, out=standard)
        standard /= self.scale
        np.clip(standard, -LIMIT, LIMIT, out=standard)
        inputs[:, len(self.mean) :] = table[:, self.which] == self.value
        return inputs


def _rows_at_a_time(weight: NDArray[np.float64]) -> int:
    """So many rows that OpenBLAS starts no threads for their product with a weight (below 2^18 multiplications): on
    busy cores those wait for each other."""
    return max(1, ((1 << 18) - 1) // max(weight.size, 1))
