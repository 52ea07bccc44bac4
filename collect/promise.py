"""In which order to scan a space: the best is met early, and bounds what the rest may cost."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from ..datasets import DeviceSpec, Family, ForetuneError, KernelConfig, Problem
from ..model import RooflineRanker, load_bundle

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..model import Bundle


def by_promise(
    family: Family, problem: Problem, device: DeviceSpec, space: Sequence[KernelConfig], bundle: Bundle | None = None
) -> list[KernelConfig]:
    """The configs of `space`, the one that promises most first.

    What promises is the bundle (the shipped one if left out) where it has learned this family on this arch, and
    else the family's roofline.
    """
    estimate = _predicted(family, problem, device, space, bundle)
    if estimate is None:
        estimate = RooflineRanker().predict(family, problem, device, space)
    return [space[i] for i in np.argsort(estimate, kind="stable")]


def _predicted(
    family: Family, problem: Problem, device: DeviceSpec, space: Sequence[KernelConfig], bundle: Bundle | None
) -> NDArray[np.float64] | None:
    try:
        bundle = bundle or _shipped()
        if device.arch not in {spec.arch for spec in bundle.trained_on(family.name)}:
            return None
        return bundle.ranker(family.name).predict(family, problem, device, space)
    except ForetuneError:  # no such family in it, or the family has other features by now
        return None


@lru_cache(maxsize=1)
def _shipped() -> Bundle:
    return load_bundle()
