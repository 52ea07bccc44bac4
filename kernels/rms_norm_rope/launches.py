"""Launches of the kernels with tensors and a config, for the op and for measurements."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...runtime.launching.launcher import Launcher, launch_nothing
from .space import block_constants, chunks_of, forward_grid, head_blocks
from .triton_kernels import rms_norm_rope_backward_kernel, rms_norm_rope_kernel, weight_sums_kernel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...datasets import KernelConfig
    from ..launchers import Launch

_launch = Launcher(rms_norm_rope_kernel)
_launch_backward = Launcher(rms_norm_rope_backward_kernel)
_launch_sums = Launcher(weight_sums_kernel)
#: The tile of the kernel that adds partial sums: rows of partial sums x columns of a head.
_SUMMED_ROWS, _SUMMED_COLUMNS = 128, 16


class Rotation(NamedTuple):
    """The arguments of the op other than q and k: the rotation's tables and the norm's weights and settings."""

    cos: torch.Tensor  # (positions, columns); the first HEAD_DIM / 2 columns are used
    sin: torch.Tensor
    q_weight: torch.Tensor | None  # (HEAD_DIM,); both are None without a norm
    k_weight: torch.Tensor | None
    eps: float
    weight_offset: float
    interleaved: bool


def prepare_forward(
    q: torch.Tensor, k: torch.Tensor, rotation: Rotation, config: KernelConfig, *, inverse: bool = False
) -> Launch:
    """Return a function that launches the kernel, without waiting for it, on tensors with these shapes and strides.

    Its argument is (q, k, q_out, k_out, cos, sin, q_weight, k_weight), where the outputs have the shapes of q and k and
    are contiguous.

    Args:
        q: (tokens, q_heads, HEAD_DIM), with contiguous heads.
        k: (tokens, k_heads, HEAD_DIM), with contiguous heads.
        rotation: The other arguments.
        config: The config.
        inverse: Rotate in the opposite direction, which undoes a rotation.
    """
    tokens, q_heads, head_dim = q.shape
    grid = forward_grid(tokens, q_heads, k.shape[1], config)
    if not grid:
        return launch_nothing
    flags = {"INTERLEAVED": rotation.interleaved, "INVERSE": inverse}
    return _launch.prepare((grid, 1, 1), _numbers((q, k), rotation), config, **block_constants(head_dim), **flags)


def prepare_backward(
    dq: torch.Tensor, dk: torch.Tensor, q: torch.Tensor, k: torch.Tensor, rotation: Rotation, config: KernelConfig
) -> Launch:
    """Return a function that launches the kernels, without waiting for them, on tensors with these shapes and strides.

    Its argument is (dq, dk, q, k, the four gradients to write, cos, sin, q_weight, k_weight), where the gradients are
    those of q, k and both weights, all contiguous.

    Args:
        dq: The gradient of the rotated q.
        dk: The gradient of the rotated k.
        q: As in the forward pass.
        k: As in the forward pass.
        rotation: The other arguments of the forward pass.
        config: The config.
    """
    tokens, q_heads, head_dim = q.shape
    q_blocks, k_blocks = head_blocks(q_heads, config), head_blocks(k.shape[1], config)
    chunks = chunks_of(tokens, config)
    programs = chunks * (q_blocks + k_blocks)
    if programs == 0:
        return launch_nothing
    constants = block_constants(head_dim) | {"INTERLEAVED": rotation.interleaved}
    numbers = _numbers((dq, dk, q, k), rotation)
    gradients = _launch_backward.prepare((programs, 1, 1), numbers, config, **constants)
    rows = (chunks * q_blocks, chunks * k_blocks)
    sums = {"HEAD_DIM": head_dim, "ROWS": _SUMMED_ROWS, "COLUMNS": _SUMMED_COLUMNS}
    add = _launch_sums.prepare((-(-head_dim // _SUMMED_COLUMNS), 2, 1), rows, None, **sums)

    def launch(tensors: Sequence[Any]) -> None:
        partials = torch.empty((programs, head_dim), dtype=torch.float32, device=tensors[0].device)
        gradients((*tensors[:6], partials, *tensors[8:]))
        add((partials, *tensors[6:8]))

    return launch


def _numbers(heads: Sequence[torch.Tensor], rotation: Rotation) -> tuple[Any, ...]:
    """Return the kernels' numeric arguments, which follow the tensors: strides, sizes, and numbers of `rotation`.

    `heads` are the tensors of heads that the kernel reads, (tokens, heads, head_dim), of which q and k are the last.
    """
    cos, _, _, _, eps, offset, _ = rotation
    (tokens, q_heads, _), k_heads = heads[-2].shape, heads[-1].shape[1]
    strides = tuple(tensor.stride(0) // 8 for tensor in heads)
    return (tokens, q_heads, k_heads, *strides, len(cos), cos.stride(0) // 8, eps, offset)
