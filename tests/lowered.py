"""What Inductor would choose from on a GPU that is not here: functions lowered by Inductor itself, on tensors without
memory, up to the moment when it would time its choices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from foretune.datasets import DeviceSpec
from foretune.kernels.inductor.generated import properties_of
from foretune.runtime import use_stub_driver

if TYPE_CHECKING:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

#: What max-autotune's choices are timed for, and all that is listed.
EXHAUSTIVE = {"max_autotune": True, "max_autotune_gemm_search_space": "EXHAUSTIVE"}


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """One to be lowered on: its shape, strides and dtype count."""
    return torch.empty(*shape, dtype=dtype, device="meta")


def lowered(
    function: Callable[..., Any],
    *tensors: torch.Tensor,
    dynamic: Sequence[int] = (),
    written: list[str] | None = None,
    **options: Any,
) -> tuple[list[list[Any]], ShapeEnv]:
    """The choices of each op that is timed, as they are after all limits, and what the shapes are guarded on. The
    first dimension of the tensors in `dynamic` is a symbol. The code that Inductor writes is added to `written`."""
    # Here: they take seconds to import, in every process that collects tests.
    from torch._dynamo import device_interface
    from torch._inductor import config, select_algorithm
    from torch._inductor.debug import DebugContext
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
    from torch.utils._triton import has_triton

    shapes, device = ShapeEnv(), DeviceSpec.named("h200")
    seen: list[list[Any]] = []

    def first_alone(choices: list[Any]) -> list[Any]:
        seen.append(choices)
        return choices[:1]  # of which Inductor times nothing

    selector = select_algorithm.get_algorithm_selector_cache()
    with ExitStack() as stack:
        mode = stack.enter_context(FakeTensorMode(shape_env=shapes))
        stack.enter_context(use_stub_driver(device))
        properties = stack.enter_context(properties_of(device))
        stack.enter_context(patch.dict(device_interface.caching_worker_device_properties, {"cuda": [properties]}))
        stack.enter_context(config.patch(EXHAUSTIVE | options))
        stack.callback(setattr, selector, "preprocessing_fns", selector.preprocessing_fns)
        has_triton.cache_clear()  # who asked before saw no GPU
        stack.callback(has_triton.cache_clear)
        selector.preprocessing_fns = [*selector.preprocessing_fns, first_alone]
        given = []
        for place, like in enumerate(tensors):
            first = DimDynamic.DYNAMIC if place in dynamic else DimDynamic.STATIC
            context = StatelessSymbolicContext([first, *[DimDynamic.STATIC] * (like.ndim - 1)])
            given.append(mode.from_tensor(like, symbolic_context=context))
        # Traced on the CPU: autograd looks for the device itself.
        there = {
            kind: [torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=kind) for one in given]
            for kind in ("cpu", "cuda")
        }
        traced = make_fx(function, decomposition_table=select_decomp_table(), tracing_mode="real")(*there["cpu"])
        traced.graph.eliminate_dead_code()
        traced.recompile()
        graph = GraphLowering(traced, example_inputs=there["cuda"], shape_env=shapes)
        with V.set_graph_handler(graph), V.set_fake_mode(mode):
            graph.run(*there["cuda"])
            if written is not None:
                with DebugContext():
                    written.append(graph.codegen()[0].value)
    return seen, shapes
