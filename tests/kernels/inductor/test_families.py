"""Inductor's templates as families: the contract, Inductor's own lists, and what estimates say."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from foretune.datasets import DeviceSpec, ForetuneError, KernelConfig, Problem
from foretune.kernels import find_family, workloads
from foretune.kernels.inductor import InductorMM, choices
from foretune.kernels.inductor.choices import GROWTH, best_first
from foretune.kernels.inductor.contenders import BASELINES
from foretune.kernels.testing import FamilyContract
from foretune.model import load_bundle
from foretune.runtime.shortlist import make_shortlist

H200 = DeviceSpec.named("h200")
MM = find_family("inductor:mm")


def product(m, n, k, **more):
    return Problem.of("inductor_mm", batch=more.pop("batch", 1), m=m, n=n, k=k, **more)


class TestMM(FamilyContract):
    family = MM
    compiled = 2

    def problems(self):
        return [
            product(40, 96, 64, dtype="fp16", flags=("b_transposed", "bias")),
            product(17, 33, 70, batch=3),
            product(64, 64, 96, dtype="fp8e4m3", flags=("b_transposed",)),
            product(64, 512, 512, dtype="fp32", flags=("tf32",)),
        ]

    def test_cases_follow_their_seed_and_their_limits(self, monkeypatch):
        some = workloads.load_dense_models()[:2]  # else every config is asked about every layer of all models
        monkeypatch.setattr(workloads, "load_dense_models", lambda path=None: some)
        super().test_cases_follow_their_seed_and_their_limits()

    def small_problems(self):
        return []  # Inductor's decorators want a compiled kernel


class Templates(FamilyContract):
    sizes = ({},)
    compiled = 1

    def problems(self):
        return [Problem.of(self.family.name, **sizes) for sizes in self.sizes]

    def small_problems(self):
        return []  # Inductor's decorators want a compiled kernel; test_lowered.py interprets the functions in them


class TestGroupedMM(Templates):
    family = "inductor_grouped_mm"
    sizes = (
        {"groups": 8, "m": 1000, "n": 512, "k": 256, "flags": ("a_ragged",)},
        {"groups": 8, "m": 512, "n": 256, "k": 1000, "flags": ("both_ragged",)},
        {"groups": 2, "m": 100, "n": 512, "k": 256},
    )


class TestConvolution(Templates):
    family = "inductor_convolution"
    compiled = 121  # of which Inductor lists a few for a problem
    sizes = ({"groups": 1, "images": 2, "m": 6272, "n": 128, "k": 64, "window": 9, "stride": 1},)


class TestFlexAttention(Templates):
    family = "inductor_flex_attention"
    sizes = ({"batch": 16, "groups": 1, "queries": 1000, "keys": 1000, "head_qk": 64, "head_v": 64},)


class TestFlexBackward(Templates):
    family = "inductor_flex_backward"
    sizes = TestFlexAttention.sizes


class TestFlexDecoding(Templates):
    family = "inductor_flex_decoding"
    sizes = ({**TestFlexAttention.sizes[0], "queries": 4, "keys": 4096, "splits": 8, "flags": ("block_mask",)},)


def test_a_package_of_ours_is_enough_to_name_a_family():
    assert find_family("inductor:mm") is find_family("inductor_mm") is find_family(InductorMM)
    assert find_family("inductor:flex_attention") is find_family("inductor_flex_attention")
    with pytest.raises(ForetuneError, match="no kernel family at 'inductor:conv'"):
        find_family("inductor:conv")


def test_a_tile_larger_than_the_problem_is_refused_by_its_knob():
    config = KernelConfig.of(BLOCK_M=64, BLOCK_N=64, BLOCK_K=32, GROUP_M=8, PERSISTENT_TMA=0, num_warps=4, num_stages=3)
    assert MM.supports(config, product(33, 64, 32), H200) is None
    assert MM.supports(config, product(32, 64, 32), H200) == "BLOCK_M must be at most 32 for m=32 but is 64"


@pytest.mark.parametrize(
    ("problem", "why"),
    [
        (product(64, 64, 64, batch=2), "in a batch"),
        (product(64, 60, 64), "not multiples of 16 bytes"),
        (product(64, 64, 60, flags=("b_transposed",)), "not multiples of 16 bytes"),
        (product(1, 64, 64), "with m=1: Inductor's template computes wrong results"),
    ],
)
def test_tma_is_refused_where_inductor_does_not_use_it_or_gets_it_wrong(problem, why):
    knobs = {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 32, "GROUP_M": 8, "num_warps": 4, "num_stages": 3}
    assert why in MM.supports(KernelConfig.of(**knobs, PERSISTENT_TMA=1), problem, H200)
    assert MM.supports(KernelConfig.of(**knobs, PERSISTENT_TMA=0), problem, H200) is None


def test_a_device_without_tma_is_offered_none():
    a100 = DeviceSpec(**{**H200.to_json(), "name": "A", "arch": "sm_80", "matrix_tflops_by_dtype": ()})
    assert {config["PERSISTENT_TMA"] for config in MM.space(a100)} == {0}
    assert {config["PERSISTENT_TMA"] for config in MM.space(H200)} == {0, 1}


def test_estimates_want_small_tiles_for_few_rows_and_large_ones_for_many():
    configs = MM.space(H200)
    for m, block in ((16, 16), (8192, 128)):
        problem = product(m, 8192, 8192)
        able = [config for config in configs if MM.supports(config, problem, H200) is None]
        best = able[int(np.argmin(MM.estimate_us(problem, H200, able)))]
        assert (best["BLOCK_M"] >= block) if m > 16 else (best["BLOCK_M"] == block)


def test_a_stage_less_takes_longer_where_loads_are_waited_for():
    knobs = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "GROUP_M": 8, "PERSISTENT_TMA": 0, "num_warps": 8}
    stages = [KernelConfig.of(**knobs, num_stages=count) for count in (1, 2, 3)]
    us = MM.estimate_us(product(4096, 4096, 4096), H200, stages)
    assert list(us) == sorted(us, reverse=True)


@pytest.mark.parametrize(
    ("given", "ours", "is_exact"),
    [
        ({"batch": 2, "flags": ("b_transposed", "bias")}, {"batch": 2, "flags": ("bias",)}, False),
        ({"dtype": "fp16", "flags": ("a_transposed",)}, {"dtype": "fp16", "flags": ("a_km", "b_kn")}, False),
        ({"dtype": "fp32", "flags": ("b_transposed", "tf32")}, {"dtype": "fp32"}, False),
        ({"dtype": "fp32", "flags": ("b_transposed",)}, {"dtype": "fp32"}, True),
        ({"dtype": "fp8e4m3", "flags": ("b_transposed",)}, {"dtype": "int8"}, False),
    ],
)
def test_a_ranker_sees_what_it_sees_of_our_own_gemm(given, ours, is_exact):
    knobs = {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64, "GROUP_M": 8, "num_warps": 4, "num_stages": 3}
    pair = [KernelConfig.of(**knobs, PERSISTENT_TMA=tma) for tma in (0, 1)]
    plain = {"SPLIT_K": 1, "CONSUMERS": 0, "PINGPONG": 0}
    same = [KernelConfig.of(**knobs, **plain, TMA=tma, PROGRAMS_PER_SM=tma) for tma in (0, 1)]
    matmul = find_family("matmul")
    expected = matmul.features(Problem.of("matmul", **{"batch": 1, "m": 64, "n": 256, "k": 512} | ours), H200, same)
    expected[:, matmul.feature_names.index("fp32")] += is_exact
    found = MM.features(product(64, 256, 512, **given), H200, pair)
    assert np.array_equal(found[:, : len(matmul.feature_names)], expected)


def test_on_an_arch_that_nothing_was_learned_on_more_go_through():
    problem, configs = product(4096, 4096, 4096), MM.space(H200)
    b200 = DeviceSpec(**{**H200.to_json(), "name": "B", "arch": "sm_100"})
    assert len(best_first(problem, configs, b200, 3)) > len(best_first(problem, configs, H200, 3)) == 3


def test_exact_float32_products_want_operands_that_registers_hold():
    knobs = {"BLOCK_M": 64, "BLOCK_N": 256, "BLOCK_K": 32, "GROUP_M": 8, "num_warps": 4, "num_stages": 4}
    small, large = KernelConfig.of(**knobs, PERSISTENT_TMA=0), KernelConfig.of(**knobs, PERSISTENT_TMA=1)
    times = {}
    for dtype, flags in (("fp32", ()), ("fp32", ("tf32",)), ("bf16", ())):
        problem = product(16384, 8192, 2560, dtype=dtype, flags=("b_transposed", *flags))
        times[dtype, flags] = us = MM.estimate_us(problem, H200, [small, large])
        assert bool(us[1] > 3 * us[0]) is (dtype == "fp32" and not flags)
    assert (times["fp32", ("tf32",)] > times["bf16", ()]).all()
    assert (times["fp32", ("tf32",)] < times["fp32", ()] / 4).all()


@pytest.mark.parametrize(("flags", "odd"), [(("b_transposed",), "k"), ((), "n"), (("a_transposed",), "m")])
def test_rows_at_odd_places_want_operands_that_registers_hold(flags, odd):
    knobs = {"BLOCK_M": 128, "BLOCK_N": 128, "GROUP_M": 8, "PERSISTENT_TMA": 0, "num_warps": 4, "num_stages": 2}
    shallow, deep = (KernelConfig.of(**knobs, BLOCK_K=depth) for depth in (64, 128))
    for off, is_held in ((0, False), (2, False), (1, True)):
        sizes = {"m": 4096, "n": 4096, "k": 4096, odd: 4096 + off}
        us = MM.estimate_us(product(**sizes, flags=flags), H200, [shallow, deep])
        assert bool(us[1] > 1.5 * us[0]) is is_held


def test_tf32_keeps_all_stages_in_shared_memory_as_16_bits_do():
    """An H200 refused this one: "shared memory, Required: 245760" (torch 2.11)."""
    knobs = {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 32, "GROUP_M": 8, "num_warps": 8, "num_stages": 5}
    config = KernelConfig.of(**knobs, PERSISTENT_TMA=0)
    sizes = {"m": 4096, "n": 9216, "k": 7168}
    assert MM.supports(config, product(**sizes, dtype="fp32", flags=("b_transposed",)), H200) is None
    refused = MM.supports(config, product(**sizes, dtype="fp32", flags=("b_transposed", "tf32")), H200)
    assert refused.startswith("needs 245760 bytes")


def test_sums_of_tf32_that_are_cut_off_at_each_step_are_within_the_tolerance():
    """An H200 was off by 0.0011 at this depth: by operands that are cut off to 10 bits, and by their sum."""
    depth, rng = 151_936, np.random.default_rng(0)
    a, b = rng.standard_normal((2, 512, 500)).astype(np.float32)
    cut_a, cut_b = ((operand.view(np.int32) & ~0x1FFF).view(np.float32).astype(np.float64) for operand in (a, b))
    product_of_both = (a.astype(np.float64) * b).sum(axis=0)
    by_operands = float(np.linalg.norm((cut_a * cut_b).sum(axis=0) - product_of_both) / np.linalg.norm(product_of_both))
    summed, exact = np.zeros(500, np.float32), np.zeros(500)
    for _ in range(depth // 8):
        step = (rng.standard_normal((8, 500)) * rng.standard_normal((8, 500))).sum(axis=0)
        exact += step
        rounded = (wide := summed + step).astype(np.float32)
        summed = np.where(abs(rounded) > abs(wide), np.nextafter(rounded, np.float32(0)), rounded)
    by_sums = float(np.linalg.norm(summed - exact) / np.linalg.norm(exact))
    off = by_operands + by_sums
    family = find_family("inductor:mm")
    tolerances = [
        family.tolerance(product(256, 2560, k, dtype="fp32", flags=("tf32",))) for k in (depth, depth // 4, 64)
    ]
    assert 1e-3 < off < tolerances[0] < 2 * off
    assert tolerances[1] < off
    assert tolerances[2] < 1.01e-3


def test_only_float32_is_rounded_to_tf32():
    knobs = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32, "GROUP_M": 8, "num_warps": 4, "num_stages": 3}
    config = KernelConfig.of(**knobs, PERSISTENT_TMA=0)
    assert MM.supports(config, product(64, 64, 64, dtype="fp32", flags=("tf32",)), H200) is None
    assert (
        MM.supports(config, product(64, 64, 64, flags=("tf32",)), H200)
        == "flag tf32 is only valid for fp32, not for bf16"
    )


def test_twice_k_go_through_while_nothing_is_learned_and_twins_count(monkeypatch):
    monkeypatch.setattr(choices, "bundle_in_force", lambda bundle: SimpleNamespace(families=()))
    family = find_family("inductor:convolution")
    problem, configs = (
        Problem.of(family.name, groups=1, images=2, m=6272, n=128, k=64, window=9, stride=1),
        list(family.space(H200)),
    )
    chosen = best_first(problem, configs, H200, 3)
    assert len(set(chosen)) == 3 * GROWTH
    us = family.estimate_us(problem, H200, [configs[place] for place in chosen])
    assert list(us) == sorted(us)
    twins = best_first(problem, [config for config in configs for _ in range(2)], H200, 3)
    assert twins[:2] == (2 * chosen[0], 2 * chosen[0] + 1)
    assert len(twins) == 3 * GROWTH


@pytest.mark.parametrize(("n", "grown"), [(512, 1), (508, GROWTH)])
def test_more_go_through_where_rows_are_unaligned(n, grown):
    assert len(best_first(product(64, n, 512), list(MM.space(H200)), H200, 3)) == 3 * grown


def test_the_shipped_bundle_has_learned_them_and_prefers_eight_warps_for_wide_heads():
    """On an H100, flex attention's backward pass of head dimension 256 takes 1.5 times as long with 4 warps."""
    names = ("grouped_mm", "convolution", "flex_attention", "flex_decoding", "flex_backward")
    assert {f"inductor_{name}" for name in names} <= set(load_bundle().families)
    family, h100 = find_family("inductor:flex_backward"), DeviceSpec.named("h100")
    sizes = {"batch": 64, "groups": 4, "queries": 1024, "keys": 1024, "head_qk": 256, "head_v": 256}
    problem = Problem.of(family.name, flags=("block_mask",), **sizes)
    (first, *_) = make_shortlist(family, problem, h100, k=4).configs
    assert first.num_warps == 8


def test_threads_may_hash_the_templates_of_different_ops_at_once():
    """Training does so. The modules of these ops import each other in circles; a new process has imported none."""
    script = """
from concurrent.futures import ThreadPoolExecutor
from foretune.kernels import find_family
names = ("grouped_mm", "flex_attention", "flex_decoding", "convolution", "flex_backward", "mm")
families = [find_family(f"inductor:{name}") for name in names]
with ThreadPoolExecutor(len(families)) as pool:
    print(len(set(pool.map(lambda family: family.source_hash(), families))))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout == "6\n", done.stderr


def test_inductors_own_order_is_its_default_then_its_list_then_the_estimates():
    family = find_family("inductor:flex_attention")
    problem = Problem.of(family.name, **TestFlexAttention.sizes[0])
    configs = [config for config in family.space(H200) if family.supports(config, problem, H200) is None]
    ranks = BASELINES["inductor"].rankers[0]().predict(family, problem, H200, configs)
    ranked = [configs[place] for place in ranks.argsort()]
    listed = family.usual(problem, H200)
    assert tuple(ranked[: len(listed)]) == tuple(listed)
    assert ranked[0] == family.default(problem, H200)
    us = family.estimate_us(problem, H200, ranked[len(listed) :])
    assert list(us) == sorted(us)
    assert family.supports(KernelConfig.of(BLOCK_M=128, BLOCK_N=128, num_warps=8, num_stages=2), problem, H200) is None


@pytest.mark.parametrize("name", ["flex_attention", "flex_backward", "flex_decoding"])
def test_what_inductor_lists_is_in_the_space(name):
    family = find_family(f"inductor:{name}")
    for case in family.cases(per_layer=1, random=3):
        reasons = {family.supports(config, case.problem, H200) for config in family.usual(case.problem, H200)}
        assert all(reason is None or "shared memory" in reason for reason in reasons), reasons


def test_inductor_reduces_blocks_of_convolution_to_the_problem():
    family = find_family("inductor:convolution")
    problem = Problem.of(family.name, groups=1, images=1, m=196, n=96, k=3, window=9, stride=1)
    listed = family.listed(problem)
    assert max(config["BLOCK_M"] for config in listed) == 256
    assert max(config["BLOCK_N"] for config in listed) == 128
    assert {config["BLOCK_K"] for config in listed} == {16}
    assert listed[0] == family.default(problem, H200)
    assert {config for config in family.space(H200) if family.supports(config, problem, H200) is None} == set(listed)


@pytest.mark.parametrize(("rows", "blocks"), [(16, {16, 32}), (32, {16, 32, 64}), (64, {32, 64, 128}), (65, {64, 128})])
def test_grouped_products_have_the_blocks_that_inductor_lists_for_their_rows(rows, blocks):
    family = find_family("inductor:grouped_mm")
    problem = Problem.of(family.name, flags=("a_ragged",), groups=8, m=8 * rows, n=512, k=512)
    able = {config["BLOCK_M"] for config in family.space(H200) if family.supports(config, problem, H200) is None}
    assert able == blocks


def test_cases_are_calls_that_the_family_takes_with_the_layers_they_are_of():
    cases = MM.cases(per_layer=1, random=8)
    assert {case.problem.dtype for case in cases} >= {"bf16", "fp16", "fp8e4m3"}
    assert all(MM.default(case.problem, H200) for case in cases)
    with pytest.raises(ForetuneError, match="token counts must be between 1 and"):
        MM.cases(tokens=(0,))
    with pytest.raises(ForetuneError, match="per_layer must be >= 0"):
        MM.cases(per_layer=-1)
