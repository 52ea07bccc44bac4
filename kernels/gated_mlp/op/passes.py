"""The forward and backward pass of one call: plain tensors in and out, nothing recorded, nothing waited for."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ....datasets import DeviceSpec, KernelConfig
from ...matmul.op.op import matmul
from ...op_calls import ConfiguredLaunch, on_device_of
from ..family import flags_of
from ..launches import launch_backward, launch_gated

_forward = ConfiguredLaunch("gated_mlp")


class Options(NamedTuple):
    """What a call has besides its tensors; `gated_mlp` says what each means."""

    activation: str
    config: KernelConfig | None
    mode: str | None


def forward(
    x: torch.Tensor, w: torch.Tensor, options: Options, *, saves: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """h (..., N), and gate and up (M, 2 N) if they are saved. x (..., K), w (2 N, K)."""
    n, k = w.shape[0] // 2, w.shape[1]
    h = torch.empty((*x.shape[:-1], n), dtype=x.dtype, device=x.device)
    x, w = _ready(x.reshape(-1, k)), _ready(w)
    m = len(x)
    saved = torch.empty((m, 2 * n), dtype=x.dtype, device=x.device) if saves else None

    def launch(config: KernelConfig, device: DeviceSpec) -> None:
        launch_gated(x, w, h.view(-1, n), saved, config, device.sm_count, options.activation)

    if m:
        _forward(x, (m, n, k), flags_of(options.activation, saves), options.config, options.mode, launch)
    return h, saved


def backward(
    dh: torch.Tensor, x: torch.Tensor, w: torch.Tensor, saved: torch.Tensor | None, activation: str, mode: str | None
) -> torch.Tensor:
    """The gradient of gate and up, (M, 2 N); they are computed again where they were not saved."""
    k = w.shape[1]
    if saved is None:
        saved = product(x.reshape(-1, k), w.t(), mode)
    grad = torch.empty_like(saved)
    with on_device_of(dh):
        launch_backward(_ready(dh.reshape(-1, w.shape[0] // 2)), saved, grad, activation)
    return grad


def gradient_of_x(grad: torch.Tensor, x: torch.Tensor, w: torch.Tensor, mode: str | None) -> torch.Tensor:
    """In the shape of x, from the gradient of gate and up."""
    return product(grad, w, mode).view(x.shape)


def gradient_of_w(grad: torch.Tensor, x: torch.Tensor, mode: str | None) -> torch.Tensor:
    """(2 N, K), from the gradient of gate and up."""
    return product(grad.t(), x.reshape(-1, x.shape[-1]), mode)


def product(a: torch.Tensor, b: torch.Tensor, mode: str | None) -> torch.Tensor:
    """a @ b of the backward pass, by the dense GEMM. That multiplies float32 as tf32: here it is exact, so torch's."""
    return torch.mm(a, b) if a.dtype == torch.float32 else matmul(a, b, mode=mode)


def _ready(x: torch.Tensor) -> torch.Tensor:
    """Contiguous, and beginning at a multiple of 16 bytes, as TMA and vector loads do."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x
