"""The space of the scaled GEMMs: what is in it, what a config needs, and which problems are drawn."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from foretune.datasets import ForetuneError, KernelConfig, roofline_us
from foretune.kernels.scaled_gemm.features import FEATURE_NAMES
from foretune.kernels.scaled_gemm.space import GRANULARITIES, granularity_of, smem_bytes
from foretune.kernels.scaled_gemm.workload import GRANULARITY_SHARES, TOKENS, dense_layers
from foretune.kernels.workloads import load_dense_models
from foretune.runtime import use_stub_driver
from grouped import L40S
from scaled import DENSE, FAMILIES, GROUPED, H200, SPECIALIZED, config, problem, specialized, split

LAYER = problem(DENSE, m=4096, n=4096, k=7168)


@pytest.mark.compile
@pytest.mark.parametrize(
    ("family", "kind", "each", "instruction"),
    [
        (DENSE, "blockwise", config(128, 32, 0, 1, 1, 4, 3, k=32), "wgmma"),
        (DENSE, "rowwise", config(128, 32, 0, 1, 1, 4, 3, k=32), "wgmma"),  # whose scales are laid out anew
        (DENSE, "rowwise", config(64, 32, 0, 0, 0, 4, 2, k=32), "wgmma"),
        (DENSE, "blockwise", split((16, 64, 1, 0), 2, k=32), "wgmma"),
        (GROUPED, "blockwise", config(16, 64, 1, 1, 0, 4, 3, k=32), "wgmma"),
        (GROUPED, "tensorwise", config(16, 32, 0, 1, 0, 4, 4, k=32), "mma.sync"),
    ],
)
def test_a_binary_needs_as_much_shared_memory_as_is_said(own_cache, family, kind, each, instruction):
    call = problem(family, kind, **dict.fromkeys(family.dims, 256))
    assert family.supports(each, call, H200) is None
    with use_stub_driver(H200):
        binary = family.compile(each, call)
    assert binary.metadata.shared == smem_bytes(each, H200, kind)
    assert instruction in binary.asm["ptx"]


@pytest.mark.compile
@pytest.mark.parametrize(
    ("family", "kind", "way"),
    [
        (GROUPED, "tensorwise", (2, 160, 6)),
        (DENSE, "tensorwise", (2, 144, 6)),
        (DENSE, "rowwise", (2, 192, 5)),
        (DENSE, "blockwise", (2, 64, 5)),
        (DENSE, "rowwise", (3, 128, 4)),
    ],
)
def test_warps_with_jobs_need_no_more_shared_memory_than_is_said(own_cache, family, kind, way):
    call, each = problem(family, kind, **dict.fromkeys(family.dims, 256)), specialized(*way)
    assert family.supports(each, call, H200) is None
    with use_stub_driver(H200):
        binary = family.compile(each, call)
    assert 0 <= smem_bytes(each, H200, kind) - binary.metadata.shared <= 16
    assert "wgmma.mma_async" in binary.asm["ptx"]
    assert "setmaxnreg" in binary.asm["ptx"]


def test_its_roofline_is_that_of_8_bits():
    assert roofline_us(DENSE, LAYER, H200) == pytest.approx(DENSE.flops(LAYER) / (2 * H200.matrix_tflops * 1e6))
    assert H200.matrix_tflops_of("fp8e4m3", "bf16") == H200.matrix_tflops


def test_the_space_has_every_way_and_its_ranges_narrow_it():
    space = DENSE.space(H200)
    assert {config["SWAP_AB"] for config in space if config["BLOCK_M"] < 64} == {0, 1}
    assert {config["PROGRAMS_PER_SM"] for config in space} == {0, 1, 2}
    assert {config["BLOCK_M"] for config in DENSE.space(block_m=[64])} == {64}
    assert {config["SPLIT_K"] for config in space} == {1, 2, 4, 8}
    assert {config["SPLIT_K"] for config in DENSE.space(split_k=[1])} == {1}
    with_jobs = {(config["CONSUMERS"], config["BLOCK_N"]) for config in space if config["CONSUMERS"]}
    assert with_jobs == {(consumers, n) for consumers, n, _ in SPECIALIZED}
    assert {config["CONSUMERS"] for config in DENSE.space(consumers=[0])} == {0}
    assert {config["CONSUMERS"] for config in GROUPED.space(H200)} == {0, 2}
    assert {config["SPLIT_K"] for config in GROUPED.space(H200)} == {1}
    for wrong, why in (
        ({"block_m": [24]}, "block_m must be a power of two between 16 and 256, or 192 but is 24"),
        ({"consumers": [1]}, "consumers must be 0, 2 or 3 but is 1"),
        ({"block_k": [256]}, "block_k must be 32, 64 or 128 but is 256"),
        ({"num_warps": 4}, "num_warps must be a list of values but is 4"),
        ({"blocks": [1]}, "blocks is not a range of the space; the ranges are block_k"),
    ):
        with pytest.raises(ForetuneError, match=why):
            DENSE.space(**wrong)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"BLOCK_M": 128, "SWAP_AB": 1}, "SWAP_AB must be 0 with BLOCK_M = 128 but is 1"),
        ({"BLOCK_M": 16, "BLOCK_N": 32, "SWAP_AB": 1}, "SWAP_AB must be 0 with BLOCK_N = 32 but is 1"),
        ({"BLOCK_M": 16, "SWAP_AB": 1, "TMA_STORE": 1}, "TMA_STORE must be 0 with SWAP_AB = 1"),
        ({"BLOCK_M": 256, "num_warps": 4}, "BLOCK_M x BLOCK_N must be at most 16384 elements with num_warps = 4"),
        ({"num_stages": 8}, "needs 302144 bytes of shared memory"),
        ({"BLOCK_K": 256}, "BLOCK_K cannot be 256: 32, 64 or 128"),
        ({"TMA_LOAD": True}, "TMA_LOAD cannot be True: 0 or 1"),
        ({"BLOCK_M": 192}, "BLOCK_M cannot be 192 with CONSUMERS = 0: a power of two"),
        ({"BLOCK_N": 160}, "BLOCK_N cannot be 160 with CONSUMERS = 0: a power of two"),
        ({"SPLIT_K": 2}, "PROGRAMS_PER_SM must be 0 with SPLIT_K = 2 but is 1"),
        ({"SPLIT_K": 2, "PROGRAMS_PER_SM": 0}, "TMA_STORE must be 0 with SPLIT_K = 2, which stores float32 sums"),
        ({"CONSUMERS": 3}, "BLOCK_M cannot be 128 with CONSUMERS = 3: 192"),
        ({"CONSUMERS": 2}, "num_warps cannot be 8 with CONSUMERS = 2: 4"),
        (
            {"CONSUMERS": 2, "num_warps": 4, "BLOCK_N": 32},
            "BLOCK_N cannot be 32 with CONSUMERS = 2: 64, 128, 144, 160, 192",
        ),
        (
            {"CONSUMERS": 2, "num_warps": 4, "BLOCK_N": 192},
            "BLOCK_N must divide 128 with CONSUMERS and blockwise scales but is 192",
        ),
        (
            {"CONSUMERS": 2, "num_warps": 4, "num_stages": 1},
            "num_stages cannot be 1 with CONSUMERS = 2: at least 2",
        ),
    ],
)
def test_what_cannot_run_is_refused_with_the_reason(changed, why):
    knobs = config(128, 128, 0, 1, 1, 8, 4).to_json() | changed
    assert DENSE.supports(KernelConfig.of(**knobs), LAYER, H200).startswith(why)


def test_problems_and_devices_that_cannot_be_are_refused():
    each = config(128, 128, 0, 1, 1, 8, 4)
    for call, why in (
        (replace(LAYER, dtype="bf16"), "dtype must be fp8e4m3 (of both operands) but is bf16"),
        (replace(LAYER, flags=("blockwise", "rowwise")), "a problem cannot have both flags blockwise and rowwise"),
        (replace(LAYER, flags=("columnwise",)), "flag columnwise is not one of"),
        (problem(DENSE, m=16, n=40, k=64), "N and K must be multiples of 16 but are 40 and 64"),
        (problem(GROUPED, groups=0, rows=16, n=64, k=64), "groups, N and K must be >= 1"),
    ):
        family = GROUPED if "groups" in dict(call.dims) else DENSE
        assert family.supports(each, call, H200).startswith(why)
    assert DENSE.supports(each, LAYER, L40S) == "TMA_LOAD cannot be 1: sm_89 has no TMA"
    assert DENSE.supports(DENSE.default(LAYER, L40S), LAYER, L40S) is None
    jobs = specialized(2, 128, 4)
    assert DENSE.supports(jobs, LAYER, H200) is None
    for other, name in ((replace(H200, arch="sm_100"), "sm_100"), (replace(H200, backend="cpu"), "the interpreter")):
        assert DENSE.supports(jobs, LAYER, other).startswith(
            f"CONSUMERS cannot be 2: {name} has no wgmma; it must be 0"
        )
    routed = problem(GROUPED, sizes=(64, 64), n=4096, k=7168)
    assert GROUPED.supports(jobs, routed, H200) is None
    assert GROUPED.supports(specialized(3, 128, 4), routed, H200).startswith(
        "CONSUMERS must be 0 or 2 for grouped products"
    )
    assert GROUPED.supports(split((64, 64, 0, 1), 2), routed, H200) == "SPLIT_K must be 1 for grouped products but is 2"
    assert DENSE.supports(each, LAYER, replace(H200, arch="gfx942")).startswith("gfx942 does not support fp8e4m3")


def test_cases_have_every_kind_and_no_layer_of_two_model_families():
    cases = DENSE.cases(random=0)
    for kind in GRANULARITIES:
        share = sum(granularity_of(case.problem) == kind for case in cases) / len(cases)
        assert share == pytest.approx(GRANULARITY_SHARES[kind], abs=0.02)
    assert {case.problem["m"] for case in cases} == set(TOKENS)
    assert all(len(case.model_families) == 1 for case in cases)
    assert any(case.sources[0].startswith("DeepSeek-V3/") for case in cases)
    shared = {(layer.n, layer.k): layer.sources for layer in dense_layers(load_dense_models())}[4096, 4096]
    assert shared[0].startswith("random/")  # attention's output of Llama, Qwen, OLMo, ...
    for wrong, why in (
        ({"per_layer": -1}, "per_layer must be >= 0 but got -1"),
        ({"tokens": [0]}, "token counts must"),
    ):
        with pytest.raises(ForetuneError, match=why):
            DENSE.cases(**wrong)


def test_the_grouped_cases_are_of_the_moe_models():
    cases = GROUPED.cases(random=2, per_layer=1)
    assert any(source.startswith("DeepSeek-V3/R1/") for case in cases for source in case.sources)
    assert {granularity_of(case.problem) for case in cases} == set(GRANULARITIES)
    assert all(case.problem["n"] % 16 == case.problem["k"] % 16 == 0 for case in cases)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_features_say_what_they_are_named(family):
    def table(**dims):
        rows = {"m": 4096} if family is DENSE else {"rows": 4096, "groups": 1}
        return family.features(problem(family, **rows | {"n": 4096, "k": 7168} | dims), H200, configs)

    configs = [config(128, 128, 0, 1, 1, 8, 4), config(128, 64, 0, 1, 1, 4, 4), specialized(2, 128, 4)]
    columns = dict(zip(FEATURE_NAMES, table().T, strict=True))
    assert columns["log_tiles"].tolist() == [10, 11, 10]
    assert columns["steps_per_tile"].tolist() == [56, 56, 56]
    assert columns["accumulators"].tolist() == [64, 64, 64]
    assert columns["blockwise"].tolist() == [1, 1, 1]
    assert columns["consumers"].tolist() == [0, 0, 2]
    assert columns["roofline_us"][2] < columns["roofline_us"][0]  # nothing waits for what is added up
    assert np.allclose(table(k=14336)[:, FEATURE_NAMES.index("log_compute_us")] - columns["log_compute_us"], 1)
