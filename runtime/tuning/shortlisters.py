"""`Shortlister`: choose which configs to time for a launch, by a family's ranker or from the kernel's earlier times."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...datasets import Family, ForetuneError, KernelConfig, Problem
from ...datasets.errors import reason_of
from ..arguments import Mode, resolve_mode, warn_once
from ..facts.prior import Prior
from ..how_many import predicted_us
from ..launching.collector import collecting_later
from ..launching.kernel import Kernel
from ..launching.stub_driver import device_here, stubbed
from ..pin_file import PinError
from ..prune import (
    CAN_ASK_SINCE,
    Pruner,
    TracedPositions,
    break_graph,
    in_full,
    is_traced,
    leave_launches_to_triton,
    torch_release,
)
from ..same_bits import VARIABLE, is_requested
from ..shortlist import bundle_in_force
from .launches import LaunchFamily
from .own_timings import USUAL_COST_S, OwnTimings
from .ranks.agreement import scope

if TYPE_CHECKING:
    import triton

    from ..how_many import Length

#: Logs, at level INFO, how many configs a launch is tuned over, and why. Problems are warnings instead.
_log = logging.getLogger("foretune")


class Shortlister(ABC):
    """Turns launches of one kernel into problems of a family, and picks configs to time for them.

    A stand-in is the problem with rounded sizes that represents all problems of its bucket (those that round to it):
    only the stand-in is tuned. Every method may raise; callers then go on without a shortlist.

    Attributes:
        family: The family.
        bundle: The digest of the bundle that predicts; "" without one.

    Args:
        family: The family.
        bucket: Dimensions to round, in addition to those that the family rounds.
    """

    bundle = ""
    #: Whether `positions` must be asked again after its configs were timed, until it returns no new ones.
    searches = False
    mode: str | None = None  # overrides FORETUNE_MODE

    def __init__(self, family: Family, bucket: tuple[str, ...]) -> None:
        self.family, self._bucket = family, bucket

    def problem(self, arguments: Mapping[str, Any]) -> Problem:
        """Return the problem (sizes, dtype and flags) that a launch with these arguments, given by name, solves."""
        return self.family.problem_from_call(arguments)

    def stand_in(self, problem: Problem) -> Problem:
        """Return the problem with rounded sizes that is tuned in place of all problems that round to it."""
        return self.family.at_call_time(problem).rounded(*self._bucket)

    def value(self, config: triton.Config) -> KernelConfig:
        """Return a config as a `KernelConfig` with the family's knob names."""
        return KernelConfig.from_triton(config)

    def expect(self, problem: Problem, arguments: Mapping[str, Any]) -> None:  # noqa: B027 - optional
        """Prepare a prediction for `problem`, which has rounded sizes and will be tuned, from a launch's arguments."""

    @abstractmethod
    def positions(
        self, problem: Problem, configs: tuple[triton.Config, ...], cost_s: float | None = None
    ) -> tuple[int, ...]:
        """Return the positions of the configs to try, best first, according to FORETUNE_MODE.

        Args:
            problem: The problem.
            configs: The configs to choose from.
            cost_s: The seconds that it takes to compile and time a config, if known.
        """

    def at_once(self, problem: Problem, configs: tuple[triton.Config, ...]) -> tuple[int, ...]:
        """Return the positions of the configs to time, for a caller that cannot ask for more configs after these."""
        return self.positions(problem, configs)

    def slowdowns(self, problem: Problem, configs: tuple[triton.Config, ...], count: int) -> tuple[float, ...]:
        """Return the predicted slowdowns of the `count` configs that `positions` returned; 1.0 without a prediction."""
        return (1.0,) * count

    def scale(self, problem: Problem, config: triton.Config) -> float:
        """Return a launch's predicted time in microseconds, to compare launches of different sizes; 1.0 if unknown."""
        return 1.0

    def supports(self, config: triton.Config, problem: Problem) -> bool:
        """Return whether a config that was chosen for a problem's stand-in (its rounded sizes) can run the problem."""
        return True

    def learn(self, problem: Problem, times_us: Mapping[KernelConfig, float | None], ranks: int = 0) -> None:  # noqa: B027 - optional
        """Use the measured times of a problem in later predictions; a time of None marks a config that failed.

        Args:
            problem: The problem that was timed, which represents all that are rounded to the same sizes.
            times_us: Microseconds by config.
            ranks: The `scope()` of times that were agreed on with other ranks; 0 for this rank's own.
        """

    def finish(self, problem: Problem) -> None:  # noqa: B027 - optional
        """Stop proposing new configs for `problem` (with rounded sizes), as an earlier process chose its config."""


class FamilyShortlister(Shortlister):
    """Picks configs with a family's trained ranker, as `foretune.prune` does."""

    def __init__(self, pruner: Pruner, bucket: tuple[str, ...] = ()) -> None:
        if unknown := [dim for dim in bucket if dim not in pruner.family.dims]:
            raise ForetuneError(
                f"bucket must name dimensions of {pruner.family.name}, which has {', '.join(pruner.family.dims)}, "
                f"but has {unknown[0]}"
            )
        super().__init__(pruner.family, bucket)
        self._pruner = pruner

    @property
    def bundle(self) -> str:  # type: ignore[override]  # evaluated at each use
        """The digest of the bundle in force."""
        return bundle_in_force(self._pruner.bundle).digest

    def problem(self, arguments: Mapping[str, Any]) -> Problem:
        """Return the problem that the pruner derives from a launch's arguments; see `Shortlister.problem`."""
        return self._pruner.problem(arguments)

    def value(self, config: triton.Config) -> KernelConfig:
        """Return a config with the family's knob names; see `Shortlister.value`."""
        return self._pruner.own_knobs.config(config)

    def positions(
        self, problem: Problem, configs: tuple[triton.Config, ...], cost_s: float | None = None
    ) -> tuple[int, ...]:
        """Return the positions of the configs that the family's ranker keeps for a problem, best first.

        With FORETUNE_MODE=off these are all that the family supports, with `predict` only the best.
        """
        self._pruner.mode = self.mode
        return self._pruner.positions(problem, configs)

    def slowdowns(self, problem: Problem, configs: tuple[triton.Config, ...], count: int) -> tuple[float, ...]:
        """Return the slowdowns that the family's ranker predicts; see `Shortlister.slowdowns`."""
        return self._pruner.slowdowns(problem, configs)

    def scale(self, problem: Problem, config: triton.Config) -> float:
        """Return the family's estimate of a launch's time in microseconds; see `Shortlister.scale`."""
        return predicted_us(self.family, problem, self._pruner.device or device_here(), self.value(config))

    def supports(self, config: triton.Config, problem: Problem) -> bool:
        """Return whether the family supports a config on a problem on this device; see `Shortlister.supports`."""
        return self.family.supports(self.value(config), problem, self._pruner.device or device_here()) is None


class OwnShortlister(Shortlister):
    """Picks configs with a model of the kernel's own timings (`OwnTimings`), which proposes more after each timing.

    `ranks` returns a number for the ranks that choose together, by default `scope()`. Each number has its own model,
    because the ranks of a job must take the same steps: times that one of them measured alone do not count there.
    """

    searches = True

    def __init__(self, tuner: Any, k: Length, bucket: tuple[str, ...] = (), ranks: Callable[[], int] = scope) -> None:
        if unknown := [name for name in bucket if name not in tuner.keys]:
            raise ForetuneError(f"bucket must name some of key, {', '.join(tuner.keys)}, but has {unknown[0]}")
        super().__init__(LaunchFamily(tuner), bucket)
        if is_requested():
            what = "is not applied to kernels without a family, because nothing is known of their bits"
            warn_once(f"{VARIABLE} {what}", ": tuning may change their results")
        self._own: dict[int, OwnTimings] = {}
        self._tuner = tuner
        self._expected: dict[Problem, dict[KernelConfig, float]] = {}  # predicted log slowdowns by stand-in
        self._k, self._ranks, self._is_broken = k, ranks, False

    def expect(self, problem: Problem, arguments: Mapping[str, Any]) -> None:
        """Predict the configs' slowdowns on a new problem with the shipped prior; see `Shortlister.expect`."""
        if problem not in self._expected and resolve_mode(self.mode) in (Mode.SHORTLIST, Mode.PREDICT):
            self._expected[problem] = self._prior(arguments)

    def _prior(self, arguments: Mapping[str, Any]) -> dict[KernelConfig, float]:
        """Return the log slowdown of each config as predicted from the kernel's source; {} without a prediction."""
        configs = self._tuner.configs
        try:
            knobs = [config.all_kwargs() for config in configs]
            with collecting_later():
                logs = Prior.shipped().log_slowdowns(Kernel(self._tuner), arguments, knobs, device_here())
            return {self.value(config): float(log) for config, log in zip(configs, logs, strict=True)}
        except Exception as error:  # noqa: BLE001 - the search also works without it
            _log.debug("%s: nothing is predicted of its source (%s)", self.family.name, reason_of(error))
            return {}

    def positions(
        self, problem: Problem, configs: tuple[triton.Config, ...], cost_s: float | None = None
    ) -> tuple[int, ...]:
        """Return the positions of the timed configs, fastest first, and then of those to time next.

        In mode `off` and for a single config, all positions are returned. In mode `predict`, only that of the fastest
        config is returned, timed or predicted; while the kernel has no timing, the prior predicts it. Without a prior
        (see `expect`) all are returned, with a warning.
        """
        if (wanted := resolve_mode(self.mode)) is Mode.OFF or len(configs) == 1 or self._is_broken:
            return tuple(range(len(configs)))
        values, k = [self.value(config) for config in configs], 1 if wanted is Mode.PREDICT else self._k
        ranks = self._ranks()
        # Ranks measure different costs but must take the same steps; a stub's cost says nothing.
        cost = USUAL_COST_S if ranks or cost_s is None or stubbed() is not None else cost_s
        stand_in = self.stand_in(problem)
        expected = {} if ranks else self._expected.get(stand_in, {})  # ranks may see different sizes
        prior = np.array([expected[value] for value in values]) if expected.keys() >= {*values} else None
        advice = self._timings(ranks).advise(stand_in, values, k, cost, prior=prior)
        if wanted is Mode.REFINE and not advice.sure:
            return tuple(range(len(configs)))
        reason = advice.reason
        if wanted is Mode.PREDICT and not advice.sure:
            if prior is None:
                any_may_run = f": any of {len(configs)} configs may run"
                warn_once(f"{problem.family}: no prediction (no timing is known)", any_may_run)
                return tuple(range(len(configs)))
            reason = "no timing is known: the fastest as predicted from its source"
        _log.info("%s: %d of %d configs: %s", problem, len(advice.positions), len(values), reason)
        # Times are not known by value for configs that share one (see `values_of`): these are always tried.
        shared = {value for value, count in Counter(values).items() if count > 1}
        others = [at for at, value in enumerate(values) if value in shared and at not in advice.positions]
        return (*advice.positions, *others) or tuple(range(len(configs)))  # if all failed, they are tried again

    def learn(self, problem: Problem, times_us: Mapping[KernelConfig, float | None], ranks: int = 0) -> None:
        """Add a problem's measured times to the model of the kernel's timings for `ranks`; see `Shortlister.learn`."""
        self._is_broken = True  # if it raises, there is nothing to search with
        self._timings(ranks).learn(problem, times_us)
        self._is_broken = False

    def at_once(self, problem: Problem, configs: tuple[triton.Config, ...]) -> tuple[int, ...]:
        """Return the positions of the timed and best predicted configs; all while the kernel has no timing."""
        values = [self.value(config) for config in configs]
        is_known = self._timings(self._ranks()).advise(self.stand_in(problem), values).sure
        return self.positions(problem, configs) if is_known else tuple(range(len(configs)))

    def finish(self, problem: Problem) -> None:
        """Stop proposing new configs for `problem`; see `Shortlister.finish`."""
        self._timings(0).finish(problem)

    def _timings(self, ranks: int) -> OwnTimings:
        """Return the timings of the ranks with this number (0: this rank alone), creating the object if necessary."""
        return self._own.setdefault(ranks, OwnTimings(self.family))


class TracedPrune(TracedPositions):
    """The prune callback (`early_config_prune`) of a `PredictedAutotuner`, which only `torch.compile` (Dynamo) calls.

    Dynamo makes its own autotuner from the configs that this returns (see `runtime/prune.py`):

    - For static shapes, that is the config known to be the fastest, alone, so that nothing is tuned; else the
      shortlist. A kernel that needs its tensors reset or restored gets a single config, too.
    - Otherwise, as for dynamic shapes, the graph breaks at the launch, which then runs outside the graph and chooses as
      usual. It also breaks with a torch whose Dynamo cannot pass configs to a function that it does not trace.
    """

    def __init__(
        self,
        kernel: str,
        own: Callable[..., Sequence[triton.Config]] | None,
        shortlister: Shortlister,
        best_known: Callable[[Problem, tuple[triton.Config, ...]], int | None],
        *,
        alters: bool,
    ) -> None:
        self._kernel, self._own, self._shortlister, self._alters = kernel, own, shortlister, alters
        self._best_known, self._problem = best_known, shortlister.problem
        self._can_ask = torch_release() >= CAN_ASK_SINCE

    def __call__(
        self, configs: Sequence[triton.Config], named_args: Mapping[str, Any], /, **kwargs: Any
    ) -> list[triton.Config]:
        """Return the configs that Dynamo's autotuner gets for a launch, or break the graph."""
        leave_launches_to_triton()
        own = in_full(self._own)
        allowed = configs if own is None else own(configs, named_args, **kwargs)
        if self._can_ask:
            problem = self._problem({**named_args, **kwargs})
            if positions := self.positions_of(problem, allowed):
                return [allowed[position] for position in positions]
        break_graph()
        return list(allowed)

    def let_through(self, problem: Problem, configs: tuple[triton.Config, ...]) -> tuple[int, ...]:
        """Return the positions of the configs that Dynamo's autotuner gets; () if the graph must break."""
        try:
            if (best := self._best_known(problem, configs)) is not None:
                return (best,)
            positions = self._shortlister.at_once(problem, configs)
            if resolve_mode(self._shortlister.mode) in (Mode.PREDICT, Mode.REFINE):  # nothing is timed in the graph
                positions = positions[:1]
        except PinError:
            raise
        except Exception as error:  # noqa: BLE001 - a failed prediction must not stop a launch
            warn_once(f"{self._kernel}: no prediction ({reason_of(error)})", f": all {len(configs)} configs go through")
            positions = tuple(range(len(configs)))
        if not self._alters:
            return positions
        return positions[:1] if len(positions) < len(configs) or len(configs) == 1 else ()


class PinnedPrune(TracedPrune):
    """Replaces an attached kernel's prune callback while a pin file is in force: Dynamo gets only the pinned config.

    Other callers get the configs that the kernel's own callback keeps.
    """

    def __call__(
        self, configs: Sequence[triton.Config], named_args: Mapping[str, Any], /, **kwargs: Any
    ) -> list[triton.Config]:
        """Return the pinned config while Dynamo traces, else the configs that the kernel's own callback keeps."""
        if not is_traced():
            return list(configs if self._own is None else self._own(configs, named_args, **kwargs))
        return super().__call__(configs, named_args, **kwargs)
