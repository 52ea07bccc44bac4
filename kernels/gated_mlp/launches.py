"""Launch the gated MLP's kernels on tensors with a config; used by the op and for measuring."""

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
#: Columns and warps of one program of the activation's gradient: 8 elements per thread.
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
    """Launch the forward kernel once. All tensors are contiguous.

    Args:
        x: (M, K).
        w: (2 N, K), the rows of gate first.
        h: (M, N), the output.
        saved: (M, 2 N), where gate and up are stored; None to not store them.
        config: The kernel's config.
        sm_count: The SMs of the device, for the persistent grid.
        activation: "silu", "gelu" or "gelu_tanh".
    """
    prepare_gated(len(x), h.shape[1], x.shape[1], config, sm_count, activation)((x, w, h, saved))


def prepare_gated(
    m: int, n: int, k: int, config: KernelConfig, sm_count: int, activation: str
) -> Callable[[Sequence[torch.Tensor | None]], None]:
    """Return a function that launches the forward kernel on (x, w, h, saved) of the given sizes.

    It can be called repeatedly with different tensors of the same sizes; the arguments are those of `launch_gated`.
    """
    if m == 0:
        return launch_nothing
    grid = (programs_of(m, n, config, sm_count), 1, 1)
    prepared = _launch.prepare(grid, (m, n // 8, k // 8), config, ACTIVATION=activation)
    return with_scratch(prepared) if config["TMA"] else prepared


def launch_backward(dh: torch.Tensor, saved: torch.Tensor, grad: torch.Tensor, activation: str) -> None:
    """Launch the gradient of the activation and the product with up. All tensors are contiguous.

    Args:
        dh: (M, N), the gradient of the output.
        saved: (M, 2 N), gate and up.
        grad: (M, 2 N), where the gradients of gate and up are stored.
        activation: "silu", "gelu" or "gelu_tanh".
    """
    m, n = dh.shape
    if m == 0:
        return
    constants = {"ACTIVATION": activation, "BLOCK": _BACKWARD_BLOCK, "num_warps": _BACKWARD_WARPS}
    _launch_backward((m * -(-n // _BACKWARD_BLOCK), 1, 1), (dh, saved, grad), (m, n // 8), None, **constants)
