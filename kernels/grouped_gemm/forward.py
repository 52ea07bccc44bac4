"""The forward kernel: y[rows of e] = x[rows of e] @ w[e].T."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from .scratch import ensure_allocator
from .tiles import load_tile, load_tile_count, tile_position

if TYPE_CHECKING:
    import torch

    from ...datasets import KernelConfig
    from .tiles import TileMap


UNSPECIALIZED = ["rows", "groups", "N8", "K8", "GROUP_M", "PROGRAMS_PER_SM"]
#: What an autotuner of the kernel tunes anew for. The group sizes are tensor contents, which no key can see.
KEY = ["rows", "groups", "N8", "K8"]


# One binary per config serves every shape: no runtime integer is specialised (Triton would otherwise compile
# again for E=64 and E=8, or for N divisible by 16 and not), and N and K come divided by 8, so that the compiler
# still knows that rows are 16-byte aligned. GROUP_M and PROGRAMS_PER_SM are runtime integers for the same reason.
@triton.jit(do_not_specialize=UNSPECIALIZED)
def grouped_gemm_fwd_kernel(
    x_ptr,  # (rows, K), sorted by group
    w_ptr,  # (groups, N, K)
    y_ptr,  # (rows, N)
    tiles_ptr,  # a TileMap's tiles
    rows,
    groups,
    N8,  # N // 8
    K8,  # K // 8
    GROUP_M,
    PROGRAMS_PER_SM,  # for the grid only: meta["PROGRAMS_PER_SM"] * the number of SMs
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    USE_TMA: tl.constexpr,
):
    """Persistent: program p takes tiles p, p + programs, ... of the map. Accumulates in float32."""
    N = N8 * 8
    K = K8 * 8
    n_tiles = tl.cdiv(N, BLOCK_N)
    m_tiles = load_tile_count(tiles_ptr, BLOCK_M)
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    if USE_TMA:
        x_desc = tl.make_tensor_descriptor(x_ptr, [rows, K], [K.to(tl.int64), 1], [BLOCK_M, BLOCK_K])
        w_desc = tl.make_tensor_descriptor(w_ptr, [groups * N, K], [K.to(tl.int64), 1], [BLOCK_N, BLOCK_K])

    for tile in tl.range(tl.program_id(0), m_tiles * n_tiles, tl.num_programs(0)):
        m_tile, n_tile = tile_position(tile, m_tiles, n_tiles, GROUP_M)
        group, row, row_end = load_tile(tiles_ptr, m_tile, rows, groups, BLOCK_M)
        col = n_tile * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if USE_TMA:
            # Rows past the group's end and columns past N read a neighbour's values; the store drops them.
            for k in tl.range(0, K, BLOCK_K):
                x = x_desc.load([row, k])
                w = w_desc.load([group * N + col, k])
                acc = tl.dot(x, w.T, acc)
        else:
            # Clamped rows need no mask: only the K tail does.
            safe_m = tl.minimum(row + offs_m, row_end - 1).to(tl.int64)
            safe_n = group.to(tl.int64) * N + tl.minimum(col + offs_n, N - 1)
            x_ptrs = x_ptr + safe_m[:, None] * K + offs_k[None, :]
            w_ptrs = w_ptr + safe_n[:, None] * K + offs_k[None, :]
            for k in tl.range(0, K, BLOCK_K):
                inside = (offs_k < K - k)[None, :]
                x = tl.load(x_ptrs, inside, other=0.0)
                w = tl.load(w_ptrs, inside, other=0.0)
                acc = tl.dot(x, w.T, acc)
                x_ptrs += BLOCK_K
                w_ptrs += BLOCK_K
        y_rows = row + offs_m
        y_cols = col + offs_n
        y_ptrs = y_ptr + y_rows.to(tl.int64)[:, None] * N + y_cols[None, :]
        mask = (y_rows < row_end)[:, None] & (y_cols < N)[None, :]
        tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask)


def launch(
    x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, tile_map: TileMap, config: KernelConfig, sm_count: int
) -> None:
    """Launches the kernel with explicit arguments and does not wait for it."""
    groups, n, _ = w.shape
    m_tiles = triton.cdiv(tile_map.rows, config["BLOCK_M"]) + groups
    grid = min(sm_count * config["PROGRAMS_PER_SM"], m_tiles * triton.cdiv(n, config["BLOCK_N"]))
    if tile_map.rows == 0 or grid == 0:
        return
    if config["USE_TMA"]:
        ensure_allocator()
    grouped_gemm_fwd_kernel[(grid,)](*arguments(x, w, y, tile_map), **config.to_json())


def arguments(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, tile_map: TileMap) -> tuple[Any, ...]:
    """The kernel's positional arguments, less the knobs."""
    groups, n, k = w.shape
    return x, w, y, tile_map.tiles, tile_map.rows, groups, n // 8, k // 8
