"""Softmax along the rows of a matrix, a few rows a program."""

import triton
import triton.language as tl


@triton.jit
def softmax_kernel(x_ptr, y_ptr, n_rows, n_columns, x_stride, y_stride, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]  # a whole row: BLOCK >= n_columns
    inside = (rows < n_rows) & (columns < n_columns)
    x = tl.load(x_ptr + rows.to(tl.int64) * x_stride + columns, mask=inside, other=float("-inf")).to(tl.float32)
    powers = tl.exp(x - tl.max(x, axis=1)[:, None])
    y = powers / tl.sum(powers, axis=1)[:, None]
    tl.store(y_ptr + rows.to(tl.int64) * y_stride + columns, y.to(y_ptr.dtype.element_ty), mask=inside)


def elements_per_thread(block: int, rows: int, warps: int) -> float:
    return block * rows / (32 * warps)


CONFIGS = [
    triton.Config({"BLOCK": block, "ROWS": rows}, num_warps=warps)
    for block in (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
    for rows in (1, 2, 4, 8)
    for warps in (2, 4, 8, 16)
    if 2 <= elements_per_thread(block, rows, warps) <= 64
]
