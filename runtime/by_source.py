"""`expected`: shortlists for a `TritonFamily` that no bundle has data of, predicted from the kernel's source."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..datasets import KernelConfig, Problem
from .facts.prior import COVERAGE, Prior, coverage_length
from .how_many import HowMany
from .launching.kernel import Kernel
from .shortlist import Chooser, Shortlist
from .triton_family import TritonFamily

if TYPE_CHECKING:
    from ..model import Bundle


def expected(chooser: Chooser, problem: Problem, k: HowMany, bundle: Bundle) -> Shortlist | None:
    """Return the shortlist that the shipped prior predicts for a `TritonFamily` from its kernel's source.

    Returns None for another family, and if `bundle` has data of the family.

    Args:
        chooser: Has the family, the device and the configs to choose from.
        problem: The problem.
        k: The rule for the length. If it is no integer, the list is as long as `coverage_length` of prior.py says.
        bundle: The bundle in force.
    """
    family = chooser.family
    if not isinstance(family, TritonFamily) or family.name in bundle.families:
        return None
    near = family.at_call_time(problem)

    def grid(given: Mapping[str, Any]) -> tuple[int, ...]:
        knobs = {knob: given[knob] for knob in (*family.knobs, "num_ctas") if given.get(knob) is not None}
        return family.grid(near, KernelConfig.of(**knobs))

    able = chooser.candidates(problem)
    configs = [chooser.configs[at] for at in able]
    arguments = {**family.arguments(near, "meta"), "grid": grid}
    knobs = [config.to_json() for config in configs]
    logs = Prior.shipped().log_slowdowns(Kernel(family.kernel), arguments, knobs, chooser.device)
    length = min(coverage_length(len(able)) if k.k == "auto" else k.k, len(able))
    first = np.argsort(logs, kind="stable")[:length].tolist()
    return Shortlist(
        configs=tuple(configs[at] for at in first),
        predicted_slowdown=tuple(np.exp(logs[first] - logs[first[0]]).tolist()),
        positions=tuple(able[at] for at in first),
        reason=f"no data of {family.name}: predicted from its source; k={length}"
        + (f" for {COVERAGE}" if k.k == "auto" else ""),
        device=chooser.device.name,
    )
