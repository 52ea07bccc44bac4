"""The kernels of RMSNorm and rotary embedding: forward, backward, and the sum of the weights' partial gradients.

A tile is ROWS tokens x HEADS heads. A head is processed as pairs of elements that rotate together: i and i + HEAD_DIM /
2 (half layout), or 2 i and 2 i + 1 (interleaved). All arithmetic is in float32, and rounded once.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: No runtime number is specialized, so one binary of a config serves every shape of one head size. Strides are passed
#: divided by 8, so that the compiler still knows that each head begins at a multiple of 16 bytes.
UNSPECIALIZED = [
    "tokens",
    "q_heads",
    "k_heads",
    "q_stride8",
    "k_stride8",
    "positions",
    "cos_stride8",
    "eps",
    "weight_offset",
]


@triton.jit
def load_pairs(ptrs, inside, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Load both elements of all pairs, (ROWS, HEADS, BLOCK) each, in float32.

    The heads begin at `ptrs` (ROWS, HEADS, 1). Pairs of heads that are not `inside`, and those past HEAD_DIM, are zero.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    if INTERLEAVED:
        offs = tl.arange(0, 2 * BLOCK)[None, None, :]
        there = inside if HALF == BLOCK else inside & (offs < HEAD_DIM)
        both = tl.load(ptrs + offs, there, other=0.0)
        first, second = tl.split(tl.reshape(both, (both.shape[0], both.shape[1], BLOCK, 2)))
    else:
        offs = tl.arange(0, BLOCK)[None, None, :]
        there = inside if HALF == BLOCK else inside & (offs < HALF)
        first = tl.load(ptrs + offs, there, other=0.0)
        second = tl.load(ptrs + HALF + offs, there, other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def store_pairs(ptrs, inside, first, second, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Store both elements of all pairs; the inverse of `load_pairs`."""
    HALF: tl.constexpr = HEAD_DIM // 2
    element = ptrs.dtype.element_ty
    if INTERLEAVED:
        offs = tl.arange(0, 2 * BLOCK)[None, None, :]
        there = inside if HALF == BLOCK else inside & (offs < HEAD_DIM)
        both = tl.reshape(tl.join(first, second), (first.shape[0], first.shape[1], 2 * BLOCK))
        tl.store(ptrs + offs, both.to(element), there)
    else:
        offs = tl.arange(0, BLOCK)[None, None, :]
        there = inside if HALF == BLOCK else inside & (offs < HALF)
        tl.store(ptrs + offs, first.to(element), there)
        tl.store(ptrs + HALF + offs, second.to(element), there)


@triton.jit
def load_angles(cos_ptr, sin_ptr, rows, tokens, positions, cos_stride8, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Load cos and sin of each pair, (ROWS, 1, BLOCK), from row token % positions of the tables."""
    HALF: tl.constexpr = HEAD_DIM // 2
    offs = tl.arange(0, BLOCK)[None, None, :]
    place = (rows % positions).to(tl.int64)[:, None, None] * (cos_stride8 * 8) + offs
    there = (rows < tokens)[:, None, None]
    if HALF != BLOCK:
        there = there & (offs < HALF)
    cos = tl.load(cos_ptr + place, there, other=0.0)
    sin = tl.load(sin_ptr + place, there, other=0.0)
    return cos.to(tl.float32), sin.to(tl.float32)


@triton.jit
def load_weight(weight_ptr, weight_offset, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Load the norm's weights by pairs, (1, 1, BLOCK), and add their offset."""
    ptrs = weight_ptr + tl.zeros((1, 1, 1), tl.int32)
    first, second = load_pairs(ptrs, tl.full((1, 1, 1), True, tl.int1), HEAD_DIM, BLOCK, INTERLEAVED)
    return first + weight_offset, second + weight_offset


@triton.jit
def inverse_rms(first, second, eps, HEAD_DIM: tl.constexpr):
    """Return 1 / sqrt(mean of squares + eps) of each head, (ROWS, HEADS, 1)."""
    squares = tl.sum(first * first + second * second, axis=2, keep_dims=True)
    return tl.rsqrt(squares / HEAD_DIM + eps)


@triton.jit
def rotate_heads(
    x_ptr,
    y_ptr,
    weight_ptr,
    cos,
    sin,
    rows,
    heads,
    tokens,
    n_heads,
    stride8,
    eps,
    weight_offset,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Normalize and rotate one tile of q or of k."""
    inside = (rows < tokens)[:, None, None] & (heads < n_heads)[None, :, None]
    token = rows.to(tl.int64)[:, None, None]
    place = token * (stride8 * 8) + heads[None, :, None] * HEAD_DIM
    first, second = load_pairs(x_ptr + place, inside, HEAD_DIM, BLOCK, INTERLEAVED)
    if weight_ptr is not None:
        scale = inverse_rms(first, second, eps, HEAD_DIM)
        first_weight, second_weight = load_weight(weight_ptr, weight_offset, HEAD_DIM, BLOCK, INTERLEAVED)
        first = first * scale * first_weight
        second = second * scale * second_weight
    out = token * (n_heads * HEAD_DIM) + heads[None, :, None] * HEAD_DIM
    y_first = first * cos - second * sin
    y_second = second * cos + first * sin
    store_pairs(y_ptr + out, inside, y_first, y_second, HEAD_DIM, BLOCK, INTERLEAVED)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def rms_norm_rope_kernel(
    q_ptr,  # (tokens, q_heads, HEAD_DIM), tokens q_stride8 * 8 elements apart
    k_ptr,  # (tokens, k_heads, HEAD_DIM), tokens k_stride8 * 8 elements apart
    q_out_ptr,  # (tokens, q_heads, HEAD_DIM), contiguous
    k_out_ptr,
    cos_ptr,  # (positions, HEAD_DIM / 2), rows cos_stride8 * 8 elements apart
    sin_ptr,
    q_weight_ptr,  # (HEAD_DIM,), or None: no norm
    k_weight_ptr,
    tokens,
    q_heads,
    k_heads,
    q_stride8,
    k_stride8,
    positions,
    cos_stride8,
    eps,
    weight_offset,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,  # the smallest power of two >= HEAD_DIM / 2
    INTERLEAVED: tl.constexpr,
    INVERSE: tl.constexpr,  # rotate back: the gradient without a norm
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Normalize and rotate one tile of q or of k per program.

    Programs of the same tokens are adjacent: they share rows of cos and sin, and pages of memory.
    """
    q_blocks = tl.cdiv(q_heads, HEADS)
    blocks = q_blocks + tl.cdiv(k_heads, HEADS)
    block = tl.program_id(0) % blocks
    rows = (tl.program_id(0) // blocks) * ROWS + tl.arange(0, ROWS)
    heads = tl.arange(0, HEADS)
    cos, sin = load_angles(cos_ptr, sin_ptr, rows, tokens, positions, cos_stride8, HEAD_DIM, BLOCK)
    if INVERSE:
        sin = -sin
    if block < q_blocks:
        rotate_heads(
            q_ptr,
            q_out_ptr,
            q_weight_ptr,
            cos,
            sin,
            rows,
            block * HEADS + heads,
            tokens,
            q_heads,
            q_stride8,
            eps,
            weight_offset,
            HEAD_DIM,
            BLOCK,
            INTERLEAVED,
        )
    else:
        rotate_heads(
            k_ptr,
            k_out_ptr,
            k_weight_ptr,
            cos,
            sin,
            rows,
            (block - q_blocks) * HEADS + heads,
            tokens,
            k_heads,
            k_stride8,
            eps,
            weight_offset,
            HEAD_DIM,
            BLOCK,
            INTERLEAVED,
        )


@triton.jit
def back_through_heads(
    dy_ptr,
    x_ptr,
    dx_ptr,
    weight_ptr,
    partial_ptr,
    cos_ptr,
    sin_ptr,
    first_row,
    heads,
    tokens,
    n_heads,
    dy_stride8,
    x_stride8,
    positions,
    cos_stride8,
    eps,
    weight_offset,
    STEPS,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute the gradients of STEPS tiles of q or of k, one after another, and their share of the weight's gradient.

    The share is one row of partial sums, over all tokens and heads of these tiles.
    """
    first_weight, second_weight = load_weight(weight_ptr, weight_offset, HEAD_DIM, BLOCK, INTERLEAVED)
    first_sum = tl.zeros((ROWS, HEADS, BLOCK), tl.float32)
    second_sum = tl.zeros((ROWS, HEADS, BLOCK), tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        rows = first_row + step * ROWS + tl.arange(0, ROWS)
        inside = (rows < tokens)[:, None, None] & (heads < n_heads)[None, :, None]
        token = rows.to(tl.int64)[:, None, None]
        head = heads[None, :, None] * HEAD_DIM
        cos, sin = load_angles(cos_ptr, sin_ptr, rows, tokens, positions, cos_stride8, HEAD_DIM, BLOCK)
        dy_first, dy_second = load_pairs(dy_ptr + token * (dy_stride8 * 8) + head, inside, HEAD_DIM, BLOCK, INTERLEAVED)
        first, second = load_pairs(x_ptr + token * (x_stride8 * 8) + head, inside, HEAD_DIM, BLOCK, INTERLEAVED)
        scale = inverse_rms(first, second, eps, HEAD_DIM)
        first = first * scale
        second = second * scale
        # Rotated back: the gradient of the norm's output.
        back_first = dy_first * cos + dy_second * sin
        back_second = dy_second * cos - dy_first * sin
        first_sum += back_first * first
        second_sum += back_second * second
        back_first = back_first * first_weight
        back_second = back_second * second_weight
        mean = tl.sum(back_first * first + back_second * second, axis=2, keep_dims=True) / HEAD_DIM
        store_pairs(
            dx_ptr + token * (n_heads * HEAD_DIM) + head,
            inside,
            scale * (back_first - first * mean),
            scale * (back_second - second * mean),
            HEAD_DIM,
            BLOCK,
            INTERLEAVED,
        )
    everything = tl.full((1, 1, 1), True, tl.int1)
    first_sum = tl.sum(tl.sum(first_sum, axis=0, keep_dims=True), axis=1, keep_dims=True)
    second_sum = tl.sum(tl.sum(second_sum, axis=0, keep_dims=True), axis=1, keep_dims=True)
    ptrs = partial_ptr + tl.zeros((1, 1, 1), tl.int32)
    store_pairs(ptrs, everything, first_sum, second_sum, HEAD_DIM, BLOCK, INTERLEAVED)


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "dq_stride8", "dk_stride8", "STEPS"])
def rms_norm_rope_backward_kernel(
    dq_ptr,  # (tokens, q_heads, HEAD_DIM), tokens dq_stride8 * 8 elements apart: gradient of the rotated q
    dk_ptr,
    q_ptr,  # as in the forward pass
    k_ptr,
    q_grad_ptr,  # (tokens, q_heads, HEAD_DIM), contiguous
    k_grad_ptr,
    partials_ptr,  # (programs, HEAD_DIM) float32: those of q first
    cos_ptr,
    sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    tokens,
    q_heads,
    k_heads,
    dq_stride8,
    dk_stride8,
    q_stride8,
    k_stride8,
    positions,
    cos_stride8,
    eps,
    weight_offset,
    STEPS,  # tiles per program; a runtime argument
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    num_stages: tl.constexpr,
):
    """Compute the gradients of STEPS tiles, and one row of the weights' partial sums, per program.

    No two programs add to the same number, so results are bitwise reproducible.
    """
    q_blocks = tl.cdiv(q_heads, HEADS)
    blocks = q_blocks + tl.cdiv(k_heads, HEADS)
    block = tl.program_id(0) % blocks
    chunk = tl.program_id(0) // blocks
    chunks = tl.num_programs(0) // blocks
    partial_ptr = partials_ptr + (block.to(tl.int64) * chunks + chunk) * HEAD_DIM
    first_row = chunk * STEPS * ROWS
    heads = tl.arange(0, HEADS)
    if block < q_blocks:
        back_through_heads(
            dq_ptr,
            q_ptr,
            q_grad_ptr,
            q_weight_ptr,
            partial_ptr,
            cos_ptr,
            sin_ptr,
            first_row,
            block * HEADS + heads,
            tokens,
            q_heads,
            dq_stride8,
            q_stride8,
            positions,
            cos_stride8,
            eps,
            weight_offset,
            STEPS,
            HEAD_DIM,
            BLOCK,
            INTERLEAVED,
            ROWS,
            HEADS,
            num_stages,
        )
    else:
        back_through_heads(
            dk_ptr,
            k_ptr,
            k_grad_ptr,
            k_weight_ptr,
            partial_ptr,
            cos_ptr,
            sin_ptr,
            first_row,
            (block - q_blocks) * HEADS + heads,
            tokens,
            k_heads,
            dk_stride8,
            k_stride8,
            positions,
            cos_stride8,
            eps,
            weight_offset,
            STEPS,
            HEAD_DIM,
            BLOCK,
            INTERLEAVED,
            ROWS,
            HEADS,
            num_stages,
        )


@triton.jit(do_not_specialize=["q_rows", "k_rows"])
def weight_sums_kernel(
    partials_ptr,  # (q_rows + k_rows, HEAD_DIM) float32
    q_weight_grad_ptr,  # (HEAD_DIM,)
    k_weight_grad_ptr,
    q_rows,
    k_rows,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Sum the partial gradients of the weights of q in programs (i, 0), and of k in programs (i, 1).

    Program (i, j) sums the i-th block of COLUMNS columns, in a fixed order.
    """
    of_k = tl.program_id(1)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    first = of_k * q_rows
    end = q_rows + of_k * k_rows
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in tl.range(first, end, ROWS):
        rows = start + tl.arange(0, ROWS)
        inside = (rows < end)[:, None] & (columns < HEAD_DIM)[None, :]
        sums += tl.load(partials_ptr + rows.to(tl.int64)[:, None] * HEAD_DIM + columns[None, :], inside, other=0.0)
    total = tl.sum(sums, axis=0)
    if of_k == 0:
        tl.store(q_weight_grad_ptr + columns, total.to(q_weight_grad_ptr.dtype.element_ty), columns < HEAD_DIM)
    else:
        tl.store(k_weight_grad_ptr + columns, total.to(k_weight_grad_ptr.dtype.element_ty), columns < HEAD_DIM)
