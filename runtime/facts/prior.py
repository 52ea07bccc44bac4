"""Predict which configs of a kernel that nobody has measured are fast: `Prior`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...datasets import BundleError, DeviceSpec
from ...model import bundle_file
from ...model.scoring.trees import Forest
from ..launching.kernel import Kernel
from .features import NAMES, launch_features

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: The share of a list that holds a config within 5 % of the best in 90 % of cases, on packages that the prior was not
#: trained on, and the shortest list for which that is known (`kernel_prior.py`).
_SHARE, _SHORTEST = 0.5, 6
COVERAGE = "a config within 5 % of the best in 90 % of cases, as on held-out packages"
_SHIPPED = Path(__file__).parents[2] / "model" / "shipped" / "prior.npz"
_FEATURES = "features.json"


def coverage_length(n_configs: int) -> int:
    """Return how many of the best predicted configs have the `COVERAGE`; all of a list of less than six configs.

    >>> coverage_length(4), coverage_length(20)
    (4, 10)
    """
    return n_configs if n_configs < _SHORTEST else math.ceil(_SHARE * n_configs)


@dataclass(frozen=True)
class Prior:
    """A ranker of the configs of any kernel, trained on many kernels (`tests/studies/kernel_prior.py`).

    Attributes:
        forest: Predicts log slowdowns, up to a constant for each launch, from `launch_features`.
    """

    forest: Forest

    @classmethod
    @cache
    def shipped(cls) -> Prior:
        """Return the prior that Foretune ships. Raises `BundleError` if it does not fit the features."""
        return cls.loads(bundle_file.read(_SHIPPED) or b"")

    @classmethod
    def loads(cls, content: bytes) -> Prior:
        """Return what `dumps` saved. Raises `BundleError` for other content, or if the features have changed."""
        arrays, texts = bundle_file.loads(content)
        if json.loads(texts.get(_FEATURES, b"[]")) != [*NAMES]:
            raise BundleError("the prior was trained with other features")
        return cls(Forest(**arrays))

    def dumps(self) -> bytes:
        """Return the content of a file."""
        return bundle_file.dumps(self.forest.arrays(), {_FEATURES: json.dumps(NAMES).encode()})

    def log_slowdowns(
        self, kernel: Kernel, arguments: Mapping[str, Any], configs: Sequence[Mapping[str, Any]], device: DeviceSpec
    ) -> NDArray[np.float64]:
        """Return the predicted log times of configs on a launch, up to a constant, (n_configs,).

        Args:
            kernel: The kernel.
            arguments: See `launch_features`.
            configs: See `launch_features`.
            device: The device.
        """
        return self.forest.predict(launch_features(kernel, arguments, configs, device))
