"""What a prune callback has to know where `torch.compile` traces a launch, and what both of ours do there.

Dynamo runs the callback, and makes of what it lets through an autotuner of its own, which is tuned once for each graph
(torch 2.13: `TritonHOPifier.call_triton_kernel`). That one has lost the key (pytorch#164124), so that a graph of
dynamic shapes would run one config for all of them; and, since configs were pruned, `reset_to_zero` and
`restore_value`, so that tuning a kernel that needs them would change its results.
"""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

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
    """Whether Dynamo traces whoever asks. (It takes the answer for a constant.)"""
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


# For Dynamo to call it, and take its answer as a constant (see `Pruner`).
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
