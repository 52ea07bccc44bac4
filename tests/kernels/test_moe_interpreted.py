"""A whole MoE layer on the op, in Triton's interpreter: fused and unfused, through our interface and Unsloth's."""

from __future__ import annotations

import pytest
import torch
from foretune import grouped_gemm
from foretune.kernels.grouped_gemm import (
    KernelConfigBackward_dW,
    KernelConfigBackward_dX,
    KernelConfigForward,
    unsloth_grouped_gemm,
)
from loops import error, moe_fused, moe_loop

pytestmark = pytest.mark.interpret

TOKENS, TOPK, EXPERTS, HIDDEN, INNER = 24, 3, 6, 40, 24


def ours(x, w, sizes, topk, indices, **options):
    return grouped_gemm(x, w, sizes, topk=topk, gather_indices=indices, mode="off", **options)


def unsloths(x, w, sizes, topk, indices, **options):
    return unsloth_grouped_gemm(
        x, w, sizes, topk, indices, fuse_mul_post=options.get("topk_weights") is not None, **options
    )


def unsloths_by_hand(x, w, sizes, topk, indices, **options):
    """With manual configs."""
    blocks = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 64}
    return unsloths(
        x,
        w,
        sizes,
        topk,
        indices,
        kernel_config_fwd=KernelConfigForward(**blocks, use_tma_load_w=True),
        kernel_config_bwd_dX=KernelConfigBackward_dX(**blocks, use_tma_load_w=True),
        kernel_config_bwd_dW=KernelConfigBackward_dW(**blocks, use_tma_store=True),
        **options,
    )


@pytest.fixture
def layer():
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "x": (TOKENS, HIDDEN),
        "router": (EXPERTS, HIDDEN),
        "w13": (EXPERTS, 2 * INNER, HIDDEN),
        "w2": (EXPERTS, HIDDEN, INNER),
    }
    return {name: torch.randn(shape, generator=generator) / shape[-1] ** 0.5 for name, shape in shapes.items()}


def run(moe, tensors, **options):
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
    y = moe(**leaves, topk=TOPK, **options)
    y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y))
    return {"y": y.detach()} | {name: leaf.grad for name, leaf in leaves.items()}


HALF, SINGLE = (torch.float16, 2e-3), (torch.float32, 1e-6)


@pytest.mark.filterwarnings("ignore::foretune.runtime.ForetuneWarning")  # with and without a prediction
@pytest.mark.parametrize(
    ("precision", "gemm", "fused"),
    [
        (HALF, ours, {}),
        (HALF, ours, {"permutes": False}),
        (HALF, ours, {"weighs": False}),
        (HALF, ours, {"permutes": False, "weighs": False}),
        (HALF, unsloths, {}),
        (HALF, unsloths, {"weighs": False}),
        (HALF, unsloths_by_hand, {}),
        (SINGLE, ours, {}),
        (SINGLE, unsloths_by_hand, {}),
    ],
)
def test_the_layer_and_all_its_gradients(layer, gemm, fused, precision):
    dtype, tolerance = precision
    layer = {name: tensor.to(dtype) for name, tensor in layer.items()}
    results = run(moe_fused, layer, gemm=gemm, **fused)
    expected = run(moe_loop, {name: tensor.double() for name, tensor in layer.items()})
    for name, reference in expected.items():
        assert error(results[name], reference) <= tolerance, name
