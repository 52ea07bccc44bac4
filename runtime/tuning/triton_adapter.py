"""`Attachment`: the adapter of a `TuningSession` to an autotuner of Triton, which keeps its own loop over configs."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...datasets import DeviceSpec, Family, ForetuneError, Problem
from ...datasets.errors import reason_of
from ...datasets.forking import renew_in_children
from ..arguments import Mode, resolve_mode, warn_once
from ..how_many import Length
from ..launching.kernel import Kernel
from ..launching.stub_driver import device_here, measures
from ..launching.triton_hash import hash_triton
from ..prune import Pruner
from .known_times import KeyTimes, KnownTimes
from .launches import LaunchFamily
from .one_launch import OneConfigCache, OneLaunch, key_of_launch, microseconds, times_one
from .ranks.agreement import choose_together, epoch, may_tune, scope
from .session import Measured, TuningSession, is_capturing
from .shortlisters import FamilyShortlister, OwnShortlister, Shortlister

if TYPE_CHECKING:
    import triton


class Attachment:
    """The hooks that Foretune places on one attached autotuner: four instance attributes that hide those of its class.

    - `prune_configs` selects the configs to time: the kernel's own `early_config_prune` first, then Foretune's
      shortlist, and `perf_model` last. `early_config_prune` itself is not replaced, because other code calls it: FLA,
      to check a config from a file; and Dynamo (torch 2.13), which makes an autotuner of what it returns, but without
      `reset_to_zero` and `restore_value`, so that compiled code would compute wrong results.
    - `_bench` times one config, with Foretune's timer unless the kernel has its own `do_bench` or its class its own
      `_bench`. Each time is learned and stored at once, so that a killed process loses none. Known times are not
      measured again, and the other configs are first compiled in parallel.
    - `run` launches, one thread at a time, because Triton keeps a launch's arguments on the autotuner, where threads
      would mix them up. While a CUDA graph is captured nothing is timed: a new key runs the predicted config, or else
      the first allowed one, and that choice is not remembered.
    - `__getstate__` gives copies and pickles the autotuner without the hooks.

    `holders` counts the open `attached` blocks that hold it; 0 for `attach`. Where ranks choose together (`agree`),
    `prune_configs` times the configs and returns the agreed one, which Triton then remembers. With FORETUNE_MODE=off,
    all hooks do what Triton does.
    """

    holders, is_on = 0, False
    is_automatic = False  # attached by FORETUNE_ATTACH, so that `attach` replaces it

    def __init__(self, tuner: triton.runtime.Autotuner, family: Family | None, k: Length) -> None:
        from triton.runtime import Autotuner

        own = LaunchFamily(tuner)
        self.name, self.tuner = own.name, tuner
        self._bench, self.own_run = tuner._bench, tuner.run
        as_triton_does = tuner._do_bench is None and getattr(self._bench, "__func__", None) is Autotuner._bench
        self._how_timed = "cold" if as_triton_does else "autotuner"
        self._pruner = None if family is None else Pruner(family, k)
        if self._pruner is not None:
            self._pruner.timed = self._how_timed
        self._k, self._is_interpreted = k, Kernel(tuner).is_interpreted
        self._known: dict[DeviceSpec, KnownTimes] = {}
        self._epoch = epoch()
        self._chosen_together: dict[int, dict[Any, triton.Config]] = {}  # Triton's `cache` by `scope()`
        self._launched: set[Any] = set()  # keys launched before the cache was cleared
        renew_in_children(self)

    def renew(self) -> None:
        """Create a new lock and forget a running launch, also in forked processes (see `renew_in_children`)."""
        self.lock = threading.RLock()
        self._tuning: _Tuning | None = None
        self._is_running = False

    @staticmethod
    def of(tuner: triton.runtime.Autotuner) -> Attachment | None:
        """Return an autotuner's attachment; None if it is not attached."""
        bench = getattr(tuner.__dict__.get("_bench"), "__self__", None)
        return bench if isinstance(bench, Attachment) else None

    def begin(self) -> None:
        """Place the hooks on the autotuner."""
        # A lambda that looks `run` up at each launch, so that `forced` can replace it.
        run = lambda *args, **kwargs: self.run(*args, **kwargs)  # noqa: E731
        self._hooks = {"prune_configs": self.prune_configs, "_bench": self.bench, "run": run}
        self._hooks["__getstate__"] = self.state
        self._hidden = {name: self.tuner.__dict__[name] for name in self._hooks if name in self.tuner.__dict__}
        self.tuner.__dict__.update(self._hooks)
        self.is_on = True

    def end(self) -> None:
        """Remove the hooks; raise `ForetuneError` if other code has replaced one of them meanwhile."""
        here = self.tuner.__dict__
        with self.lock:  # wait for a running launch
            if changed := [name for name, hook in self._hooks.items() if here.get(name) is not hook]:
                raise ForetuneError(
                    f"{self.name} cannot be detached: its {changed[0]} was replaced by other code after it was attached"
                )
            self._put_back(here)
            self.is_on = False

    def state(self) -> Any:
        """Return the state for a copy or pickle of the autotuner: its attributes without the hooks."""
        get_state = getattr(type(self.tuner), "__getstate__", None)  # every class has it from Python 3.11
        state = self.tuner.__dict__ if get_state is None else get_state(self.tuner)
        return self._put_back(dict(state)) if isinstance(state, dict) else state

    def _put_back(self, attributes: dict[str, Any]) -> dict[str, Any]:
        """Replace the hooks in a dict of attributes by the values that they hid, and return it."""
        for name, hook in self._hooks.items():
            if attributes.get(name) is hook:
                del attributes[name]
                if name in self._hidden:
                    attributes[name] = self._hidden[name]
        return attributes

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Launch the kernel through Triton's own `run`, one thread at a time, and record what it chose."""
        with self.lock:
            if self._epoch != epoch() and not self._is_switched_off():
                self._epoch, ranks = epoch(), scope()
                if ranks:
                    self._launched |= self.tuner.cache.keys()
                    self.tuner.cache.clear()
                    self.tuner.cache.update(self._chosen_together.get(ranks, {}))
            before, self._is_running = self.tuner.__dict__.get("configs_timings"), True
            try:
                result = self.own_run(*args, **kwargs)
                if self._tuning is not None:
                    self._or_warn(self._finish, self._tuning, before)
                return result
            except _CapturedError as captured:
                return self._run_once(captured.config, args, kwargs)
            except Exception:
                if self._tuning is not None and self._tuning.session.best is None:
                    for key in self.tuner.cache.keys() - self._tuning.keys:  # all configs failed: try them again
                        del self.tuner.cache[key]
                raise
            finally:
                self._tuning, self._is_running = None, False

    def _is_switched_off(self) -> bool:
        """Return whether FORETUNE_MODE is "off"."""
        return self._or_warn(resolve_mode) is Mode.OFF

    def _run_once(self, config: triton.Config, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Launch with a config without remembering it."""
        real = self.tuner.cache
        self.tuner.cache = OneConfigCache(config)
        try:
            return self.own_run(*args, **kwargs)
        finally:
            self.tuner.cache = real

    def bench(self, *args: Any, config: triton.Config, **meta: Any) -> Any:
        """Return the timing of a config as Triton's `_bench` does; a known time is not measured again."""
        if self._is_switched_off():
            return self._bench(*args, config=config, **meta)
        tuning = self._tuning if self._tuning is not None and config in self._tuning.allowed else None
        if tuning is None:
            timing = self._bench(*args, config=config, **meta)
        elif (known := tuning.session.measured.get(config)) is not None:
            # Three quantiles, as Triton's benchmarker returns them.
            return [math.inf if known.time_us is None else known.time_us / 1e3] * 3
        else:
            if tuning.uncompiled:
                self._or_warn(self._compile, tuning, args, meta)
            timing = self._timed(args, config, meta)
        try:
            time_us = microseconds(timing)
        except ForetuneError as error:
            if tuning is not None:
                tuning.session.refuse(config, error)
            warn_once(f"{self.name}: {error}", ": that config counts as failed")
            return math.inf if isinstance(timing, (int, float)) else [math.inf] * 3
        if tuning is not None:
            tuning.session.keep(config, Measured.of(time_us))
        return timing

    def _timed(self, args: tuple[Any, ...], config: triton.Config, meta: Mapping[str, Any]) -> Any:
        """Return the timing of a config, in milliseconds, from Foretune's timer where possible, else from Triton's."""
        if self._how_timed == "cold" and measures(self.tuner):
            try:
                return [OneLaunch(self.tuner, args, meta).time_us(config) / 1e3] * 3
            except Exception:  # noqa: BLE001 - Triton tells a config's failure from the launch's
                pass
        return self._bench(*args, config=config, **meta)

    def prune_configs(self, kwargs: dict[str, Any]) -> list[triton.Config]:
        """Return the configs that Triton should time for this launch; a single one where nothing may be timed."""
        if self._is_switched_off():
            return type(self.tuner).prune_configs(self.tuner, kwargs)  # type: ignore[no-any-return]
        view = copy(self.tuner)  # the class's prune_configs with our early_config_prune, on a copy
        view.early_config_prune = self._prune
        self._n_allowed = 0
        pruned: list[triton.Config] = type(self.tuner).prune_configs(view, kwargs)
        if not self._is_running:
            return pruned
        if not self._is_interpreted:
            hash_triton()
        if is_capturing():
            raise _CapturedError(pruned[0])
        resets = len(pruned) == 1 and self._would_be_timed(kwargs)
        if len(pruned) > 1 and (choose_together() or self._searches()):
            pruned = self._searched(pruned, kwargs)
            resets = resets or choose_together() or len(pruned) == 1
        if resets and not times_one():  # as Triton does after it has timed configs
            self.tuner.pre_hook({**self.tuner.nargs, **kwargs, **pruned[0].all_kwargs()}, reset_only=True)
        return pruned

    def _would_be_timed(self, kwargs: Mapping[str, Any]) -> bool:
        """Return whether Triton alone would time configs for this launch: several are allowed, and the key is new."""
        tuner, left = self.tuner, self._n_allowed
        if tuner.perf_model is not None:
            top_k = tuner.configs_top_k
            left = min(left, max(1, int(left * top_k)) if isinstance(top_k, float) else top_k)
        return left > 1 and key_of_launch(tuner, {**tuner.nargs, **kwargs}) not in self._launched

    def _searches(self) -> bool:
        """Return whether the configs are searched: without a family, and without a `perf_model` that drops some."""
        return self._pruner is None and self.tuner.perf_model is None

    def _searched(self, configs: list[triton.Config], kwargs: Mapping[str, Any]) -> list[triton.Config]:
        """Time these configs and those that the search goes on with.

        Returns:
            The timed configs; where ranks choose together, the one that they agree on, or the first, which is the same
            on all ranks.
        """
        tuning, asked = self._tuning, set(configs[:0])
        if tuning is None:
            return configs[:1] if choose_together() else configs
        given = tuple(self.tuner.nargs.values())

        def times_us() -> list[float | None]:
            return [microseconds(self.bench(*given, config=config, **kwargs)) for config in configs]

        if not choose_together() and (cached := self._or_warn(self._in_tritons_cache, tuning, kwargs)):
            return [cached]
        while not asked.issuperset(configs):
            asked.update(configs)
            if not choose_together():
                times_us()
            else:
                best, time_us = tuning.times.agree(configs, times_us)
                if best is None:
                    return configs[:1]
            if self._searches():
                configs = self._or_warn(self._next, tuning) or configs
        if not choose_together():
            return configs
        tuning.session.measured[best] = Measured.of(time_us)  # Triton 3.6 times even a single config
        return [best]

    def _next(self, tuning: _Tuning) -> list[triton.Config]:
        """Return the timed configs, fastest first, and those to time next, which are to be compiled."""
        shortlister, allowed = self._known_here().shortlister, tuning.allowed
        configs = [allowed[at] for at in shortlister.positions(tuning.problem, allowed, tuning.session.cost_s)]
        self._prepare(tuning, configs)
        return configs

    def _in_tritons_cache(self, tuning: _Tuning, kwargs: Mapping[str, Any]) -> triton.Config | None:
        """Return the best config by Triton's own cache of all allowed configs' times; None if it has none."""
        tuner = self.tuner
        if not getattr(tuner, "cache_results", False):
            return None
        key = key_of_launch(tuner, {**tuner.nargs, **kwargs})

        def missing() -> None:
            raise KeyError

        try:
            tuner.check_disk_cache(key, tuning.allowed, missing)
        except KeyError:
            return None
        return tuner.cache[key]  # type: ignore[no-any-return]

    def _prune(
        self, configs: Sequence[triton.Config], named_args: Mapping[str, Any], /, **kwargs: Any
    ) -> Sequence[triton.Config]:
        """Return what the kernel's `early_config_prune` allows, shortened to a shortlist if one is available."""
        theirs = self.tuner.early_config_prune
        allowed = configs if theirs is None else theirs(configs, named_args, **kwargs)
        self._n_allowed = len(allowed)
        kept = self._or_warn(self._shortlisted, allowed, named_args, kwargs) if allowed else None
        return allowed if kept is None else kept

    def _shortlisted(
        self, allowed: Sequence[triton.Config], named_args: Mapping[str, Any], kwargs: Mapping[str, Any]
    ) -> list[triton.Config]:
        """Return the configs to time first, best first; all of them for a `perf_model` to choose from."""
        known, arguments = self._known_here(), {**named_args, **kwargs}
        problem = known.shortlister.problem(arguments)
        times = known.of(known.shortlister.stand_in(problem))
        if self._pruner is not None:
            kept = self._pruner(allowed, named_args, **kwargs)
            if not may_tune() and resolve_mode() is not Mode.OFF:
                kept = kept[:1]
        else:
            kept = list(allowed)
            if self._searches():
                kept = [allowed[position] for position in known.shortlister.positions(problem, tuple(allowed))]
        if self._is_running:  # otherwise Triton only compiles
            session, keys = TuningSession(times), set(self.tuner.cache)
            self._tuning = _Tuning(times, session, tuple(allowed), problem, keys, arguments)
            self._or_warn(self._prepare, self._tuning, kept)
        return kept

    def _prepare(self, tuning: _Tuning, configs: Sequence[triton.Config]) -> None:
        """Load the known times of configs that are about to be timed, and list what must be compiled."""
        tuner, session, times = self.tuner, tuning.session, tuning.times
        # A kernel's own do_bench may return another kind of value, which Triton would compare with known times. So
        # known times are used only if all configs have one.
        if tuner._do_bench is None or len(times.recall(configs)) == len(configs):
            session.recall(configs)
        # Compile ahead only if no pre_hook can change arguments that a binary depends on, and no perf_model drops
        # configs.
        left = [config for config in configs if config not in session.measured]
        plain = tuner.perf_model is None and not any(config.pre_hook for config in left)
        if plain and len(configs) > 1 and not self._is_interpreted:
            tuning.uncompiled = tuple(left)

    def _compile(self, tuning: _Tuning, args: Sequence[Any], meta: Mapping[str, Any]) -> None:
        """Compile configs in parallel; errors are ignored, because Triton meets them when it times the config."""
        configs, tuning.uncompiled = tuning.uncompiled, ()
        given = {name: value for name, value in meta.items() if name != "warmup"}
        tuning.session.compile(configs, lambda config: self.tuner.fn.warmup(*args, **given, **config.all_kwargs()))

    def _finish(self, tuning: _Tuning, before: Any) -> None:
        """Store the choice after a tuned launch, and learn times that came from Triton's own cache."""
        tuner, session = self.tuner, tuning.session
        after = tuner.__dict__.get("configs_timings")
        if after is not None and after is not before:
            for config, timing in after.items():
                if config in tuning.allowed and config not in session.measured:
                    session.keep(config, Measured.of(microseconds(timing)))
        new = tuner.cache.keys() - tuning.keys
        if choose_together():
            self._chosen_together.setdefault(scope(), {}).update((key, tuner.cache[key]) for key in new)
        if tuner.best_config in tuning.allowed:
            is_pruned = bool(tuner.early_config_prune or tuner.perf_model)
            tuning.times.choose(tuner.best_config, new, tuning.arguments, is_pruned=is_pruned, bundle="")

    def _known_here(self) -> KnownTimes:
        """Return the known times on the current device, loaded from the cache at the first launch."""
        device = device_here()
        with self.lock:
            if device not in self._known:
                # Ranks that choose together need the same shortlist, so their model learns from agreed times alone.
                shortlister: Shortlister = (
                    OwnShortlister(self.tuner, self._k, ranks=lambda: scope() if choose_together() else 0)
                    if self._pruner is None
                    else FamilyShortlister(self._pruner)
                )
                # With a family, its pruner does the logging.
                self._known[device] = KnownTimes(
                    self.tuner,
                    self.name,
                    shortlister,
                    device,
                    timed=self._how_timed,
                    logs=self._pruner is None,
                    is_pruned=bool(self.tuner.early_config_prune or self.tuner.perf_model),
                )
            known = self._known[device]
            known.open()
            return known

    def _or_warn(self, function: Any, *arguments: Any) -> Any:
        """Call a function; if it raises, warn once and return None, so that the launch goes on."""
        try:
            return function(*arguments)
        except Exception as error:  # noqa: BLE001
            warn_once(f"{self.name}: {reason_of(error)}", ": its autotuner goes on without that")


@dataclass
class _Tuning:
    """The tuning of one key while it runs; Triton has the loop over the configs."""

    times: KeyTimes
    session: TuningSession[triton.Config]
    allowed: tuple[triton.Config, ...]
    problem: Problem
    keys: set[Any]  # the keys that Triton already had a config for
    arguments: Mapping[str, Any]
    uncompiled: tuple[triton.Config, ...] = ()


class _CapturedError(Exception):
    """Ends a launch with a new key during CUDA graph capture, before Triton times anything."""

    def __init__(self, config: triton.Config) -> None:
        self.config = config
