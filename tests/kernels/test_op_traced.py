"""The op where PyTorch traces it: `torch.compile` with gradients, fake tensors, PyTorch's own checks of operators.

Kernels run in Triton's interpreter, so that what was traced can also be compared.
"""

from __future__ import annotations

import subprocess
import sys

import foretune
import pytest
import torch
from foretune import KernelConfig
from foretune.kernels.grouped_gemm import KernelConfigForward, unsloth_grouped_gemm
from torch._subclasses import FakeTensorMode

pytestmark = pytest.mark.interpret

TOPK, N, K, SIZES = 2, 8, 16, (7, 0, 5)  # 12 rows
SMALL = KernelConfig.of(BLOCK_M=16, BLOCK_N=32, BLOCK_K=32, num_stages=2)


def tensors(rows=12):
    generator = torch.Generator().manual_seed(0)
    made = {
        "x": torch.randn(rows // TOPK, K, generator=generator).half(),
        "w": torch.randn(len(SIZES), N, K, generator=generator).half(),
        "topk_weights": torch.rand(rows, generator=generator),
        "bias": torch.randn(len(SIZES), N, generator=generator).half(),
    }
    leaves = {name: tensor.requires_grad_() for name, tensor in made.items()}
    sizes = (rows - sum(SIZES[1:]), *SIZES[1:])
    return {
        **leaves,
        "group_sizes": torch.tensor(sizes, dtype=torch.int32),
        "gather_indices": torch.randperm(rows, generator=generator),
    }


def ours(x, w, group_sizes, gather_indices, topk_weights, bias):
    y = foretune.grouped_gemm(
        2 * x,
        w,
        group_sizes,
        gather_indices=gather_indices,
        topk=TOPK,
        permute_x=True,
        topk_weights=topk_weights,
        bias=bias,
        config=SMALL,
        config_dw=SMALL,
        mode="off",
    )
    return y.sin()


UNSLOTHS = KernelConfigForward(BLOCK_SIZE_M=16)


def unsloths(x, w, group_sizes, gather_indices, topk_weights, bias):
    y = unsloth_grouped_gemm(
        x,
        w,
        group_sizes,
        TOPK,
        gather_indices,
        permute_x=True,
        topk_weights=topk_weights,
        fuse_mul_post=True,
        kernel_config_fwd=UNSLOTHS,
    )
    return y + bias.sum()


def run(function, inputs):
    y = function(**inputs)
    leaves = [tensor for tensor in inputs.values() if tensor.requires_grad]
    return [y, *torch.autograd.grad(y, leaves, torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y))]


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setenv("FORETUNE_MODE", "off")


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("function", [ours, unsloths])
def test_a_whole_graph_with_gradients_equals_eager(function, backend):
    inputs = tensors()
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    for result, expected in zip(run(compiled, inputs), run(function, inputs), strict=True):
        assert torch.equal(result, expected)


def test_one_graph_serves_any_number_of_rows():
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    compiled = torch.compile(ours, fullgraph=True, backend=counter, dynamic=True)
    for rows in (12, 30, 46):
        assert torch.equal(compiled(**tensors(rows)), ours(**tensors(rows)))
    assert counter.frame_count == 1


def test_the_first_use_of_the_name_may_be_in_a_compiled_function():
    code = f"""
        import torch, foretune
        x, w = torch.ones(4, {K}).half(), torch.ones(1, {N}, {K}).half()
        def call(x, w, sizes): return foretune.grouped_gemm(x, w, sizes, mode="off")
        print(torch.compile(call, fullgraph=True, backend="aot_eager")(x, w, torch.tensor([4])).sum().item())
    """
    program = "\n".join(line.strip() for line in code.splitlines())
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.stdout == f"{4.0 * N * K}\n", ran.stderr[-4000:]


@pytest.mark.parametrize("frozen", [(), ("x",), ("w",), ("x", "w", "topk_weights")])
def test_pytorchs_own_checks(frozen):
    inputs = tensors()
    for name in frozen:
        inputs[name] = inputs[name].detach()
    flat = [inputs[name] for name in ("x", "w", "group_sizes", "gather_indices", "topk_weights", "bias")]
    torch.library.opcheck(
        torch.ops.foretune.grouped_gemm, (*flat, TOPK, True, False, "BLOCK_M=16;num_warps=4", None, None, "off")
    )


def test_fake_tensors_are_refused_for_the_same_reasons():
    with FakeTensorMode():
        y = foretune.grouped_gemm(torch.empty(6, K), torch.empty(2, N, K), torch.empty(2, dtype=torch.int32))
        assert (y.shape, y.dtype) == ((6, N), torch.float32)
        with pytest.raises(ValueError, match="x must have K = 16 columns, as w"):
            foretune.grouped_gemm(torch.empty(6, 24), torch.empty(2, N, K), torch.empty(2, dtype=torch.int32))


def test_a_dispatch_mode_sees_the_operator():
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **kwargs or {})

    with Watch():
        ours(**tensors())
    assert torch.ops.foretune.grouped_gemm.default in seen


def test_a_second_derivative_is_refused():
    inputs = tensors()
    (dx,) = torch.autograd.grad(ours(**inputs).sum(), inputs["x"], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()
