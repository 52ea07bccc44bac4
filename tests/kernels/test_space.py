"""The families without a compiler: their spaces, what is supported, features, problems of calls, hashes."""

from __future__ import annotations

import inspect
import itertools
import json
import os
import pickle
import random
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import triton
from foretune.datasets import ForetuneError, KernelConfig
from foretune.kernels import families
from foretune.kernels import find_family as family_named
from foretune.kernels.grouped_gemm import dw, gemm, ragged, sorting, tiles
from foretune.kernels.grouped_gemm.chunks import chunk_rows
from foretune.kernels.grouped_gemm.group_sizes import typical_sizes
from foretune.kernels.grouped_gemm.space import resident_programs, smem_bytes
from grouped import A10, A100, B200, CPU, DTYPES, DW, DX, FAMILIES, FLAGS, FORWARD, H200, MI300X, made, problem
from grouped import config as config_of
from triton.runtime.jit import JITFunction

every_device = pytest.mark.parametrize("device", [H200, A100, A10, B200, MI300X], ids=lambda device: device.arch)


def named(value):
    """A family's name: its address is another one in every process, and pytest's workers compare."""
    return str(getattr(value, "name", value))


every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


def test_the_registry_knows_the_families_and_names_them_where_another_is_asked_for():
    assert tuple(families()) == ("grouped_gemm_fwd", "grouped_gemm_dx", "grouped_gemm_dw")
    assert all(family_named(family.name) is family for family in FAMILIES)
    with pytest.raises(
        ForetuneError, match=r"unknown kernel family .gemm.; known: grouped_gemm_dw, grouped_gemm_dx, grouped_gemm_fwd"
    ):
        family_named("gemm")


@every_family
def test_the_space_is_large_and_has_no_twins(family):
    space = family.space(H200)
    assert len(space) >= 700
    assert len(set(space)) == len(space)
    assert len({json.dumps(config.to_json()) for config in family.space()}) == len(family.space())


@every_family
def test_the_space_covers_the_knobs(family):
    seen = {knob: {config[knob] for config in family.space(H200)} for knob in family.knobs}
    assert seen["BLOCK_M"] == {64, 128, 256} | (set() if family is DW else {16, 32})
    assert seen["BLOCK_N"] == {64, 128, 256} | (set() if family is DW else {32})
    assert seen["BLOCK_K"] == ({32, 64} if family is DW else {64, 128})
    assert seen["GROUP_M"] == {1, 8}
    assert seen["num_warps"] == {4, 8}
    assert seen["num_stages"] == {2, 3, 4, 5, 6}
    assert seen["PROGRAMS_PER_SM"] == {1, 2}
    assert all(seen[knob] == {0, 1} for knob in family.operation.tma)


@every_family
def test_accumulators_that_registers_cannot_hold_are_refused_before_any_compiling(family):
    """A thread has 255 registers: 256 x 256 at 8 warps, or 256 x 128 at 4, would need 256 for the sums alone."""
    large = family.space(block_m=[256], block_n=[128, 256], num_warps=[4, 8])
    assert {(config["BLOCK_N"], config["num_warps"]) for config in large} == {(128, 8)}


@every_family
@every_device
def test_the_space_of_a_device_is_what_it_supports_of_the_whole(family, device):
    some = problem(family)
    assert family.space(device) == tuple(c for c in family.space() if family.supports(c, some, device) is None)
    assert len(family.space(device)) >= 50


@every_family
@every_device
@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_every_permutation_leaves_configs_to_choose_from(family, device, flags):
    supported = [c for c in family.space(device) if family.supports(c, problem(family, flags=flags), device) is None]
    assert len(supported) >= 50
    if device in (H200, B200):  # and the side that is not permuted may still go through TMA
        assert any(config[knob] for config in supported for knob in family.operation.tma)


@every_family
def test_ranges_replace_the_values_of_a_knob(family):
    space = family.space(H200, block_m=[64], tma=[0])
    assert space == tuple(
        c for c in family.space(H200) if c["BLOCK_M"] == 64 and not any(c[knob] for knob in family.operation.tma)
    )
    assert space
    assert {c.num_stages for c in family.space(H200, num_stages=(4,))} == {4}
    assert {c["BLOCK_K"] for c in family.space(block_k=[16, 512], block_m=[64], num_stages=[7])} == {16, 512}
    assert family.space(A100, tma=[1]) == ()


@every_family
@pytest.mark.parametrize(
    ("ranges", "why"),
    [
        (
            {"block_x": [1]},
            "block_x is not a range of the space; there are block_k, block_m, block_n, num_stages, num_w",
        ),
        ({"group_m": [8]}, "group_m is not a range"),
        ({"block_m": [64, 512]}, "block_m must be a power of two between 16 and 256 but is 512"),
        ({"block_n": [48]}, "block_n must be a power of two between 16 and 512 but is 48"),
        ({"block_k": ["64"]}, "block_k must be a power of two between 16 and 512 but is '64'"),
        ({"block_m": [64.0]}, "block_m must be .* but is 64.0"),
        ({"num_warps": [6]}, "num_warps must be 1, 2, 4, 8 or 16 but is 6"),
        ({"num_stages": [0]}, "num_stages must be between 1 and 8 but is 0"),
        ({"tma": [2]}, "tma must be 0 or 1 but is 2"),
        ({"block_m": 64}, "block_m must be a list of values but is 64"),
        ({"block_m": []}, r"block_m must be a list of values but is \[\]"),
    ],
    ids=str,
)
def test_a_bad_range_is_named(family, ranges, why):
    with pytest.raises(ForetuneError, match=why):
        family.space(H200, **ranges)


@every_family
@every_device
@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_default_is_supported_from_decode_to_training(family, device, flags, dtype):
    for groups, rows, n in itertools.product((1, 8, 512), (0, 1, 16, 512, 65536, 1 << 20), (8, 2048)):
        call = problem(family, flags=flags, dtype=dtype, groups=groups, rows=rows, n=n)
        assert family.supports(family.default(call, device), call, device) is None


@every_family
@every_device
def test_the_default_has_the_knobs_of_the_space(family, device):
    knobs = set(family.default(problem(family), device).to_json())
    assert knobs == set(family.space()[0].to_json()) == {*family.knobs, "num_ctas"}


def chosen(family=FORWARD, **knobs):
    return KernelConfig.from_json(family.default(problem(family), H200).to_json() | knobs)


TMA_OF_PERMUTED = [
    (FORWARD, "permute_x", "TMA_X"),
    (FORWARD, "permute_y", "TMA_Y"),
    (DX, "permute_x", "TMA_Y"),
    (DX, "permute_y", "TMA_X"),
]


@pytest.mark.parametrize(("family", "flag", "knob"), TMA_OF_PERMUTED, ids=named)
def test_rows_that_are_permuted_do_not_go_through_tma_and_all_else_may(family, flag, knob):
    call = problem(family, flags=(flag,))
    everything = dict.fromkeys(family.operation.tma, 1)
    why = family.supports(chosen(family, **everything), call, H200)
    assert why == f"{knob}=1 with {flag}: TMA moves boxes of neighbouring rows, and these are permuted"
    assert family.supports(chosen(family, **everything | {knob: 0}), call, H200) is None
    assert family.supports(chosen(family, **everything), problem(family), H200) is None


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_dw_sorts_permuted_rows_first_so_that_all_may_go_through_tma(flags):
    assert DW.supports(chosen(DW, **dict.fromkeys(DW.operation.tma, 1)), problem(DW, flags=flags), H200) is None


REFUSALS = {
    "no TMA": (chosen(num_stages=2), {}, A100, "sm_80 has no TMA"),
    "no TMA to load": (chosen(num_stages=2, TMA_X=0, TMA_Y=0), {}, A100, "sm_80 has no TMA"),
    "no TMA to store": (chosen(num_stages=2, TMA_X=0, TMA_W=0), {}, A100, "sm_80 has no TMA"),
    "no TMA on AMD": (chosen(num_stages=2), {}, MI300X, "gfx942 has no TMA"),
    "shared memory": (
        chosen(BLOCK_M=128, BLOCK_N=256, BLOCK_K=128, num_stages=3),
        {},
        H200,
        "needs 360472 bytes of shared memory but NVIDIA H200 has 232448 a block",
    ),
    "float32 is twice as large": (
        chosen(BLOCK_M=64, BLOCK_N=64, BLOCK_K=128, num_stages=5, TMA_X=0, TMA_W=0, TMA_Y=0),
        {"dtype": "fp32"},
        H200,
        "needs 278528 bytes of shared memory",
    ),
    "less on an A10": (
        chosen(TMA_X=0, TMA_W=0, TMA_Y=0, num_stages=5),
        {},
        A10,
        "bytes of shared memory but A10 has 101376 a block",
    ),
    "N": (chosen(), {"n": 2052}, H200, "multiples of 8 but are 2052 and 1024"),
    "K": (chosen(), {"k": 1023}, H200, "multiples of 8 but are 2048 and 1023"),
    "no groups": (chosen(), {"groups": 0}, H200, "groups, N and K must be >= 1 but are 0, 2048 and 1024"),
    "no columns": (chosen(), {"n": 0}, H200, "groups, N and K must be >= 1 but are 64, 0 and 1024"),
    "a tile of float32": (
        chosen(BLOCK_M=64),
        {"dtype": "fp32"},
        H200,
        "fp32 tiles have at most 4096 elements but .* 8192",
    ),
    "both permutations": (
        chosen(),
        {"flags": ("permute_x", "permute_y")},
        H200,
        "permute_x and permute_y cannot both be fused into one GEMM",
    ),
    "an unknown flag": (chosen(), {"flags": ("permute_z",)}, H200, "flag permute_z is not one of permute_x, permute_y"),
    "a block that the map does not have": (chosen(BLOCK_M=512, BLOCK_N=32), {}, H200, "between 16 and 256 but is 512"),
    "a block that is no power of two": (chosen(BLOCK_M=48), {}, H200, "a power of two between 16 and 256 but is 48"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_refusal_says_why(case):
    config, call, device, why = REFUSALS[case]
    assert re.search(why, FORWARD.supports(config, problem(FORWARD, **call), device))


def test_what_shared_memory_cannot_hold_on_one_arch_another_may():
    """wgmma needs every stage in shared memory, the older mma one less; both need some for the output, tcgen05 less of
    it and a barrier more."""

    def smem(m, device, tma=(0, 0, 0), itemsize=2):
        return smem_bytes(FORWARD.operation, config_of(FORWARD, m, 128, 64, tma=tma, stages=3), itemsize, device)

    stage, out = 256 * 64 * 2, 128 * 128 * 2
    assert smem(128, H200) == 3 * stage + out // 4
    assert smem(128, B200) == 3 * stage + out // 4 + 16
    assert smem(128, A100) == 2 * stage + out // 2  # a bound
    assert smem(128, MI300X) == 3 * stage  # a bound
    assert smem(128, H200, (1, 1, 0)) == 3 * (stage + 8) + out // 4
    assert smem(128, H200, (1, 1, 1)) == 3 * (stage + 8) + out
    stage, out = 160 * 64 * 2, 32 * 128 * 2
    assert smem(32, H200) == smem(32, B200) == 2 * stage + out // 4
    assert smem(32, A100) == 2 * stage + out
    assert smem(32, H200, (1, 1, 0)) == 2 * (stage + 8) + out // 4


@every_family
def test_configs_of_one_binary_differ_in_runtime_arguments_only(family):
    binaries = {}
    for config in family.space(H200):
        binaries.setdefault(family.binary_of(config), []).append(config)
    assert len(binaries) < len(family.space(H200))
    runtime = ("GROUP_M", "PROGRAMS_PER_SM")
    for binary, configs in binaries.items():
        assert family.binary_of(binary) == binary
        for config in configs:
            assert {knob for knob in family.knobs if config[knob] != binary[knob]} <= set(runtime)
    compiled = [knob for knob in family.knobs if knob not in runtime]
    assert len({tuple(config[knob] for knob in compiled) for config in family.space(H200)}) == len(binaries)


@every_family
def test_every_config_survives_json_triton_and_pickle(family):
    for config in family.space():
        assert KernelConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
        assert KernelConfig.from_triton(config.to_triton()) == config
        assert hash(pickle.loads(pickle.dumps(config))) == hash(config)


@every_family
@every_device
def test_the_programs_of_one_sm_fit(family, device):
    for config in family.space(device):
        programs = resident_programs(family.operation, config, 2, device)
        assert 1 <= programs <= config["PROGRAMS_PER_SM"]
        smem = smem_bytes(family.operation, config, 2, device)
        assert programs == 1 or programs * smem <= device.smem_per_sm_bytes


ODD = {
    "unknown sizes": {},
    "known sizes": {"sizes": (0, 69, 1)},
    "one group": {"groups": 1},
    "no rows": {"rows": 0},
    "no rows, known": {"sizes": (0, 0)},
    "one row": {"rows": 1},
    "896 groups": {"groups": 896},
    "more groups than rows": {"groups": 896, "rows": 3},
    "tiny": {"groups": 1, "rows": 1, "n": 8, "k": 8},
    "huge": {"groups": 1, "rows": 1 << 22, "n": 1 << 17, "k": 1 << 17},
    "all in one group": {"sizes": (*(0,) * 511, 1 << 20)},
    "fp16": {"dtype": "fp16"},
    "fp32": {"dtype": "fp32"},
    "permute_x": {"flags": ("permute_x",)},
    "permute_y": {"flags": ("permute_y",)},
}


@every_family
@every_device
@pytest.mark.parametrize("name", ODD)
def test_features_are_finite_and_complete(family, name, device):
    space = family.space(device)
    table = family.features(problem(family, **ODD[name]), device, space)
    assert table.shape == (len(space), len(family.feature_names))
    assert table.dtype == np.float32
    assert np.isfinite(table).all()
    assert (table[:, family.feature_names.index("roofline_us")] > 0).all()


@every_family
def test_feature_names_are_unique(family):
    assert len(set(family.feature_names)) == len(family.feature_names)


@every_family
def test_a_config_has_the_same_features_in_any_list_and_every_time(family):
    space, call = list(family.space(H200)), problem(family)
    table = family.features(call, H200, space)
    order = random.Random(0).sample(range(len(space)), 50)
    np.testing.assert_array_equal(family.features(call, H200, [space[i] for i in order]), table[order])
    np.testing.assert_array_equal(family.features(call, H200, space), table)
    np.testing.assert_array_equal(family.features(call, H200, space[:1]), table[:1])


def column(name, call, config, family=FORWARD, device=H200):
    return float(family.features(call, device, [config])[0, family.feature_names.index(name)])


@pytest.mark.parametrize("family", [FORWARD, DX], ids=lambda family: family.name)
def test_features_say_what_a_call_over_rows_is(family):
    config = chosen(family, BLOCK_M=64, BLOCK_N=128, BLOCK_K=128)
    # The output has 320 columns and the contraction 200 steps: N and K for the forward pass, K and N for dX.
    dims = {"n": 320, "k": 200} if family is FORWARD else {"n": 200, "k": 320}
    call = problem(family, (0, 65, 135, 0), **dims)
    expected = {
        "log_tiles": np.log2((2 + 3) * 3),
        "padding_m": 5 * 64 / 200,
        "padding_n": 384 / 320,
        "padding_k": 256 / 200,
        "steps_per_tile": 2,
        "m_tiles_per_group": 5 / 2,
        "n_tiles": 3,
        "log_active": 1,
        "skew": 135 / 50,
        "smem_bytes": smem_bytes(family.operation, config, 2, H200),
    }
    assert {name: column(name, call, config, family) for name in expected} == pytest.approx(expected)


def test_features_say_what_a_call_of_dw_is():
    config = chosen(DW, BLOCK_M=64, BLOCK_N=128, BLOCK_K=32)
    call = problem(DW, (0, 65, 135, 0), n=200, k=320)
    expected = {
        "log_tiles": np.log2(4 * 4 * 3),  # a group without rows has its zeros to write
        "padding_m": 256 / 200,
        "padding_n": 384 / 320,
        "padding_k": (1 + 3 + 5 + 1) * 32 / 200,
        "steps_per_tile": 10 / 4,
        "m_tiles_per_group": 4,
        "n_tiles": 3,
        "longest_over_share": 5 / (10 * 12 / 132),
    }
    assert {name: column(name, call, config, DW) for name in expected} == pytest.approx(expected)


def test_features_know_that_dw_splits_a_long_group():
    config = chosen(DW, BLOCK_M=128, BLOCK_N=128, BLOCK_K=64)
    split, whole = problem(DW, (8192, 0, 0, 0), n=512, k=512), problem(DW, (2048,) * 4, n=512, k=512)
    assert chunk_rows(8192, 512, 512, H200.sm_count) == 1024
    assert column("log_tiles", split, config, DW) == np.log2(np.float32(11 * 16))
    assert column("log_tiles", whole, config, DW) == np.log2(8 * 16)
    assert column("longest_over_share", split, config, DW) == pytest.approx(16 / ((8 * 16 + 3) * 16 / 132), rel=1e-5)


@every_family
def test_features_tell_dtypes_flags_and_known_sizes_apart(family):
    config, call = chosen(family), problem(family, (3, 5))
    seen = [
        [column(name, problem(family, **told), config, family) for name in ("fp16", "fp32", "permute_x", "permute_y")]
        for told in ({}, {"dtype": "fp16"}, {"dtype": "fp32"}, {"flags": ("permute_x",)}, {"flags": ("permute_y",)})
    ]
    assert seen == [[0, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    known = [column("sizes_known", each, config, family) for each in (call, call.without_sizes())]
    assert known == [1, 0]
    ways = [family.operation.tma, ("tma_left", "tma_right", "tma_out")]
    for knob, name in zip(*ways, strict=True):
        assert [column(name, call, chosen(family, **{knob: on}), family) for on in (0, 1)] == [0, 1]


@every_family
def test_features_of_the_whole_space_take_milliseconds(family):
    space, best = family.space(H200), float("inf")
    for i in range(30):
        call = problem(family, rows=8192 + i)
        typical_sizes(call["rows"], call["groups"])  # kept for every later problem of that many rows
        began = time.perf_counter()
        family.features(call, H200, space)
        best = min(best, time.perf_counter() - began)
    assert best < 3e-3  # under 1 ms on a quiet 2026 core


@pytest.mark.parametrize("rows", [0, 1, 128, 1000, 8192, 65536, 1 << 20])
@pytest.mark.parametrize(("n", "k"), [(8, 8), (704, 2880), (1536, 2048), (14336, 4096)])
@pytest.mark.parametrize("sm_count", [1, 78, 132, 304])
def test_chunks_are_neither_short_nor_longer_than_all_rows(rows, n, k, sm_count):
    length = chunk_rows(rows, n, k, sm_count)
    assert 1 <= length <= max(rows, 1)
    assert length == max(rows, 1) or (length >= 1024 and length % 128 == 0)
    assert chunk_rows(rows, n, k, 2 * sm_count) <= length


@pytest.mark.parametrize("groups", [1, 2, 7, 8, 64, 128, 512, 896])
def test_typical_sizes_add_up(groups):
    for rows in (0, 1, 2, 3, 16, 63, 64, 65, 1000, 4096, 30 * groups, 30 * groups + 1, 65536, 1_000_003):
        sizes = typical_sizes(rows, groups)
        assert sizes.shape == (groups,)
        assert sizes.sum() == rows
        assert sizes.min() >= 0
        assert (np.diff(sizes) <= 0).all()


def test_typical_sizes_are_spread_as_uniform_routing_spreads_them():
    drawn = np.random.default_rng(0)
    for rows, groups in ((64, 128), (1024, 64), (16384, 128)):
        routings = [np.bincount(drawn.integers(0, groups, rows), minlength=groups) for _ in range(200)]
        typical = typical_sizes(rows, groups)
        assert (typical > 0).sum() == pytest.approx(np.mean([(r > 0).sum() for r in routings]), rel=0.1)
        assert typical.max() == pytest.approx(np.mean([r.max() for r in routings]), rel=0.35)
        assert typical.std() == pytest.approx(np.mean([r.std() for r in routings]), rel=0.15)


@pytest.fixture
def no_maps(monkeypatch):
    """Inputs without the map that a launch would need, and that takes a device to make."""
    import torch

    def build(sizes, rows, chunk_rows=None):
        return tiles.TileMap(torch.empty(0, dtype=torch.int32), rows, len(sizes), chunk_rows or max(rows, 1))

    monkeypatch.setattr(tiles.TileMap, "build", build)


#: The kernel's N and K, and its tensor that says the dtype: dX contracts over the layer's N.
CALLED = {FORWARD: ("x_ptr", 2048, 1024), DX: ("x_ptr", 1024, 2048), DW: ("dy_ptr", 2048, 1024)}
FLAGGED = [
    (FORWARD, "GATHER", "permute_x"),
    (FORWARD, "SCATTER", "permute_y"),
    (DX, "SCATTER", "permute_x"),
    (DX, "GATHER", "permute_y"),
]


def call(family, dtype="torch.bfloat16", **changed):
    tensor, n, k = CALLED[family]
    arguments = {tensor: SimpleNamespace(dtype=dtype), "rows": 4096, "groups": 64, "N8": n // 8, "K8": k // 8}
    return {**arguments, "GROUP_M": 8, "grid": None, "warmup": False, **changed}


@every_family
def test_the_problem_of_a_call(family):
    assert family.problem_from_call(call(family)) == problem(family, rows=4096)
    for dtype, name in (("torch.float16", "fp16"), ("torch.float32", "fp32")):
        assert family.problem_from_call(call(family, dtype)) == problem(family, rows=4096, dtype=name)
    assert family.problem_from_call(call(family, rows=0))["rows"] == 0


@pytest.mark.parametrize(("family", "argument", "flag"), FLAGGED, ids=named)
def test_the_problem_of_a_call_that_permutes(family, argument, flag):
    others = {name: False for other, name, _ in FLAGGED if other is family}
    assert family.problem_from_call(call(family, **others)).flags == ()
    assert family.problem_from_call(call(family, **others | {argument: True})).flags == (flag,)


@pytest.mark.parametrize(
    ("family", "flags"), [*itertools.product((FORWARD, DX), FLAGS), (DW, ())], ids=named
)  # dW's kernel never sees a permutation
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_launch_of_a_problem_is_a_call_of_that_problem(family, flags, dtype, no_maps):
    """What the kernel is given says what the problem was, less the group sizes."""
    inputs = made(family, (3, 0, 9), n=16, k=24, flags=flags, dtype=dtype, device=CPU)
    arguments = inspect.signature(family._kernel()[0].fn).parameters
    bound = dict(zip(arguments, family._arguments(inputs), strict=False))
    assert family.problem_from_call(bound | family._flags(inputs.problem)) == inputs.problem.without_sizes()


@every_family
def test_the_problem_of_a_call_never_looks_at_tensor_contents(family):
    class Tensor:
        dtype = "torch.bfloat16"

        def __getattr__(self, name):
            raise AssertionError(f"{name} was asked for")

    family.problem_from_call(call(family, **{CALLED[family][0]: Tensor()}, map_ptr=Tensor(), indices_ptr=Tensor()))


@every_family
@pytest.mark.parametrize("missing", [["rows"], ["N8", "K8"], ["tensor"]])
def test_a_call_with_other_parameter_names_is_told_so(family, missing):
    missing = [CALLED[family][0] if name == "tensor" else name for name in missing]
    arguments = {name: value for name, value in call(family).items() if name not in missing}
    with pytest.raises(ForetuneError, match=f"has no argument {', '.join(missing)}: .*problem="):
        family.problem_from_call(arguments)


@every_family
def test_a_call_with_an_unknown_dtype_is_told_so(family):
    tensor = CALLED[family][0]
    with pytest.raises(ForetuneError, match=rf"{tensor} must be a tensor of .*float32 but its dtype is torch\.int8"):
        family.problem_from_call(call(family, "torch.int8"))
    with pytest.raises(ForetuneError, match="its dtype is None"):
        family.problem_from_call(call(family, **{tensor: 7}))


@every_family
def test_a_call_with_a_negative_size_is_told_so(family):
    with pytest.raises(ForetuneError, match="rows must be >= 0 but got -1"):
        family.problem_from_call(call(family, rows=-1))


@every_family
@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_check_problem_has_every_edge(family, flags, dtype):
    asked = problem(family, flags=flags, dtype=dtype)
    check = family.check_problem(asked)
    assert (check.family, check.dtype, check.flags) == (asked.family, dtype, flags)
    assert {0, 1} < set(check.group_sizes)
    assert max(check.group_sizes) > 256
    assert all(check[dim] % block for dim in ("n", "k") for block in (32, 64, 128, 256))
    for config in family.space(H200):  # and what is refused, is refused for every problem of that dtype and flags
        assert family.supports(config, check, H200) == family.supports(config, asked, H200)


@every_family
@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_the_reference_is_the_gradient_that_pytorch_computes(family, flags, no_maps):
    """Of the layer y[where it goes] = x[where it comes from] @ w[group].T, row by row."""
    import torch

    rows, sizes = 12, (3, 0, 1, 8)
    mine = made(family, sizes, n=16, k=24, flags=flags, dtype="fp32")
    groups = torch.repeat_interleave(torch.arange(4), torch.tensor(sizes))
    permuted = torch.arange(rows) if mine.indices is None else mine.indices.long()
    x = {FORWARD: mine.left, DW: mine.right}.get(family, torch.zeros(rows, 24))
    w = mine.right if family is not DW else torch.zeros(4, 16, 24)
    x = x.repeat_interleave(mine.topk, 0).clone().requires_grad_()  # a row of it for each of y, as dX has
    w = w.clone().requires_grad_()
    loaded = x[permuted if flags == ("permute_x",) else torch.arange(rows)]
    y = torch.einsum("rk,rnk->rn", loaded, w[groups])
    if flags == ("permute_y",):
        y = torch.zeros_like(y).index_copy(0, permuted, y)
    expected = y.detach()
    if family is not FORWARD:
        y.backward(mine.left)
        expected = x.grad if family is DX else w.grad
    torch.testing.assert_close(family.reference(mine), expected, rtol=1e-5, atol=1e-5)


def test_the_source_hash_is_the_same_in_every_process():
    script = "from foretune.kernels import families; print([f.source_hash() for f in families().values()])"
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == str([family.source_hash() for family in families().values()])


def kernels_of(family):
    """(module, name) of every kernel that a launch runs or calls, found by the names in their sources."""
    homes = {
        kernel: (module, name)
        for module in (dw, gemm, ragged, sorting, tiles)
        for name, kernel in vars(module).items()
        if isinstance(kernel, JITFunction) and kernel.fn.__module__ == module.__name__
    }
    besides = [dw.sum_partials_kernel, sorting.sorted_rows_kernel] if family is DW else []
    found, left = set(), [family._kernel()[0], tiles.tile_map_kernel, *besides]
    while left:
        kernel = left.pop()
        if kernel not in found:
            found.add(kernel)
            names = set(re.findall(r"\w+", kernel.src)) & kernel.fn.__globals__.keys()
            left += [
                kernel.fn.__globals__[name] for name in names if isinstance(kernel.fn.__globals__[name], JITFunction)
            ]
    return {homes[kernel] for kernel in found if kernel in homes}


@every_family
def test_the_source_hash_changes_with_the_source_of_every_kernel_that_runs(family, monkeypatch):
    before, used = family.source_hash(), kernels_of(family)
    assert {name for _, name in used} > {"tile_map_kernel", "tile_position", "ragged_descriptor", "clamped"}
    for module, name in used:
        changed = triton.jit(getattr(module, name).fn)
        changed._unsafe_update_src(changed.src + "\n    pass\n")
        with monkeypatch.context() as patch:
            patch.setattr(module, name, changed)
            assert family.source_hash() != before, name
    assert family.source_hash() == before


def test_the_source_hash_is_that_of_what_a_kernel_computes(monkeypatch):
    """Not of its comments and line breaks: a dataset stays one of this kernel when somebody explains it better."""
    before = DW.source_hash()
    changed = triton.jit(dw.store_partial.fn)
    changed._unsafe_update_src(changed.src.replace("out, slot, m,", "out,  # where\n    slot, m,") + "    # the end\n")
    monkeypatch.setattr(dw, "store_partial", changed)
    assert DW.source_hash() == before


def test_the_kernels_of_one_family_do_not_change_the_hash_of_another(monkeypatch):
    hashes = {family: family.source_hash() for family in FAMILIES}
    assert hashes[FORWARD] == hashes[DX] != hashes[DW]
    changed = triton.jit(dw.grouped_gemm_dw_kernel.fn)
    changed._unsafe_update_src(changed.src + "\n    pass\n")
    monkeypatch.setattr(dw, "grouped_gemm_dw_kernel", changed)
    assert [family.source_hash() == hashes[family] for family in FAMILIES] == [True, True, False]
