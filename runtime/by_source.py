"""`expected`: shortlists for a `TritonFamily` that no bundle has data of, predicted from the kernel's source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..datasets import ForetuneError, KernelConfig, Problem
from .facts.prior import COVERAGE, Prior, coverage_length
from .how_many import HowMany
from .launching.kernel import Kernel
from .shortlist import Chooser, Shortlist
from .triton_declaration import outside_ranges
from .triton_family import TritonFamily

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..model import Bundle


@dataclass(frozen=True)
class SourcePrediction:
    """The shipped prior's prediction for the candidates of a problem, from facts about the kernel's source.

    `logs` has the candidates' predicted log times, up to a constant, and `positions` their positions in the list of
    configs to choose from, (n_candidates,) each.
    """

    positions: tuple[int, ...]  # (n_candidates,) the candidates' positions in the list to choose from
    launch: tuple[Any, ...]  # the arguments of `Prior.log_slowdowns`
    logs: NDArray[np.float64]  # (n_candidates,) its result
    outside: str  # names sizes outside of the declared ranges; "" = none


def predict_by_source(chooser: Chooser, problem: Problem, bundle: Bundle) -> SourcePrediction | None:
    """Return the prior's prediction for a `TritonFamily`; None for another family, and if `bundle` has data of it.

    Args:
        chooser: Has the family, the device and the configs to choose from.
        problem: The problem.
        bundle: The bundle in force.

    Raises:
        ForetuneError: The family supports no config for the problem.
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
    # Either all candidates are supported, or none is, and they are all configs.
    if (reason := family.supports(configs[0], problem, chooser.device)) is not None:
        raise ForetuneError(f"none of the configs can run this problem: {reason}")
    arguments = {**family.arguments(near, "meta"), "grid": grid}
    launch = Kernel(family.kernel), arguments, [config.to_json() for config in configs], chooser.device
    outside = outside_ranges(type(family), problem)
    return SourcePrediction(able, launch, Prior.shipped().log_slowdowns(*launch), outside)


def expected(chooser: Chooser, problem: Problem, k: HowMany, bundle: Bundle) -> Shortlist | None:
    """Return the shortlist of the configs that `predict_by_source` predicts to be fastest; None if it predicts nothing.

    Args:
        chooser: Has the family, the device and the configs to choose from.
        problem: The problem.
        k: The rule for the shortlist's length: an integer, or for "auto" the length that `coverage_length` returns.
        bundle: The bundle in force. If it has data of the family, nothing is predicted from the source.

    Raises:
        ForetuneError: The family supports no config for the problem.
    """
    if (found := predict_by_source(chooser, problem, bundle)) is None:
        return None
    family, able, logs = chooser.family, found.positions, found.logs
    length = min(coverage_length(len(able)) if k.k == "auto" else k.k, len(able))
    first = np.argsort(logs, kind="stable")[:length].tolist()
    reason = f"no data of {family.name}: predicted from its source; k={length}"
    reason += f" for {COVERAGE}" if k.k == "auto" else ""
    return Shortlist(
        configs=tuple(chooser.configs[able[at]] for at in first),
        predicted_slowdown=tuple(np.exp(logs[first] - logs[first[0]]).tolist()),
        positions=tuple(able[at] for at in first),
        reason="; ".join(part for part in (reason, found.outside) if part),
        device=chooser.device.name,
    )
