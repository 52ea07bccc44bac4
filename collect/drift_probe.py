"""The launch that is repeated through a run, to see whether the devices stay the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

from ..datasets import Case, DeviceSpec, ForetuneError, Measurable, roofline_us
from .worker import Probe

#: About how long it takes: enough that the clocks count and not the launch, little enough to repeat it often.
PROBE_US = 200.0
#: It is chosen among so many cases: a GPU waits for it.
CONSIDERED = 64


def choose_probe(families: Mapping[str, Measurable], cases: Sequence[Case], device: DeviceSpec) -> Probe | None:
    """The default config of the case that is the nearest to PROBE_US, by the roofline, of the first ones; the
    same for the same cases, so that all GPUs of a device's name have one. None where there is no case."""
    distances: list[tuple[float, str, Probe]] = []
    for case in cases[:CONSIDERED]:
        family, problem = families[case.problem.family], case.problem
        with suppress(ForetuneError):  # no config can run it
            config = family.default(problem, device)
            if family.supports(config, problem, device) is None:
                distance = abs(roofline_us(family, problem, device) - PROBE_US)
                distances.append((distance, str(problem.to_json()), Probe(problem, config)))
    return min(distances, key=lambda one: one[:2])[2] if distances else None
