"""How long the pieces are in which dW sums a long group."""

from __future__ import annotations

#: No piece is shorter: it would have too few steps to pay for the sum.
_LEAST_ROWS = 1024
_MULTIPLE = 128


def chunk_rows(rows: int, n: int, k: int, sm_count: int) -> int:
    """How many rows of one group dW sums at a time, at most: a sixth of what an SM has to do in all.

    One huge group among small ones is otherwise N x K / tile area long jobs for more SMs than that. Depends only on
    what the host knows. Where N x K is large no group is split, because its tiles alone keep the SMs even.

    >>> chunk_rows(65536, 1536, 2048, 132), chunk_rows(65536, 14336, 4096, 132)
    (8064, 65536)
    """
    tiles = cdiv(n, 128) * cdiv(k, 256)
    share = cdiv(rows * tiles, 6 * sm_count)
    return min(max(cdiv(share, _MULTIPLE) * _MULTIPLE, _LEAST_ROWS), max(rows, 1))


def cdiv(a: int, b: int) -> int:
    return -(-a // b)
