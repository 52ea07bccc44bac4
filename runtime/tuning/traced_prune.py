"""`TracedPrune`: which configs a kernel has inside a function that `torch.compile` compiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...datasets import Problem
from ...datasets.errors import reason_of
from ..arguments import warn_once
from ..prune import CAN_ASK_SINCE, TracedPositions, break_graph, leave_launches_to_triton, torch_release

if TYPE_CHECKING:
    import triton

    from .advice import Advisor


class TracedPrune(TracedPositions):
    """The `early_config_prune` of a `PredictedAutotuner`, for Dynamo, which makes an autotuner of its own of what this
    lets through (see `runtime/prune.py`):

    - Static shapes: the config that is known to be the fastest, alone, so that nothing is tuned; else the shortlist.
      Of a kernel that needs its tensors reset or restored it is one config, too.
    - Where that cannot be told, as for dynamic shapes, the graph breaks at the launch, which then runs outside it and
      chooses as ever; so it does with a torch whose Dynamo cannot hand configs to a function that it does not trace.
    """

    def __init__(
        self,
        kernel: str,
        own: Callable[..., Sequence[triton.Config]] | None,
        advisor: Advisor,
        best_known: Callable[[Problem, tuple[triton.Config, ...]], int | None],
        *,
        alters: bool,
    ) -> None:
        self._kernel, self._own, self._advisor, self._alters = kernel, own, advisor, alters
        self._best_known, self._problem = best_known, advisor.problem
        self._can_ask = torch_release() >= CAN_ASK_SINCE

    def __call__(
        self, configs: Sequence[triton.Config], named_args: Mapping[str, Any], /, **kwargs: Any
    ) -> list[triton.Config]:
        leave_launches_to_triton()
        allowed = configs if self._own is None else self._own(configs, named_args, **kwargs)
        if self._can_ask:
            problem = self._problem({**named_args, **kwargs})
            if positions := self.positions_of(problem, allowed):
                return [allowed[position] for position in positions]
        break_graph()
        return list(allowed)

    def let_through(self, problem: Problem, configs: tuple[triton.Config, ...]) -> tuple[int, ...]:
        """Return which configs go through; none where the launch has to find out by itself."""
        try:
            if (best := self._best_known(problem, configs)) is not None:
                return (best,)
            positions = self._advisor.positions(problem, configs)
        except Exception as error:  # noqa: BLE001 - no trouble of ours stops a launch
            warn_once(f"{self._kernel}: no prediction ({reason_of(error)})", f": all {len(configs)} configs go through")
            positions = tuple(range(len(configs)))
        if not self._alters:
            return positions
        return positions[:1] if len(positions) < len(configs) or len(configs) == 1 else ()
