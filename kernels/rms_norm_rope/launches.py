"""Launches of the kernels with tensors and a config, for the op and for measuring."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...runtime.launching.launcher import Launcher
from .space import block_constants, chunks_of, forward_grid, head_blocks
from .triton_kernels import rms_norm_rope_backward_kernel, rms_norm_rope_kernel, weight_sums_kernel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...datasets import KernelConfig

_launch = Launcher(rms_norm_rope_kernel)
_launch_backward = Launcher(rms_norm_rope_backward_kernel)
_launch_sums = Launcher(weight_sums_kernel)
#: One sum's tile: rows of partial sums by columns of a head.
_SUMMED_ROWS, _SUMMED_COLUMNS = 128, 16


class Rotation(NamedTuple):
    """What a call has besides q and k."""

    cos: torch.Tensor  # (positions, columns): of each row the first HEAD_DIM / 2 count
    sin: torch.Tensor
    q_weight: torch.Tensor | None  # (HEAD_DIM,); both are None where there is no norm
    k_weight: torch.Tensor | None
    eps: float
    weight_offset: float
    interleaved: bool


def launch_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    q_out: torch.Tensor,
    k_out: torch.Tensor,
    rotation: Rotation,
    config: KernelConfig,
    *,
    inverse: bool = False,
) -> None:
    """q (tokens, q_heads, HEAD_DIM) and k likewise, heads contiguous, as the outputs are altogether. `inverse` rotates
    back."""
    given = forward_arguments(q, k, q_out, k_out, rotation)
    grid = forward_grid(len(q), q.shape[1], k.shape[1], config)
    if grid:
        flags = {"INTERLEAVED": rotation.interleaved, "INVERSE": inverse}
        _launch((grid, 1, 1), given[:8], given[8:], config, **block_constants(q.shape[2]), **flags)


def launch_backward(
    dq: torch.Tensor,
    dk: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    grads: Sequence[torch.Tensor],
    rotation: Rotation,
    config: KernelConfig,
) -> None:
    """`grads` are those to write: of q, k, and both weights, all contiguous."""
    tokens, q_heads, head_dim = q.shape
    q_blocks, k_blocks = head_blocks(q_heads, config), head_blocks(k.shape[1], config)
    chunks = chunks_of(tokens, config)
    programs = chunks * (q_blocks + k_blocks)
    if programs == 0:
        return
    partials = torch.empty((programs, head_dim), dtype=torch.float32, device=q.device)
    given = backward_arguments(dq, dk, q, k, grads[0], grads[1], partials, rotation)
    constants = block_constants(head_dim) | {"INTERLEAVED": rotation.interleaved}
    _launch_backward((programs, 1, 1), given[:11], given[11:], config, **constants)
    rows = (chunks * q_blocks, chunks * k_blocks)
    sums = {"HEAD_DIM": head_dim, "ROWS": _SUMMED_ROWS, "COLUMNS": _SUMMED_COLUMNS}
    _launch_sums((-(-head_dim // _SUMMED_COLUMNS), 2, 1), (partials, *grads[2:]), rows, None, **sums)


def forward_arguments(
    q: torch.Tensor, k: torch.Tensor, q_out: torch.Tensor, k_out: torch.Tensor, rotation: Rotation
) -> tuple[Any, ...]:
    """The forward kernel's positional arguments: eight tensors, then numbers."""
    cos, sin, q_weight, k_weight, eps, offset, _ = rotation
    tokens, q_heads, _ = q.shape
    strides = (q.stride(0) // 8, k.stride(0) // 8)
    numbers = (tokens, q_heads, k.shape[1], *strides, len(cos), cos.stride(0) // 8, eps, offset)
    return (q, k, q_out, k_out, cos, sin, q_weight, k_weight, *numbers)


def backward_arguments(
    dq: torch.Tensor,
    dk: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    q_grad: torch.Tensor,
    k_grad: torch.Tensor,
    partials: torch.Tensor,
    rotation: Rotation,
) -> tuple[Any, ...]:
    """The backward kernel's positional arguments: eleven tensors, then numbers."""
    cos, sin, q_weight, k_weight, eps, offset, _ = rotation
    tokens, q_heads, _ = q.shape
    strides = tuple(tensor.stride(0) // 8 for tensor in (dq, dk, q, k))
    numbers = (tokens, q_heads, k.shape[1], *strides, len(cos), cos.stride(0) // 8, eps, offset)
    return (dq, dk, q, k, q_grad, k_grad, partials, cos, sin, q_weight, k_weight, *numbers)
