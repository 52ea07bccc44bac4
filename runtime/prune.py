"""`Pruner`: the prune callback that gives `triton.autotune` a shortlist instead of the whole space."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..datasets import DeviceSpec, Dtype, Family, ForetuneError, KernelConfig, Problem, not_empty
from ..datasets.errors import reason_of, shown
from .arguments import bundle_of, family_of
from .how_many import TRIAL_S, HowMany, Length
from .launching.stub_driver import device_here
from .mode import Mode, resolve_mode
from .own_knobs import OwnKnobs
from .shortlist import make_shortlist, supported
from .timing.flywheel import expect
from .traced import (
    CAN_ASK_SINCE,
    break_graph,
    is_traced,
    leave_launches_to_triton,
    may_tune_what_is_traced,
    torch_release,
)
from .warn import warn_once

if TYPE_CHECKING:
    from pathlib import Path

    import triton

    from ..model import Bundle


#: Lists of configs whose values are kept: a pruner serves one kernel, or a few.
_MOST_LISTS = 8


class Pruner:
    """Picks the configs worth measuring for a launch: `triton.autotune(prune_configs_by={"early_config_prune": ...})`.

    `problem` turns a launch's arguments, by parameter name, into a `Problem`; left out, the family does. For a kernel
    of its own words, `knobs` says what the family calls its knobs, and `fixed` what counts for those that it lacks:
    `knobs={"BM": "BLOCK_M"}, fixed={"GROUP_M": 1}`. `configs`, the autotuner's, are checked and no more, so that a
    mistake shows where the kernel is declared. `device` is what the configs are chosen for (a spec, the name of a
    shipped one, or a spec's JSON file; the current device if left out) and `bundle` what predicts, or its folder
    (the shipped one if left out). `k` and what goes with it are as for `make_shortlist`.

    Hands back the autotuner's own `Config` objects, fastest first; never none of them, never a changed one, and
    never an exception: whatever is wrong, all supported configs go through with one warning that says why.

    In a function under `torch.compile`, static shapes are traced whole (also with `fullgraph=True`), with the best
    predicted config alone where the autotuner resets or restores tensors, which compiled code does not. The graph
    breaks at the launch, which then runs and is pruned outside it, for dynamic shapes, where such a kernel has no
    prediction, and before torch 2.13.

    Raises `ForetuneError` for `k` < 1, for what is no device or bundle, for knobs that the family has not, for configs
    that are not the family's, and for a FORETUNE_MODE that does not exist.

    >>> class Toy(Family):
    ...     name, dims, dtypes, knobs = "toy", ("rows",), ("bf16",), ("BLOCK", "num_warps", "num_stages")
    ...     space = supports = features = problem_from_call = None
    >>> Pruner(Toy(), k=4, knobs={"B": "BLOCK"})
    <Pruner of toy, k=4>
    """

    def __init__(
        self,
        family: Family,
        k: Length = "auto",
        *,
        problem: Callable[[Mapping[str, Any]], Problem] | None = None,
        knobs: Mapping[str, str] | None = None,
        fixed: Mapping[str, Any] | None = None,
        configs: Sequence[triton.Config] | None = None,
        device: DeviceSpec | Path | str | None = None,
        bundle: Bundle | Path | str | None = None,
        expected_calls: float | None = None,
        call_us: float | None = None,
        trial_s: float = TRIAL_S,
    ) -> None:
        self.family, self.k = family_of(family), HowMany.of(family, k, expected_calls, call_us, trial_s)
        if problem is not None and not callable(problem):
            raise ForetuneError(f"problem must be a function of a launch's arguments but is {shown(problem)}")
        resolve_mode()  # a value that does not exist is refused here, where the kernel is declared, not in a launch
        self.problem = problem or family.problem_from_call
        self.device = None if device is None else DeviceSpec.find(device)
        self.bundle = bundle_of(bundle)
        #: How what it leaves is timed, in the words of logs: by Triton, unless who made it knows better.
        self.timed = "autotuner"
        self.own_knobs = OwnKnobs(family, knobs, fixed)
        if configs is not None:
            self.own_knobs.check(configs)
        self._can_ask = torch_release() >= CAN_ASK_SINCE
        # Configs, the positions of those that are the family's, and those as values.
        self._lists: list[tuple[tuple[triton.Config, ...], tuple[int, ...], tuple[KernelConfig, ...]]] = []

    def __repr__(self) -> str:
        return f"<Pruner of {self.family.name}, k={self.k.k}>"

    def __call__(
        self, configs: Sequence[triton.Config], named_args: Mapping[str, Any], /, **kwargs: Any
    ) -> list[triton.Config]:
        """The shortlist of a launch. Positional arguments come in `named_args` and keyword arguments in `kwargs`,
        along with `grid` and `warmup`. (The two parameters are positional only, so that a kernel can have
        arguments of these names.)"""
        if is_traced():
            leave_launches_to_triton()
            if not self._can_ask:
                break_graph()
        try:
            problem = self.problem({**named_args, **kwargs})
            if not isinstance(problem, Problem):
                raise ForetuneError(f"the launch must be made a Problem but was made {shown(problem)}")
        except Exception as error:  # noqa: BLE001 - no trouble of ours stops a launch
            self._say_no_prediction(error, len(configs))
            return list(configs)
        if positions := self._positions(problem.family, problem.dims, problem.dtype, problem.flags, *configs):
            return [configs[position] for position in positions]
        break_graph()
        return list(configs)

    def _positions(
        self,
        family: str,
        dims: tuple[tuple[str, int], ...],
        dtype: Dtype,
        flags: tuple[str, ...],
        *configs: triton.Config,
    ) -> tuple[int, ...]:
        """Which configs go through; none where the launch must not be traced. It takes plain values and the configs one
        by one, because so Dynamo can call it."""
        one_alone = not may_tune_what_is_traced()
        try:
            problem = Problem(family, dims, dtype, flags)
            kept = self.positions(problem, configs, one_alone)
            values, device = dict(zip(*self._usable(configs), strict=True)), self.device or device_here()
            left = [configs[at] for at in kept]
            expect(self.family, problem, device, left, [values[at] for at in kept], timed=self.timed)
        except Exception as error:  # noqa: BLE001 - no trouble of ours stops a launch
            self._say_no_prediction(error, len(configs))
            kept = tuple(range(len(configs)))
        return () if one_alone and len(kept) > 1 else kept

    # When a torch.compile'd function calls the kernel, Dynamo traces `__call__`. It cannot trace a prediction, so it
    # is told to call `_positions` and take the answer as a constant. This is all that
    # `torch.compiler.assume_constant_result` does, and torch must not be imported for it.
    _positions.__dict__["_dynamo_marked_constant"] = True

    def _say_no_prediction(self, error: Exception, n_configs: int) -> None:
        warn_once(f"{self.family.name}: no prediction ({reason_of(error)})", f": all {n_configs} configs go through")

    def positions(
        self, problem: Problem, configs: tuple[triton.Config, ...], one_alone: bool = False
    ) -> tuple[int, ...]:
        """Which configs go through for a problem, fastest first, or the fastest alone; whoever asks logs what it
        measures. Raises `ForetuneError` where none is the family's, and whatever the family raises."""
        device, (usable, values), wanted = self.device or device_here(), self._usable(configs), resolve_mode()
        if wanted is Mode.OFF:
            kept = supported(self.family, problem, device, values)
        else:
            k = HowMany(1) if one_alone or wanted is Mode.PREDICT else self.k
            kept = make_shortlist(
                self.family,
                not_empty(self.family, problem),
                device,
                k=k.k,
                expected_calls=k.expected_calls,
                call_us=k.call_us,
                trial_s=k.trial_s,
                configs=values,
                bundle=self.bundle,
            ).positions
        return tuple(usable[position] for position in kept)

    def _usable(self, configs: tuple[triton.Config, ...]) -> tuple[tuple[int, ...], tuple[KernelConfig, ...]]:
        """`OwnKnobs.usable`. An autotuner passes the same list at every call, and some share a pruner, so the last few
        are remembered: converting a thousand configs takes milliseconds, comparing identities microseconds."""
        for known, usable, values in self._lists:
            if len(known) == len(configs) and all(map(operator.is_, known, configs)):
                return usable, values
        usable, values = self.own_knobs.usable(configs)
        self._lists = [(configs, usable, values), *self._lists[: _MOST_LISTS - 1]]
        return usable, values
