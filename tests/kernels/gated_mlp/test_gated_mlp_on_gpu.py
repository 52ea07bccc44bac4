"""The gated MLP on the card: results and gradients of the op and of the whole space, determinism, CUDA graphs,
`torch.compile`, waiting for nothing, and what it is compared with."""

from __future__ import annotations

import pytest
import torch
from foretune import DeviceSpec, Problem, gated_mlp
from foretune.collect.compiling import compile_ahead
from foretune.kernels import find_family
from foretune.kernels.registry import comparison_of
from torch.nn.functional import gelu, silu

pytestmark = [
    pytest.mark.gpu,
    # Right results are the same with and without a prediction.
    pytest.mark.filterwarnings("ignore::foretune.runtime.ForetuneWarning"),
]

#: Of results, and of gradients, whose gate and up are rounded on the way.
TOLERANCES = {torch.bfloat16: (4e-3, 8e-3), torch.float16: (5e-4, 1e-3), torch.float32: (1e-5, 1e-5)}
ACTIVATIONS = {"silu": silu, "gelu": gelu, "gelu_tanh": lambda x: gelu(x, approximate="tanh")}
FAMILY = find_family("gated_mlp")


@pytest.fixture(scope="module")
def device():
    return DeviceSpec.live()


@pytest.fixture(autouse=True)
def exact_products(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


def tensors(m, n, k, dtype=torch.bfloat16):
    torch.manual_seed(0)
    x = torch.randn(m, k, device="cuda").to(dtype)
    w = (torch.randn(2 * n, k, device="cuda") / k**0.5).to(dtype)
    return x.requires_grad_(), w.requires_grad_()


def plain(x, w, activation):
    gate, up = (x.double() @ w.double().t()).chunk(2, -1)
    return ACTIVATIONS[activation](gate) * up


def run(function, x, w, *arguments, **options):
    """The result, and both gradients."""
    h = function(x, w, *arguments, **options)
    seed = torch.linspace(-1, 1, h.numel(), device="cuda").view_as(h).to(h.dtype)
    return [h.detach(), *torch.autograd.grad(h, (x, w), seed)]


def error(one, other):
    return float((one.double() - other.double()).norm() / other.double().norm())


@pytest.mark.parametrize("recompute", [False, True], ids=["saved", "again"])
@pytest.mark.parametrize(
    ("dtype", "activation"),
    [*((torch.bfloat16, name) for name in ACTIVATIONS), (torch.float16, "silu"), (torch.float32, "silu")],
    ids=str,
)
def test_results_and_gradients(dtype, activation, recompute):
    for shape in ((1, 8, 8), (77, 328, 328), (513, 264, 1032)):
        x, w = tensors(*shape, dtype)
        ours, expected = run(gated_mlp, x, w, activation, recompute=recompute), run(plain, x, w, activation)
        result, *grads = map(error, ours, expected)
        assert result < TOLERANCES[dtype][0]
        assert max(grads) < TOLERANCES[dtype][1]


@pytest.mark.parametrize("flags", [(), ("gelu_tanh", "saves")], ids=["silu", "gelu_tanh saved"])
def test_every_config_of_the_space_is_right(flags, device):
    """Of each binary the configs whose grids differ most: bands of eight and two programs an SM, and neither."""
    problem = Problem.of("gated_mlp", flags=flags, m=1024, n=1024, k=1024)
    configs = [config for config in FAMILY.space(device) if FAMILY.supports(config, problem, device) is None]
    of_binary = {}
    for config in configs:
        of_binary.setdefault(FAMILY.binary_key(config, problem), []).append(config)
    step = 1 if not flags else 4
    chosen = [config for some in list(of_binary.values())[::step] for config in {some[0], some[-1]}]
    compile_ahead(FAMILY, [(config, problem) for config in chosen], device)
    inputs = FAMILY.inputs(FAMILY.check_problem(chosen[0], problem), device)
    expected, wrong = FAMILY.reference(inputs), []
    for config in chosen:
        inputs.out.fill_(float("nan"))
        out = FAMILY.launch(inputs, config).float()
        if not float((out - expected).norm() / expected.norm()) <= FAMILY.tolerance(problem):
            wrong.append(config)
    assert not wrong, f"{len(wrong)} of {len(chosen)} configs are wrong: {wrong[:3]}"


def test_the_same_bits_every_time_and_no_waiting():
    x, w = tensors(777, 1024, 512)
    first = run(gated_mlp, x, w)
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = [run(gated_mlp, x, w) for _ in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for results in again:
        assert all(map(torch.equal, results, first))


def test_a_cuda_graph_replays_with_other_values():
    x, w = (tensor.detach() for tensor in tensors(64, 512, 256))
    gated_mlp(x, w)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        h = gated_mlp(x, w)
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(h, gated_mlp(x, w))


@pytest.mark.parametrize("recompute", [False, True], ids=["saved", "again"])
def test_a_layer_that_inductor_compiles_gets_the_same(recompute):
    torch._dynamo.reset()

    def layer(x, w):
        return 2 * gated_mlp(x, w, recompute=recompute)

    ours = run(torch.compile(layer, fullgraph=True), *tensors(128, 512, 256))
    for one, other in zip(ours, run(layer, *tensors(128, 512, 256)), strict=True):
        assert error(one, other) < 1e-2


def test_an_output_of_more_elements_than_32_bits_count():
    m, n, k = 2**31 // 16384 + 5, 16384, 8
    x, w = (tensor.detach() for tensor in tensors(m, n, k))
    h = gated_mlp(x, w)
    for rows in (slice(0, 5), slice(-5, None)):
        assert error(h[rows], plain(x[rows], w, "silu")) < 4e-3


def test_what_it_is_compared_with_computes_the_same(device):
    for flags in ((), ("gelu_tanh",)):
        problem = Problem.of("gated_mlp", flags=flags, m=64, n=512, k=256)
        inputs = FAMILY.inputs(problem, device)
        ways = comparison_of(FAMILY).contenders(FAMILY, problem, inputs, device, {})
        assert {"eager", "compile", "cublas"} <= set(ways)
        expected = FAMILY.reference(inputs).view(64, 512)
        for name in ways.keys() - {"cublas"}:
            assert error(ways[name](), expected) < 2e-2  # they round in between
