"""Which of Inductor's choices are worth generating: by what the bundle learned of the family, or of its next of kin,
else by an estimate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...datasets import DeviceSpec, KernelConfig, Problem
from ...runtime.shortlist import bundle_in_force, make_shortlist, predicted_slowdowns, supported
from .. import find_family
from .family import InductorTemplate

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ...model import Bundle

#: So many times as many choices go through while nothing is learned of an op. (Inductor's default lists have about 20,
#: so trying them still takes less than that.)
GROWTH = 2


def best_first(
    problem: Problem, configs: Sequence[KernelConfig], device: DeviceSpec, k: int, bundle: Bundle | None = None
) -> tuple[int, ...]:
    """Positions of the configs to try, fastest first: `k` where the bundle (the shipped one if left out) has learned
    the op, or a kernel of ours that does the same (`InductorTemplate.kin`) on such a card; `GROWTH` times `k` where the
    family's estimate ranks. The same arguments give the same answer.

    >>> problem = Problem.of("inductor_mm", batch=1, m=4096, n=4096, k=4096)
    >>> configs, h200 = find_family("inductor_mm").space(), DeviceSpec.named("h200")
    >>> len(best_first(problem, configs, h200, k=4))
    4
    >>> odd = Problem.of("inductor_mm", batch=1, m=4096, n=4096, k=4095)
    >>> len(best_first(odd, configs, h200, k=4))
    8
    """
    import numpy as np

    family = find_family(problem.family)
    distinct = tuple(dict.fromkeys(configs))
    if family.name in bundle_in_force(bundle).families:
        chosen = make_shortlist(family, problem, device, k=k, configs=list(distinct), bundle=bundle).configs
    else:
        able = [distinct[position] for position in supported(family, problem, device, distinct)]
        slowness = _of_kin(problem, able, device, bundle)
        if slowness is None:
            k, slowness = GROWTH * k, family.estimate_us(problem, device, able)
        order = np.argsort(slowness, kind="stable")
        chosen = tuple(able[position] for position in order[:k].tolist())
    # Knobs that the family lacks may tell choices apart: as many go through all the same.
    positions = [position for config in chosen for position, one in enumerate(configs) if one == config]
    return tuple(positions[: len(chosen)])


def _of_kin(
    problem: Problem, configs: Sequence[KernelConfig], device: DeviceSpec, bundle: Bundle | None
) -> NDArray[np.float64] | None:
    """What the bundle predicts for the kernel of ours that does the same, (n_configs,); None where there is none, and
    on an arch that it knows nothing of."""
    family = find_family(problem.family)
    kin = family.kin(problem, configs) if isinstance(family, InductorTemplate) else None
    if kin is None:
        return None
    same, as_ours = kin
    known = bundle_in_force(bundle)
    if same.family not in known.families or device.arch not in {spec.arch for spec in known.trained_on(same.family)}:
        return None
    return predicted_slowdowns(find_family(same.family), same, device, tuple(as_ours), bundle)
