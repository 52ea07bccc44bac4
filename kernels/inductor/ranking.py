"""Which of Inductor's choices are worth generating: by what the bundle learned of the op, else by an estimate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...datasets import DeviceSpec, KernelConfig, Problem
from ...runtime.shortlist import bundle_in_force, make_shortlist, supported
from .. import find_family

if TYPE_CHECKING:
    from ...model import Bundle

#: So many times as many choices go through while nothing is learned of an op. (Inductor's default lists have about 20,
#: so trying them still takes less than that.)
GROWTH = 2


def best_first(
    problem: Problem, configs: Sequence[KernelConfig], device: DeviceSpec, k: int, bundle: Bundle | None = None
) -> tuple[int, ...]:
    """Positions of the configs to try, fastest first: `k` where the bundle (the shipped one if left out) has learned
    the op, more on an arch that it knows nothing of (see `make_shortlist`), and `GROWTH` times `k` where the family's
    estimate ranks. The same arguments give the same answer.

    >>> problem = Problem.of("inductor_mm", batch=1, m=4096, n=4096, k=4096)
    >>> configs, h200 = find_family("inductor_mm").space(), DeviceSpec.named("h200")
    >>> len(best_first(problem, configs, h200, k=4))
    4
    >>> grouped, configs = find_family("inductor_grouped_mm"), find_family("inductor_grouped_mm").space()
    >>> problem = Problem.of(grouped.name, groups=8, m=4096, n=4096, k=4096)
    >>> len(best_first(problem, configs, h200, k=4))
    8
    """
    import numpy as np

    family = find_family(problem.family)
    distinct = tuple(dict.fromkeys(configs))
    if family.name in bundle_in_force(bundle).families:
        chosen = make_shortlist(family, problem, device, k=k, configs=list(distinct), bundle=bundle).configs
    else:
        able = [distinct[position] for position in supported(family, problem, device, distinct)]
        order = np.argsort(family.estimate_us(problem, device, able), kind="stable")
        chosen = tuple(able[position] for position in order[: GROWTH * k].tolist())
    # Knobs that the family lacks may tell choices apart: as many go through all the same.
    positions = [position for config in chosen for position, one in enumerate(configs) if one == config]
    return tuple(positions[: len(chosen)])
