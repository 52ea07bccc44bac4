"""The space of dW in fp8: what is in it, what a config needs, and which problems are drawn; its kernels compile."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from foretune.datasets import KernelConfig, Problem
from foretune.kernels import find_family
from foretune.kernels.scaled_gemm.space import dw_smem_bytes
from foretune.kernels.scaled_gemm.triton_kernels import both_ways, one_way
from foretune.runtime import use_stub_driver
from grouped import B200, L40S, RTX_5090
from scaled import H200

FAMILY = find_family("scaled_grouped_gemm_dw")
SPACE = FAMILY.space(H200)
CASE = FAMILY.cases(random=1, per_layer=1)[0]
BINARIES = {FAMILY.binary_key(config, CASE.problem): config for config in SPACE}


def problem(*flags, groups=8, rows=65536, n=4096, k=2048, **more):
    return Problem.of(FAMILY.name, dtype="fp8e4m3", flags=flags, groups=groups, rows=rows, n=n, k=k, **more)


@pytest.mark.compile
@pytest.mark.parametrize("flags", [("blockwise",), ()], ids=str)
@pytest.mark.parametrize(
    "each",
    [
        pytest.param(config, marks=[pytest.mark.slow] if place > 8 else [])
        for place, config in enumerate(BINARIES.values())
        if place % 4 == 0
    ],
    ids=str,
)
def test_a_binary_needs_no_more_shared_memory_than_is_said(own_cache, flags, each):
    with use_stub_driver(H200):
        binary = FAMILY.compile(each, problem(*flags))
    assert 0 <= dw_smem_bytes(each, bool(flags)) - binary.metadata.shared <= 2048
    assert "wgmma.mma_async" in binary.asm["ptx"]
    assert ("setmaxnreg" in binary.asm["ptx"]) == bool(each["CONSUMERS"])


@pytest.mark.compile
@pytest.mark.parametrize(
    "device",
    [L40S, *(pytest.param(device, marks=pytest.mark.slow) for device in (RTX_5090, B200))],
    ids=lambda device: device.arch,
)
def test_it_compiles_where_there_is_no_wgmma(own_cache, device):
    default = FAMILY.default(problem("blockwise"), device)
    assert default["CONSUMERS"] == 0
    assert FAMILY.supports(default, problem("blockwise"), device) is None
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    f32, i32, bf16 = torch.float32, torch.int32, torch.bfloat16
    with use_stub_driver(device):
        for flags, fp8 in (((), e4m3), (("blockwise",), e5m2)):
            assert FAMILY.compile(default, problem(*flags)).metadata.shared <= device.smem_per_block_bytes
            tensors, blockwise = (bf16, fp8, f32, fp8, f32, i32), bool(flags)
            largest = torch.finfo(fp8).max
            both_ways.quantize_both_ways_kernel.warmup(
                *tensors,
                1024,
                8,
                128,
                grid=(1,),
                BLOCKWISE=blockwise,
                WEIGHTS=False,
                LARGEST=largest,
                **both_ways._OPTIONS,
            )
        both_ways.largest_kernel.warmup(
            bf16, f32, f32, i32, 1024, 8, 128, grid=(1,), LARGEST=448.0, **both_ways._OPTIONS
        )


@pytest.mark.compile
@pytest.mark.parametrize("weights", [False, True])
def test_what_is_quantized_is_stored_16_bytes_at_a_time(own_cache, weights):
    # A mask or an address that could end within 16 bytes made the kernel three times as slow (H100, 2026-11).
    fp8, f32 = torch.float8_e4m3fn, torch.float32
    tensors = torch.bfloat16, fp8, f32, fp8, f32, torch.int32
    with use_stub_driver(H200):
        binary = both_ways.quantize_both_ways_kernel.warmup(
            *tensors, 1024, 8, 128, grid=(1,), BLOCKWISE=False, WEIGHTS=weights, LARGEST=448.0, **both_ways._OPTIONS
        )
    stores = re.findall(r"st\.global\S*", binary.asm["ptx"])
    assert stores
    assert all(".v4.b32" in store for store in stores)


@pytest.mark.compile
@pytest.mark.parametrize("rowwise", [False, True])
def test_one_copy_is_loaded_and_stored_16_bytes_at_a_time(own_cache, rowwise):
    tensors, options = (torch.bfloat16, torch.float8_e4m3fn, torch.float32), {"RECIPROCAL": 1 / 448, "grid": (1,)}
    with use_stub_driver(H200):
        if rowwise:
            binary = one_way.quantize_rows_kernel.warmup(
                *tensors, 1024, 1, 8, ROWWISE=True, ROWS=4, BLOCK_K=1024, **options, **one_way._OPTIONS
            )
        else:
            binary = one_way.quantize_blocks_of_kernel.warmup(
                *tensors, 1024, 8, ROWS=64, SQUARE=False, **options, **one_way._OPTIONS
            )
    ptx = binary.asm["ptx"]
    moves = [move for move in re.findall(r"(?:ld|st)\.global\S*", ptx) if ".v4.b32" in move]
    assert any(move.startswith("ld") for move in moves)
    assert any(move.startswith("st") for move in moves)
    assert "div.rn.f32" in ptx


def test_the_default_is_specialized_on_hopper_alone():
    assert FAMILY.default(problem(), H200)["CONSUMERS"] == 2
    assert FAMILY.default(problem(), replace(H200, backend="cpu"))["CONSUMERS"] == 0
    assert FAMILY.default(problem(), B200)["CONSUMERS"] == 0


def test_a_triton_without_gluon_runs_the_plain_kernel(monkeypatch):
    monkeypatch.setattr("foretune.kernels.scaled_gemm.dw_family.why_no_gluon", lambda: "it has none")
    assert FAMILY.default(problem(), H200)["CONSUMERS"] == 0


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"BLOCK_N": 256}, "BLOCK_N cannot be 256 with CONSUMERS = 2: 128"),
        ({"TMA": 0}, "TMA cannot be 0 with CONSUMERS = 2: 1"),
        ({"num_warps": 8}, "num_warps cannot be 8 with CONSUMERS = 2: 4"),
        ({"BLOCK_K": 64}, "BLOCK_K cannot be 64: 128"),
        ({"BLOCK_M": 64}, "BLOCK_M x IN_FLIGHT cannot be 64 x 2 with CONSUMERS = 2: 128 x 1, 128 x 2"),
        ({"BLOCK_M": 256, "IN_FLIGHT": 2}, "BLOCK_M x IN_FLIGHT cannot be 256 x 2"),
        ({"num_stages": 1}, "num_stages cannot be 1 with CONSUMERS = 2: at least 2"),
        ({"num_stages": 7}, "bytes of shared memory but NVIDIA H200 has 232448"),
        ({"CONSUMERS": 0}, "IN_FLIGHT must be 1 with CONSUMERS = 0 but is 2"),
        (
            {"CONSUMERS": 0, "IN_FLIGHT": 1},
            "at most 8192 elements with CONSUMERS = 0 and num_warps = 4",
        ),
    ],
)
def test_what_cannot_run_is_refused_with_the_reason(changed, why):
    knobs = FAMILY.default(problem("blockwise"), H200).to_json()
    assert why in FAMILY.supports(KernelConfig.of(**knobs | changed), problem("blockwise"), H200)


def test_two_products_in_flight_are_for_blockwise_scales():
    two, one = FAMILY.default(problem("blockwise"), H200), FAMILY.default(problem(), H200)
    assert (two["IN_FLIGHT"], one["IN_FLIGHT"]) == (2, 1)
    assert FAMILY.supports(one, problem(), H200) is None
    why = "IN_FLIGHT must be 1 without blockwise scales but is 2: registers hold the scales of rows and columns"
    assert FAMILY.supports(two, problem(), H200) == why


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (problem(n=24), "N and K must be multiples of 16 but are 24 and 2048"),
        (problem(groups=0, rows=0), "groups, N and K must be >= 1 but are 0, 4096 and 2048"),
        (replace(problem(), dtype="bf16"), "dtype bf16 is not one of fp8e4m3"),
        (replace(problem(), flags=("rowwise",)), "flag rowwise is not one of blockwise"),
    ],
)
def test_a_problem_that_no_config_runs_is_refused(asked, why):
    assert FAMILY.supports(SPACE[0], asked, H200) == why
    a100 = replace(H200, arch="sm_80")
    assert FAMILY.supports(SPACE[0], problem(), a100).startswith("sm_80 does not support fp8e4m3; sm_89")


def test_problems_have_both_kinds_of_scales():
    cases = FAMILY.cases(random=40, per_layer=1)
    kinds = [case.problem.flags for case in cases]
    assert set(kinds) == {("blockwise",), ()}
    assert 0.4 < kinds.count(("blockwise",)) / len(kinds) < 0.6


def test_longer_work_is_estimated_longer_and_one_long_group_counts():
    def estimate(**dims):
        return FAMILY.estimate_us(problem("blockwise", **dims), H200, SPACE)

    assert (estimate(rows=131072) > estimate()).all()
    assert (estimate(k=4096) > estimate()).all()
    one_hot = problem("blockwise", n=256, k=128, ragged={"rows": (65536, *[0] * 7)})
    even = problem("blockwise", n=256, k=128, ragged={"rows": (8192,) * 8})
    name = FAMILY.feature_names.index("longest_over_share")
    assert FAMILY.features(one_hot, H200, SPACE)[0, name] >= FAMILY.features(even, H200, SPACE)[0, name]
    assert np.isfinite(FAMILY.features(problem(rows=0), H200, SPACE)).all()
