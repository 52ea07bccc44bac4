"""The op in Triton's interpreter: results and gradients against plain PyTorch in double precision, what it refuses, and
how PyTorch traces it."""

from __future__ import annotations

import pytest
import torch
from foretune import ForetuneError, ForetuneWarning, KernelConfig, gated_mlp
from torch.nn.functional import gelu, silu

pytestmark = pytest.mark.interpret

N, K = 24, 40  # off every block
SMALL = KernelConfig.of(BLOCK_M=16, BLOCK_N=16, BLOCK_K=32, num_stages=2)
ACTIVATIONS = {"silu": silu, "gelu": gelu, "gelu_tanh": lambda x: gelu(x, approximate="tanh")}


@pytest.fixture(autouse=True)
def not_predicted(monkeypatch):
    monkeypatch.setenv("FORETUNE_MODE", "off")


def tensors(dtype=torch.float16):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 9, K, generator=generator).to(dtype).requires_grad_()
    w = (torch.randn(2 * N, K, generator=generator) / 4).to(dtype).requires_grad_()
    return x, w


def plain(x, w, activation):
    gate, up = (x.double() @ w.double().t()).chunk(2, -1)
    return ACTIVATIONS[activation](gate) * up


def run(function, x, w, *arguments, **options):
    """The result, and both gradients."""
    h = function(x, w, *arguments, **options)
    seed = torch.linspace(-1, 1, h.numel()).view_as(h).to(h.dtype)
    return [h.detach(), *torch.autograd.grad(h, (x, w), seed)]


def assert_close(ours, expected, tolerance):
    for one, other in zip(ours, expected, strict=True):
        assert one.shape == other.shape
        assert float((one - other).norm() / other.norm()) < tolerance


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_results_and_gradients(activation, recompute):
    x, w = tensors()
    ours = run(gated_mlp, x, w, activation, recompute=recompute, config=SMALL)
    assert_close(ours, run(plain, x, w, activation), 1e-3)


def test_float32_is_exact_and_a_gradient_may_be_of_one_operand_alone():
    x, w = tensors(torch.float32)
    config = KernelConfig.of(BLOCK_M=32, BLOCK_N=32, BLOCK_K=32)
    assert_close(run(gated_mlp, x, w, config=config), run(plain, x, w, "silu"), 1e-6)
    for leaf in (x, w):
        given = [tensor if tensor is leaf else tensor.detach() for tensor in (x, w)]
        gated_mlp(*given, config=config).sum().backward()
        assert leaf.grad is not None


def test_float32_runs_the_default_config_and_warns_of_nothing(recwarn):
    x, w = tensors(torch.float32)
    assert_close([gated_mlp(x, w, mode="predict")], [plain(x, w, "silu")], 1e-6)
    assert [str(one.message) for one in recwarn if one.category is ForetuneWarning] == []


def test_odd_views_and_no_rows():
    x, w = (tensor.detach() for tensor in tensors())
    expected = gated_mlp(x, w, config=SMALL)
    odd = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view_as(x).copy_(x)
    strided = w.repeat(1, 2)[:, :K]
    assert torch.equal(gated_mlp(odd, strided, config=SMALL), expected)
    assert torch.equal(gated_mlp(x[0, 0], w, config=SMALL), expected[0, 0])
    x, w = x[:, :0].requires_grad_(), w.requires_grad_()
    h = gated_mlp(x, w)
    h.sum().backward()
    assert h.shape == (2, 0, N)
    assert not w.grad.any()


@pytest.mark.parametrize("recompute", [False, True])
def test_a_compiled_layer_is_one_graph_and_gets_the_same(recompute):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def layer(x, w):
        return gated_mlp(2 * x, w, recompute=recompute, config=SMALL).sin()

    ours, eager = (
        run(function, *tensors()) for function in (torch.compile(layer, backend=counter, fullgraph=True), layer)
    )
    assert all(map(torch.equal, ours, eager))
    assert counter.frame_count == 1


def test_pytorchs_own_checks_of_the_operator():
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for saves in (False, True):
        arguments = (*tensors(), "silu", saves, None, "off")
        torch.library.opcheck(torch.ops.foretune.gated_mlp, arguments, test_utils=checks)


@pytest.mark.parametrize(
    ("x", "w", "options", "named"),
    [
        (7, torch.zeros(48, 40), {}, "x must be a tensor but is a int"),
        (torch.zeros(3, 40).long(), torch.zeros(48, 40), {}, "x must be one of torch.bfloat16"),
        (torch.zeros(3, 40).half(), torch.zeros(48, 40), {}, "w_gate_up is torch.float32 but x is torch.float16"),
        (torch.zeros(3, 32), torch.zeros(48, 40), {}, "x has 32 columns but w_gate_up"),
        (torch.zeros(3, 40), torch.zeros(2, 48, 40), {}, r"w_gate_up must be \(2 N, K\)"),
        (torch.zeros(3, 40), torch.zeros(49, 40), {}, "w_gate_up must have 2 N rows"),
        (torch.zeros(3, 40), torch.zeros(40, 40), {}, "N and K must be positive multiples of 8"),
        (torch.zeros(3, 40), torch.zeros(48, 40), {"activation": "relu"}, "silu, gelu, gelu_tanh but is 'relu'"),
        (torch.zeros(3, 40), torch.zeros(48, 40), {"config": KernelConfig.of(BLOCK_M=24)}, "BLOCK_M cannot be 24"),
        (torch.zeros(3, 40), torch.zeros(48, 40), {"mode": "fast"}, "fast"),
    ],
)
def test_what_cannot_be_is_named(x, w, options, named):
    with pytest.raises(ForetuneError, match=named):
        gated_mlp(x, w, **options)
