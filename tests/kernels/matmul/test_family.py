"""The dense GEMM as a family, without a compiler: its space, what it refuses, what stands for a call, and which
problems are measured and compared."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from foretune.datasets import ForetuneError, load
from foretune.kernels.matmul.contenders import suite_cases
from foretune.kernels.matmul.space import call_dims, is_aligned, row_lengths, wrong_unaligned_tile
from foretune.kernels.matmul.workload import MOST_TFLOP, TOKENS, draw
from foretune.kernels.registry import comparison_of
from foretune.kernels.workloads import Draws, load_dense_models
from foretune.model.splits import split_groups
from foretune.runtime.timing.compare import Row
from products import A100, B200, CPU, H200, LAYOUTS, MATMUL, MI300X, SPECIALIZED, config, problem, specialized

MODELS = load_dense_models()
BF16 = problem("bf16", batch=1, m=4096, n=4096, k=4096)
DTYPES = ("bf16", "fp16", "fp32", "int8")


def supported(call, device=H200):
    return [one for one in MATMUL.space(device) if MATMUL.supports(one, call, device) is None]


@pytest.mark.parametrize(("dtype", "least", "most"), [("bf16", 900, 1300), ("fp32", 450, 800), ("int8", 900, 1300)])
@pytest.mark.parametrize("flags", LAYOUTS, ids="-".join)
def test_the_space_is_large_and_sane(dtype, flags, least, most):
    call = problem(dtype, flags, 1, 4096, 4096, 4096)
    assert least <= len(supported(call)) <= most
    assert len({MATMUL.binary_key(one, call) for one in supported(call)}) <= 700


def test_the_space_has_the_configs_that_are_known_to_be_fast():
    seen = {tuple(one[knob] for knob in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_warps")) for one in supported(BF16)}
    assert {(128, 256, 64, 8), (256, 128, 64, 8), (128, 128, 64, 4), (64, 256, 64, 4), (16, 64, 256, 4)} <= seen
    knobs = {knob: {one[knob] for one in supported(BF16)} for knob in MATMUL.knobs}
    assert knobs["TMA"] == {0, 1, 2}
    assert knobs["PROGRAMS_PER_SM"] == {0, 1, 2}
    assert {1, 2, 4, 8} == knobs["SPLIT_K"]


def test_of_warps_that_have_one_job_each_it_has_every_tile():
    knobs = ("CONSUMERS", "PINGPONG", "BLOCK_M", "BLOCK_N")
    jobs = [one for one in supported(BF16) if one["CONSUMERS"]]
    assert {(*(one[knob] for knob in knobs), one.num_stages) for one in jobs} == set(SPECIALIZED)
    for call in (problem("fp32"), problem("int8"), problem("bf16", k=100)):
        assert not any(one["CONSUMERS"] for one in supported(call))


@pytest.mark.parametrize("device", [A100, B200, MI300X], ids=lambda device: device.arch)
def test_other_devices_have_a_part_of_it(device):
    assert 30 <= len(supported(BF16, device)) <= len(supported(BF16))
    assert {one["TMA"] for one in supported(BF16, device)} == ({0, 1, 2} if device is B200 else {0})


@pytest.mark.parametrize(
    ("knobs", "told", "why"),
    [
        ({"TMA": 1}, {"k": 100}, "TMA must be 0 but is 1: rows of this problem do not begin at multiples of 16 bytes"),
        (
            {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64},
            {"k": 100},
            "must be at most 16384 with num_warps = 4, or registers may spill, .* but is 20480",
        ),
        ({"BLOCK_K": 16}, {"dtype": "int8"}, "BLOCK_K must be at least 32 in int8 but is 16"),
        ({"SPLIT_K": 2, "PROGRAMS_PER_SM": 1}, {}, "PROGRAMS_PER_SM must be 0 with SPLIT_K = 2 but is 1"),
        ({"SPLIT_K": 2, "TMA": 2}, {}, "TMA must be 0 or 1 with SPLIT_K = 2, .* but is 2"),
        (
            {"BLOCK_M": 256, "BLOCK_N": 128},
            {},
            "must be at most 16384 elements with num_warps = 4, .* but is 256 x 128",
        ),
        ({"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 128, "num_stages": 6}, {}, "needs .* bytes of shared memory"),
        ({"BLOCK_N": 48}, {}, "BLOCK_N cannot be 48: a power of two between 16 and 256, or 160 or 192"),
        ({"BLOCK_N": 160}, {}, "BLOCK_N cannot be 160 with CONSUMERS = 0: a power of two"),
        ({"BLOCK_M": 192}, {}, "BLOCK_M cannot be 192 with CONSUMERS = 0: a power of two"),
        ({"PINGPONG": 1}, {}, "PINGPONG must be 0 with CONSUMERS = 0 but is 1"),
        ({}, {"flags": ("relu", "silu")}, "one activation at most but has relu and silu"),
        ({}, {"dtype": "int8", "flags": ("bias",)}, "bias is not available for int8, which is summed in int32"),
        ({}, {"m": 0}, "m must be between 1 and"),
        ({}, {"m": 2**30, "n": 2**30}, "tiles do not fit into 32 bits"),
        (
            {"SPLIT_K": 8},
            {"batch": 6, "m": 16384, "n": 16384},
            "SPLIT_K must be smaller than 8 .* 12884901888 partial sums",
        ),
        ({}, {"dtype": "fp64"}, "dtype fp64 is not one of bf16, fp16, fp32, int8"),
    ],
)
def test_what_is_refused_and_why(knobs, told, why):
    call = problem(**{"dtype": "bf16", "batch": 1, "m": 64, "n": 64, "k": 64} | told)
    assert re.search(why, MATMUL.supports(config(**knobs), call, H200))


@pytest.mark.parametrize(("data", "problems"), [("h200_matmul", 12), ("h100_h200_medium", 3)])
def test_tiles_that_are_refused_for_rows_that_are_not_aligned_were_slow(data, problems):
    grid, best = load(data).grid(MATMUL), []
    refused = np.array([wrong_unaligned_tile(one.to_json(), itemsize=2) is not None for one in grid.configs])
    for case, times in zip(grid.cases, grid.first_us, strict=True):
        if case.problem.itemsize <= 2 and not is_aligned(case.problem):
            assert np.nanmedian(times[refused]) > 1.5 * np.nanmedian(times[~refused])
            best.append(np.nanmin(times[~refused]) / np.nanmin(times))
    assert len(best) == problems
    assert sorted(best)[-2] == 1.0  # the fastest tile is refused on one problem at most
    assert max(best) < 1.2


@pytest.mark.parametrize(
    ("knobs", "told", "why"),
    [
        ({"BLOCK_K": 128}, {}, "BLOCK_K cannot be 128 with CONSUMERS = 2: 64"),
        ({"TMA": 1}, {}, "TMA cannot be 1 with CONSUMERS = 2: 2"),
        ({"num_warps": 8}, {}, "num_warps cannot be 8 with CONSUMERS = 2: 4"),
        ({"num_stages": 1}, {}, "num_stages cannot be 1 with CONSUMERS = 2: at least 2"),
        ({"num_stages": 8}, {}, "needs .* bytes of shared memory"),
        ({"CONSUMERS": 3}, {}, "PINGPONG cannot be 1 with CONSUMERS = 3: 0"),
        (
            {"BLOCK_N": 256},
            {},
            "BLOCK_M x BLOCK_N cannot be 128 x 256 with CONSUMERS = 2 and PINGPONG = 1: 64 x 256, 128 x 128, "
            "128 x 160, 128 x 192$",
        ),
        (
            {},
            {"dtype": "fp32"},
            "CONSUMERS must be 0 in fp32 but is 2: the warp-specialized kernel takes 16-bit dtypes",
        ),
        ({}, {"k": 100}, "TMA must be 0 but is 2: rows of this problem"),
    ],
)
def test_what_of_warps_that_have_one_job_each_is_refused_and_why(knobs, told, why):
    call = problem(**{"dtype": "bf16", "batch": 1, "m": 64, "n": 64, "k": 64} | told)
    assert MATMUL.supports(specialized(2, 1, 128, 128, 6), BF16, H200) is None
    assert re.search(why, MATMUL.supports(specialized(2, 1, 128, 128, 6, **knobs), call, H200))


@pytest.mark.parametrize(
    ("device", "why"),
    [
        (A100, "TMA cannot be 2: sm_80 has none"),
        (B200, "CONSUMERS cannot be 2: sm_100 has no wgmma; it must be 0"),
        (CPU, "CONSUMERS cannot be 2: the interpreter has no wgmma; it must be 0"),
    ],
    ids=("sm_80", "sm_100", "interpreter"),
)
def test_they_are_hoppers(device, why):
    assert MATMUL.supports(specialized(2, 0, 128, 256, 4), BF16, device).startswith(why)


def test_features_say_how_many_warps_multiply_a_tile():
    names = MATMUL.feature_names
    jobs = [specialized(2, 1, 128, 128, 6), specialized(2, 0, 128, 256, 4), specialized(3, 0, 192, 192, 4)]
    columns = dict(zip(names, MATMUL.features(BF16, H200, [config(128, 128, 64, num_warps=8), *jobs]).T, strict=True))
    assert columns["consumers"].tolist() == [0, 2, 2, 3]
    assert columns["pingpong"].tolist() == [0, 1, 0, 0]
    assert columns["num_warps"].tolist() == [8, 4, 8, 12]
    assert columns["accumulator_registers"].tolist() == [64, 128, 128, 96]


@pytest.mark.parametrize("flags", LAYOUTS, ids="-".join)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_stands_for_a_call_is_as_aligned(flags, dtype):
    rng = np.random.default_rng(0)
    for m, n, k in rng.integers(1, 5000, (200, 3)).tolist():
        for step in (1, 16):
            call = problem(dtype, flags, 1, m * step, n * step, k * step)
            near = MATMUL.at_call_time(call)
            assert is_aligned(near) == is_aligned(call)
            assert {dim for dim in MATMUL.dims if near[dim] != call[dim]} <= set(call_dims(call))
            assert not set(call_dims(call)) & set(row_lengths(call))


def test_estimates_know_what_everybody_knows():
    """Few rows: small tiles, in parts where there are few of them. Many: large ones."""

    def best(call):
        configs = supported(call)
        return configs[int(np.argmin(MATMUL.estimate_us(call, H200, configs)))]

    assert best(BF16)["BLOCK_M"] * best(BF16)["BLOCK_N"] >= 128 * 128
    decode = best(replace(BF16, dims=(("batch", 1), ("k", 16384), ("m", 8), ("n", 1024))))
    assert decode["BLOCK_M"] == 16
    assert decode["SPLIT_K"] > 1


def test_the_workload_has_every_token_count_pass_and_dtype():
    drawn = draw(MODELS, Draws(per_layer=3, random=100))
    assert len(drawn) > 500
    assert drawn == draw(MODELS, Draws(per_layer=3, random=100)) != draw(MODELS, Draws(per_layer=3, random=100, seed=1))
    assert len({case.problem for case in drawn}) == len(drawn)
    assert {case.scenario for case in drawn} == {"forward", "dx", "dw", "batched"}
    dtypes = Counter(case.problem.dtype for case in drawn)
    assert dtypes["bf16"] > 0.6 * len(drawn)
    assert set(dtypes) == set(DTYPES)
    octaves = Counter(
        int(np.log2(case.problem[call_dims(case.problem)[0]])) for case in drawn if case.sources != ("random",)
    )
    assert min(octaves[count] for count in range(len(TOKENS) - 2)) > 8
    assert sum(not is_aligned(case.problem) for case in drawn) > 5
    for case in drawn:
        assert MATMUL.flops(case.problem) <= MOST_TFLOP * 1e12
        assert MATMUL.supports(MATMUL.default(case.problem, H200), case.problem, H200) is None


def test_model_families_can_be_held_out_apart():
    """Shapes that several of them have are nobody's: else a few groups would be all there are."""
    drawn = [case for case in draw(MODELS, Draws(random=0)) if not case.sources[0].startswith("random")]
    owners = {}
    for case, group in zip(drawn, split_groups(drawn).tolist(), strict=True):
        owners.setdefault(group, set()).update(case.model_families)
    assert len(owners) >= 8
    assert max(len(families) for families in owners.values()) <= 2


def test_token_counts_that_are_given_are_taken_and_impossible_ones_refused():
    drawn = draw(MODELS[:3], Draws(tokens=[48, 3000], random=4))
    assert {case.problem[call_dims(case.problem)[0]] for case in drawn} <= {48, 3000}
    with pytest.raises(ForetuneError, match="token counts must be between 1 and"):
        draw(MODELS, Draws(tokens=[0]))
    with pytest.raises(ForetuneError, match="random must be >= 0 but got -1"):
        draw(MODELS, Draws(random=-1))
    with pytest.raises(ForetuneError, match="found no random shape with at most 1e-12 TFLOP"):
        draw(MODELS[:1], Draws(tokens=[64], max_tflop=1e-12, random=1))


def test_the_suite_can_run_and_is_judged_next_to_both():
    comparison = comparison_of(MATMUL)
    cases = comparison.suite(MATMUL)
    assert cases == suite_cases(MODELS)
    for case in cases.values():
        assert MATMUL.supports(MATMUL.default(case.problem, H200), case.problem, H200) is None
    with pytest.raises(ForetuneError, match=r"the suite needs the model Llama-3\.1-8B"):
        suite_cases(MODELS[:1])
    row = Row("square", "matmul", BF16, None, 100.0, {"cublas": 96.0, "inductor": 120.0}, 80.0, 40.0, config())
    met = {goal.goal: goal.met for goal in comparison.goals([row])}
    assert met == {
        "dense GEMM, predicted config, over cuBLAS": True,
        "dense GEMM, predicted config, over Inductor's max-autotune": True,
    }
    slower = replace(row, others_us={"cublas": 80.0})
    assert [goal.met for goal in comparison.goals([slower])] == [False]


@pytest.mark.parametrize("flags", [("bias", "gelu"), ("a_km", "b_kn"), ("b_kn", "bias")], ids="-".join)
def test_torch_computes_the_same(flags):
    """What the kernel is compared with is the same product."""
    import torch
    from foretune.kernels.matmul.contenders import in_tf32, torch_operands, torch_product

    inputs = MATMUL.inputs(problem("fp32", flags, batch=len(flags) - 1), replace(H200, backend="cpu"))
    y, expected = in_tf32(torch_product(inputs.problem), *torch_operands(inputs)), MATMUL.reference(inputs)
    torch.testing.assert_close(y.view(expected.shape), expected)
    assert torch.get_float32_matmul_precision() == "highest"
