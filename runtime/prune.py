"""`Pruner`: the prune callback that gives `triton.autotune` a shortlist instead of the whole space."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ..datasets import DeviceSpec, Dtype, Family, ForetuneError, KernelConfig, Problem
from .mode import Mode, resolve_mode
from .shortlist import make_shortlist, supported
from .warn import warn_once

if TYPE_CHECKING:
    import triton

    from ..model import Bundle


class Pruner:
    """Picks the configs worth measuring for a launch: `triton.autotune(prune_configs_by={"early_config_prune": ...})`.

    `problem` turns a launch's arguments, by parameter name, into a `Problem`; left out, the family does. `device` is
    what the configs are chosen for (the current device if left out) and `bundle` what predicts (the shipped one).

    Hands back the autotuner's own `Config` objects, fastest first; never none of them, never a changed one, and
    never an exception: whatever is wrong, all supported configs go through with one warning that says why.

    In a function under `torch.compile`, static shapes are traced whole (also with `fullgraph=True`). Dynamic ones
    cannot be: there the graph breaks at the launch, which then runs, and is pruned, outside it (torch 2.13).

    Raises `ForetuneError` for `k` < 1 and for a FORETUNE_MODE that does not exist.

    >>> from types import SimpleNamespace as Toy
    >>> Pruner(Toy(name="toy", problem_from_call=None), k=4)
    <Pruner of toy, k=4>
    """

    def __init__(
        self,
        family: Family,
        k: int = 8,
        *,
        problem: Callable[[Mapping[str, Any]], Problem] | None = None,
        device: DeviceSpec | None = None,
        bundle: Bundle | None = None,
    ) -> None:
        if k < 1:
            raise ForetuneError(f"k must be >= 1 but got {k}")
        resolve_mode()  # a value that does not exist is refused here, where the kernel is declared, not in a launch
        self.family, self.k, self.device, self.bundle = family, k, device, bundle
        self.problem = problem or family.problem_from_call
        self._known: tuple[tuple[triton.Config, ...], tuple[KernelConfig, ...]] = ((), ())

    def __repr__(self) -> str:
        return f"<Pruner of {self.family.name}, k={self.k}>"

    def __call__(
        self, configs: Sequence[triton.Config], named_args: Mapping[str, Any], /, **kwargs: Any
    ) -> list[triton.Config]:
        """The shortlist of a launch. Positional arguments come in `named_args` and keyword arguments in `kwargs`,
        along with `grid` and `warmup`. (The two parameters are positional only, so that a kernel can have
        arguments of these names.)"""
        try:
            problem = self.problem({**named_args, **kwargs})
            positions = self._positions(problem.family, problem.dims, problem.dtype, problem.flags, *configs)
            return [configs[position] for position in positions]
        except Exception as error:  # noqa: BLE001 - no trouble of ours stops a launch
            why = str(error) if isinstance(error, ForetuneError) else f"{type(error).__name__}: {error}"
            warn_once(f"{self.family.name}: no prediction, so every config goes through ({why})")
            return list(configs)

    def _positions(
        self,
        family: str,
        dims: tuple[tuple[str, int], ...],
        dtype: Dtype,
        flags: tuple[str, ...],
        *configs: triton.Config,
    ) -> tuple[int, ...]:
        """Which configs go through. It takes plain values and the configs one by one, because so Dynamo can call it."""
        problem, device = Problem(family, dims, dtype, flags), self.device or _live(_current_device())
        values, wanted = self._values(configs), resolve_mode()
        if wanted is Mode.OFF:
            return supported(self.family, problem, device, values)
        k = 1 if wanted is Mode.PREDICT else self.k
        return make_shortlist(self.family, problem, device, k=k, configs=values, bundle=self.bundle).positions

    # When a torch.compile'd function calls the kernel, Dynamo traces `__call__`. It cannot trace a prediction, so it
    # is told to call `_positions` and take the answer as a constant. This is all that
    # `torch.compiler.assume_constant_result` does, and torch must not be imported for it.
    _positions.__dict__["_dynamo_marked_constant"] = True

    def _values(self, configs: tuple[triton.Config, ...]) -> tuple[KernelConfig, ...]:
        """The configs as values. An autotuner passes the same list at every call, so the last one is remembered:
        converting a thousand takes milliseconds, comparing identities microseconds."""
        known, values = self._known
        if len(known) != len(configs) or not all(map(operator.is_, known, configs)):
            values = tuple(KernelConfig.from_triton(config) for config in configs)
            self._known = (configs, values)
        return values


def _current_device() -> int | None:
    try:
        import torch
    except ImportError:
        return None  # `DeviceSpec.live` says what is missing
    return torch.cuda.current_device() if torch.cuda.is_available() else None


@lru_cache
def _live(index: int | None) -> DeviceSpec:
    return DeviceSpec.live(index)
