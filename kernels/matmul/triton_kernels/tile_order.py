"""The order in which the programs of a dense product take its tiles."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_at(tile, m_tiles, n_tiles, GROUP_M):
    """Return (matrix, m_tile, n_tile) of a linear tile id.

    Matrices follow each other; within one, tiles are in bands of GROUP_M M tiles, M fastest within a band, so that
    concurrent programs share rows of one operand and columns of the other in L2.
    """
    tiles = m_tiles * n_tiles
    matrix = tile // tiles
    tile = tile % tiles
    band = GROUP_M * n_tiles
    first = tile // band * GROUP_M
    height = tl.minimum(m_tiles - first, GROUP_M)
    within = tile % band
    return matrix, first + within % height, within // height


@triton.jit
def split_range(split, splits, K, BLOCK_K: tl.constexpr):
    """Return (first, end) of one part of a contraction of length K: whole steps of BLOCK_K, as even as possible.

    Parts past the end are empty. (Only the end is limited to K: the compiler must see that `first` is a multiple of
    BLOCK_K.)
    """
    length = tl.cdiv(tl.cdiv(K, BLOCK_K), splits) * BLOCK_K
    first = split * length
    return first, tl.minimum(first + length, K)
