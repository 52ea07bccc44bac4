"""A few rows times their groups' weights: a kernel that streams the weights, instead of tiles padded to 16 rows.

Such a product is bound by reading the weights. Each program multiplies one row, or adds up the `topk` rows of one
token, with float32 multiply-adds, and reduces once at the end; so results are bitwise reproducible.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import triton
import triton.language as tl

from ....runtime.launching.launcher import Launcher
from ..space import cdiv

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

_UNSPECIALIZED = ["x_rows", "rows", "groups", "N8", "K8", "divisor", "sizes_at"]


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def few_rows_kernel(
    x_ptr,  # (x_rows, K)
    w_ptr,  # (groups, N, K)
    y_ptr,  # (rows, N), or (rows / divisor, N) if TERMS
    groups_ptr,  # (rows,) the group of each row; or from `sizes_at` on the sizes of the groups (groups,) if SORTED
    indices_ptr,  # (rows,), or None: the position of each sorted row in the permuted order
    scale_ptr,  # (rows,), or None: the factor of each row of y, in the order of the permuted side
    bias_ptr,  # (groups, N), or None: added before scaling
    x_rows,
    rows,
    groups,
    N8,  # N // 8
    K8,  # K // 8
    divisor,  # rows of y, or terms of a sum, per row of x
    sizes_at,
    SORTED: tl.constexpr,  # rows are sorted by group
    LANES: tl.constexpr,  # at least `groups` if SORTED
    GATHER: tl.constexpr,
    SCATTER: tl.constexpr,
    TERMS: tl.constexpr,  # 0, or a power of two from `divisor` on: the rows of a token are added up
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute BLOCK_N columns of one row of y.

    A row whose group does not exist is zero, and adds nothing to a sum.
    """
    N = N8 * 8
    K = K8 * 8
    unit = tl.program_id(0)
    LINES: tl.constexpr = BLOCK_N * max(TERMS, 1)  # each is one column of one row
    lines = tl.arange(0, LINES)
    offs_k = tl.arange(0, BLOCK_K)[None, :]
    col = tl.program_id(1) * BLOCK_N + lines // max(TERMS, 1)
    safe_col = tl.minimum(col, N - 1)
    target = unit
    if TERMS:
        term = lines % TERMS
        row = unit * divisor + tl.minimum(term, divisor - 1)
        group = tl.load(groups_ptr + row).to(tl.int32)
        exists = (term < divisor) & (group >= 0) & (group < groups)
        x_at = x_ptr + row.to(tl.int64)[:, None] * K + offs_k
        scaled_by = row
    else:
        if SORTED:
            lanes = tl.arange(0, LANES)
            sizes = tl.load(groups_ptr + sizes_at + lanes, lanes < groups, other=0)
            ends = tl.cumsum(tl.minimum(tl.maximum(sizes, 0), rows).to(tl.int64), 0)
            group = tl.sum(((ends <= unit) & (lanes < groups)).to(tl.int32), 0)
        else:
            group = tl.load(groups_ptr + unit).to(tl.int32)
        exists = (group >= 0) & (group < groups)
        permuted = unit
        if GATHER or SCATTER:
            permuted = tl.load(indices_ptr + unit).to(tl.int32)
        source = unit
        if GATHER:
            source = tl.minimum(tl.maximum(permuted // divisor, 0), x_rows - 1)
        if not SORTED:
            source = unit // divisor
        if SCATTER:
            target = permuted
        x_at = x_ptr + source.to(tl.int64) * K + offs_k
        scaled_by = permuted
    group = tl.where(exists, group, 0)
    w_at = w_ptr + (group.to(tl.int64) * N + safe_col)[:, None] * K + offs_k
    acc = tl.zeros((LINES, BLOCK_K), tl.float32)
    end = K
    if not TERMS:  # (with terms, such a mask would make loads narrower, and rows without a group are rare)
        end = tl.where(exists, K, 0)
    for k in range(0, K, BLOCK_K):
        there = offs_k < end - k
        w = tl.load(w_at, there, other=0.0, eviction_policy="evict_first")
        x = tl.load(x_at, there, other=0.0)
        acc += w.to(tl.float32) * x.to(tl.float32)
        w_at += BLOCK_K
        x_at += BLOCK_K
    y = tl.sum(acc, 1)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + group.to(tl.int64) * N + safe_col).to(tl.float32)
    if scale_ptr is not None:
        inside = exists & (scaled_by >= 0) & (scaled_by < rows)
        y *= tl.load(scale_ptr + scaled_by, inside, other=0.0).to(tl.float32)
    y = tl.where(exists, y, 0.0)
    if TERMS:
        y = tl.sum(tl.reshape(y, (BLOCK_N, TERMS)), 1)
        col = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = N
    if SCATTER:
        columns = tl.where((target >= 0) & (target < rows), N, 0)
    tl.store(y_ptr + target.to(tl.int64) * N + col, y.to(y_ptr.dtype.element_ty), col < columns)


_launch = Launcher(few_rows_kernel)


class Blocks(NamedTuple):
    """The block of one program, `n` columns in steps of `k` along K, and the program's number of warps."""

    n: int
    k: int
    warps: int


def prepare_few_rows(
    rows: int,
    groups: int,
    n: int,
    k: int,
    *,
    x_rows: int,
    blocks: Blocks | None = None,
    sizes_at: int | None = None,
    gathers: bool = False,
    scatters: bool = False,
    divisor: int = 1,
    sums: bool = False,
) -> Callable[[Sequence[torch.Tensor | None]], None]:
    """Return a function that launches `few_rows_kernel` on any tensors of these sizes.

    Its argument is (x, w, y, groups of the rows or their sizes, indices, scale, bias).

    Args:
        rows: The number of rows.
        groups: The number of groups.
        n: The number of columns of y.
        k: The number of columns of x.
        x_rows: The number of rows of x.
        blocks: The block of one program; that of `chosen_blocks` if None.
        sizes_at: Where the sizes begin in the fourth tensor; None if it has the group of each row.
        gathers: Sorted row i is row indices[i] // divisor of x.
        scatters: Sorted row i is stored as row indices[i] of y.
        divisor: The number of rows per row of x, or of y with `sums`.
        sums: Add up the `divisor` rows of each token.
    """
    terms = triton.next_power_of_2(divisor) if sums else 0
    block_n, block_k, warps = blocks or chosen_blocks(terms)
    units = rows // divisor if sums else rows
    return _launch.prepare(
        (units, cdiv(n, block_n), 1),
        (x_rows, rows, groups, n // 8, k // 8, divisor, sizes_at or 0),
        SORTED=sizes_at is not None,
        LANES=1 if sizes_at is None else triton.next_power_of_2(groups),
        GATHER=gathers,
        SCATTER=scatters,
        TERMS=terms,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=warps,
    )


def chosen_blocks(terms: int) -> Blocks:
    """Return the default block of a program that adds up `terms` rows; `terms` is 0 if it computes a single row.

    On an H100 it was within 2 % of the best block tried (4 % with sums), for up to 32 rows of Qwen3-30B-A3B and 4 of
    Mixtral-8x7B (tests/kernels/decode_on_gpu.py).
    """
    return Blocks(1, max(1024 // terms, 32), 1) if terms else Blocks(4, 1024, 4)
