"""`Pruner`: the prune callback that gives `triton.autotune` a shortlist instead of the whole space."""

from __future__ import annotations

import logging
import operator
import re
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, version
from traceback import walk_stack
from typing import TYPE_CHECKING, Any

from ..datasets import DeviceSpec, Dtype, Family, ForetuneError, KernelConfig, Problem, not_empty
from ..datasets.errors import did_you_mean, reason_of, shown
from .arguments import Mode, OwnKnobs, family_of, resolve_mode, warn_once
from .how_many import TRIAL_S, HowMany, Length, narrowing
from .launching.kernel import Kernel
from .launching.stub_driver import device_here
from .pins import are_in_force, is_covered, pinned_config
from .same_bits import keeping_class_of, unrestricted, why_none_kept
from .shortlist import Chooser, Shortlist, bundle_of, chooser_of, supported
from .timing.flywheel import expect, launching_autotuner
from .triton_declaration import outside_ranges

if TYPE_CHECKING:
    from pathlib import Path

    import triton

    from ..model import Bundle

# When `torch.compile` traces a launch, Dynamo runs the prune callback and creates a new autotuner from the configs that
# it returns; that one is tuned once for each graph (torch 2.13: `TritonHOPifier.call_triton_kernel`). It does not have
# the `key` (pytorch#164124), so a graph of dynamic shapes would run one config for all of them. If configs were pruned,
# it does not have `reset_to_zero` and `restore_value` either, so tuning a kernel that needs them would change its
# results.

#: The first torch release whose Dynamo accepts a `triton.Config` as a constant, which a prediction in a trace needs;
#: the Dynamo of 2.11 stops with an error.
CAN_ASK_SINCE = (2, 13)

_log = logging.getLogger(__name__)


@cache
def torch_release() -> tuple[int, ...]:
    """Return the first two numbers of the installed torch's version, without importing it; () without torch."""
    try:
        return tuple(map(int, re.findall(r"\d+", version("torch"))[:2]))
    except PackageNotFoundError:
        return ()


def is_traced() -> bool:
    """Return whether `torch.compile` (Dynamo) is tracing the caller; Dynamo treats the result as a constant."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and bool(torch.compiler.is_compiling())


def leave_launches_to_triton() -> None:
    """Stop Dynamo from tracing Triton's own code at launches outside of its graphs. Call this before a graph may break.

    Otherwise torch 2.11 stops with an error ("Can't construct an AttrSource"), and torch 2.13 takes seconds to trace
    the tuning, again for every shape.
    """
    with suppress(ImportError, AttributeError):  # private functions of torch, which 2.11 and 2.13 have
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
        from triton.runtime.jit import KernelInterface

        launch = KernelInterface.__getitem__(None, None)  # the function that runs every launch
        set_code_exec_strategy(launch.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))


# Makes Dynamo call the function instead of tracing it (see `TracedPositions`).
leave_launches_to_triton.__dict__["_dynamo_marked_constant"] = True


def break_graph() -> None:
    """End Dynamo's graph before the traced launch, which is then pruned, tuned and run outside of the graph.

    Does nothing if Dynamo is not tracing.
    """
    import torch._dynamo

    torch._dynamo.graph_break()


def may_tune_what_is_traced() -> bool:
    """Return whether a launch that is being traced may be given several configs to tune.

    It may not if the autotuner resets or restores tensors, because the autotuner that Dynamo puts in its place does
    not, or if the autotuner cannot be found on the stack. Only valid in functions that Dynamo calls instead of tracing.
    """
    guards: Any = sys.modules.get("torch._guards")
    if guards is None or guards.TracingContext.try_get() is None:
        return True
    autotuner = None
    for frame, _ in walk_stack(sys._getframe(1)):
        name = frame.f_code.co_name
        if name == "prune_configs" and autotuner is None:
            return True  # Triton's own pruning of an untraced launch; Dynamo traces only our callback
        if name == "call_triton_kernel":  # the outermost: it calls itself with the new autotuner
            autotuner = getattr(frame.f_locals.get("variable"), "kernel", None)
    return autotuner is not None and not (autotuner.reset_to_zero or autotuner.restore_value)


def _kernel_of_launch() -> Kernel | None:
    """Return the kernel of the autotuner that is pruning now, or whose launch Dynamo traces; None if there is none."""
    if (tuner := launching_autotuner()) is None:
        for frame, _ in walk_stack(sys._getframe(1)):
            if frame.f_code.co_name == "call_triton_kernel":
                tuner = getattr(frame.f_locals.get("variable"), "kernel", None)
    return None if tuner is None else _kernel(tuner)


@lru_cache(maxsize=256)
def _kernel(tuner: Any) -> Kernel:
    """Return the `Kernel` of an autotuner, the same object each time: `pinned_config` remembers hashes by it."""
    return Kernel(tuner)


class TracedPositions:
    """Base class of prune callbacks that choose configs inside of a function that Dynamo traces.

    Dynamo cannot trace a prediction, so `_as_constant` is marked as a method that Dynamo calls, and whose result it
    treats as a constant, as `torch.compiler.assume_constant_result` does, but without importing torch. Dynamo accepts
    only plain values as arguments, so the problem is passed field by field and the configs one by one.
    """

    def positions_of(self, problem: Problem, configs: Sequence[triton.Config]) -> tuple[int, ...]:
        """Return the positions in `configs` of the configs that the prune keeps; () if Dynamo must break the graph."""
        return self._as_constant(problem.family, problem.dims, problem.dtype, problem.flags, *configs)

    def _as_constant(
        self,
        family: str,
        dims: tuple[tuple[str, int], ...],
        dtype: Dtype,
        flags: tuple[str, ...],
        *configs: triton.Config,
    ) -> tuple[int, ...]:
        """Return the result of `positions_of`, given the problem's fields; Dynamo treats the result as a constant."""
        return self.let_through(Problem(family, dims, dtype, flags), configs)

    _as_constant.__dict__["_dynamo_marked_constant"] = True

    def let_through(self, problem: Problem, configs: tuple[triton.Config, ...]) -> tuple[int, ...]:
        """Return the positions in `configs` of the configs that the prune keeps, or () if Dynamo must break the graph.

        Subclasses implement the choice here. Only errors about a pin file may leave this method.
        """
        raise NotImplementedError


def in_full(own: Any) -> Any:
    """Return a kernel's own prune callback `own`; None if it is a `Pruner` while a pin file is in force.

    Without the callback all configs stay, because the file's config need not be on the pruner's shortlist.
    """
    return None if isinstance(own, Pruner) and are_in_force() else own


def warn_if_not_restored(family: Family, tuner: Any) -> None:
    """Warn once if an autotuner does not restore the tensors that its kernel updates, which `family.in_place` names.

    Nothing is warned of if the autotuner has one config, which is not timed, or a `pre_hook`, which may restore them.
    """
    restored = {*tuner.restore_value, *tuner.reset_to_zero}
    names = [name for name in getattr(family, "in_place", ()) if name in tuner.arg_names and name not in restored]
    if names and len(tuner.configs) > 1 and not tuner.user_defined_pre_hook:
        what = f"{family.name}: its kernel updates {', '.join(names)} in place, and its autotuner does not restore that"
        warn_once(what, f": tuning applies the kernel several times; pass restore_value={names} to the autotuner")


#: The most lists of configs of which a pruner keeps the values. A pruner serves one kernel, or a few.
_MOST_LISTS = 8
#: The most lines that a pruner remembers as logged. A full memo is emptied, and they are logged again.
_MOST_LOGGED = 4096


class Pruner(TracedPositions):
    """Picks the configs worth measuring for a launch: `triton.autotune(prune_configs_by={"early_config_prune": ...})`.

    `foretune.prune` documents the arguments and returns such a pruner for a family that may also be given by name;
    `trial_s` is as for `make_shortlist`.

    The callback returns the autotuner's own `Config` objects, best first. The list is never empty, no config is
    changed, and no exception leaves the callback: if anything fails, all supported configs are kept, with one warning
    that says why. While a pin file is in force, its config alone is kept, and a launch that it does not cover
    raises a `PinError`. Each problem's first prune is logged at INFO level ("... 1254 configs, 1155 usable -> 8").

    In a function under `torch.compile`, launches with static shapes stay in the graph (also with `fullgraph=True`). If
    the autotuner resets or restores tensors, which compiled code does not, only the config predicted to be fastest is
    kept. The graph breaks at the launch, which then runs and is pruned outside of it, for dynamic shapes, for a
    kernel with reset or restored tensors that has no prediction, and before torch 2.13.

    Raises:
        ForetuneError: `k` < 1, an invalid device or bundle, a bundle without the family, knobs that the family does not
            have, configs that are not the family's, or an invalid FORETUNE_MODE.

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
        resolve_mode()  # refuses an invalid FORETUNE_MODE where the kernel is declared, not in a launch
        self.problem = problem or family.problem_from_call
        self.device = None if device is None else DeviceSpec.find(device)
        self.bundle = bundle_of(bundle)
        if self.bundle is not None:
            self.bundle.trained_on(self.family.name)  # refuses a bundle without the family
        #: How the kept configs are timed, as logs call it: by Triton, unless the pruner's owner sets another value.
        self.timed = "autotuner"
        #: Whether a pin file's choices for the family apply. An attached kernel has choices of its own there.
        self.is_pinnable = True
        #: The mode that overrides FORETUNE_MODE.
        self.mode: str | None = None
        self.own_knobs = OwnKnobs(family, knobs, fixed)
        if configs is not None:
            self.own_knobs.check(configs)
        self._can_ask = torch_release() >= CAN_ASK_SINCE
        # Configs, the positions of those that belong to the family, and these as values.
        self._lists: list[tuple[tuple[triton.Config, ...], tuple[int, ...], tuple[KernelConfig, ...]]] = []
        self._logged: set[Hashable] = set()

    def __repr__(self) -> str:
        return f"<Pruner of {self.family.name}, k={self.k.k}>"

    def __call__(
        self, configs: Sequence[triton.Config], named_args: Mapping[str, Any], /, **kwargs: Any
    ) -> list[triton.Config]:
        """Return the shortlist of a launch.

        Triton passes the launch's positional arguments in `named_args`, and its keyword arguments, `grid` and `warmup`
        in `kwargs`. `configs` and `named_args` are positional only, so that a kernel can have arguments of these names.
        """
        if is_traced():
            leave_launches_to_triton()
            if not self._can_ask:
                break_graph()
        try:
            problem = self.problem({**named_args, **kwargs})
            if not isinstance(problem, Problem):
                raise ForetuneError(f"the launch's problem must be a Problem but is {shown(problem)}")
        except Exception as error:  # noqa: BLE001 - a failed prediction never stops a launch
            self._pinned(None, configs)
            names = (*named_args, *kwargs) if isinstance(named_args, Mapping) else ()
            self._warn_no_prediction(error, len(configs), names)
            return list(configs)
        if positions := self.positions_of(problem, configs):
            return [configs[position] for position in positions]
        break_graph()
        return list(configs)

    def let_through(self, problem: Problem, configs: tuple[triton.Config, ...]) -> tuple[int, ...]:
        """Return the positions of the kept configs, best first, or () if Dynamo must break the graph.

        The kept configs are announced to the log of FORETUNE_LOG, which will record the times that the autotuner
        measures.

        Raises:
            PinError: The pin file in force does not cover the launch.
        """
        if (pinned := self._pinned(problem, configs)) is not None:
            return (pinned,)
        one_alone = not may_tune_what_is_traced()
        if (tuner := launching_autotuner()) is not None:
            warn_if_not_restored(self.family, tuner)
        try:
            device, (usable, values) = self.device or device_here(), self._usable(configs)
            kept = self._kept(problem, device, values, one_alone)
            positions = tuple(usable[place] for place in kept)
            left = [configs[position] for position in positions]
            expect(self.family, problem, device, left, [values[place] for place in kept], timed=self.timed)
        except Exception as error:  # noqa: BLE001 - a failed prediction never stops a launch
            self._warn_no_prediction(error, len(configs))
            positions = tuple(range(len(configs)))
        return () if one_alone and len(positions) > 1 else positions

    def _pinned(self, problem: Problem | None, configs: Sequence[triton.Config]) -> int | None:
        """Return the position in `configs` of the config that the pin file has for a launch.

        Returns None without a pin file, and for an uncovered launch if uncovered launches are to be predicted.

        Raises:
            PinError: The file does not cover the launch.
        """
        if not (self.is_pinnable and are_in_force()):
            return None
        family, device, kernel = self.family, self.device or device_here(), _kernel_of_launch()
        values: dict[int, KernelConfig] = {}
        with suppress(ForetuneError):  # none of the configs is the family's
            values = dict(zip(*self._usable(tuple(configs)), strict=True))
        name, source = family.name, getattr(family, "source_hash", None)
        position_of = {value: at for at, value in values.items()}
        if kernel is not None and is_covered(kernel.name):
            name, source = kernel.name, kernel.tuned_hash
            position_of = {KernelConfig.from_triton(configs[at]): at for at in values}

        def reason(config: KernelConfig) -> str | None:
            if config not in position_of:
                return f"it is not among the {len(configs)} configs of the launch"
            return None if problem is None else family.supports(values[position_of[config]], problem, device)

        near = None if problem is None else family.at_call_time(not_empty(family, problem))
        config = pinned_config(name, source, device, near, reason)
        return None if config is None else position_of[config]

    def _warn_no_prediction(self, error: Exception, n_configs: int, arguments: tuple[str, ...] = ()) -> None:
        """Warn, once for each reason, that nothing was predicted and all `n_configs` configs are used, and log it.

        If the user's `problem` function raised a `KeyError`, the warning says which argument it reads and which ones
        the launch has.
        """
        if arguments and isinstance(error, KeyError) and isinstance(name := error.args[0], str):
            hint = did_you_mean(name, arguments)
            error = ForetuneError(f"problem= reads {name!r}{hint}; the launch has {', '.join(arguments)}")
        warn_once(f"{self.family.name}: no prediction ({reason_of(error)})", f": all {n_configs} configs go through")
        if self._is_new((reason_of(error), n_configs)):
            _log.info("foretune: %s: %s -> %s configs (no prediction)", self.family.name, n_configs, n_configs)

    def positions(self, problem: Problem, configs: tuple[triton.Config, ...]) -> tuple[int, ...]:
        """Return the positions of the configs that are kept for a problem, best first.

        Unlike `let_through`, it does not announce them to FORETUNE_LOG, because the caller logs the times that it
        measures. Raises `ForetuneError` if none of the configs has the family's knobs, and all errors of the family.
        """
        usable, values = self._usable(configs)
        return tuple(usable[place] for place in self._kept(problem, self.device or device_here(), values))

    def slowdowns(self, problem: Problem, configs: tuple[triton.Config, ...]) -> tuple[float, ...]:
        """Return the predicted slowdowns of the configs whose positions `positions` returns in mode `refine`."""
        chooser = chooser_of(self.family, self.device or device_here(), self._usable(configs)[1], self.bundle)
        return chooser.choose(not_empty(self.family, problem), self.k).predicted_slowdown

    def _kept(
        self, problem: Problem, device: DeviceSpec, values: tuple[KernelConfig, ...], one_alone: bool = False
    ) -> tuple[int, ...]:
        """Return the positions in `values` of the configs that the prune keeps in the current mode.

        Mode `off`: all that the family supports, in their order. `predict`, or any other mode with `one_alone`: the
        config predicted to be fastest. Otherwise: the `k` configs predicted to be fastest, best first. If nothing can
        be predicted, it warns and returns all supported ones. Each problem's first prune is logged; in mode `off`, only
        the first of all.
        """
        wanted, family = resolve_mode(self.mode), self._restricted(problem, device, values)
        if wanted is Mode.OFF:
            if self._is_new(Mode.OFF):
                _log.info("foretune: %s: FORETUNE_MODE=off, so all supported configs go through", family.name)
            return supported(family, problem, device, values)
        chooser = chooser_of(family, device, values, self.bundle)
        k = HowMany(1) if one_alone or wanted is Mode.PREDICT else self.k
        chosen = chooser.choose_or_warn(not_empty(self.family, problem), k)
        if self._is_new((problem.without_sizes(), device.name, len(values), len(chosen.configs))):
            self._log_prune(problem, chooser, chosen)
        return chosen.positions

    def _restricted(self, problem: Problem, device: DeviceSpec, values: tuple[KernelConfig, ...]) -> Family:
        """Return the pruner's family, restricted so that it supports at least one of `values`.

        This is the family itself, unless `same_bits` restricts it to a numerics class (configs with identical results)
        that has none of `values`. Then this warns and restricts the family to the class of the first supported value
        instead: the launch does not fail, and tuning does not change its results, but other sizes may use another
        class.
        """
        family = self.family
        if (reason := why_none_kept(family, not_empty(family, problem), device, values)) is None:
            return family
        warn_once(reason, ": the class of the first supported config is kept instead, at each size")
        own = unrestricted(family)
        return keeping_class_of(own, values[supported(own, problem, device, values)[0]])

    def _log_prune(self, problem: Problem, chooser: Chooser, chosen: Shortlist) -> None:
        """Log in one line how many configs a prune has kept (`chosen`), and which sizes are not in declared ranges."""
        from .triton_family import TritonFamily

        outside = outside_ranges(type(self.family), problem) if isinstance(self.family, TritonFamily) else ""
        usable = len(chooser.candidates(problem))
        sizes = "x".join(str(problem[dim]) for dim in self.family.dims)
        _log.info(
            "foretune: %s on %s: %s%s%s",
            " ".join((problem.family, sizes, problem.dtype_name, *problem.flags)),
            chooser.device.name,
            narrowing(len(chooser.configs), usable, len(chosen.configs)),
            "" if chosen.predicted else " (no prediction)",
            f"; {outside}" if outside else "",
        )

    def _is_new(self, key: Hashable) -> bool:
        """Return whether to log a line identified by `key`: True the first time; False if INFO lines are off."""
        if not _log.isEnabledFor(logging.INFO) or key in self._logged:
            return False
        if len(self._logged) >= _MOST_LOGGED:
            self._logged.clear()
        self._logged.add(key)
        return True

    def _usable(self, configs: tuple[triton.Config, ...]) -> tuple[tuple[int, ...], tuple[KernelConfig, ...]]:
        """Return `OwnKnobs.usable` of the configs: the valid ones' positions, and these translated.

        The results for the last few lists are remembered.

        An autotuner passes the same list at every call, and several autotuners may share a pruner. Converting a
        thousand configs takes 10 ms, comparing their identities 14 us.
        """
        for known, usable, values in self._lists:
            if len(known) == len(configs) and all(map(operator.is_, known, configs)):
                return usable, values
        usable, values = self.own_knobs.usable(configs)
        self._lists = [(configs, usable, values), *self._lists[: _MOST_LISTS - 1]]
        return usable, values
