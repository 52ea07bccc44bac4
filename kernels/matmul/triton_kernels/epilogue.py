"""The activation that follows a product before it is stored, in float32."""

from __future__ import annotations

import triton
import triton.language as tl

from ...gelu import normal_cdf


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """Return x after "relu", "gelu" (the exact one) or "silu"; x itself for "none"."""
    if ACTIVATION == "relu":
        x = tl.maximum(x, 0.0)
    elif ACTIVATION == "gelu":
        x = x * normal_cdf(x)
    elif ACTIVATION == "silu":
        x = x * tl.sigmoid(x)
    else:
        tl.static_assert(ACTIVATION == "none", "ACTIVATION must be none, relu, gelu or silu")
    return x
