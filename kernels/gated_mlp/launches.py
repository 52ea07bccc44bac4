"""Launch the gated MLP's kernels on tensors with a config; the op and the measurements use this."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...runtime.launching.launcher import Launcher, launch_nothing, with_scratch
from .space import programs_of
from .triton_kernels import gated_backward_kernel, gated_mlp_kernel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from ...datasets import KernelConfig

_launch = Launcher(gated_mlp_kernel)
_launch_backward = Launcher(gated_backward_kernel)
#: Columns that one program of the activation's backward kernel takes, and its warps: 8 elements per thread of 32-thread
#: warps.
_BACKWARD_BLOCK, _BACKWARD_WARPS = 1024, 4


def launch_gated(
    x: torch.Tensor,
    w: torch.Tensor,
    h: torch.Tensor,
    saved: torch.Tensor | None,
    config: KernelConfig,
    sm_count: int,
    activation: str,
) -> None:
    """Compute h = act(x @ gate.T) * (x @ up.T) in one launch, without waiting for it.

    All tensors must be contiguous, and of one dtype on one CUDA or HIP device.

    Args:
        x: (M, K).
        w: (2 N, K), gate's rows first.
        h: The output, (M, N); overwritten.
        saved: If not None, (M, 2 N); overwritten with gate and up as they were before the activation, side by side.
        config: A config of the family `gated_mlp`.
        sm_count: The number of SMs of the device, which bounds the grid if the config is persistent.
        activation: "silu", "gelu" or "gelu_tanh".
    """
    prepare_gated(len(x), h.shape[1], x.shape[1], config, sm_count, activation)((x, w, h, saved))


def prepare_gated(
    m: int, n: int, k: int, config: KernelConfig, sm_count: int, activation: str
) -> Callable[[Sequence[torch.Tensor | None]], None]:
    """Return a function that launches the kernel on (x, w, h, saved) of these sizes, and can be called repeatedly.

    The tensors and the other arguments are those of `launch_gated`.
    """
    if m == 0:
        return launch_nothing
    grid = (programs_of(m, n, config, sm_count), 1, 1)
    prepared = _launch.prepare(grid, (m, n // 8, k // 8), config, ACTIVATION=activation)
    return with_scratch(prepared) if config["TMA"] else prepared


def launch_backward(dh: torch.Tensor, saved: torch.Tensor, grad: torch.Tensor, activation: str) -> None:
    """Compute the gradients of gate and up from the output's gradient, without waiting for them.

    All tensors must be contiguous.

    Args:
        dh: The gradient of h, (M, N).
        saved: Gate and up before the activation, (M, 2 N).
        grad: The result, (M, 2 N): the gradients of gate and up; overwritten.
        activation: "silu", "gelu" or "gelu_tanh".
    """
    m, n = dh.shape
    if m == 0:
        return
    constants = {"ACTIVATION": activation, "BLOCK": _BACKWARD_BLOCK, "num_warps": _BACKWARD_WARPS}
    _launch_backward((m * -(-n // _BACKWARD_BLOCK), 1, 1), (dh, saved, grad), (m, n // 8), None, **constants)
