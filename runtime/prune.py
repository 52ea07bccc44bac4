"""`Pruner`: the prune callback that gives `triton.autotune` a shortlist instead of the whole space."""

from __future__ import annotations

import operator
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from ..datasets import DeviceSpec, Dtype, Family, ForetuneError, KernelConfig, Problem, not_empty
from ..datasets.errors import reason_of, shown
from .arguments import Mode, OwnKnobs, family_of, resolve_mode, warn_once
from .how_many import TRIAL_S, HowMany, Length
from .launching.stub_driver import device_here
from .shortlist import bundle_of, chooser_of, supported
from .timing.flywheel import expect

if TYPE_CHECKING:
    from pathlib import Path

    import triton

    from ..model import Bundle

# Where `torch.compile` traces a launch, Dynamo runs the prune callback, and makes of what it lets through an autotuner
# of its own, which is tuned once for each graph (torch 2.13: `TritonHOPifier.call_triton_kernel`). That one has lost
# the key (pytorch#164124), so that a graph of dynamic shapes would run one config for all of them; and, since configs
# were pruned, `reset_to_zero` and `restore_value`, so that tuning a kernel that needs them would change its results.

#: The first torch known to take a `triton.Config` for a constant, as a prediction in a trace needs it; the Dynamo of
#: 2.11 stops with an error.
CAN_ASK_SINCE = (2, 13)


@cache
def torch_release() -> tuple[int, ...]:
    """The first two numbers of the installed torch's version, without importing it; none where there is none."""
    try:
        return tuple(map(int, re.findall(r"\d+", version("torch"))[:2]))
    except PackageNotFoundError:
        return ()


def is_traced() -> bool:
    """Return whether Dynamo traces the caller. (It takes the answer for a constant.)"""
    torch: Any = sys.modules.get("torch")
    return torch is not None and bool(torch.compiler.is_compiling())


def leave_launches_to_triton() -> None:
    """Has Dynamo look into no launch that it has left outside of its graphs. To be called before a graph may break.

    Else it traces what Triton does there: 2.11 stops with an error ("Can't construct an AttrSource"), and 2.13 takes
    seconds to trace the tuning, and traces it again for every shape.
    """
    with suppress(ImportError, AttributeError):  # all of it is private; 2.11 and 2.13 have it
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
        from triton.runtime.jit import KernelInterface

        launch = KernelInterface.__getitem__(None, None)  # a function that runs whatever kernel it was asked of
        set_code_exec_strategy(launch.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))


# For Dynamo to call it, and take its answer as a constant (see `TracedPositions`).
leave_launches_to_triton.__dict__["_dynamo_marked_constant"] = True


def break_graph() -> None:
    """Ends Dynamo's graph before the launch that is traced: that runs outside of it, and is pruned and tuned as ever.
    Outside of a trace it does nothing."""
    import torch._dynamo

    torch._dynamo.graph_break()


def may_tune_what_is_traced() -> bool:
    """Whether several configs may be let through: unless Dynamo makes an autotuner anew of one whose tensors are reset
    or restored, or one that cannot be told. To be asked in what Dynamo does not trace but calls."""
    guards: Any = sys.modules.get("torch._guards")
    if guards is None or guards.TracingContext.try_get() is None:
        return True
    autotuner = None
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        name = frame.f_code.co_name
        if name == "prune_configs" and autotuner is None:
            return True  # Triton's own, in a launch that is not traced: only our callback is
        if name == "call_triton_kernel":  # the outermost, because it calls itself with what it has made
            autotuner = getattr(frame.f_locals.get("variable"), "kernel", None)
    return autotuner is not None and not (autotuner.reset_to_zero or autotuner.restore_value)


class TracedPositions:
    """A prune callback's choice of positions, which Dynamo calls where it traces a launch, instead of tracing it.

    It cannot trace a prediction, so it is told to take the answer as a constant. For that a problem is handed over as
    plain values and the configs one by one. This is all that `torch.compiler.assume_constant_result` does, and torch
    must not be imported for it.
    """

    def positions_of(self, problem: Problem, configs: Sequence[triton.Config]) -> tuple[int, ...]:
        """Return which configs go through; none where the launch must not be traced."""
        return self._as_constant(problem.family, problem.dims, problem.dtype, problem.flags, *configs)

    def _as_constant(
        self,
        family: str,
        dims: tuple[tuple[str, int], ...],
        dtype: Dtype,
        flags: tuple[str, ...],
        *configs: triton.Config,
    ) -> tuple[int, ...]:
        return self.let_through(Problem(family, dims, dtype, flags), configs)

    _as_constant.__dict__["_dynamo_marked_constant"] = True

    def let_through(self, problem: Problem, configs: tuple[triton.Config, ...]) -> tuple[int, ...]:
        """Return what `positions_of` does. Never raises."""
        raise NotImplementedError


#: Lists of configs whose values are kept: a pruner serves one kernel, or a few.
_MOST_LISTS = 8


class Pruner(TracedPositions):
    """Picks the configs worth measuring for a launch: `triton.autotune(prune_configs_by={"early_config_prune": ...})`.

    The arguments are those of `foretune.prune`; `trial_s` is as for `make_shortlist`.

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
        if positions := self.positions_of(problem, configs):
            return [configs[position] for position in positions]
        break_graph()
        return list(configs)

    def let_through(self, problem: Problem, configs: tuple[triton.Config, ...]) -> tuple[int, ...]:
        """Return the shortlist's positions, as what the launching autotuner will time is logged."""
        one_alone = not may_tune_what_is_traced()
        try:
            device, (usable, values) = self.device or device_here(), self._usable(configs)
            kept = self._kept(problem, device, values, one_alone)
            positions = tuple(usable[place] for place in kept)
            left = [configs[position] for position in positions]
            expect(self.family, problem, device, left, [values[place] for place in kept], timed=self.timed)
        except Exception as error:  # noqa: BLE001 - no trouble of ours stops a launch
            self._say_no_prediction(error, len(configs))
            positions = tuple(range(len(configs)))
        return () if one_alone and len(positions) > 1 else positions

    def _say_no_prediction(self, error: Exception, n_configs: int) -> None:
        warn_once(f"{self.family.name}: no prediction ({reason_of(error)})", f": all {n_configs} configs go through")

    def positions(self, problem: Problem, configs: tuple[triton.Config, ...]) -> tuple[int, ...]:
        """Return which configs go through for a problem, fastest first; the caller logs what it measures.

        Raises `ForetuneError` where none of the configs is the family's, and whatever the family raises.
        """
        usable, values = self._usable(configs)
        return tuple(usable[place] for place in self._kept(problem, self.device or device_here(), values))

    def _kept(
        self, problem: Problem, device: DeviceSpec, values: tuple[KernelConfig, ...], one_alone: bool = False
    ) -> tuple[int, ...]:
        """Return the places of the values that go through, fastest first, or of the fastest alone."""
        wanted = resolve_mode()
        if wanted is Mode.OFF:
            return supported(self.family, problem, device, values)
        chooser = chooser_of(self.family, device, values, self.bundle)
        k = HowMany(1) if one_alone or wanted is Mode.PREDICT else self.k
        return chooser.choose_or_warn(not_empty(self.family, problem), k).positions

    def _usable(self, configs: tuple[triton.Config, ...]) -> tuple[tuple[int, ...], tuple[KernelConfig, ...]]:
        """`OwnKnobs.usable`. An autotuner passes the same list at every call, and some share a pruner, so the last few
        are remembered: converting a thousand configs takes 10 ms, comparing identities 14 us."""
        for known, usable, values in self._lists:
            if len(known) == len(configs) and all(map(operator.is_, known, configs)):
                return usable, values
        usable, values = self.own_knobs.usable(configs)
        self._lists = [(configs, usable, values), *self._lists[: _MOST_LISTS - 1]]
        return usable, values
