"""Launches of the kernels with tensors and a config, for the op and for measuring."""

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
#: Columns of one program of the activation's gradient: 8 elements a thread.
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
    """x (M, K), w (2 N, K), h (M, N); `saved` (M, 2 N) gets gate and up. All contiguous."""
    prepare_gated(len(x), h.shape[1], x.shape[1], config, sm_count, activation)((x, w, h, saved))


def prepare_gated(
    m: int, n: int, k: int, config: KernelConfig, sm_count: int, activation: str
) -> Callable[[Sequence[torch.Tensor | None]], None]:
    """What launches the kernel on (x, w, h, saved) of these sizes, again and again. All as in `launch_gated`."""
    if m == 0:
        return launch_nothing
    grid = (programs_of(m, n, config, sm_count), 1, 1)
    prepared = _launch.prepare(grid, (m, n // 8, k // 8), config, ACTIVATION=activation)
    return with_scratch(prepared) if config["TMA"] else prepared


def launch_backward(dh: torch.Tensor, saved: torch.Tensor, grad: torch.Tensor, activation: str) -> None:
    """dh (M, N), saved (M, 2 N); writes the gradient of what was saved, (M, 2 N). All contiguous."""
    m, n = dh.shape
    if m == 0:
        return
    constants = {"ACTIVATION": activation, "BLOCK": _BACKWARD_BLOCK, "num_warps": _BACKWARD_WARPS}
    _launch_backward((m * -(-n // _BACKWARD_BLOCK), 1, 1), (dh, saved, grad), (m, n // 8), None, **constants)
