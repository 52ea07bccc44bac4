"""The rankers that the families of Inductor's templates are compared with in evaluations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...datasets import DeviceSpec, Family, KernelConfig, Measurable, Problem
from ...model.baselines import Baseline, EstimateRanker

if TYPE_CHECKING:
    from numpy.typing import NDArray


class InductorsOrder(EstimateRanker):
    """Ranks Inductor's default config first, then the family's `usual` configs, then the others by the estimate.

    The `usual` configs of a family, if it has any, are those that Inductor's max-autotune tries.
    """

    def predict(
        self, family: Family, problem: Problem, device: DeviceSpec, configs: Sequence[KernelConfig]
    ) -> NDArray[np.float64]:
        """Return the rank of each config, (n_configs,)."""
        assert isinstance(family, Measurable)
        first = dict.fromkeys([family.default(problem, device), *family.usual(problem, device)])
        places = {config: place for place, config in enumerate(first)}
        later = super().predict(family, problem, device, configs).argsort().argsort() + len(places)
        return np.array([places.get(config, later[i]) for i, config in enumerate(configs)], dtype=np.float64)


BASELINES = {"inductor": Baseline((InductorsOrder,))}
