"""The forward and backward pass of one call: plain tensors in and out, nothing recorded, nothing waited for."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ....datasets import DeviceSpec, KernelConfig
from ...op_calls import ConfiguredLaunch
from ..launches import Rotation, launch_backward, launch_forward

_forward = ConfiguredLaunch("rms_norm_rope_fwd")
_backward = ConfiguredLaunch("rms_norm_rope_bwd")


class Options(NamedTuple):
    """What a call has besides its tensors; `rms_norm_rope` says what each means."""

    eps: float
    weight_offset: float
    interleaved: bool
    config: KernelConfig | None
    config_backward: KernelConfig | None
    mode: str | None


class Tables(NamedTuple):
    """The tensors of a call besides q and k."""

    cos: torch.Tensor
    sin: torch.Tensor
    q_weight: torch.Tensor | None
    k_weight: torch.Tensor | None


def forward(
    q: torch.Tensor, k: torch.Tensor, tables: Tables, options: Options, *, inverse: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k normed and rotated, contiguous in their shapes; rotated back if `inverse`, without a norm."""
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    rotation, read, written = _rotation(tables, options), (_heads(q), _heads(k)), (_tokens(q_out), _tokens(k_out))

    def launch(config: KernelConfig, device: DeviceSpec) -> None:
        launch_forward(*read, *written, rotation, config, inverse=inverse)

    flags = (*("interleaved",) * options.interleaved, *("unnormed",) * (rotation.q_weight is None))
    if q.numel():
        _forward(q, _dims(*read), flags, options.config, options.mode, launch)
    return q_out, k_out


def backward(
    dq: torch.Tensor, dk: torch.Tensor, q: torch.Tensor, k: torch.Tensor, tables: Tables, options: Options
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of q, k, q_weight and k_weight; the last two are empty where there is no norm."""
    if tables.q_weight is None or tables.k_weight is None:
        return *forward(dq, dk, tables, options, inverse=True), dq.new_empty(0), dq.new_empty(0)
    q_grad, k_grad = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    make = torch.empty_like if q.numel() else torch.zeros_like
    weight_grads = (make(tables.q_weight), make(tables.k_weight))
    rotation, read = _rotation(tables, options), (_heads(q), _heads(k))
    given, written = (_heads(dq), _heads(dk)), (_tokens(q_grad), _tokens(k_grad))

    def launch(config: KernelConfig, device: DeviceSpec) -> None:
        launch_backward(*given, *read, (*written, *weight_grads), rotation, config)

    if q.numel():
        flags = ("interleaved",) * options.interleaved
        _backward(q, _dims(*read), flags, options.config_backward, options.mode, launch)
    return q_grad, k_grad, *weight_grads


def _dims(q: torch.Tensor, k: torch.Tensor) -> tuple[int, int, int, int]:
    tokens, q_heads, head_dim = q.shape
    return tokens, q_heads, k.shape[1], head_dim


def _rotation(tables: Tables, options: Options) -> Rotation:
    cos, sin = (_rows(table) for table in (tables.cos, tables.sin))
    if cos.stride(0) != sin.stride(0):
        cos, sin = cos.contiguous(), sin.contiguous()
    q_weight, k_weight = (
        None if weight is None else _begun_well(weight.contiguous()) for weight in (tables.q_weight, tables.k_weight)
    )
    numbers = float(options.eps), float(options.weight_offset)
    return Rotation(cos, sin, q_weight, k_weight, *numbers, options.interleaved)


def _tokens(x: torch.Tensor) -> torch.Tensor:
    """As (tokens, heads, head_dim)."""
    return x.reshape(-1, *x.shape[-2:]) if x.dim() > 3 else x


def _heads(x: torch.Tensor) -> torch.Tensor:
    """As (tokens, heads, head_dim) as the kernels read it, copied only where it must be: heads side by side, tokens at
    multiples of 8 elements."""
    x = _tokens(x)
    tokens, heads, head_dim = x.shape
    is_ready = x.stride(2) == 1 and (heads == 1 or x.stride(1) == head_dim) and (tokens == 1 or x.stride(0) % 8 == 0)
    return _begun_well(x if is_ready else x.contiguous())


def _rows(table: torch.Tensor) -> torch.Tensor:
    """cos or sin as (positions, columns)."""
    table = table.reshape(-1, table.shape[-1])
    return _begun_well(table if table.stride(1) == 1 and table.stride(0) % 8 == 0 else table.contiguous())


def _begun_well(x: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy that begins at a multiple of 16 bytes, as vector loads do."""
    return x.clone(memory_format=torch.contiguous_format) if x.data_ptr() % 16 else x
