"""The ops under what PyTorch does with a function: autocast, torch.func's transforms, forward-mode AD.

In Triton's interpreter, and compared with the same in plain PyTorch.
"""

from __future__ import annotations

import foretune
import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn.functional import silu

pytestmark = pytest.mark.interpret


@pytest.fixture(autouse=True)
def not_predicted(monkeypatch):
    monkeypatch.setenv("FORETUNE_MODE", "off")


def randn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


SIZES = torch.tensor([3, 0, 5], dtype=torch.int32)
ANGLES, WEIGHT = randn(4, 8), randn(16)


def gated(x, w):
    gate, up = (x @ w.T).chunk(2, -1)
    return silu(gate) * up


def grouped(x, w):
    return torch.cat([x[:3] @ w[0].T, x[3:] @ w[2].T])


def normed(q, k):
    def rotated(x):
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * WEIGHT
        (a, b), cos, sin = x.chunk(2, -1), ANGLES[:, None].cos(), ANGLES[:, None].sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    return torch.cat([rotated(q), rotated(k)], 1)


#: Each op as a function of two tensors, the same in plain PyTorch, and the tensors. Results are small: the tests take
#: their sine, which multiplies rounding errors by their size.
OPS = {
    "matmul": (foretune.matmul, torch.matmul, (randn(8, 16), randn(16, 24))),
    "matmul with bias and activation": (
        lambda a, b: foretune.matmul(a, b, b[0], "silu"),
        lambda a, b: silu(a @ b + b[0]),
        (randn(8, 16), randn(16, 24)),
    ),
    "gated_mlp": (foretune.gated_mlp, gated, (randn(8, 16), randn(16, 16) / 4)),
    "gated_mlp that recomputes": (
        lambda x, w: foretune.gated_mlp(x, w, recompute=True),
        gated,
        (randn(8, 16), randn(16, 16) / 4),
    ),
    "grouped_gemm": (lambda x, w: foretune.grouped_gemm(x, w, SIZES), grouped, (randn(8, 16), randn(3, 8, 16))),
    "rms_norm_rope": (
        lambda q, k: torch.cat(foretune.rms_norm_rope(q, k, ANGLES.cos(), ANGLES.sin(), WEIGHT, WEIGHT), 1),
        normed,
        (randn(4, 2, 16), randn(4, 1, 16)),
    ),
}
every_op = pytest.mark.parametrize("op", OPS)


def assert_close(ours, expected):
    for one, other in zip(ours, expected, strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        assert float((one - other).norm() / other.norm()) < 2e-6


def gradients(function, tensors, *, during_backward=False, during_forward=False):
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=during_forward):
        y = function(*leaves)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=during_backward):
        return y.detach(), *torch.autograd.grad(y, leaves, torch.linspace(-1, 1, y.numel()).view_as(y))


@every_op
@pytest.mark.parametrize("where", [("backward",), ("forward",), ("forward", "backward")])
def test_autocast_changes_nothing(op, where):
    """An op computes in the dtype of its tensors, wherever autocast is on."""
    function, _, tensors = OPS[op]
    during = {f"during_{one}": True for one in where}
    for one, other in zip(gradients(function, tensors, **during), gradients(function, tensors), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("op", ["gated_mlp", "grouped_gemm"])
def test_autocast_changes_nothing_of_the_operator(op):
    """Which a compiler calls, and whose gradient PyTorch calls."""
    function, plain, tensors = OPS[op]
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    found = gradients(compiled, tensors, during_forward=True, during_backward=True)
    assert_close(found, gradients(plain, tensors))


@pytest.mark.parametrize("kind", ["blockwise", "rowwise", "tensorwise"])
def test_autocast_changes_nothing_of_fp8(kind):
    tensors = randn(16, 32).bfloat16(), randn(16, 32).bfloat16()

    def found(dtype, enabled):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        y = foretune.scaled_gemm(*leaves, scales=kind)
        with torch.autocast("cpu", dtype=dtype, enabled=enabled):
            y.backward(1e4 * tensors[0][:, :16])  # too large for float16 once summed
        return [leaf.grad for leaf in leaves]

    for one, other in zip(found(torch.float16, enabled=True), found(torch.float16, enabled=False), strict=True):
        assert torch.equal(one, other)


def test_autocast_that_is_off_within_one_that_is_on_stays_off():
    function, _, tensors = OPS["gated_mlp"]
    expected = gradients(function, tensors)
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    seed = torch.linspace(-1, 1, expected[0].numel()).view_as(expected[0])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = function(*leaves)
        with torch.autocast("cpu", enabled=False):
            found = torch.autograd.grad(y, leaves, seed)
        assert torch.is_autocast_enabled("cpu")
    assert all(map(torch.equal, found, expected[1:]))


def test_a_function_that_restores_the_autocast_of_its_forward_pass_gets_the_same():
    class Layer(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu")
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return foretune.gated_mlp(x, w)

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx, dh):
            with torch.enable_grad():
                leaves = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
                return torch.autograd.grad(foretune.gated_mlp(*leaves), leaves, dh)

    function, _, tensors = OPS["gated_mlp"]
    found = gradients(Layer.apply, tensors, during_forward=True)
    assert all(map(torch.equal, found, gradients(function, tensors)))


@every_op
def test_reverse_mode_transforms(op):
    function, plain, tensors = OPS[op]

    def of(one):
        y, pullback = vjp(one, *tensors)
        return y, *pullback(y.cos()), *grad(lambda *both: one(*both).sin().sum(), argnums=(0, 1))(*tensors)

    assert_close(of(function), of(plain))


@every_op
def test_vmap(op):
    function, plain, (one, other) = OPS[op]
    batch = torch.stack([one, -2 * one], 1)

    def of(call):
        mapped = vmap(call, in_dims=(1, None))
        each = vmap(grad(lambda x, y: call(x, y).sin().sum(), argnums=(0, 1)), in_dims=(1, None))
        total = grad(lambda xs: mapped(xs, other).sin().sum())
        return mapped(batch, other), *each(batch, other), total(batch)

    assert_close(of(function), of(plain))


def test_vmap_over_nothing_is_refused():
    b = randn(16, 8)
    with pytest.raises(ValueError, match="cannot be mapped over zero examples"):
        vmap(lambda a: foretune.matmul(a, b))(torch.zeros(0, 8, 16))


def test_a_jacobian_and_second_derivatives_of_matmul():
    function, plain, (a, b) = OPS["matmul"]
    a = a[:2]

    def of(op):
        gradient = grad(lambda a: op(a, b).sin().sum())
        return jacrev(lambda a: op(a, b))(a), jacrev(gradient)(a)

    assert_close(of(function), of(plain))


@pytest.mark.parametrize("op", ["gated_mlp", "grouped_gemm", "rms_norm_rope"])
def test_second_derivatives_of_others_are_refused(op):
    function, _, (one, other) = OPS[op]
    gradient = grad(lambda x: function(x, other).square().sum())
    with pytest.raises(foretune.ForetuneError, match=f"foretune.{op} has no second derivative"):
        grad(lambda x: gradient(x).sum())(one)


@every_op
def test_forward_mode_is_refused(op):
    function, _, (one, other) = OPS[op]
    why = f"foretune.{op.split()[0]} has no forward-mode derivative"
    with pytest.raises(foretune.ForetuneError, match=why):
        jvp(lambda x: function(x, other), (one,), (one,))
    with pytest.raises(foretune.ForetuneError, match=why):
        jacfwd(grad(lambda x: function(x, other).sum()))(one)
    with forward_ad.dual_level():
        with pytest.raises(foretune.ForetuneError, match=why):
            function(forward_ad.make_dual(one, one), other)
        assert torch.equal(function(one, other), function(one, other))  # nobody asks for a derivative here


@pytest.mark.parametrize("differentiate", [lambda f, x: jvp(f, (x,), (x,)), lambda f, x: grad(f)(x)])
def test_what_a_compiler_cannot_differentiate_is_refused(differentiate):
    b = randn(16, 8)

    @torch.compile(backend="eager", fullgraph=True)
    def compiled(a):
        return differentiate(lambda a: foretune.matmul(a, b).sum(), a)

    with pytest.raises(
        Exception, match=r"foretune.matmul has no forward-mode|call foretune.matmul, and apply the transform"
    ):
        compiled(randn(8, 16))


def test_fp8_maps_and_refuses_derivatives_by_transforms():
    x, w = randn(3, 16, 32).bfloat16(), randn(16, 32).bfloat16()
    mapped = vmap(lambda x: foretune.scaled_gemm(x, w, scales="rowwise"))(x)
    assert torch.equal(mapped, torch.stack([foretune.scaled_gemm(one, w, scales="rowwise") for one in x]))
    with pytest.raises(foretune.ForetuneError, match=r"cannot be differentiated under torch.func.* but x needs"):
        grad(lambda x: foretune.scaled_gemm(x, w).sum())(x[0])
    with pytest.raises(foretune.ForetuneError, match="no forward-mode derivative, but w has a tangent"):
        jvp(lambda w: foretune.scaled_gemm(x[0], w), (w,), (w,))


@pytest.mark.parametrize("make", [lambda n: randn(1).expand(n), lambda n: randn(n, 2)[:, 1]], ids=["one", "strided"])
def test_a_bias_that_is_not_contiguous_is_read_as_it_lies(make):
    a, b, bias = randn(8, 16), randn(16, 24), make(24)
    assert_close([foretune.matmul(a, b, bias)], [a @ b + bias])
