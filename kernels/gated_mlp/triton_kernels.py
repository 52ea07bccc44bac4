"""The Triton kernels of the gated MLP: the fused forward pass, and the backward pass of the activation.

h = act(x @ gate.T) * (x @ up.T), with x (M, K) and one weight (2 N, K), whose first N rows are gate and last N rows up.
All sums are in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..gelu import normal_cdf

#: Integer parameters that Triton must not specialize on, so that one binary of a config serves every shape. N and K are
#: passed divided by 8: from the product with 8, the compiler knows that rows start at multiples of 16 bytes.
UNSPECIALIZED = ["M", "N8", "K8", "GROUP_M", "PROGRAMS_PER_SM"]


@triton.jit
def tanh(x):
    """Compute tanh from a sigmoid, which Triton has on every target."""
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """Compute silu, gelu (with erf) or gelu_tanh of float32 values."""
    if ACTIVATION == "silu":
        y = x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        y = x * normal_cdf(x)
    else:
        tl.static_assert(ACTIVATION == "gelu_tanh", "unknown activation")
        y = 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    return y


@triton.jit
def activation_slope(x, ACTIVATION: tl.constexpr):
    """Compute the derivative of `activated` at x, in float32."""
    if ACTIVATION == "silu":
        sigmoid = tl.sigmoid(x)
        y = sigmoid * (1.0 + x * (1.0 - sigmoid))
    elif ACTIVATION == "gelu":
        density = 0.3989422804014327 * tl.exp(-0.5 * x * x)
        y = normal_cdf(x) + x * density
    else:
        tl.static_assert(ACTIVATION == "gelu_tanh", "unknown activation")
        t = tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))
        y = 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * 0.7978845608028654 * (1.0 + 0.134145 * x * x)
    return y


@triton.jit
def tile_position(tile, m_tiles, n_tiles, GROUP_M):
    """Return (m_tile, n_tile) of a linear tile index.

    Tiles are ordered in bands of GROUP_M M tiles, and within a band M varies fastest, so that programs that run at the
    same time share tiles of the weights in L2.
    """
    band = GROUP_M * n_tiles
    first_m = (tile // band) * GROUP_M
    height = tl.minimum(m_tiles - first_m, GROUP_M)
    within = tile % band
    return first_m + within % height, within // height


@triton.jit(do_not_specialize=UNSPECIALIZED)
def gated_mlp_kernel(
    x_ptr,  # (M, K)
    w_ptr,  # (2 N, K), gate first
    h_ptr,  # (M, N)
    saved_ptr,  # (M, 2 N): gate and up before the activation; or None, then they are not stored
    x_desc,  # TMA descriptors of x and w, in three dimensions: (2, N, K); None unless TMA
    w_desc,
    M,
    N8,  # N // 8
    K8,  # K // 8
    GROUP_M,
    PROGRAMS_PER_SM,  # used only by the host, to compute the grid
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TMA: tl.constexpr,  # whether x and w are loaded by TMA
):
    """Compute h, and store gate and up as well unless `saved_ptr` is None.

    Program p computes the tiles p, p + num_programs, and so on. A tile is BLOCK_M x BLOCK_N elements of gate, and the
    same elements of up.
    """
    N = N8 * 8
    K = K8 * 8
    m_tiles = tl.cdiv(M, BLOCK_M)
    n_tiles = tl.cdiv(N, BLOCK_N)
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    # The rows of a tile of the weights: BLOCK_N rows of gate, then the same rows of up.
    offs_w = tl.arange(0, 2 * BLOCK_N)

    # Flattening lets the next tile's loads run while this tile is stored. The outer loop must carry no value from tile
    # to tile: Triton 3.6 flattens such a loop wrongly.
    for tile in tl.range(tl.program_id(0), m_tiles * n_tiles, tl.num_programs(0), flatten=True):
        m_tile, n_tile = tile_position(tile, m_tiles, n_tiles, GROUP_M)
        row = m_tile * BLOCK_M
        col = n_tile * BLOCK_N
        if not TMA:
            safe_m = tl.minimum(row + offs_m, M - 1).to(tl.int64)
            safe_n = tl.minimum(col + offs_w % BLOCK_N, N - 1) + offs_w // BLOCK_N * N
            x_ptrs = x_ptr + safe_m[:, None] * K + offs_k[None, :]
            w_ptrs = w_ptr + safe_n.to(tl.int64)[:, None] * K + offs_k[None, :]
        # One product of twice the width, so that the tensor cores read x once for gate and up.
        both = tl.zeros((BLOCK_M, 2 * BLOCK_N), tl.float32)
        for k in tl.range(0, K, BLOCK_K):
            if TMA:
                x = x_desc.load([row, k])
                w = w_desc.load([0, col, k]).reshape(2 * BLOCK_N, BLOCK_K)
            else:
                inside_k = (offs_k < K - k)[None, :]
                x = tl.load(x_ptrs, inside_k, other=0.0)
                w = tl.load(w_ptrs, inside_k, other=0.0)
                x_ptrs += BLOCK_K
                w_ptrs += BLOCK_K
            both = tl.dot(x, w.T, both, input_precision="ieee")

        gate, up = tl.split(tl.permute(tl.reshape(both, (BLOCK_M, 2, BLOCK_N)), (0, 2, 1)))
        rows = (row + offs_m).to(tl.int64)[:, None]
        cols = (col + offs_n)[None, :]
        inside = (row + offs_m < M)[:, None] & (cols < N)
        element = h_ptr.dtype.element_ty
        if saved_ptr is not None:
            saved_ptrs = saved_ptr + rows * (2 * N) + cols
            tl.store(saved_ptrs, gate.to(element), inside)
            tl.store(saved_ptrs + N, up.to(element), inside)
        tl.store(h_ptr + rows * N + cols, (activated(gate, ACTIVATION) * up).to(element), inside)


@triton.jit(do_not_specialize=["M", "N8"])
def gated_backward_kernel(
    dh_ptr,  # (M, N)
    saved_ptr,  # (M, 2 N): gate and up
    grad_ptr,  # (M, 2 N): their gradients
    M,
    N8,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the gradients of gate and up from that of h.

    One program handles BLOCK columns of one row; consecutive programs handle consecutive column blocks.
    """
    N = N8 * 8
    blocks = tl.cdiv(N, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    cols = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < N
    gate_ptrs = saved_ptr + row * (2 * N) + cols
    gate = tl.load(gate_ptrs, inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + N, inside, other=0.0).to(tl.float32)
    dh = tl.load(dh_ptr + row * N + cols, inside, other=0.0).to(tl.float32)
    element = grad_ptr.dtype.element_ty
    grad_ptrs = grad_ptr + row * (2 * N) + cols
    tl.store(grad_ptrs, (dh * up * activation_slope(gate, ACTIVATION)).to(element), inside)
    tl.store(grad_ptrs + N, (dh * activated(gate, ACTIVATION)).to(element), inside)
