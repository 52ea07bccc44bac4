"""The scaled ops on the card: a training step of every kind of scales next to float64, without waiting for the device,
in a CUDA graph, and the same bits every time."""

from __future__ import annotations

import foretune
import pytest
import torch
from foretune.kernels.scaled_gemm.operators import QUANTIZED
from foretune.kernels.scaled_gemm.quantize import GRADIENTS, quantize_w, quantize_x
from foretune.kernels.scaled_gemm.space import GRANULARITIES

pytestmark = pytest.mark.gpu

every_kind = pytest.mark.parametrize("kind", GRANULARITIES)
SIZES = (300, 0, 1, 129, 82)
N, K = 1536, 2048
#: The relative error of e4m3: of each operand 2^-4 at most, a third of that on average.
FP8_ERROR, E5M2_ERROR, ROUNDED = 0.05, 0.07, 4e-3


@pytest.fixture(scope="module")
def layer():
    torch.manual_seed(0)
    made = {"device": "cuda", "dtype": torch.bfloat16}
    x, w, dy = (torch.randn(*shape, **made) for shape in ((sum(SIZES), K), (len(SIZES), N, K), (sum(SIZES), N)))
    return x, w, dy, torch.tensor(SIZES, dtype=torch.int32, device="cuda")


def step(x, w, dy, sizes, kind, **options):
    """y and the gradients of x and w."""
    leaves = [tensor.detach().requires_grad_() for tensor in (x, w)]
    y = foretune.scaled_grouped_gemm(*leaves, sizes, scales=kind, mode="off", **options)
    y.backward(dy)
    return y.detach(), leaves[0].grad, leaves[1].grad


def off(y, reference):
    return float((y.double() - reference).norm() / reference.norm())


@every_kind
@pytest.mark.parametrize(("gradient", "dw_dtype"), [("e4m3", "fp8"), ("e4m3", "bf16"), ("e5m2", "fp8")])
def test_a_training_step_is_right(kind, gradient, dw_dtype, layer):
    x, w, dy, sizes = layer
    y, dx, dw = step(x, w, dy, sizes, kind, grad_dtype=gradient, dw_dtype=dw_dtype)
    start, errors = 0, []
    for group, size in enumerate(SIZES):
        rows = slice(start, start + size)
        start += size
        if not size:
            assert bool((dw[group] == 0).all())
            continue
        here, dy_here, weight = x[rows].double(), dy[rows].double(), w[group].double()
        errors.append(
            (off(y[rows], here @ weight.T), off(dx[rows], dy_here @ weight), off(dw[group], dy_here.T @ here))
        )
    worst = [max(column) for column in zip(*errors, strict=True)]
    how = f"{kind} {gradient} {dw_dtype}"
    print(f"{how}: relative errors of y {worst[0]:.4f}, dx {worst[1]:.4f}, dw {worst[2]:.5f}")
    most = FP8_ERROR if gradient == "e4m3" else E5M2_ERROR
    assert worst[0] < FP8_ERROR
    assert worst[1] < most
    assert worst[2] < (ROUNDED if dw_dtype == "bf16" else most)


def test_a_dense_step_is_right(layer):
    x, w, dy, _ = layer
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (x, w[0])]
    y = foretune.scaled_gemm(*leaves, mode="off")
    y.backward(dy)
    assert off(y.detach(), x.double() @ w[0].double().T) < FP8_ERROR
    assert off(leaves[0].grad, dy.double() @ w[0].double()) < FP8_ERROR
    assert off(leaves[1].grad, dy.double().T @ x.double()) < ROUNDED


@every_kind
def test_what_is_quantized_has_the_bits_of_pytorch(kind):
    torch.manual_seed(0)
    for weights, shape in ((False, (4097, 7168)), (False, (5, 48)), (True, (3, 528, 1040)), (True, (144, 16))):
        x = torch.randn(shape, device="cuda") * 2.0 ** torch.randint(-8, 9, (*shape[:-1], 1), device="cuda")
        x[..., ::3] = torch.randint(-448, 449, x[..., ::3].shape, device="cuda").float()
        x = x.bfloat16()
        for gradient in ("e4m3",) if weights else GRADIENTS:
            fp8, scale = QUANTIZED.call(x, gradient, kind, weights)
            expected, expected_scale = quantize_w(x, kind) if weights else quantize_x(x, kind, GRADIENTS[gradient])
            assert torch.equal(scale, expected_scale)
            assert torch.equal(fp8.view(torch.uint8), expected.view(torch.uint8))


@every_kind
@pytest.mark.parametrize("dw_dtype", ["bf16", "fp8"])
def test_a_step_waits_for_nothing_and_gives_the_same_bits(kind, dw_dtype, layer):
    first = step(*layer, kind, dw_dtype=dw_dtype)
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = [step(*layer, kind, dw_dtype=dw_dtype) for _ in range(5)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for other in again:
        for one, same in zip(first, other, strict=True):
            assert torch.equal(one.view(torch.int16), same.view(torch.int16))


def test_a_captured_call_takes_other_sizes(layer):
    x, w, _, sizes = layer
    sizes = sizes.clone()
    with torch.no_grad():
        foretune.scaled_grouped_gemm(x, w, sizes, mode="off")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = foretune.scaled_grouped_gemm(x, w, sizes, mode="off")
        for told in ((0, 512, 0, 0, 0), SIZES[::-1]):
            sizes.copy_(torch.tensor(told, dtype=torch.int32))
            graph.replay()
            assert torch.equal(y, foretune.scaled_grouped_gemm(x, w, sizes, mode="off"))


def test_a_compiled_step_gives_the_same(layer):
    x, w, dy, sizes = layer
    y, dx, _ = step(*layer, "blockwise")
    leaf = x.detach().requires_grad_()
    compiled = torch.compile(lambda x: foretune.scaled_grouped_gemm(x, w, sizes, mode="off"), fullgraph=True)
    out = compiled(leaf)
    out.backward(dy)
    # Inductor may divide by a scale in another way, which moves a number by one step of e4m3 here and there.
    assert off(out.detach(), y.double()) < FP8_ERROR / 10
    assert off(leaf.grad, dx.double()) < FP8_ERROR / 10
