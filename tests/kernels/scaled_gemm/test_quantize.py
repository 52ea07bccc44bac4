"""Quantising: what the numbers and their scales are, and how far off they may be."""

from __future__ import annotations

import pytest
import torch
from foretune.kernels.scaled_gemm.quantize import (
    LARGEST,
    dequantized_weight,
    dequantized_x,
    quantize_w,
    quantize_x,
    transposed,
)
from foretune.kernels.scaled_gemm.space import GRANULARITIES, scale_shapes

every_kind = pytest.mark.parametrize("kind", GRANULARITIES)


@every_kind
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_numbers_are_near_and_scales_have_their_shapes(kind, dtype):
    torch.manual_seed(0)
    x, w = torch.randn(37, 272, dtype=dtype), torch.randn(3, 144, 272, dtype=dtype)
    (x8, x_scale), (w8, w_scale) = quantize_x(x, kind), quantize_w(w, kind)
    assert (x_scale.shape, w_scale.shape) == scale_shapes(kind, 37, 144, 272, groups=3)
    assert x8.is_contiguous()
    assert w8.is_contiguous()
    assert x_scale.t().is_contiguous() or kind != "blockwise"
    for exact, near, scale in (
        (x, dequantized_x(x8, x_scale, kind), x_scale),
        (w[1], dequantized_weight(w8[1], w_scale[1], kind), w_scale),
    ):
        # Three bits after the point; below 2^-6 steps of 2^-9, which the scale stretches.
        assert bool(((near - exact).abs() <= exact.abs() / 16 + 2.0**-10 * scale.max()).all())
    dense8, dense_scale = quantize_w(w[1], kind)
    assert torch.equal(dense8.float(), w8[1].float())
    assert dense_scale.shape == scale_shapes(kind, 37, 144, 272)[1]


@every_kind
@pytest.mark.parametrize("dtype", LARGEST)
def test_the_largest_number_is_the_largest_and_zeros_stay_zeros(kind, dtype):
    x = torch.zeros(4, 256)
    x[1, 3], x[2, 200] = -5.0, 1e-38
    fp8, scale = quantize_x(x, kind, dtype)
    assert float(fp8.float().min()) == -LARGEST[dtype]
    assert bool(torch.isfinite(scale).all())
    assert bool((scale > 0).all())
    assert float(dequantized_x(fp8, scale, kind)[1, 3]) == pytest.approx(-5.0, rel=1e-6)
    assert bool((fp8[3].float() == 0).all())


@every_kind
def test_a_transpose_is_what_was_multiplied_forward(kind):
    w = torch.randn(2, 144, 272)
    w8, scale = quantize_w(w, kind)
    t8, t_scale = transposed(w8, scale, kind)
    assert t8.shape == (2, 272, 144)
    assert t8.is_contiguous()
    assert t_scale.shape == scale_shapes(kind, 1, 272, 144, groups=2)[1]
    forward = dequantized_weight(w8[1], scale[1], kind)
    backward = dequantized_weight(t8[1], t_scale[1], kind).T
    if kind == "rowwise":  # quantised twice
        assert float((backward - forward).norm() / forward.norm()) < 0.04
    else:
        assert torch.equal(backward, forward)
