"""`KnownTimes`: what came of a kernel's configs, in this process and, as far as it was kept, in earlier ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from ...datasets import DeviceSpec, ForetuneError, KernelConfig, Problem
from ...datasets.errors import reason_of
from ..arguments import warn_once
from ..launching.kernel import hash_of_tuned
from ..launching.stub_driver import device_here, measures
from .launch_arguments import kept_arguments

if TYPE_CHECKING:
    import triton

    from .advice import Advisor
    from .cache.choice_cache import ChoiceCache

#: Microseconds, or why it failed.
Outcome = float | Exception


class KnownTimes:
    """Outcomes of one kernel, on the device that is current when it is first asked. What has no place in the cache on
    disk (a launch that is no `Problem`, a config that is more than values, times that no GPU measured) is kept in
    memory alone. `timed` says how `tuner` takes times, to whoever learns from the log. Never raises."""

    def __init__(
        self,
        kernel: str,
        jit: Any,
        configs: Sequence[triton.Config],
        advisor: Advisor,
        device: DeviceSpec | None,
        *,
        timed: str,
        tuner: Any = None,
    ) -> None:
        self._tuner = tuner
        self._kernel, self._jit, self._advisor, self._device, self._timed = kernel, jit, advisor, device, timed
        self._configs, self._values = configs, values_of(configs)
        self._here: dict[Hashable, dict[triton.Config, Outcome]] = {}
        self._on_disk: ChoiceCache | None = None
        self._is_open = False

    def open(self) -> None:
        """Reads what earlier processes left, once."""
        if self._is_open or not measures(self._tuner):
            return
        self._is_open = True
        with self._quietly():
            from .cache.choice_cache import ChoiceCache

            self._device = self._device or device_here()
            self._on_disk = ChoiceCache.of(self._kernel, hash_of_tuned(self._jit, self._configs), self._device)
            for problem in self._on_disk.problems():
                self._advisor.learn(problem, self._on_disk.times(problem))

    def of(
        self, stand_in: Problem | None, key: Hashable, configs: Sequence[triton.Config]
    ) -> dict[triton.Config, Outcome]:
        """What is known of some of these configs, for a stand-in, or for a key that has none."""
        found = self._here.setdefault(key if stand_in is None else stand_in, {})
        if self._on_disk is not None and stand_in is not None:
            with self._quietly():
                kept, values = self._on_disk.times(stand_in), self._values_of(configs)
                for config, value in values.items():
                    if config not in found and value in kept:
                        time_us = kept[value]
                        found[config] = ForetuneError("it failed before") if time_us is None else time_us
        return {config: found[config] for config in configs if config in found}

    def record(self, stand_in: Problem | None, key: Hashable, config: triton.Config, outcome: Outcome) -> None:
        """Keeps what came of a config; it is on the disk when this returns."""
        self._here.setdefault(key if stand_in is None else stand_in, {})[config] = outcome
        value = self._values_of([config]).get(config)
        if stand_in is None or value is None:
            return
        time_us = outcome if isinstance(outcome, float) else None
        is_measured = measures(self._tuner)
        with self._quietly():
            if is_measured and self._on_disk is not None and (time_us is not None or is_lasting(outcome)):
                self._on_disk.record(stand_in, value, time_us)
            self._advisor.learn(stand_in, {value: time_us})
        if is_measured and self._device is not None:
            from ..timing.flywheel import is_logging, log_row, source_that_ran

            if not is_logging():
                return
            with self._quietly():
                family, words = self._advisor.family, self._advisor.value(config)
                source = source_that_ran(family, self._jit)
                log_row(family, stand_in, words, time_us, self._device, timed=self._timed, source_hash=source)

    def choose(
        self,
        stand_in: Problem,
        config: triton.Config,
        names: Sequence[str],
        key: Sequence[Any],
        arguments: Mapping[str, Any],
        *,
        is_pruned: bool,
    ) -> None:
        """Keep what was chosen for a launch, for `foretune cache freeze`, a warm-up and whoever else reads it.

        `is_pruned` says that the kernel prunes its configs itself: what another launch of this stand-in may run, this
        one may not.
        """
        value = self._values_of([config]).get(config)
        if self._on_disk is not None and value is not None and measures(self._tuner):
            with self._quietly():
                self._on_disk.choose(stand_in, self._advisor.bundle, value)
                own = value if is_pruned else None
                self._on_disk.saw_launch(stand_in, names, key, kept_arguments(arguments), own)

    def _values_of(self, configs: Sequence[triton.Config]) -> dict[triton.Config, KernelConfig]:
        if any(config not in self._values for config in configs):  # shared ones, or a prune callback's own making
            values = values_of([*self._configs, *configs])
        else:
            values = self._values
        return {config: values[config] for config in configs if config in values}

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - no trouble of ours stops a launch
            what = f"{self._kernel}: what is measured cannot be kept ({reason_of(error)})"
            warn_once(what, ": it is in memory alone")


def values_of(configs: Sequence[triton.Config]) -> dict[triton.Config, KernelConfig]:
    """Return the value of each config that can be told by it: not of one that has no value, nor of configs that differ
    only in their `pre_hook`."""
    found: dict[triton.Config, KernelConfig] = {}
    for config in configs:
        with suppress(ForetuneError):
            found[config] = KernelConfig.from_triton(config)
    shared = Counter(found.values())
    return {config: value for config, value in found.items() if shared[value] == 1}


def is_lasting(outcome: Outcome) -> bool:
    """Whether a config that failed so will fail again: the compiler or the device refuses it. (No memory left, or an
    argument that is missing, says nothing of the config.)"""
    from triton.errors import TritonError

    from .isolation import CrashError

    return isinstance(outcome, (TritonError, CrashError))
