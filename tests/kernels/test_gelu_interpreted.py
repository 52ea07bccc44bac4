"""gelu without erf: as exact as float32 is where it matters, and the same at the ends."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl
from foretune.kernels.gelu import normal_cdf

pytestmark = pytest.mark.interpret


@triton.jit
def kernel(x_ptr, y_ptr, SIZE: tl.constexpr):
    offs = tl.arange(0, SIZE)
    tl.store(y_ptr + offs, normal_cdf(tl.load(x_ptr + offs)))


def normal_cdf_of(values):
    x = torch.as_tensor(values, dtype=torch.float32)
    y = torch.empty_like(x)
    kernel[(1,)](x, y, len(x))
    return x.double(), y.double()


def test_it_is_a_hundred_thousandth_off_at_most():
    x, y = normal_cdf_of(torch.linspace(-6, 8, 1 << 14))
    exact = torch.special.erfc(-x / math.sqrt(2)) / 2
    assert float(((y - exact) / exact).abs().max()) < 1e-5
    assert float((y - exact).abs().max()) < 3e-6


def test_far_out_it_falls_and_says_what_the_sum_with_erf_says():
    _, y = normal_cdf_of(torch.linspace(-100, -6, 1 << 10))
    assert bool((y.diff() >= 0).all())
    assert 0 <= float(y.min()) <= float(y.max()) < 1e-8
    infinite = [-math.inf, -1e4, 1e4, math.inf]
    assert normal_cdf_of(infinite)[1].tolist() == [0, 0, 1, 1]
    assert math.isnan(normal_cdf_of([math.nan] * 2)[1][0])
