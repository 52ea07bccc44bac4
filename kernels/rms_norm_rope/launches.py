"""Launch the kernels on tensors with a config; used by the op and for measuring."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...runtime.launching.launcher import Launcher, launch_nothing
from .space import block_constants, chunks_of, forward_grid, head_blocks
from .triton_kernels import rms_norm_rope_backward_kernel, rms_norm_rope_kernel, weight_sums_kernel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ...datasets import KernelConfig

_launch = Launcher(rms_norm_rope_kernel)
_launch_backward = Launcher(rms_norm_rope_backward_kernel)
_launch_sums = Launcher(weight_sums_kernel)
#: Tile of the weight-gradient sum: rows of partial sums by columns of a head.
_SUMMED_ROWS, _SUMMED_COLUMNS = 128, 16


class Rotation(NamedTuple):
    """The arguments of a call other than q and k."""

    cos: torch.Tensor  # (positions, columns); only the first HEAD_DIM / 2 columns are used
    sin: torch.Tensor
    q_weight: torch.Tensor | None  # (HEAD_DIM,); both weights are None without a norm
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
    """Launch the forward kernel once.

    Args:
        q: (tokens, q_heads, HEAD_DIM); the heads of a token are contiguous.
        k: (tokens, k_heads, HEAD_DIM), with the same requirement.
        q_out: The output for q, contiguous.
        k_out: The output for k, contiguous.
        rotation: Angles, weights and options.
        config: The kernel's config.
        inverse: Rotate by the negative angles.
    """
    prepare_forward(q, k, rotation, config, inverse=inverse)((q, k, q_out, k_out, *rotation[:4]))


def prepare_forward(
    q: torch.Tensor, k: torch.Tensor, rotation: Rotation, config: KernelConfig, *, inverse: bool = False
) -> Callable[[Sequence[torch.Tensor | None]], None]:
    """Return a function that launches the kernel on (q, k, q_out, k_out, cos, sin, q_weight, k_weight).

    It can be called repeatedly with other tensors of the same shapes and strides; see `launch_forward`.
    """
    tokens, q_heads, head_dim = q.shape
    grid = forward_grid(tokens, q_heads, k.shape[1], config)
    if not grid:
        return launch_nothing
    flags = {"INTERLEAVED": rotation.interleaved, "INVERSE": inverse}
    return _launch.prepare((grid, 1, 1), _numbers((q, k), rotation), config, **block_constants(head_dim), **flags)


def launch_backward(
    dq: torch.Tensor,
    dk: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    grads: Sequence[torch.Tensor],
    rotation: Rotation,
    config: KernelConfig,
) -> None:
    """Launch the backward kernel and the sum of the weights' partial gradients.

    Args:
        dq: Gradient of the rotated q, (tokens, q_heads, HEAD_DIM).
        dk: Gradient of the rotated k.
        q: Input of the forward pass.
        k: Input of the forward pass.
        grads: The gradients to write, of q, k and both weights, all contiguous.
        rotation: Angles, weights and options of the forward pass.
        config: The kernel's config.
    """
    prepare_backward(dq, dk, q, k, rotation, config)((dq, dk, q, k, *grads, *rotation[:4]))


def prepare_backward(
    dq: torch.Tensor, dk: torch.Tensor, q: torch.Tensor, k: torch.Tensor, rotation: Rotation, config: KernelConfig
) -> Callable[[Sequence[torch.Tensor | None]], None]:
    """Return a function that launches the kernels.

    It takes (dq, dk, q, k, the four gradients to write, cos, sin, q_weight, k_weight), and can be called repeatedly
    with other tensors of the same shapes and strides; see `launch_backward`.
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
    """Return the numbers after the tensors in the kernels' arguments; `heads` are the tensors read, q and k last."""
    cos, _, _, _, eps, offset, _ = rotation
    (tokens, q_heads, _), k_heads = heads[-2].shape, heads[-1].shape[1]
    strides = tuple(tensor.stride(0) // 8 for tensor in heads)
    return (tokens, q_heads, k_heads, *strides, len(cos), cos.stride(0) // 8, eps, offset)
