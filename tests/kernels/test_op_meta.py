"""The ops on tensors without memory (meta and fake ones), and what FLOPs PyTorch's counter says that they make."""

from __future__ import annotations

import subprocess
import sys

import foretune
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

BF16, FP32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
ROWS, GROUPS, N, K, TOPK = 12, 3, 16, 32, 2


#: Of the call that is being made.
LEAVES = []


def leaf(*shape, dtype=BF16):
    LEAVES.append(torch.empty(*shape, dtype=dtype, requires_grad=True))
    return LEAVES[-1]


def integers(*shape):
    return torch.empty(*shape, dtype=torch.int32)


def grouped(rows=ROWS, **options):
    return foretune.grouped_gemm(leaf(rows, K), leaf(GROUPS, N, K), integers(GROUPS), **options)


def normed():
    q, k, angles, weight = leaf(4, 2, 16), leaf(4, 1, 16), torch.empty(4, 8), leaf(16)
    return foretune.rms_norm_rope(q, k, angles, angles, weight, weight)


def in_fp8():
    return foretune.scaled_gemm(
        torch.empty(ROWS, K, dtype=FP8),
        torch.empty(N, K, dtype=FP8),
        x_scale=torch.empty(ROWS, 1),
        w_scale=torch.empty(N, 1),
        scales="rowwise",
    )


ONE = 2 * ROWS * N * K
#: Of each op: a call, the shape of what it returns, its dtype, and the FLOPs forward and backward.
CALLS = {
    "matmul": (lambda: foretune.matmul(leaf(ROWS, K), leaf(K, N)), (ROWS, N), BF16, ONE, 2 * ONE),
    "matmul, one gradient": (
        lambda: foretune.matmul(leaf(ROWS, K), torch.empty(K, N, dtype=BF16)),
        (ROWS, N),
        BF16,
        ONE,
        ONE,
    ),
    "matmul of batches": (
        lambda: foretune.matmul(leaf(5, ROWS, K), leaf(5, K, N), leaf(N)),
        (5, ROWS, N),
        BF16,
        5 * ONE,
        2 * 5 * ONE,
    ),
    "matmul of a batch with one matrix": (
        lambda: foretune.matmul(leaf(5, ROWS, K), leaf(K, N), activation="silu"),
        (5, ROWS, N),
        BF16,
        5 * ONE,
        2 * 5 * ONE,
    ),
    "matmul of int8": (
        lambda: foretune.matmul(torch.empty(ROWS, K, dtype=torch.int8), torch.empty(K, N, dtype=torch.int8)),
        (ROWS, N),
        torch.int32,
        ONE,
        0,
    ),
    "gated_mlp": (
        lambda: foretune.gated_mlp(leaf(3, 4, K), leaf(2 * N, K)),
        (3, 4, N),
        BF16,
        2 * ONE,
        4 * ONE,
    ),
    "gated_mlp that recomputes": (
        lambda: foretune.gated_mlp(leaf(ROWS, K), leaf(2 * N, K), recompute=True),
        (ROWS, N),
        BF16,
        2 * ONE,
        6 * ONE,
    ),
    "gated_mlp in float32": (
        lambda: foretune.gated_mlp(leaf(ROWS, K, dtype=FP32), leaf(2 * N, K, dtype=FP32)),
        (ROWS, N),
        FP32,
        2 * ONE,
        4 * ONE,
    ),
    "grouped_gemm": (grouped, (ROWS, N), BF16, ONE, 2 * ONE),
    "grouped_gemm with everything": (
        lambda: grouped(
            ROWS // TOPK,
            topk=TOPK,
            permute_x=True,
            gather_indices=integers(ROWS),
            topk_weights=leaf(ROWS // TOPK, TOPK, dtype=FP32),
            bias=leaf(GROUPS, N),
        ),
        (ROWS, N),
        BF16,
        ONE,
        2 * ONE,
    ),
    "grouped_gemm, the bias alone": (
        lambda: foretune.grouped_gemm(
            torch.empty(ROWS, K), torch.empty(GROUPS, N, K), integers(GROUPS), bias=leaf(GROUPS, N)
        ),
        (ROWS, N),
        FP32,
        ONE,
        0,
    ),
    "rms_norm_rope": (normed, (4, 2, 16), BF16, 0, 0),
    "scaled_gemm": (lambda: foretune.scaled_gemm(leaf(ROWS, K), leaf(N, K)), (ROWS, N), BF16, ONE, 2 * ONE),
    "scaled_gemm of fp8": (in_fp8, (ROWS, N), BF16, ONE, 0),
    "scaled_grouped_gemm": (
        lambda: foretune.scaled_grouped_gemm(leaf(ROWS, K), leaf(GROUPS, N, K), integers(GROUPS)),
        (ROWS, N),
        BF16,
        ONE,
        2 * ONE,
    ),
}


def check(op):
    """Make the call and its backward pass, and return the FLOPs of each."""
    call, shape, dtype, _, _ = CALLS[op]
    LEAVES.clear()
    with FlopCounterMode(display=False) as forward:
        y = call()
    outputs = y if isinstance(y, tuple) else (y,)
    assert (outputs[0].shape, outputs[0].dtype) == (shape, dtype)
    made = [output for output in outputs if output.requires_grad]
    assert bool(made) == bool(LEAVES)
    with FlopCounterMode(display=False) as backward:
        if made:
            gradients = torch.autograd.grad(made, LEAVES, [torch.empty_like(output) for output in made])
            assert [one.shape for one in gradients] == [one.shape for one in LEAVES]
            assert [one.dtype for one in gradients] == [one.dtype for one in LEAVES]
            assert {one.device for one in gradients} == {outputs[0].device}
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("op", CALLS)
def test_meta_tensors_and_flops(op):
    with torch.device("meta"):
        assert check(op) == CALLS[op][-2:]


@pytest.mark.parametrize("op", CALLS)
def test_fake_tensors_and_flops(op):
    with FakeTensorMode():
        assert check(op) == CALLS[op][-2:]


def test_meta_tensors_without_a_mode():
    """Nothing is on but the tensors' device."""
    with torch.device("meta"):
        a, b = leaf(ROWS, K), leaf(K, N)
        x, w, sizes = leaf(ROWS, K), leaf(GROUPS, N, K), integers(GROUPS)
    for y, leaves in ((foretune.matmul(a, b), (a, b)), (foretune.grouped_gemm(x, w, sizes), (x, w))):
        assert y.is_meta
        assert y.shape == (ROWS, N)
        assert all(gradient.is_meta for gradient in torch.autograd.grad(y.sum(), leaves))


def test_meta_tensors_are_refused_for_the_same_reasons():
    with pytest.raises(foretune.ForetuneError, match="w is on cpu but x is on meta"):
        foretune.grouped_gemm(torch.empty(ROWS, K, device="meta"), torch.empty(GROUPS, N, K), integers(GROUPS))
    with pytest.raises(foretune.ForetuneError, match="b must have 32 rows"):
        foretune.matmul(torch.empty(ROWS, K, device="meta"), torch.empty(N, K, device="meta"))


@pytest.mark.parametrize("when", ["made before the op is imported", "active while the op is imported"])
def test_a_counter_that_is_older_than_the_op_counts_it(when):
    code = f"""
        import torch, foretune
        from torch.utils.flop_counter import FlopCounterMode
        counter = FlopCounterMode(display=False)
        a = torch.empty(4, 8, device="meta")
        {"foretune.matmul(a, a.T)" if "before" in when else ""}
        with counter: foretune.matmul(a, a.T)
        print(counter.get_total_flops())
    """
    program = "\n".join(line.strip() for line in code.splitlines())
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.stdout == f"{2 * 4 * 4 * 8}\n", ran.stderr[-4000:]


def test_a_formula_of_the_users_own_is_kept():
    a = torch.empty(4, 8, device="meta")
    with FlopCounterMode(display=False, custom_mapping={torch.ops.foretune.matmul: lambda *_, **__: 7}) as counter:
        foretune.matmul(a, a.T)
    assert counter.get_total_flops() == 7
