"""What is found out once for calls that are alike, and that copies are made for those that need them and no others: of
every op, compiled for a GPU that need not be here."""

from __future__ import annotations

import foretune
import pytest
import torch
from foretune import KernelConfig
from foretune.datasets import DeviceSpec
from foretune.kernels import op_calls
from foretune.kernels.gated_mlp.op import OP as GATED_MLP
from foretune.kernels.matmul.op import OP as MATMUL
from foretune.kernels.rms_norm_rope.op import OP as RMS_NORM_ROPE
from foretune.kernels.scaled_gemm.op import PRODUCT
from foretune.runtime import use_stub_driver
from foretune.runtime.launching.launcher import Launcher

pytestmark = [pytest.mark.compile, pytest.mark.usefixtures("own_cache")]

BF16 = torch.bfloat16
TILE = KernelConfig.of(BLOCK_M=16, BLOCK_N=32, BLOCK_K=64, num_stages=2)
SPLIT = KernelConfig.of(**TILE.to_json(), SPLIT_K=2)
FP8 = KernelConfig.of(**TILE.to_json(), SWAP_AB=0)
FP8_SPLIT = KernelConfig.of(**FP8.to_json(), SPLIT_K=2, PROGRAMS_PER_SM=0, TMA_STORE=0)
JOBS = KernelConfig.of(
    BLOCK_M=128, BLOCK_N=64, PROGRAMS_PER_SM=1, SWAP_AB=0, TMA_LOAD=1, TMA_STORE=1, CONSUMERS=2, num_stages=2
)
BF16_JOBS = KernelConfig.of(
    BLOCK_M=128, BLOCK_N=160, BLOCK_K=64, PROGRAMS_PER_SM=1, SPLIT_K=1, TMA=2, CONSUMERS=2, num_warps=4, num_stages=2
)
HEADS = KernelConfig.of(HEADS=2, num_warps=1)
OPS = {
    "matmul": MATMUL,
    "matmul, specialized": MATMUL,
    "gated_mlp": GATED_MLP,
    "rms_norm_rope": RMS_NORM_ROPE,
    "scaled_gemm": PRODUCT,
    "scaled_gemm, split": PRODUCT,
    "scaled_gemm, specialized": PRODUCT,
}


def zeros(*shape, dtype=BF16, offset=0):
    count = torch.Size(shape).numel()
    return torch.zeros(count + offset, dtype=dtype)[offset:].view(shape)


def of_heads(offset=0):
    angles, weight = zeros(8, 8), zeros(16)
    return zeros(8, 4, 16, offset=offset), zeros(8, 1, 16), angles, angles, weight, weight


def in_fp8():
    scales = {"x_scale": torch.ones(16, 1), "w_scale": torch.ones(32, 1)}
    return zeros(16, 64, dtype=torch.float8_e4m3fn), zeros(32, 64, dtype=torch.float8_e4m3fn), scales


#: Of each op a call of tensors, the first of which begins `offset` elements after a multiple of 16 bytes, and the
#: kernels that it launches.
CALLS = {
    "matmul": (
        lambda offset=0: foretune.matmul(zeros(16, 64, offset=offset), zeros(32, 64).T, config=SPLIT),
        ["matmul_kernel", "add_partials_kernel"],
    ),
    "matmul, specialized": (
        lambda offset=0: foretune.matmul(zeros(16, 64, offset=offset), zeros(32, 64).T, config=BF16_JOBS),
        ["specialized_matmul_kernel"],
    ),
    "gated_mlp": (
        lambda offset=0: foretune.gated_mlp(zeros(16, 64, offset=offset), zeros(64, 64), config=TILE),
        ["gated_mlp_kernel"],
    ),
    "rms_norm_rope": (
        lambda offset=0: foretune.rms_norm_rope(*of_heads(offset), config=HEADS),
        ["rms_norm_rope_kernel"],
    ),
    "scaled_gemm": (
        lambda: foretune.scaled_gemm(*in_fp8()[:2], **in_fp8()[2], scales="rowwise", config=FP8),
        ["scaled_gemm_kernel"],
    ),
    "scaled_gemm, split": (
        lambda: foretune.scaled_gemm(*in_fp8()[:2], **in_fp8()[2], scales="rowwise", config=FP8_SPLIT),
        ["scaled_gemm_kernel", "add_partials_kernel"],
    ),
    "scaled_gemm, specialized": (
        lambda: foretune.scaled_gemm(*in_fp8()[:2], **in_fp8()[2], scales="rowwise", config=JOBS),
        ["specialized_scaled_gemm_kernel"],
    ),
}


@pytest.fixture
def stub(monkeypatch):
    for op in OPS.values():
        monkeypatch.setattr(op, "calls", op_calls.Memo())
    with use_stub_driver(DeviceSpec.named("h200")) as driver:
        yield driver


@pytest.mark.parametrize("op", CALLS)
def test_a_hot_call_launches_and_finds_out_nothing(op, stub, monkeypatch):
    call, kernels = CALLS[op]
    call()

    def refuse(*_, **__):
        pytest.fail("a hot call finds out what the first one did")

    monkeypatch.setattr(op_calls.Call, "__init__", refuse)
    monkeypatch.setattr(op_calls.ConfiguredLaunch, "__init__", refuse)
    monkeypatch.setattr(op_calls.ConfiguredLaunch, "_chosen", refuse)
    # What adds up parts of sums depends on nothing that is chosen, and is looked up by its launcher.
    prepared, prepare = [], Launcher.prepare
    monkeypatch.setattr(Launcher, "prepare", lambda self, *a, **k: prepared.append(self) or prepare(self, *a, **k))
    for _ in range(3):
        call()
    assert [launch.kernel for launch in stub.launches] == kernels * 4
    assert len(prepared) == 3 * (len(kernels) - 1)


@pytest.mark.parametrize("op", [op for op in CALLS if OPS[op] is not PRODUCT])
@pytest.mark.parametrize("first", [0, 1])
def test_what_begins_at_an_odd_address_is_copied_and_what_is_else_alike_is_not(op, first, stub, monkeypatch):
    call, kernels = CALLS[op]
    copied, clone = [], torch.Tensor.clone
    monkeypatch.setattr(
        torch.Tensor, "clone", lambda x, **options: copied.append(x.data_ptr() % 16) or clone(x, **options)
    )
    for offset in (first, 1 - first, first, 1 - first):
        call(offset)
    assert copied == [2, 2]
    assert [launch.kernel for launch in stub.launches] == kernels * 4
    calls = OPS[op].calls
    assert len(calls) == 1  # a copy is laid out alike


@pytest.mark.parametrize("op", CALLS)
def test_a_full_memo_is_emptied(op, stub, monkeypatch):
    monkeypatch.setattr(op_calls.Memo, "most", 1)
    memo = OPS[op].calls
    memo.add(("another",), None)
    CALLS[op][0]()
    assert len(memo) == 1


def test_calls_are_made_anew_when_the_ranks_are_to_agree(stub):
    call, _ = CALLS["gated_mlp"]
    call()
    with foretune.agree():
        call()
    assert len(GATED_MLP.calls) == 2


@pytest.mark.parametrize(("load", "store"), [(0, 0), (0, 1), (1, 0)])
def test_no_program_makes_a_descriptor(load, store, stub):
    """It would need scratch memory for it."""
    tile = KernelConfig.of(**FP8.to_json(), TMA_LOAD=load, TMA_STORE=store)
    foretune.scaled_gemm(*in_fp8()[:2], **in_fp8()[2], scales="rowwise", config=tile)
    product = stub.launches[-1]
    assert (product.kernel, product.metadata.global_scratch_size) == ("scaled_gemm_kernel", 0)
    assert len(product.metadata.tensordesc_meta) == 2 * load + store
