"""`Ranker`: what learned predictors and baselines have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from ..datasets import DeviceSpec, Family, ForetuneError, KernelConfig, Problem
from ..datasets.grid import Grid

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import Self


class Ranker(ABC):
    """Learns from a `Grid` which configs are fast. scikit-learn's habits: hyper-parameters in the constructor,
    which validates them; learned state in attributes that end in "_".

    >>> from foretune.model import StaticRanker
    >>> StaticRanker(size=8).get_params()
    {'size': 8}
    """

    #: Whether `fit` looks at the measurements at all.
    learns: ClassVar[bool] = True

    @abstractmethod
    def fit(self, grid: Grid, family: Family) -> Self:
        """Learns from these measurements; returns itself."""

    @abstractmethod
    def predict(
        self, family: Family, problem: Problem, device: DeviceSpec, configs: Sequence[KernelConfig]
    ) -> NDArray[np.float64]:
        """Predicted slowdown of each config, (n_configs,): time over the best config's time; lower is faster.

        Finite and positive. A config's figure does not depend on which others are in the list, nor on their
        order. Raises `ForetuneError` before `fit`.
        """

    def get_params(self) -> dict[str, Any]:
        """The hyper-parameters by name; a constructor called with them makes the same ranker, unfitted."""
        return {name: value for name, value in vars(self).items() if not name.endswith("_")}

    def _check_fitted(self, attribute: str) -> None:
        if not hasattr(self, attribute):
            raise ForetuneError(f"this {type(self).__name__} has learned nothing yet: call fit first")
