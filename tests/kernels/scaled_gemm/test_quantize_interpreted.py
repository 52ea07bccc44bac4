"""The kernels that quantize along rows, in Triton's interpreter: the bits are those of PyTorch."""

from __future__ import annotations

import pytest
import torch
from foretune.kernels.scaled_gemm.operators import QUANTIZED
from foretune.kernels.scaled_gemm.quantize import GRADIENTS, quantize_w, quantize_x
from foretune.kernels.scaled_gemm.space import GRANULARITIES

pytestmark = [pytest.mark.interpret, pytest.mark.usefixtures("right_fp8")]

every_kind = pytest.mark.parametrize("kind", GRANULARITIES)


def same_bits(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        assert one.is_contiguous() == other.is_contiguous()
        assert torch.equal(torch.nan_to_num(one.float(), nan=1e9), torch.nan_to_num(other.float(), nan=1e9))


def numbers(*shape):
    """Normal numbers of many magnitudes, among them numbers that are halfway between two of fp8."""
    random = torch.Generator().manual_seed(0)
    made = torch.randn(shape, generator=random)
    made[..., ::3] = torch.randint(-448, 449, made[..., ::3].shape, generator=random)
    return (made * 2.0 ** torch.randint(-8, 9, (*shape[:-1], 1), generator=random)).bfloat16()


@every_kind
@pytest.mark.parametrize("gradient", GRADIENTS)
def test_activations_have_the_bits_of_pytorch(kind, gradient):
    x = numbers(70, 1168)
    x[3, 5], x[4, 7], x[5] = 448.0, -57344.0, 0.0
    same_bits(QUANTIZED.call(x, gradient, kind, False), quantize_x(x, kind, GRADIENTS[gradient]))


@every_kind
def test_weights_have_the_bits_of_pytorch(kind):
    w = numbers(3, 144, 272)
    same_bits(QUANTIZED.call(w, "e4m3", kind, True), quantize_w(w, kind))
    same_bits(QUANTIZED.call(w[1], "e4m3", kind, True), quantize_w(w[1], kind))


@every_kind
def test_numbers_that_are_not_finite_or_subnormal_have_the_bits_of_pytorch(kind):
    x = numbers(12, 272)
    x[0, 1], x[1, 2], x[2, 200] = float("nan"), float("inf"), float("-inf")
    same_bits(QUANTIZED.call(x, "e4m3", kind, False), quantize_x(x, kind))
    small = numbers(12, 272) * 2.0**-130
    same_bits(QUANTIZED.call(small, "e4m3", kind, False), quantize_x(small, kind))


@every_kind
def test_an_operand_of_any_layout_is_quantized(kind):
    x = numbers(48, 32).t()
    same_bits(QUANTIZED.call(x, "e4m3", kind, False), quantize_x(x, kind))
