"""LayerNorm along the rows of a matrix: two passes over the columns, in blocks."""

import triton
import triton.language as tl


@triton.jit
def layer_norm_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, n_rows, n_columns, stride, eps, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    places = rows.to(tl.int64) * stride + columns
    mean = tl.zeros((ROWS, 1), dtype=tl.float32)
    squares = tl.zeros((ROWS, 1), dtype=tl.float32)  # of the distances from the mean, summed
    for start in range(0, n_columns, BLOCK):  # Chan's way to join the moments of two parts
        inside = (rows < n_rows) & (columns < n_columns - start)
        x = tl.load(x_ptr + places + start, mask=inside, other=0.0).to(tl.float32)
        here = tl.minimum(n_columns - start, BLOCK)
        block_mean = tl.sum(x, axis=1)[:, None] / here
        away = tl.where(inside, x - block_mean, 0.0)
        step, share = block_mean - mean, here / (start + here)
        squares += tl.sum(away * away, axis=1)[:, None] + step * step * share * start
        mean += step * share
    scale = 1.0 / tl.sqrt(squares / n_columns + eps)
    for start in range(0, n_columns, BLOCK):
        inside = (rows < n_rows) & (columns < n_columns - start)
        x = tl.load(x_ptr + places + start, mask=inside, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + start + columns, mask=columns < n_columns - start, other=0.0).to(tl.float32)
        bias = tl.load(bias_ptr + start + columns, mask=columns < n_columns - start, other=0.0).to(tl.float32)
        y = (x - mean) * scale * weight + bias
        tl.store(y_ptr + places + start, y.to(y_ptr.dtype.element_ty), mask=inside)


def elements_per_thread(block: int, rows: int, warps: int) -> float:
    return block * rows / (32 * warps)


CONFIGS = [
    triton.Config({"BLOCK": block, "ROWS": rows}, num_warps=warps)
    for block in (256, 512, 1024, 2048, 4096, 8192)
    for rows in (1, 2, 4)
    for warps in (2, 4, 8, 16)
    if 4 <= elements_per_thread(block, rows, warps) <= 64
]
