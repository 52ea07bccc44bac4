"""What ranks before anything is measured: the best is met early, and bounds what the rest may cost."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from ..datasets import DeviceSpec, Family, ForetuneError, KernelConfig, Problem
from ..datasets.grid import Grid
from ..model import EstimateRanker, Ranker, load_bundle

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import Self

    from ..model import Bundle


class Prior(Ranker):
    """The bundle (the shipped one if left out) where it has learned the family on the device's arch, else the family's
    own estimate."""

    learns = False

    def __init__(self, bundle: Bundle | None = None) -> None:
        self.bundle = bundle

    def fit(self, grid: Grid, family: Family) -> Self:
        """Nothing to learn."""
        return self

    def predict(
        self, family: Family, problem: Problem, device: DeviceSpec, configs: Sequence[KernelConfig]
    ) -> NDArray[np.float64]:
        try:
            bundle = self.bundle or _shipped()
            if device.arch in {spec.arch for spec in bundle.trained_on(family.name)}:
                return bundle.ranker(family.name).predict(family, problem, device, configs)
        except ForetuneError:  # no such family in it, or the family has other features by now
            pass
        return EstimateRanker().predict(family, problem, device, configs)


@lru_cache(maxsize=1)
def _shipped() -> Bundle:
    return load_bundle()
