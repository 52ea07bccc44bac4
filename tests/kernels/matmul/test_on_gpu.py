"""The dense GEMM on the card: every kind through every way, each element compared; the op with its gradients, in a CUDA
graph; the same bits in every run; more than 2^31 elements."""

from __future__ import annotations

import pytest
import torch
from foretune.datasets import DeviceSpec
from foretune.kernels.matmul import matmul
from foretune.kernels.matmul.space import worth_turning
from products import LAYOUTS, MATMUL, SPECIALIZED, config, problem, specialized

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("own_cache"),
    # Right results are the same with and without a prediction.
    pytest.mark.filterwarnings("ignore::foretune.runtime.ForetuneWarning"),
]

LARGE = {"m": 128, "n": 128, "k": 64, "num_warps": 8, "num_stages": 3, "GROUP_M": 8}
SMALL = {"m": 16, "n": 64, "k": 64, "num_stages": 4}
WAYS = {
    "pointers": LARGE,
    "a program a tile": LARGE | {"TMA": 1},
    "persistent": LARGE | {"TMA": 1, "PROGRAMS_PER_SM": 1},
    "stores": LARGE | {"TMA": 2, "PROGRAMS_PER_SM": 1},
    "split": SMALL | {"SPLIT_K": 5},
    "split by TMA": SMALL | {"SPLIT_K": 5, "TMA": 1},
}


@pytest.fixture(scope="module")
def device():
    return DeviceSpec.live()


def check(call, one, device):
    if reason := MATMUL.supports(one, call, device):
        pytest.skip(reason)
    inputs = MATMUL.inputs(call, device)
    expected, y = MATMUL.reference(inputs), MATMUL.launch(inputs, one).float()
    tolerance, norm = MATMUL.tolerance(call), expected.norm()
    assert float((y - expected).norm() / norm) <= tolerance
    limit = 20 * tolerance * (expected.abs() + norm / expected.numel() ** 0.5)
    assert bool(((y - expected).abs() <= limit).all())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("flags", LAYOUTS, ids="-".join)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "int8"])
def test_every_layout_dtype_and_way(dtype, flags, way, device):
    """More tiles than programs in all, so that flattened loops go from tile to tile."""
    check(problem(dtype, flags, 2, 1360, 1200, 720), config(**WAYS[way]), device)


@pytest.mark.parametrize("way", SPECIALIZED, ids=str)
@pytest.mark.parametrize("flags", LAYOUTS, ids="-".join)
def test_every_layout_by_warps_that_have_one_job_each(flags, way, device):
    """More tiles than programs, fewer, and one: of groups that take turns, one has then nothing to do. More steps than
    stages, and fewer; ends of all three sizes inside a tile."""
    for batch, m, n, k in ((2, 2320, 2200, 520), (1, 704, 1000, 72), (1, 8, 8, 8), (3, 200, 168, 2056)):
        for band in (1, 16):
            check(problem("bf16", flags, batch, m, n, k), specialized(*way, GROUP_M=band), device)


@pytest.mark.parametrize("after", [("bias",), ("relu",), ("bias", "gelu"), ("bias", "silu")], ids="-".join)
@pytest.mark.parametrize("way", [SPECIALIZED[0], SPECIALIZED[3], SPECIALIZED[9]], ids=str)
def test_what_follows_the_product_of_such_warps(after, way, device):
    check(problem("fp16", after, 1, 2000, 1000, 520), specialized(*way), device)


@pytest.mark.parametrize("way", ["pointers", "split"])
@pytest.mark.parametrize("flags", LAYOUTS, ids="-".join)
def test_sizes_that_nothing_divides(flags, way, device):
    check(problem("bf16", flags, 3, 333, 1021, 517), config(**WAYS[way]), device)


@pytest.mark.parametrize("after", [("bias",), ("relu",), ("bias", "gelu"), ("bias", "silu")], ids="-".join)
@pytest.mark.parametrize("way", ["persistent", "split by TMA"])
def test_what_follows_the_product(after, way, device):
    check(problem("bf16", after, 1, 2000, 1000, 520), config(**WAYS[way]), device)


def test_the_bits_are_the_same_in_every_run_and_in_a_graph(device):
    x, w = torch.randn(8, 8192, device="cuda").bfloat16(), torch.randn(1024, 8192, device="cuda").bfloat16()
    split = config(SPLIT_K=8, **SMALL)
    first = matmul(x, w.T, config=split)
    assert all(matmul(x, w.T, config=split).equal(first) for _ in range(20))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = matmul(x, w.T, config=split)
    for _ in range(3):
        captured.zero_()
        graph.replay()
        assert captured.equal(first)


def test_the_op_and_its_gradients_are_those_of_torch(device):
    ours = [torch.randn(*shape, device="cuda") for shape in ((2, 300, 512), (768, 512), (768,))]
    theirs = [tensor.bfloat16().double().requires_grad_() for tensor in ours]
    ours = [tensor.bfloat16().requires_grad_() for tensor in ours]
    expected = torch.nn.functional.silu(theirs[0] @ theirs[1].T + theirs[2])
    dy = torch.randn_like(expected).bfloat16()
    expected.backward(dy.double())
    y = matmul(ours[0], ours[1].T, ours[2], "silu")
    y.backward(dy)
    for mine, other in [(y, expected), *((a.grad, b.grad) for a, b in zip(ours, theirs, strict=True))]:
        assert float((mine.double() - other).norm() / other.norm()) <= 1e-2


@pytest.mark.parametrize("sizes", [(2048, 2304, 2100), (4099, 2051, 640)])
def test_float32_that_lies_across_k_is_copied_and_multiplied(sizes, device):
    m, n, k = sizes
    call = problem("fp32", ("a_km", "b_kn"), 1, m, n, k)
    assert worth_turning(call, device) == (True, True)
    a, b = torch.randn(k, m, device="cuda").mT, torch.randn(k, n, device="cuda")
    expected = a.double() @ b.double()
    assert float((matmul(a, b) - expected).norm() / expected.norm()) <= MATMUL.tolerance(call)


def test_a_layer_that_inductor_compiles_gets_the_same():
    torch._dynamo.reset()

    def layer(x, w, bias):
        return 2 * matmul(x, w.T, bias, "silu")

    def run(function):
        torch.manual_seed(0)
        made = [torch.randn(*shape, device="cuda").bfloat16() for shape in ((300, 512), (768, 512), (768,))]
        y = function(*(tensor.requires_grad_() for tensor in made))
        return y.detach(), *torch.autograd.grad(
            y, made, torch.linspace(-1, 1, y.numel(), device="cuda").view_as(y).bfloat16()
        )

    for one, other in zip(run(torch.compile(layer, fullgraph=True)), run(layer), strict=True):
        assert float((one.float() - other.float()).norm() / other.float().norm()) <= 1e-2


def test_more_than_32_bits_of_elements(device):
    call = problem("bf16", (), 1, 70000, 33000, 72)
    inputs = MATMUL.inputs(call, device)
    for one in (config(**WAYS["pointers"]), config(**WAYS["stores"]), specialized(*SPECIALIZED[1])):
        if MATMUL.supports(one, call, device) is None:
            y = MATMUL.launch(inputs, one)
            last = inputs.a[0, -100:].float() @ inputs.b[0].float().T
            assert float((y[0, -100:].float() - last).norm() / last.norm()) <= MATMUL.tolerance(call)
