"""The ops in Triton's interpreter: forward and dX of every kind of scales, next to the same in float64. (The
interpreter gets products of bf16 wrong, so dW of groups is tested on the card.)"""

from __future__ import annotations

import foretune
import pytest
import torch
from foretune.kernels.op_calls import Memo
from foretune.kernels.scaled_gemm.op import PRODUCT
from foretune.kernels.scaled_gemm.quantize import dequantized_weight, dequantized_x, quantize_w, quantize_x
from foretune.kernels.scaled_gemm.space import GRANULARITIES

pytestmark = [pytest.mark.interpret, pytest.mark.usefixtures("right_fp8")]

every_kind = pytest.mark.parametrize("kind", GRANULARITIES)
SIZES = (9, 0, 3)
N, K = 144, 160
#: The relative error of e4m3: of each operand 2^-4 at most, a third of that on average, on either side.
FP8_ERROR = 0.05
ROUNDED = 4e-3


@pytest.fixture
def layer():
    torch.manual_seed(0)
    x, dy = torch.randn(12, K), torch.randn(12, N)
    w = torch.randn(3, N, K)
    return tuple(tensor.bfloat16() for tensor in (x, w, dy))


def off(y, reference):
    return float((y.detach().double() - reference).norm() / reference.norm())


@every_kind
def test_a_grouped_layer_and_its_dx_are_right(kind, layer):
    x, w, dy = layer
    x.requires_grad_()
    y = foretune.scaled_grouped_gemm(x, w, torch.tensor(SIZES), scales=kind, dw_dtype="bf16", mode="off")
    y.backward(dy)
    (x8, x_scale), (w8, w_scale) = quantize_x(x.detach(), kind), quantize_w(w, kind)
    exact = dequantized_x(x8, x_scale, kind, torch.float64)
    start = 0
    for group, size in enumerate(SIZES):
        rows = slice(start, start + size)
        start += size
        if not size:
            continue
        weight = dequantized_weight(w8[group], w_scale[group], kind, torch.float64)
        assert off(y[rows], exact[rows] @ weight.T) < ROUNDED
        assert off(y[rows], x[rows].detach().double() @ w[group].double().T) < FP8_ERROR
        assert off(x.grad[rows], dy[rows].double() @ w[group].double()) < FP8_ERROR


@pytest.fixture
def dirty_memory():
    """Fresh memory is full of NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.usefixtures("dirty_memory")
def test_rows_of_no_group_have_no_gradient_and_are_zero_if_contents_are_checked(layer, checked, monkeypatch):
    monkeypatch.setattr(PRODUCT, "calls", Memo())
    monkeypatch.setenv("FORETUNE_CHECK", str(int(checked)))
    x, w, dy = layer
    x.requires_grad_()
    y = foretune.scaled_grouped_gemm(x, w, torch.tensor([5, 0, 2]), dw_dtype="bf16", mode="off")
    y.backward(dy)
    assert not x.grad[7:].any()
    assert off(x.grad[:5], dy[:5].double() @ w[0].double()) < FP8_ERROR
    assert off(x.grad[5:7], dy[5:7].double() @ w[2].double()) < FP8_ERROR
    if checked:
        assert not y[7:].any()
        with pytest.raises(
            foretune.ForetuneError, match="group_sizes must sum to at most 12, the number of rows, but sum to 13"
        ):
            foretune.scaled_grouped_gemm(x, w, torch.tensor([5, 6, 2]), mode="off")


def test_the_gradient_of_w_does_not_depend_on_how_x_is_stored(layer):
    x, w, dy = layer
    grads = []
    for stored in (x, x.t().contiguous().t()):
        leaf = w.clone().requires_grad_()
        foretune.scaled_grouped_gemm(stored, leaf, torch.tensor(SIZES), mode="off").backward(dy)
        grads.append(leaf.grad)
    assert torch.equal(*grads)


@every_kind
def test_a_dense_layer_has_both_gradients(kind, layer):
    x, w, dy = layer[0], layer[1][0], layer[2]
    leaves = [tensor.clone().requires_grad_() for tensor in (x, w)]
    y = foretune.scaled_gemm(*leaves, scales=kind, mode="off")
    y.backward(dy)
    assert off(y, x.double() @ w.double().T) < FP8_ERROR
    assert off(leaves[0].grad, dy.double() @ w.double()) < FP8_ERROR
    assert off(leaves[1].grad, dy.double().T @ x.double()) < ROUNDED


def test_what_is_quantised_already_gives_the_same(layer):
    x, w, dy = layer
    sizes = torch.tensor(SIZES)
    (x8, x_scale), (w8, w_scale) = quantize_x(x, "blockwise"), quantize_w(w, "blockwise")
    expected = foretune.scaled_grouped_gemm(x, w, sizes, mode="off")
    y = foretune.scaled_grouped_gemm(x8, w8, sizes, x_scale=x_scale.contiguous(), w_scale=w_scale, mode="off")
    assert torch.equal(y, expected)
    x.requires_grad_()
    foretune.scaled_grouped_gemm(x, w8, sizes, w_scale=w_scale, mode="off").backward(dy)
    assert off(x.grad[:9], dy[:9].double() @ w[0].double()) < FP8_ERROR


@every_kind
def test_a_weight_learns_from_an_x_that_is_fp8_already(kind, layer):
    x, w, dy = layer
    x8, x_scale = quantize_x(x, kind)
    leaf = w[0].clone().requires_grad_()
    foretune.scaled_gemm(x8, leaf, x_scale=x_scale, scales=kind, mode="off").backward(dy)
    assert off(leaf.grad, dy.double().T @ dequantized_x(x8, x_scale, kind, torch.float64)) < ROUNDED


@pytest.mark.slow
def test_a_compiled_layer_gives_the_same(layer):
    x, w, dy = layer
    sizes, grads = torch.tensor(SIZES), []

    def step(x):
        return foretune.scaled_grouped_gemm(x, w, sizes, mode="off")

    torch._dynamo.reset()
    for run in (step, torch.compile(step, backend="eager", fullgraph=True)):
        leaf = x.clone().requires_grad_()
        y = run(leaf)
        y.backward(dy)
        grads.append((y.detach(), leaf.grad))
    assert torch.equal(grads[0][0], grads[1][0])
    assert torch.equal(grads[0][1], grads[1][1])


def test_nothing_in_gives_nothing_out():
    w = torch.randn(2, 32, 48).bfloat16()
    y = foretune.scaled_grouped_gemm(torch.empty(0, 48).bfloat16(), w, torch.tensor([0, 0]), mode="off")
    assert y.shape == (0, 32)
    assert foretune.scaled_gemm(torch.empty(0, 48).bfloat16(), w[0], mode="off").shape == (0, 32)
