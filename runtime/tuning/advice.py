"""What is worth measuring for a launch: says a family's ranker, or without a family the kernel's own timings."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ...datasets import Family, ForetuneError, KernelConfig, Problem
from ..arguments import Mode, resolve_mode, warn_once
from ..launching.stub_driver import device_here
from ..prune import Pruner
from ..shortlist import bundle_in_force
from .ranks.agreement import scope

if TYPE_CHECKING:
    import triton

    from ..how_many import Length
    from .own_timings import Advice, OwnTimings

#: For who wants to know why a launch was tuned over so many configs; warnings are for what is wrong.
_log = logging.getLogger("foretune")


def tell(problem: Problem, advice: Advice, n_configs: int) -> None:
    """Says at level INFO what a kernel's own timings advise, and how sure they are."""
    _log.info("%s: %d of %d configs: %s", problem, len(advice.positions), n_configs, advice.reason)


class Advisor(Protocol):
    """Makes a launch a problem, and ranks configs for it. Any of it may raise: whoever asks goes on without advice."""

    def problem(self, arguments: Mapping[str, Any]) -> Problem:
        """The problem of a launch with these arguments, by parameter name."""

    def stand_in(self, problem: Problem) -> Problem:
        """What stands for it and for all that are tuned with it."""

    def positions(self, problem: Problem, configs: tuple[triton.Config, ...]) -> tuple[int, ...]:
        """Which configs to try, the best first, as FORETUNE_MODE has it."""

    def supports(self, config: triton.Config, problem: Problem) -> bool:
        """Whether a config that was chosen for the problem's stand-in can run the problem itself."""

    def learn(self, problem: Problem, times_us: Mapping[KernelConfig, float | None], ranks: int = 0) -> None:
        """Takes note of what was measured of a stand-in; None = it failed. `ranks` is the `scope()` of what was agreed
        on with other ranks."""

    def value(self, config: triton.Config) -> KernelConfig:
        """A config in the words of `family`."""

    @property
    def family(self) -> Family:
        """Whose problems these are."""

    @property
    def bundle(self) -> str:
        """The digest of what predicts; "" for none."""


class FamilyAdvisor:
    """Asks a family's ranker, as `prune` does. `bucket` are dimensions to round beside those that the family does."""

    def __init__(self, pruner: Pruner, bucket: tuple[str, ...] = ()) -> None:
        if unknown := [dim for dim in bucket if dim not in pruner.family.dims]:
            raise ForetuneError(
                f"bucket must name dimensions of {pruner.family.name}, which has {', '.join(pruner.family.dims)}, "
                f"but has {unknown[0]}"
            )
        self._pruner, self._bucket, self.family = pruner, bucket, pruner.family
        self.problem, self.positions, self.value = pruner.problem, pruner.positions, pruner.own_knobs.config

    def stand_in(self, problem: Problem) -> Problem:
        return self.family.at_call_time(problem).rounded(*self._bucket)

    def supports(self, config: triton.Config, problem: Problem) -> bool:
        return self.family.supports(self.value(config), problem, self._pruner.device or device_here()) is None

    def learn(self, problem: Problem, times_us: Mapping[KernelConfig, float | None], ranks: int = 0) -> None:
        """The ranker has learned what it knows."""

    @property
    def bundle(self) -> str:
        return bundle_in_force(self._pruner.bundle).digest


class OwnAdvisor:
    """Asks the model of the kernel's own timings, which has to see some before it shortens a list.

    There is one for each `scope()`: the ranks of a job need the same list, so what one of them measured alone does not
    count there.
    """

    def __init__(self, tuner: Any, k: Length, bucket: tuple[str, ...] = ()) -> None:
        from .launches import LaunchFamily

        if unknown := [name for name in bucket if name not in tuner.keys]:
            raise ForetuneError(f"bucket must name some of key, {', '.join(tuner.keys)}, but has {unknown[0]}")
        self.family = LaunchFamily(tuner)
        self._own: dict[int, OwnTimings] = {}
        self._k, self._bucket, self.bundle = k, bucket, ""
        self.problem, self.value = self.family.problem_from_call, KernelConfig.from_triton

    def stand_in(self, problem: Problem) -> Problem:
        return self.family.at_call_time(problem).rounded(*self._bucket)

    def positions(self, problem: Problem, configs: tuple[triton.Config, ...]) -> tuple[int, ...]:
        if (wanted := resolve_mode()) is Mode.OFF:
            return tuple(range(len(configs)))
        values: Sequence[KernelConfig] = tuple(KernelConfig.from_triton(config) for config in configs)
        own = self._timings(scope())
        advice = own.advise(self.stand_in(problem), values, 1 if wanted is Mode.PREDICT else self._k)
        if wanted is Mode.PREDICT and not advice.sure:
            warn_once(f"{problem.family}: no prediction ({advice.reason})", ": the first of its likely configs runs")
        tell(problem, advice, len(values))
        return tuple(advice.positions[:1] if wanted is Mode.PREDICT else advice.positions)

    def supports(self, config: triton.Config, problem: Problem) -> bool:
        return True

    def learn(self, problem: Problem, times_us: Mapping[KernelConfig, float | None], ranks: int = 0) -> None:
        if problem.family == self.family.name:  # the kernel may have been tuned with a family, too
            self._timings(ranks).learn(problem, times_us)

    def _timings(self, ranks: int) -> OwnTimings:
        from .own_timings import OwnTimings

        return self._own.setdefault(ranks, OwnTimings(self.family))
