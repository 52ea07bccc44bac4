"""`Attachment`: what stands between one autotuner and Triton while it is attached."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from ...datasets import Family, ForetuneError, KernelConfig, Problem
from ...datasets.errors import reason_of
from ..arguments import Mode, family_of, resolve_mode, warn_once
from ..forking import renew_in_children
from ..how_many import Length
from ..launching.ahead import compile_ahead
from ..launching.kernel import Kernel
from ..launching.stub_driver import device_here, measures
from ..prune import Pruner
from .advice import tell
from .known_times import values_of
from .launch_arguments import kept_arguments
from .launches import LaunchFamily
from .one_launch import OneConfigCache, OneLaunch, is_capturing, key_of_launch, milliseconds, times_one
from .own_timings import OwnTimings
from .ranks.agreement import agreed, choose_together, epoch, may_tune, scope

if TYPE_CHECKING:
    import triton

    from ...datasets import DeviceSpec
    from .cache.choice_cache import ChoiceCache


class Attachment:
    """Four attributes of an autotuner's own, which hide its class's:

    - `prune_configs`, which says what to time: here the kernel's own `early_config_prune` goes first, ours picks among
      what that leaves, and `perf_model` comes last. (`early_config_prune` itself stays as it is, because others ask it:
      FLA, whether a config from a file is allowed; and Dynamo, which then makes an autotuner anew of what is left, but
      without `reset_to_zero` and `restore_value`, so that compiled code would compute something else; torch 2.13.)
    - `_bench`, which times one config. Here our timer does, unless the kernel has a `do_bench` of its own, or its class
      a `_bench`; each time is learned and kept as it comes, so that none is lost when the process is killed; what is
      known from before is not timed again; and what is to be timed is compiled in parallel.
    - `run`, which launches. Here it is one thread at a time, because Triton keeps a launch's arguments on the
      autotuner, where two threads mix them up. While a CUDA graph is captured nothing is timed: a new key runs the
      predicted config, else the first that is allowed, which is not remembered.
    - `__getstate__`, which copies and pickles ask: they get the autotuner without the attachment.

    `holders` counts the `attached` blocks that it belongs to; 0 for `attach`.

    Where ranks choose together (`agree`), `prune_configs` does: it times what it has left, and lets one config through.
    What Triton remembers is that from then on, and not what each rank had chosen alone.
    """

    holders, is_on = 0, False

    def __init__(self, tuner: triton.runtime.Autotuner, family: Family | None, k: Length) -> None:
        from triton.runtime import Autotuner

        own = LaunchFamily(tuner)
        self.name, self.tuner, self.family = own.name, tuner, own if family is None else family_of(family)
        self._bench, self.own_run = tuner._bench, tuner.run
        as_triton_does = tuner._do_bench is None and getattr(self._bench, "__func__", None) is Autotuner._bench
        self._how_timed = "cold" if as_triton_does else "autotuner"
        self._pruner = None if family is None else Pruner(self.family, k)
        if self._pruner is not None:
            self._pruner.timed = self._how_timed
        self._k, self._kernel = k, Kernel(tuner)
        self._known: dict[tuple[DeviceSpec, int], _Known] = {}  # by device, and whom it was learned with
        self._epoch = epoch()
        self._chosen_together: dict[int, dict[Any, triton.Config]] = {}  # Triton's `cache`, by whom it was chosen with
        self._met: set[Any] = set()  # keys that were launched before the cache was cleared
        renew_in_children(self)

    def renew(self) -> None:
        """See `renew_in_children`."""
        self.lock = threading.RLock()
        self._tuning: _Tuning | None = None
        self._is_running = False

    @staticmethod
    def of(tuner: triton.runtime.Autotuner) -> Attachment | None:
        """That of an autotuner, unless it has none."""
        bench = getattr(tuner.__dict__.get("_bench"), "__self__", None)
        return bench if isinstance(bench, Attachment) else None

    def begin(self) -> None:
        # (By name at each launch, so that `forced` can stand before it.)
        run = lambda *args, **kwargs: self.run(*args, **kwargs)  # noqa: E731
        self._ours = {"prune_configs": self.prune_configs, "_bench": self.bench, "run": run}
        self._ours["__getstate__"] = self.state
        self._theirs = {name: self.tuner.__dict__[name] for name in self._ours if name in self.tuner.__dict__}
        self.tuner.__dict__.update(self._ours)
        self.is_on = True

    def end(self) -> None:
        """Leaves the autotuner as it was. Raises `ForetuneError` where somebody has put something else there since."""
        here = self.tuner.__dict__
        with self.lock:  # after the launch that is going on
            if changed := [name for name, ours in self._ours.items() if here.get(name) is not ours]:
                raise ForetuneError(
                    f"{self.name} cannot be detached: somebody has replaced its {changed[0]} since it was attached"
                )
            self._put_back(here)
            self.is_on = False

    def state(self) -> Any:
        """Return the state for a copy or a pickle of the autotuner: its attributes without ours."""
        get_state = getattr(type(self.tuner), "__getstate__", None)  # every class has one since Python 3.11
        state = self.tuner.__dict__ if get_state is None else get_state(self.tuner)
        return self._put_back(dict(state)) if isinstance(state, dict) else state

    def _put_back(self, attributes: dict[str, Any]) -> dict[str, Any]:
        for name, ours in self._ours.items():
            if attributes.get(name) is ours:
                del attributes[name]
                if name in self._theirs:
                    attributes[name] = self._theirs[name]
        return attributes

    def run(self, *args: Any, **kwargs: Any) -> Any:
        with self.lock:
            if self._epoch != epoch():
                self._epoch, ranks = epoch(), scope()
                if ranks:
                    self._met |= self.tuner.cache.keys()
                    self.tuner.cache.clear()
                    self.tuner.cache.update(self._chosen_together.get(ranks, {}))
            before, self._is_running = self.tuner.__dict__.get("configs_timings"), True
            try:
                result = self.own_run(*args, **kwargs)
                if self._tuning is not None:
                    self._tried(self._finish, self._tuning, before)
                return result
            except _CapturedError as captured:
                return self._run_once(captured.config, args, kwargs)
            except Exception:
                if self._tuning is not None and not self._tuning.works:
                    for key in self.tuner.cache.keys() - self._tuning.keys:  # of configs that all failed: try again
                        del self.tuner.cache[key]
                raise
            finally:
                self._tuning, self._is_running = None, False

    def _run_once(self, config: triton.Config, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Launch with a config, and do not remember it."""
        real = self.tuner.cache
        self.tuner.cache = OneConfigCache(config)
        try:
            return self.own_run(*args, **kwargs)
        finally:
            self.tuner.cache = real

    def bench(self, *args: Any, config: triton.Config, **meta: Any) -> Any:
        tuning = self._tuning
        if tuning is None or config not in tuning.configs:
            timing = self._bench(*args, config=config, **meta)
        elif (known := tuning.recalled.get(config)) is not None:
            tuning.works = True  # else there would be nothing that is recalled
            return known
        else:
            if tuning.uncompiled:
                self._tried(self._compile, tuning, args, meta)
            timing = self._timed(args, config, meta)
        try:
            time_us = _microseconds(timing)
        except ForetuneError as error:
            if tuning is not None:
                tuning.timed.add(config)
            warn_once(f"{self.name}: {error}", ": that config counts as failed")
            return math.inf if isinstance(timing, (int, float)) else [math.inf] * 3
        if tuning is not None and config in tuning.configs:
            tuning.works = tuning.works or time_us is not None
            self._tried(self._record, tuning, config, time_us)
        return timing

    def _timed(self, args: tuple[Any, ...], config: triton.Config, meta: Mapping[str, Any]) -> Any:
        if self._how_timed == "cold" and self._is_real():
            try:
                return [OneLaunch(self.tuner, args, meta).time_us(config) / 1e3] * 3
            except Exception:  # noqa: BLE001 - Triton knows which failures of a config are none of the launch
                pass
        return self._bench(*args, config=config, **meta)

    def prune_configs(self, kwargs: dict[str, Any]) -> list[triton.Config]:
        view = copy(self.tuner)  # the class's own way, with another early_config_prune: nobody else sees it
        view.early_config_prune = self._prune
        self._n_allowed = 0
        pruned: list[triton.Config] = type(self.tuner).prune_configs(view, kwargs)
        if not self._is_running:
            return pruned
        if is_capturing():
            raise _CapturedError(pruned[0])
        resets = len(pruned) == 1 and self._would_be_timed(kwargs)
        if len(pruned) > 1 and choose_together():
            pruned, resets = [self._chosen_with_others(pruned, kwargs)], True
        if resets and not times_one():  # as Triton would have done after it had timed them
            self.tuner.pre_hook({**self.tuner.nargs, **kwargs, **pruned[0].all_kwargs()}, reset_only=True)
        return pruned

    def _would_be_timed(self, kwargs: Mapping[str, Any]) -> bool:
        """Return whether Triton alone would time configs for this launch: several are allowed, and the key is new."""
        tuner, left = self.tuner, self._n_allowed
        if tuner.perf_model is not None:
            top_k = tuner.configs_top_k
            left = min(left, max(1, int(left * top_k)) if isinstance(top_k, float) else top_k)
        return left > 1 and key_of_launch(tuner, {**tuner.nargs, **kwargs}) not in self._met

    def _chosen_with_others(self, configs: Sequence[triton.Config], kwargs: Mapping[str, Any]) -> triton.Config:
        """The config that is fastest on the rank where it is slowest; the first, which is the same everywhere, where
        ranks do not agree or this launch is no problem."""
        tuning, tuner = self._tuning, self.tuner
        if tuning is None:
            return configs[0]
        given = tuple(tuner.nargs.values())

        def times_us() -> list[float | None]:
            return [_microseconds(self.bench(*given, config=config, **kwargs)) for config in configs]

        shared = agreed(times_us, self.name, tuning.problem, [{"": str(config)} for config in configs])
        timed = [(time_us, at) for at, time_us in enumerate(shared) if time_us is not None]
        time_us, best = min(timed, default=(math.inf, 0))
        tuning.recalled[configs[best]] = [time_us / 1e3] * 3  # Triton 3.6 times also the only config that is left
        if timed:
            told = {tuning.configs[config]: time_us for config, time_us in zip(configs, shared, strict=True)}
            tuning.known.own.learn(tuning.problem, {value: told[value] for value in told.keys() - tuning.shared})
        return configs[best]

    def _prune(
        self, configs: Sequence[triton.Config], named_args: Mapping[str, Any], /, **kwargs: Any
    ) -> Sequence[triton.Config]:
        theirs = self.tuner.early_config_prune
        allowed = configs if theirs is None else theirs(configs, named_args, **kwargs)
        self._n_allowed = len(allowed)
        kept = self._tried(self._picked, allowed, named_args, kwargs) if allowed else None
        return allowed if kept is None else kept

    def _picked(
        self, allowed: Sequence[triton.Config], named_args: Mapping[str, Any], kwargs: Mapping[str, Any]
    ) -> list[triton.Config]:
        """Those that are worth timing, best first; all where nobody knows."""
        problem = self.family.at_call_time(self.family.problem_from_call({**named_args, **kwargs}))
        if self._pruner is not None:
            kept = self._pruner(allowed, named_args, **kwargs)
            if not may_tune() and resolve_mode() is not Mode.OFF:
                kept = kept[:1]
        else:
            kept = [allowed[position] for position in self._positions(problem, allowed)]
        if self._is_running:  # else Triton only compiles
            self._tried(self._expect, problem, kept, {**named_args, **kwargs})
        return kept

    def _positions(self, problem: Problem, configs: Sequence[triton.Config]) -> Sequence[int]:
        wanted = resolve_mode()
        if wanted is Mode.OFF or len(configs) == 1:
            return range(len(configs))
        values = [KernelConfig.from_triton(config) for config in configs]
        advice = self._here().own.advise(problem, values, 1 if wanted is Mode.PREDICT else self._k)
        if wanted is Mode.PREDICT and not advice.sure:
            warn_once(f"{self.name}: no prediction ({advice.reason})", f": all {len(configs)} configs go through")
        tell(problem, advice, len(values))
        return advice.positions

    def _expect(self, problem: Problem, configs: Sequence[triton.Config], arguments: Mapping[str, Any]) -> None:
        """Takes note of what is about to be timed, and of what of that is known."""
        values = {config: KernelConfig.from_triton(config) for config in configs}
        names = [name for name in self.tuner.keys if name in arguments]
        kept = kept_arguments(arguments)
        shared = frozenset(values.values()) - frozenset(values_of([*self.tuner.configs, *configs]).values())
        self._tuning = tuning = _Tuning(self._here(), problem, values, shared, set(self.tuner.cache), names, kept)
        tuning.recall(self.tuner)
        # A pre_hook may change arguments that a binary depends on, and a perf_model leaves some configs out.
        left = [config for config in values if config not in tuning.recalled]
        plain = self.tuner.perf_model is None and not any(config.pre_hook for config in left)
        if plain and len(configs) > 1 and not self._kernel.is_interpreted:
            tuning.uncompiled = tuple(left)

    def _compile(self, tuning: _Tuning, args: Sequence[Any], meta: Mapping[str, Any]) -> None:
        """Compiles what will be timed, in parallel. What fails does so again when it is timed, and Triton says so."""
        configs, tuning.uncompiled = tuning.uncompiled, ()
        given = {name: value for name, value in meta.items() if name != "warmup"}
        compile_ahead([partial(self.tuner.fn.warmup, *args, **given, **config.all_kwargs()) for config in configs])

    def _record(self, tuning: _Tuning, config: triton.Config, time_us: float | None) -> None:
        tuning.timed.add(config)
        value = tuning.configs[config]
        if value in tuning.shared:
            return
        tuning.known.record(tuning.problem, value, time_us)
        # (What a family's pruner leaves is logged as that of any pruner is.)
        if os.environ.get("FORETUNE_LOG") and self._pruner is None and self._is_real():
            from ..timing.flywheel import log_row

            source, timed = self._kernel.source_hash(), self._how_timed
            log_row(self.family, tuning.problem, value, time_us, tuning.known.device, timed=timed, source_hash=source)

    def _finish(self, tuning: _Tuning, before: Any) -> None:
        """After a launch for which a config was chosen. Timings that came from Triton's own cache are learned now."""
        after = self.tuner.__dict__.get("configs_timings")
        if after is not None and after is not before:
            for config, timing in after.items():
                if config in tuning.configs and config not in tuning.timed and config not in tuning.recalled:
                    self._record(tuning, config, _microseconds(timing))
        new = self.tuner.cache.keys() - tuning.keys
        if choose_together():
            self._chosen_together.setdefault(scope(), {}).update((key, self.tuner.cache[key]) for key in new)
        best = tuning.configs.get(self.tuner.best_config)
        if best is not None and best not in tuning.shared and tuning.known.cache is not None:
            tuning.known.cache.choose(tuning.problem, "", best)
            own = best if self.tuner.early_config_prune or self.tuner.perf_model else None
            for key in new:
                tuning.known.cache.saw_launch(tuning.problem, tuning.names, key, tuning.arguments, own)

    def _here(self) -> _Known:
        """What is known on the device of this launch; the first time, with what earlier processes left."""
        device, ranks = device_here(), scope() if choose_together() else 0
        with self.lock:
            if (device, ranks) not in self._known:
                cache = self._tried(self._opened, device) if self._is_real() else None
                self._known[device, ranks] = known = _Known(device, OwnTimings(self.family), cache, ranks > 0)
                if cache is not None and not ranks:
                    self._tried(known.read, self.family.name)
            return self._known[device, ranks]

    def _is_real(self) -> bool:
        """Whether its times are some."""
        return measures(self.tuner)

    def _opened(self, device: DeviceSpec) -> ChoiceCache | None:
        from .cache.choice_cache import ChoiceCache

        return ChoiceCache.of(self.name, self._kernel.tuned_hash(), device)

    def _tried(self, do: Any, *about: Any) -> Any:
        """What comes of it; None, and one warning, where it cannot be done: no trouble of ours stops a launch."""
        try:
            return do(*about)
        except Exception as error:  # noqa: BLE001
            warn_once(f"{self.name}: {reason_of(error)}", ": its autotuner goes on without that")


@dataclass
class _Known:
    """What is known of one kernel on one device. What ranks choose together they have to shortlist alike, so that
    `own` learns there only what was agreed on."""

    device: DeviceSpec
    own: OwnTimings
    cache: ChoiceCache | None
    is_shared: bool

    def read(self, family: str) -> None:
        """Learns what earlier processes left."""
        if self.cache is not None:
            for problem in self.cache.problems():
                if problem.family == family:
                    self.own.learn(problem, self.cache.times(problem))

    def record(self, problem: Problem, config: KernelConfig, time_us: float | None) -> None:
        if not self.is_shared:
            self.own.learn(problem, {config: time_us})
        if self.cache is not None:
            self.cache.record(problem, config, time_us)


@dataclass
class _Tuning:
    """One key's tuning, while it goes on."""

    known: _Known
    problem: Problem
    configs: dict[triton.Config, KernelConfig]
    shared: frozenset[KernelConfig]  # of configs that differ in their `pre_hook` alone: no time is known by these
    keys: set[Any]  # those that Triton had chosen for before
    names: list[str]  # of the arguments that this launch's key begins with
    arguments: dict[str, Any] | None  # see `kept_arguments`
    recalled: dict[triton.Config, list[float]] = field(default_factory=dict)  # as Triton's benchmarker gives it, ms
    uncompiled: tuple[triton.Config, ...] = ()
    timed: set[triton.Config] = field(default_factory=set)
    works: bool = False  # whether any config has a time

    def recall(self, tuner: triton.runtime.Autotuner) -> None:
        """Finds what needs no timing: it was timed before for this problem. Somebody's own `do_bench` may give another
        kind of value, which Triton would compare with these, so there it is all of them or none."""
        before = {} if self.known.cache is None else self.known.cache.times(self.problem)
        for config, value in self.configs.items():
            if value in before and value not in self.shared:
                time_us = before[value]
                self.recalled[config] = [math.inf if time_us is None else time_us / 1e3] * 3
        timed = any(times[0] < math.inf for times in self.recalled.values())
        if not timed or (tuner._do_bench is not None and len(self.recalled) < len(self.configs)):
            self.recalled = {}


class _CapturedError(Exception):
    """Ends a launch with a new key while a CUDA graph is captured, before anything is timed."""

    def __init__(self, config: triton.Config) -> None:
        self.config = config


def _microseconds(timing: Any) -> float | None:
    """Return the time that a benchmarker gave (its median, or all quantiles, in ms); None for a config that failed.

    Raises:
        ForetuneError: It gave no time (see `milliseconds`).
    """
    time_us = 1e3 * milliseconds(timing)
    return time_us if math.isfinite(time_us) else None
