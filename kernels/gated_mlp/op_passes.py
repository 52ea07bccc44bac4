"""The forward and backward pass of one call: plain tensors in and out, nothing recorded, nothing waited for."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...datasets import KernelConfig, Problem
from ...runtime import Mode, resolve_mode
from ..matmul.op import matmul
from ..op_calls import DTYPES, ConfiguredLaunch, Memo, are_placed, key_of, on_device_of
from .family import flags_of
from .launches import launch_backward, prepare_gated
from .op_checks import check_call

if TYPE_CHECKING:
    from ...datasets import DeviceSpec
    from ..op_calls import Launch

_calls: Memo[Call] = Memo()


class Options(NamedTuple):
    """What a call has besides its tensors; `gated_mlp` says what each means."""

    activation: str
    config: KernelConfig | None
    mode: str | None


def forward(
    x: torch.Tensor, w: torch.Tensor, options: Options, *, saves: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """h (..., N), and gate and up (M, 2 N) if they are saved. x (..., K), w (2 N, K). Raises `ForetuneError` as
    `check_call` does."""
    key = key_of((x, w), (options, saves))
    call = _calls.found(key) or _calls.add(key, Call(key[0], x, w, options, saves=saves))
    if call.copies or not are_placed((x, w)):
        return forward(_ready(x), _ready(w), options, saves=saves)  # a call like any other
    h = x.new_empty(*call.out_shape)
    saved = x.new_empty(*call.saved_shape) if saves else None
    if call.launch is not None:
        call.launch((x, w, h, saved))
    return h, saved


class Call:
    """All forward passes with tensors of these shapes and strides. FORETUNE_MODE is read when it is made."""

    def __init__(self, place: int, x: torch.Tensor, w: torch.Tensor, options: Options, *, saves: bool) -> None:
        check_call(x, w, options.activation)
        self.copies = not (x.is_contiguous() and w.is_contiguous())  # then the kernel cannot read them as they lie
        m, n, k = prod(x.shape[:-1]), w.shape[0] // 2, w.shape[1]
        self.out_shape, self.saved_shape = (*x.shape[:-1], n), (m, 2 * n)
        self.launch: ConfiguredLaunch | None = None  # nothing is launched where there are no rows
        if self.copies or m == 0:
            return

        def prepare(config: KernelConfig, device: DeviceSpec, _: Any) -> Launch:
            return prepare_gated(m, n, k, config, device.sm_count, options.activation)

        flags = flags_of(options.activation, saves)
        problem = Problem.of("gated_mlp", dtype=DTYPES[x.dtype], flags=flags, m=m, n=n, k=k)
        mode = resolve_mode(options.mode, default=Mode.PREDICT)
        if x.dtype == torch.float32:  # which runs without tensor cores: the space has no config for it
            mode = Mode.OFF
        self.launch = ConfiguredLaunch(problem, place, options.config, mode, prepare)


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
    return x if are_placed([x]) else x.clone()
