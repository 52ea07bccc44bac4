"""The launch that is repeated through a run, to see whether the devices stay the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..datasets import Case, DeviceSpec, Family
from .promise import expected_us
from .worker import Reference

#: About how long it takes: enough that the clocks count and not the launch, little enough to repeat it often.
REFERENCE_US = 200.0
#: It is chosen among so many cases: a GPU waits for it.
CONSIDERED = 64


def choose(families: Mapping[str, Family], cases: Sequence[Case], device: DeviceSpec) -> Reference | None:
    """The default config of the case that is the nearest to REFERENCE_US, by the roofline, of the first ones; the
    same for the same cases, so that all GPUs of a device's name have one. None where there is no case."""
    distances: list[tuple[float, str, Reference]] = []
    for case in cases[:CONSIDERED]:
        family, problem = families[case.problem.family], case.problem
        config = family.default(problem, device)
        if family.supports(config, problem, device) is None:
            distance = abs(expected_us(family, problem, device) - REFERENCE_US)
            distances.append((distance, str(problem.to_json()), Reference(problem, config)))
    return min(distances, key=lambda one: one[:2])[2] if distances else None
