"""`KnownTimes`: what was measured of a kernel's configs in this process and, as far as it was kept, earlier."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from ...datasets import DeviceSpec, ForetuneError, KernelConfig, Problem
from ...datasets.errors import reason_of
from ..arguments import warn_once
from ..launching.kernel import Kernel
from ..launching.stub_driver import device_here, measures
from .launch_arguments import kept_arguments
from .ranks.agreement import agreed, choose_together, scope
from .ranks.rendezvous import Times
from .session import Measured

if TYPE_CHECKING:
    import triton

    from .cache.kernel_cache import ChoiceCache
    from .shortlisters import Shortlister


class KnownTimes:
    """The times of one kernel on one device; `of` returns them by key.

    What has no place in the cache on disk (a launch that is no `Problem`, a config that is more than values, times that
    no GPU measured) is kept in memory alone. Never raises.

    Args:
        tuner: The kernel's autotuner.
        name: The kernel's name.
        shortlister: Learns from each time.
        device: Left out, the one that is current when `open` is first called.
        timed: How `tuner` takes times, for whoever learns from the log.
        logs: Whether times go to FORETUNE_LOG from here.
    """

    def __init__(
        self,
        tuner: triton.runtime.Autotuner,
        name: str,
        shortlister: Shortlister,
        device: DeviceSpec | None = None,
        *,
        timed: str,
        logs: bool = True,
    ) -> None:
        self.tuner, self.name, self.shortlister, self.device = tuner, name, shortlister, device
        self._kernel, self._timed, self._logs = Kernel(tuner), timed, logs
        self._configs = tuple(tuner.configs)
        self._values = values_of(self._configs)
        self._here: dict[Hashable, dict[triton.Config, Measured]] = {}
        self._on_disk: ChoiceCache | None = None
        self._is_open = False

    def open(self) -> None:
        """Read what earlier processes left, once."""
        if self._is_open or not measures(self.tuner):
            return
        self._is_open = True
        with self.quietly():
            from .cache.kernel_cache import ChoiceCache

            self.device = self.device or device_here()
            self._on_disk = ChoiceCache.of(self.name, self._kernel.tuned_hash(), self.device)
            for problem in self._on_disk.problems():
                if problem.family == self.shortlister.family.name:  # the kernel may have been tuned with another, too
                    self.shortlister.learn(problem, self._on_disk.times(problem))

    def of(self, stand_in: Problem | None, key: Hashable = None) -> KeyTimes:
        """Return what is known of a stand-in, or of a key that has none."""
        return KeyTimes(self, stand_in, self._here.setdefault(key if stand_in is None else stand_in, {}), str(key))

    def values(self, configs: Sequence[triton.Config]) -> dict[triton.Config, KernelConfig]:
        """Return the values that times are kept by, of those configs that have one."""
        if any(config not in self._values for config in configs):  # shared ones, or a prune callback's own making
            values = values_of([*self._configs, *configs])
        else:
            values = self._values
        return {config: values[config] for config in configs if config in values}

    def log(self, problem: Problem, config: triton.Config, time_us: float | None) -> None:
        """Log a row where FORETUNE_LOG asks for it."""
        if not self._logs or self.device is None:
            return
        from ..timing.flywheel import is_logging, log_row, source_that_ran

        if is_logging():
            with self.quietly():
                family, words = self.shortlister.family, self.shortlister.value(config)
                source = source_that_ran(family, self._kernel.jit)
                log_row(family, problem, words, time_us, self.device, timed=self._timed, source_hash=source)

    @contextmanager
    def quietly(self) -> Iterator[None]:
        """Make a warning of what is raised in the block: no trouble of ours stops a launch."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - as above
            what = f"{self.name}: what is measured cannot be kept ({reason_of(error)})"
            warn_once(what, ": it is in memory alone")


class KeyTimes:
    """What is known of one key of a kernel: the `Known` of a `TuningSession`, and what ranks agree on.

    On the disk, and for whoever learns, the key's `problem` stands for it; None where it has none.
    """

    def __init__(
        self, kernel: KnownTimes, problem: Problem | None, here: dict[triton.Config, Measured], key: str
    ) -> None:
        self._kernel, self.problem, self._here, self._key = kernel, problem, here, key

    def recall(self, configs: Sequence[triton.Config]) -> Mapping[triton.Config, Measured]:
        """See `Known`."""
        if (disk := self._kernel._on_disk) is not None and self.problem is not None:
            with self._kernel.quietly():
                kept = disk.times(self.problem)
                for config, value in self._kernel.values(configs).items():
                    if config not in self._here and value in kept:
                        self._here[config] = Measured.of(kept[value])
        return {config: self._here[config] for config in configs if config in self._here}

    def record(self, config: triton.Config, measured: Measured, error: Exception | None = None) -> None:
        """See `Known`; it is on the disk when this returns. Only failures that last are kept there."""
        kernel, problem, time_us = self._kernel, self.problem, measured.time_us
        self._here[config] = measured
        value = kernel.values([config]).get(config)
        if problem is None or value is None:
            return
        is_measured = measures(kernel.tuner)
        with kernel.quietly():
            if is_measured and kernel._on_disk is not None and (error is None or is_lasting(error)):
                kernel._on_disk.record(problem, value, time_us)
            kernel.shortlister.learn(problem, {value: time_us})
        if is_measured:
            kernel.log(problem, config, time_us)

    def agree(
        self, configs: Sequence[triton.Config], times_us: Times | Callable[[], Times]
    ) -> tuple[triton.Config | None, float]:
        """Return the config that is fastest on the rank where it is slowest, and its time there.

        Returns:
            None and inf where no config works, or the ranks do not agree.
        """
        words = [{"": str(config)} for config in configs]
        shared = agreed(times_us, self._kernel.name, self.problem or self._key, words)
        timed = [(time_us, at) for at, time_us in enumerate(shared) if time_us is not None]
        if self.problem is not None and timed and choose_together():
            known = {value: shared[configs.index(config)] for config, value in self._kernel.values(configs).items()}
            with self._kernel.quietly():
                self._kernel.shortlister.learn(self.problem, known, scope())
        time_us, at = min(timed, default=(math.inf, None))
        return None if at is None else configs[at], time_us

    def choose(
        self,
        config: triton.Config,
        keys: Iterable[Sequence[Any]],
        arguments: Mapping[str, Any],
        *,
        is_pruned: bool,
        bundle: str | None = None,
    ) -> None:
        """Keep what was chosen, for `foretune cache freeze`, a warm-up and whoever else reads it.

        Args:
            config: What was chosen.
            keys: Triton's keys of launches that it was chosen for.
            arguments: Those of such a launch.
            is_pruned: Whether the kernel prunes its configs itself: what another launch of this problem may run, this
                one may not.
            bundle: The digest of what predicted, "" for none. Left out, the shortlister's.
        """
        kernel, problem, tuner = self._kernel, self.problem, self._kernel.tuner
        value = kernel.values([config]).get(config)
        if kernel._on_disk is None or problem is None or value is None or not measures(tuner):
            return
        with kernel.quietly():
            kernel._on_disk.choose(problem, kernel.shortlister.bundle if bundle is None else bundle, value)
            names = [name for name in tuner.keys if name in arguments]
            for key in keys:
                own = value if is_pruned else None
                kernel._on_disk.saw_launch(problem, names, key, kept_arguments(arguments), own)


def values_of(configs: Sequence[triton.Config]) -> dict[triton.Config, KernelConfig]:
    """Return the value of each config that can be told by it: not of one that has no value, nor of configs that differ
    only in their `pre_hook`."""
    found: dict[triton.Config, KernelConfig] = {}
    for config in configs:
        with suppress(ForetuneError):
            found[config] = KernelConfig.from_triton(config)
    shared = Counter(found.values())
    return {config: value for config, value in found.items() if shared[value] == 1}


def is_lasting(error: Exception) -> bool:
    """Return whether a config that failed with this error will fail again: the compiler or the device refuses it.

    Out of memory, or a missing argument, says nothing of the config.
    """
    from triton.errors import TritonError

    from .isolation import CrashError

    return isinstance(error, (TritonError, CrashError))
