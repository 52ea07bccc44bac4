"""`Network`: a small network of two hidden layers as flat arrays. NumPy predicts with it, torch trains it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ...datasets import ForetuneError
from ...datasets.feature_groups import FeatureGroup
from .network_scorer import NetworkScorer

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: No predicted logarithm of a slowdown is larger, nor its negative.
MOST_LOG = 20.0
#: Predictions are rounded to so many decimals: far below what they are right to, and far above float64's last bits.
_DECIMALS = 7
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

    def inputs(self, features: NDArray[np.float32]) -> NDArray[np.floating[Any]]:
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

    def predict_groups(
        self, groups: Sequence[FeatureGroup], rows: NDArray[np.intp] | None = None
    ) -> NDArray[np.float64]:
        """What `predict` gives for the groups' tables, (n_problems, n_rows), or for some of their rows."""
        logs = self._scorer.logs(self._scorer.units(groups), rows)
        clipped = np.minimum(np.maximum(logs, -MOST_LOG), MOST_LOG)
        result: NDArray[np.float64] = clipped.round(_DECIMALS)
        return result

    @cached_property
    def rough(self) -> NetworkScorer:
        """What says about what `predict_groups` gives, in float32 and so in half the time, and not cut at `MOST_LOG`:
        the processor, and the other rows, decide on the last digits."""
        return NetworkScorer(self, np.float32)

    @cached_property
    def _scorer(self) -> NetworkScorer:
        return NetworkScorer(self, np.float64)
