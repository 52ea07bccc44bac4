"""Calls that are alike, on the card: of every op the hot call, one of tensors that begin elsewhere, one in a CUDA graph
and one on another GPU have the bits of the first."""

from __future__ import annotations

import foretune
import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    # Right results are the same with and without a prediction.
    pytest.mark.filterwarnings("ignore::foretune.runtime.ForetuneWarning"),
]


def random(*shape, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.bfloat16)


def rotated(q, k, cos, sin, weight):
    return foretune.rms_norm_rope(q, k, cos, sin, weight, weight)[0]


ANGLES = (64, 32)
#: Of each op, and the shapes of its tensors.
OPS = {
    "matmul": (lambda a, b: foretune.matmul(a, b.T), [(64, 256), (128, 256)]),
    "gated_mlp": (foretune.gated_mlp, [(64, 256), (256, 256)]),
    "rms_norm_rope": (rotated, [(64, 4, 64), (64, 2, 64), ANGLES, ANGLES, (64,)]),
    "scaled_gemm": (foretune.scaled_gemm, [(64, 256), (128, 256)]),
}


@pytest.fixture(params=OPS)
def op(request):
    call, shapes = OPS[request.param]
    return call, [random(*shape, seed=place) for place, shape in enumerate(shapes)]


def moved(tensor):
    """The same numbers, 2 bytes after a multiple of 16."""
    return torch.empty(tensor.numel() + 1, device="cuda", dtype=tensor.dtype)[1:].view_as(tensor).copy_(tensor)


def test_hot_calls_and_those_of_tensors_that_begin_elsewhere(op):
    call, tensors = op
    odd = [moved(tensor) for tensor in tensors]
    first = call(*odd)
    for given in (tensors, odd, tensors, [odd[0], *tensors[1:]]):
        assert torch.equal(call(*given), first)


def test_a_hot_call_in_a_graph(op):
    call, tensors = op
    expected = [call(*tensors), call(2 * tensors[0], *tensors[1:])]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call(*tensors)
    graph.replay()
    assert torch.equal(y, expected[0])
    tensors[0].mul_(2)
    graph.replay()
    assert torch.equal(y, expected[1])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_a_gpu_that_is_not_the_current_one(op):
    call, tensors = op
    expected = call(*tensors)
    there = [tensor.to("cuda:1") for tensor in tensors]
    for _ in range(2):  # the first, and a hot one
        y = call(*there)
        assert y.device.index == 1
        assert torch.equal(y.cpu(), expected.cpu())
    assert torch.equal(call(*tensors), expected)
    assert torch.cuda.current_device() == 0
