"""`foretune.spaces`: grids as dictionaries, the lists for a matrix product, and how they are fitted to a problem."""

from __future__ import annotations

import itertools

import foretune
import pytest
from foretune.datasets import ForetuneError, KernelConfig, Problem
from foretune.kernels import find_family
from foretune.kernels.spaces import (
    LISTS,
    default_config,
    filter_valid,
    fit_configs,
    gemm_limit,
    generate,
    matmul_configs,
    matmul_grid,
    ready_space,
)
from grouped import A100, B200, H200, HOST, MI300X, MI350X, XPU

DEVICES = (H200, A100, B200, MI300X, MI350X, XPU, HOST)
GROUPED = Problem.of("grouped_gemm_fwd", groups=8, rows=4096, n=512, k=512)
LARGE, DECODE, SMALL = (8192, 8192, 8192), (1, 4096, 4096), (64, 64, 64)


def test_a_dictionary_generates_all_its_combinations_once_the_last_knob_fastest():
    configs = generate({"BLOCK": [64, 128, 64], "num_warps": (4, 8)})
    assert [(one["BLOCK"], one.num_warps) for one in configs] == [(64, 4), (64, 8), (128, 4), (128, 8)]
    assert [one["BLOCK"] for one in generate({"BLOCK": range(64, 67)}, keep=lambda one: one["BLOCK"] != 65)] == [64, 66]


@pytest.mark.parametrize(
    ("space", "said"),
    [
        ({}, "must be a dictionary of knobs"),
        ([("BLOCK", [64])], "must be a dictionary of knobs"),
        ({"BLOCK": 64}, "list of values for BLOCK but has 64"),
        ({"BLOCK": "64"}, "list of values for BLOCK"),
        ({"BLOCK": []}, "at least one value for BLOCK"),
        ({"BLOCK": [[64]]}, "BLOCK"),
        ({"num_warps": [3]}, "num_warps must be a power of two but got 3"),
        ({knob: range(100) for knob in "ABCD"}, "at most 1000000 configs but has 100000000"),
    ],
)
def test_what_is_no_space_is_said(space, said):
    with pytest.raises(ForetuneError, match=said):
        generate(space)


def test_a_space_of_which_nothing_is_kept_is_refused():
    with pytest.raises(ForetuneError, match="refuses all 2"):
        generate({"BLOCK": [64, 128]}, keep=lambda _: False)


@pytest.mark.parametrize("name", sorted(foretune.families()))
def test_the_ready_space_of_a_family_has_all_of_its_own(name):
    family = find_family(name)
    space, own = ready_space(name, H200), family.space(H200)
    assert set(space) <= set(family.knobs)
    assert all(one.to_json()[knob] in space[knob] for one in own for knob in space if knob in one.to_json())
    space["num_warps"].append(64)
    assert ready_space(name, H200)["num_warps"] != space["num_warps"]  # a copy


def test_validity_is_what_the_family_says():
    family = find_family("grouped_gemm_fwd")
    space = ready_space(family, H200) | {"BLOCK_K": [128], "GROUP_M": [1], "TMA_Y": [0], "num_stages": [4, 6]}
    left = filter_valid(generate(space), GROUPED, "h200")
    assert left.configs
    assert all(family.supports(one, GROUPED, H200) is None for one in left.configs)
    assert left.dropped
    assert all(family.supports(one, GROUPED, H200) == reason for one, reason in left.dropped)
    assert len(left.to_json()["dropped"]) == len(left.dropped)
    assert f"{len(left.configs)} of {len(left.configs) + len(left.dropped)} configs" in left.__rich__().below


def test_the_default_config_is_the_family_s():
    family = find_family("grouped_gemm_fwd")
    assert default_config(GROUPED, "h200") == family.default(GROUPED, H200)
    with pytest.raises(ForetuneError, match="must be a Problem but is 'matmul'"):
        default_config("matmul", "h200")
    with pytest.raises(ForetuneError, match=r"must be a KernelConfig .* but one is 3"):
        filter_valid([3], GROUPED, "h200")
    fp8 = Problem.of("scaled_gemm", m=64, n=256, k=256, dtype="fp8e4m3")
    with pytest.raises(
        ForetuneError, match=r"scaled_gemm has no default config for .* on A100: sm_80 does not support fp8e4m3"
    ):
        default_config(fp8, A100)


#: How many configs each list has, and of the exhaustive one what is left for three products.
COUNTS = {
    "sm_90": ([20, 11, 1875, 10, 18, 100], [1239, 235, 270]),
    "sm_80": ([20, 11, 1875, 10, 18, 98], [1232, 229, 270]),
    "sm_100": ([20, 11, 1875, 10, 18, 100], [1239, 235, 270]),
    "gfx942": ([33, 11, 10800, 17, 20, 38], [7728, 440, 480]),
    "gfx950": ([33, 11, 6000, 20, 20, 38], [5100, 280, 288]),
    "pvc": ([22, 11, 2000, 16, 20, 38], [1180, 160, 156]),
    "x86_64": ([20, 9, 60, 6, 12, 22], [60, 16, 27]),
}


@pytest.mark.parametrize("device", DEVICES, ids=lambda one: one.arch)
def test_how_many_configs_a_list_has(device):
    whole, fitted = COUNTS[device.arch]
    assert [len(matmul_configs(device, which)) for which in LISTS] == whole
    assert [len(matmul_configs(device, "exhaustive", shape=shape)) for shape in (LARGE, DECODE, SMALL)] == fitted


@pytest.mark.parametrize("device", DEVICES, ids=lambda one: one.arch)
@pytest.mark.parametrize("which", [name for name in LISTS if name != "exhaustive"])
def test_a_list_has_what_the_device_runs_each_once_within_its_grid(device, which):
    configs, grid = matmul_configs(device, which), matmul_grid(device)
    dtype = {"int8": "int8", "scaled": "fp8e4m3"}.get(which, "bf16")
    assert len(set(configs)) == len(configs)
    assert [gemm_limit(one, device, dtype) for one in configs] == [None] * len(configs)
    for one in configs:
        own = one.to_json()
        assert own["BLOCK_M"] in grid["BLOCK_M"]
        assert own["BLOCK_N"] in grid["BLOCK_N"]
        assert own["num_warps"] in grid["num_warps"]
        assert set(own) - {"num_ctas"} <= set(grid)
        assert ("kpack" in own) == (device.arch == "gfx942")


@pytest.mark.parametrize("device", DEVICES, ids=lambda one: one.arch)
@pytest.mark.parametrize("shape", [LARGE, DECODE, SMALL, (100, 17, 3000), (3, 5, 7)])
def test_a_fitted_list_has_no_block_past_the_problem_and_no_idle_warp(device, shape):
    fitted = matmul_configs(device, "default", shape=shape)
    assert len(set(fitted)) == len(fitted)
    assert 1 <= len(fitted) <= len(matmul_configs(device))
    for one, (axis, size) in itertools.product(fitted, zip("MNK", shape, strict=True)):
        assert one[f"BLOCK_{axis}"] < max(2 * size, 32)
    for one in fitted:
        assert one.num_warps == 1 or one.num_warps * 256 <= one["BLOCK_M"] * one["BLOCK_N"]
        assert one["GROUP_M"] == 1 or one["GROUP_M"] < 2 * -(-shape[0] // one["BLOCK_M"])


def test_what_scaling_makes_alike_is_left_once():
    one, other = (KernelConfig.of(BLOCK_M=m, BLOCK_N=64, BLOCK_K=64, GROUP_M=8, num_warps=4) for m in (128, 64))
    fitted = fit_configs([one, other], (20, 4096, 4096), H200)
    assert [(left["BLOCK_M"], left["GROUP_M"]) for left in fitted.configs] == [(32, 1)]


def test_what_is_pruned_says_why():
    large = KernelConfig.of(BLOCK_M=256, BLOCK_N=256, BLOCK_K=64, GROUP_M=8, num_warps=8, num_stages=2)
    deep = KernelConfig.of(BLOCK_M=128, BLOCK_N=128, BLOCK_K=128, GROUP_M=8, num_warps=8, num_stages=4)
    small = KernelConfig.of(BLOCK_M=64, BLOCK_N=64, BLOCK_K=16, GROUP_M=8, num_warps=4, num_stages=2, kpack=2)
    fitted = fit_configs([large, deep, small], LARGE, H200)
    assert [one["BLOCK_M"] for one in fitted.configs] == [64]
    assert "at most 32768 elements, which registers hold" in fitted.dropped[0][1]
    assert "needs 262144 bytes of shared memory" in fitted.dropped[1][1]
    assert gemm_limit(large, MI300X) is None  # its waves have 64 lanes
    assert "kpack = 2" in gemm_limit(small, MI300X)
    with pytest.raises(ForetuneError, match=r"8192 x 8192 x 8192 in bf16 is left on NVIDIA H200: BLOCK_M x"):
        fit_configs([large], LARGE, H200)


def test_steps_are_as_long_in_bytes_in_every_dtype():
    steps = {
        dtype: {one["BLOCK_K"] for one in matmul_configs("h200", dtype=dtype)} for dtype in ("int8", "bf16", "fp32")
    }
    assert steps == {"int8": {64, 128, 256}, "bf16": {32, 64, 128}, "fp32": {16, 32, 64}}
    assert {one["BLOCK_K"] for one in matmul_configs("h200", "int8", shape=(512, 512, 8))} == {32}


def test_a_family_s_further_knobs_are_combined_with_each_config():
    configs = matmul_configs("h200", TMA=[0, 1], SPLIT_K=[1])
    assert len(configs) == 40
    assert {(one["TMA"], one["SPLIT_K"]) for one in configs} == {(0, 1), (1, 1)}


def test_values_of_a_knob_that_the_list_has_take_the_place_of_its_own_and_are_fitted():
    fours = matmul_configs("h200", num_stages=[4, 4])
    assert {one.num_stages for one in fours} == {4}
    assert len(set(fours)) == len(fours) <= 20
    fitted = matmul_configs("h200", shape=(8192, 8192, 8192), num_stages=[8])
    assert [gemm_limit(one, H200) for one in fitted] == [None] * len(fitted)
    assert {one.num_stages for one in fitted} == {8}


@pytest.mark.parametrize(
    ("configs", "device", "said"),
    [
        (["x"], "h200", "each of configs must be a KernelConfig .* but one is 'x'"),
        ([KernelConfig.of(BLOCK_M=64)], "h200", "each of configs must have BLOCK_N, BLOCK_K but one is BLOCK_M=64"),
        (matmul_configs("h200"), "h300", "unknown device 'h300'"),
        ((), "h200", "there are none"),
    ],
)
def test_what_cannot_be_fitted_is_said(configs, device, said):
    with pytest.raises(ForetuneError, match=said):
        fit_configs(configs, LARGE, device)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"which": "all"}, "one of default, extra, exhaustive, persistent, int8, scaled but is 'all'"),
        ({"device": "h300"}, "unknown device 'h300'"),
        ({"shape": (1, 2)}, r"\(m, n, k\) but is \(1, 2\)"),
        ({"shape": (0, 64, 64)}, "m must be"),
        ({"dtype": "bf17"}, "bf17"),
        ({"TMA": 1}, "list of values for TMA but has 1"),
    ],
)
def test_what_no_list_can_be_made_of_is_said(arguments, said):
    with pytest.raises(ForetuneError, match=said):
        matmul_configs(**{"device": "h200"} | arguments)


def test_the_face_has_it():
    assert foretune.spaces.generate is generate
