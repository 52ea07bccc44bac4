"""The second kernel of split-K: add up partial products in a fixed order, so that results are bitwise reproducible."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from ....runtime.launching.launcher import Launcher
from ...dependent_launch import wait_for_earlier
from .epilogue import activated

if TYPE_CHECKING:
    import torch

#: The block of one program. Fewer columns would leave lanes idle if the output is narrow; more rows make up for it.
_ROWS, _COLUMNS = 4, 256
#: Parts loaded together after the first one: two or four parts are loaded at once.
_AT_ONCE = 3
_UNSPECIALIZED = ["rows", "N", "ldy", "splits"]


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def add_partials_kernel(
    partial_ptr,  # (splits, rows, N) float32, or int32
    bias_ptr,  # (N,), or None
    y_ptr,  # (rows, N), rows `ldy` elements apart
    rows,
    N,
    ldy,
    splits,
    ACTIVATION: tl.constexpr,
    ALIGNED: tl.constexpr,  # N and ldy are multiples of 4: a thread loads 16 bytes
    PDL: tl.constexpr,  # launched to begin while the product is finishing
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Compute one block of y: activation(sum of the parts + bias)."""
    if ALIGNED:
        N = N // 4 * 4
        ldy = ldy // 4 * 4
    column_blocks = tl.cdiv(N, BLOCK_COLUMNS)
    row = tl.program_id(0) // column_blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.program_id(0) % column_blocks * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    within = (row < rows)[:, None] & (column < N)[None, :]
    at = partial_ptr + row.to(tl.int64)[:, None] * N + column[None, :]
    if PDL:
        wait_for_earlier()
    acc = tl.load(at, within, other=0)
    for first in range(1, splits, AT_ONCE):
        for part in tl.static_range(AT_ONCE):
            at += rows.to(tl.int64) * N
            # (In the interpreter, comparing two scalars gives no mask.)
            there = tl.full((BLOCK_ROWS, 1), first + part, tl.int32) < splits
            acc += tl.load(at, within & there, other=0)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + column, column < N, other=0.0)[None, :].to(tl.float32)
    acc = activated(acc, ACTIVATION)
    tl.store(y_ptr + row.to(tl.int64)[:, None] * ldy + column[None, :], acc.to(y_ptr.dtype.element_ty), within)


_launch = Launcher(add_partials_kernel)


def add_partials(
    partial: torch.Tensor, y: torch.Tensor, bias: torch.Tensor | None, activation: str, aligned: bool, pdl: bool
) -> None:
    """Launch y = activation(sum of partial over its first dimension + bias), without waiting for it.

    Args:
        partial: (splits, batch, M, N), contiguous, float32 or int32.
        y: (batch, M, N), whose rows may have padding between them.
        bias: (N,), or None.
        activation: "relu", "gelu", "silu" or "none".
        aligned: All row lengths are multiples of 4 elements.
        pdl: The previous launch is the product's, and was launched with programmatic dependent launch (PDL).
    """
    splits, batch, m, n = partial.shape
    rows, ldy = batch * m, y.stride(-2)
    _launch(
        (-(-rows // _ROWS) * -(-n // _COLUMNS), 1, 1),
        (partial, bias, y),
        (rows, n, ldy, splits),
        ACTIVATION=activation,
        ALIGNED=aligned,
        **_options(pdl),
    )


def compile_add_partials(
    wide: torch.dtype, out: torch.dtype, bias: bool, activation: str, aligned: bool, pdl: bool
) -> None:
    """Compile what `add_partials` launches for sums of dtype `wide` and y of dtype `out`, into Triton's cache."""
    add_partials_kernel.warmup(
        wide,
        out if bias else None,
        out,
        64,
        64,
        64,
        2,
        ACTIVATION=activation,
        ALIGNED=aligned,
        **_options(pdl),
        grid=(1,),
    )


@cache
def _options(pdl: bool) -> dict[str, Any]:
    """Return the constexprs of the kernel that adds partial sums, and the launch option for PDL if `pdl` is true."""
    blocks = {"BLOCK_ROWS": _ROWS, "BLOCK_COLUMNS": _COLUMNS, "AT_ONCE": _AT_ONCE}
    return blocks | {"PDL": pdl} | ({"launch_pdl": True} if pdl else {})
