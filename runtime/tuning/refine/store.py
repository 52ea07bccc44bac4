"""`Store`: keep what a refinement finds out."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cached_property
from typing import Generic, TypeVar

from ....datasets import DeviceSpec, KernelConfig, Problem
from ..cache.kernel_cache import ChoiceCache
from ..cache.refined import Refined, RefinedTime, is_sound

C = TypeVar("C", bound=Hashable)


class Store(Generic[C]):
    """The results of one problem in the choice cache and in the log of FORETUNE_LOG.

    Args:
        kernel: The kernel's name in the choice cache.
        source_hash: Returns the hash of the kernel's source.
        problem: The problem that represents the calls.
        device: The device.
        values: The `KernelConfig` of each candidate; candidates without one are not stored.
        log: Logs the mean time of a candidate in microseconds; called at the decision.
        bundle: Returns the digest of the bundle that predicted, "" for none.
    """

    def __init__(
        self,
        kernel: str,
        source_hash: Callable[[], str],
        problem: Problem,
        device: DeviceSpec,
        values: dict[C, KernelConfig],
        log: Callable[[C, float], object],
        bundle: Callable[[], str],
    ) -> None:
        self._kernel, self._source_hash, self._problem, self._device = kernel, source_hash, problem, device
        self._values, self._log, self._bundle = values, log, bundle

    def load(self) -> Refined | None:
        """Return what earlier processes stored."""
        return self._cache.refined(self._problem)

    def save(self, times: dict[C, RefinedTime], decided: C | None) -> None:
        """Store the results so far: times by candidate, and the chosen one, None before the decision.

        At the decision the mean times are logged, too.
        """
        kept = {self._values[one]: time for one, time in times.items() if one in self._values}
        chosen = None if decided is None else self._values.get(decided)
        self._cache.refine(self._problem, Refined(kept, chosen), self._bundle())
        for one, time in times.items() if decided is not None else ():
            if is_sound(time):
                self._log(one, time.mean_us)

    def value(self, candidate: C) -> KernelConfig | None:
        """Return a candidate's `KernelConfig`; None if it cannot be stored."""
        return self._values.get(candidate)

    @cached_property
    def _cache(self) -> ChoiceCache:
        """The choice cache, found once: to hash a large source takes 50 ms of Python, and other threads wait for it."""
        return ChoiceCache.of(self._kernel, self._source_hash(), self._device)
