"""The tile map of dW; behind it a second one, with the longer chunks of kernels that take tiles from a counter."""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import _BLOCKS, tile_map_kernel

#: Where the second map's header has a number of tiles, which is zero before and after each launch.
COUNTER = tl.constexpr(7)


@triton.jit(do_not_specialize=["rows", "groups", "chunk_rows", "long_rows", "second"])
def dw_map_kernel(group_sizes_ptr, map_ptr, rows, groups, chunk_rows, long_rows, second, LANES: tl.constexpr):
    """Build a tile map as `tile_map_kernel` does; in programs (g, 6) the second one, which begins at entry `second`.

    The second map has a header, with the counter, and chunks of at most `long_rows` rows, but no tiles.
    """
    if tl.program_id(1) > _BLOCKS:
        tile_map_kernel(group_sizes_ptr, map_ptr + second, rows, groups, long_rows, LANES)
        tl.store(map_ptr + second + COUNTER, 0)
    else:
        tile_map_kernel(group_sizes_ptr, map_ptr, rows, groups, chunk_rows, LANES)
