"""The spaces of the grouped GEMMs without a compiler: which configs there are, and why one is refused."""

from __future__ import annotations

import itertools
import json
import pickle
import re

import pytest
from foretune.datasets import ForetuneError, KernelConfig
from foretune.kernels.config_limits import accumulator_registers
from foretune.kernels.config_table import resident_programs
from foretune.kernels.grouped_gemm.space import smem_bytes
from grouped import (
    A10,
    A100,
    B200,
    CPU,
    DTYPES,
    DW,
    DX,
    FAMILIES,
    FLAGS,
    FORWARD,
    H200,
    MI300X,
    SPECIALIZED,
    problem,
    specialized,
)
from grouped import config as config_of

every_device = pytest.mark.parametrize("device", [H200, A100, A10, B200, MI300X], ids=lambda device: device.arch)


def named(value):
    """A family's name: its address is another one in every process, and pytest's workers compare."""
    return str(getattr(value, "name", value))


every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


@every_family
def test_the_space_is_large_and_has_no_twins(family):
    space = family.space(H200)
    assert len(space) >= (700 if family is DW else 550)
    assert len(set(space)) == len(space)
    assert len({json.dumps(config.to_json()) for config in family.space()}) == len(family.space())


@every_family
def test_the_space_covers_the_knobs(family):
    seen = {knob: {config[knob] for config in family.space(H200)} for knob in family.knobs}
    assert seen["BLOCK_M"] == {64, 128, 256} | (set() if family is DW else {16, 32})
    assert seen["BLOCK_N"] == {64, 128, 256} | (set() if family is DW else {32})
    assert seen["BLOCK_K"] == ({32, 64} if family is DW else {64, 128})
    assert seen["GROUP_M"] == {1, 8}
    tall = {config["GROUP_M"] for config in family.space(H200) if config["BLOCK_M"] >= 64}
    assert tall == ({1, 8} if family is DW else {8})
    assert seen["num_warps"] == {4, 8}
    assert seen["num_stages"] == {2, 3, 4, 5, 6}
    assert seen["PROGRAMS_PER_SM"] == {1, 2}
    assert all(seen[knob] == {0, 1} for knob in family.variant.tma)


@every_family
def test_accumulators_that_registers_cannot_hold_are_refused_before_any_compiling(family):
    """A thread has 255 registers: 256 x 256 at 8 warps, or 256 x 128 at 4, would need 256 for the sums alone."""
    large = family.space(block_m=[256], block_n=[128, 256], num_warps=[4, 8], consumers=[0])
    assert {(config["BLOCK_N"], config["num_warps"]) for config in large} == {(128, 8)}


@every_family
@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_warps_may_have_one_job_each(dtype, flags, family):
    """In 16 bits, where all goes through TMA, which moves no rows that are permuted."""
    call = problem(family, dtype=dtype, flags=flags)
    jobs = [one for one in family.space(H200) if one["CONSUMERS"] and family.supports(one, call, H200) is None]
    knobs = ("PINGPONG", "BLOCK_M", "BLOCK_N")
    expected = set(SPECIALIZED[family]) if dtype != "fp32" and (family is DW or not flags) else set()
    assert {(*(one[knob] for knob in knobs), one.num_stages) for one in jobs} == expected


@every_family
def test_they_are_a_range_of_the_space(family):
    with_them, without = family.space(consumers=[2]), family.space(consumers=[0])
    assert {one["CONSUMERS"] for one in with_them} == {2}
    assert sorted(map(str, (*without, *with_them))) == sorted(map(str, family.space()))
    assert {one.num_stages for one in family.space(consumers=[2], num_stages=[4])} == {4}
    assert family.space(consumers=[2], tma=[0]) == family.space(consumers=[2], block_k=[32]) == ()
    with pytest.raises(ForetuneError, match="consumers must be 0 or 2 but is 3"):
        family.space(consumers=[3])


@pytest.mark.parametrize(
    ("knobs", "told", "why"),
    [
        ({"BLOCK_K": 32}, {}, "BLOCK_K cannot be 32 with CONSUMERS = 2: 64"),
        ({"TMA_DY": 0}, {}, "TMA_DY cannot be 0 with CONSUMERS = 2: 1"),
        ({"PROGRAMS_PER_SM": 2}, {}, "PROGRAMS_PER_SM cannot be 2 with CONSUMERS = 2: 1"),
        ({"num_warps": 8}, {}, "num_warps cannot be 8 with CONSUMERS = 2: 4"),
        ({"num_stages": 1}, {}, "num_stages cannot be 1 with CONSUMERS = 2: at least 2"),
        ({"num_stages": 8}, {}, "needs .* bytes of shared memory"),
        ({"CONSUMERS": 0, "PINGPONG": 1}, {}, "PINGPONG must be 0 with CONSUMERS = 0 but is 1"),
        ({"PINGPONG": 1}, {}, "PINGPONG cannot be 1 with CONSUMERS = 2: 0"),
        (
            {"BLOCK_N": 128},
            {},
            "BLOCK_M x BLOCK_N cannot be 128 x 128 with CONSUMERS = 2 and PINGPONG = 0: 128 x 256, 256 x 128$",
        ),
        (
            {},
            {"dtype": "fp32"},
            "CONSUMERS must be 0 in fp32 but is 2: the warp-specialized kernel takes 16-bit dtypes",
        ),
    ],
    ids=str,
)
def test_what_of_them_is_refused_and_why(knobs, told, why):
    one = specialized(DW, 0, 128, 256, 4)
    assert DW.supports(one, problem(DW), H200) is None
    changed = KernelConfig.from_json(one.to_json() | knobs)
    assert re.match(why, DW.supports(changed, problem(DW, **told), H200))


@pytest.mark.parametrize(
    ("device", "why"),
    [
        (A100, "TMA_DY cannot be 1: sm_80 has no TMA"),
        (B200, "CONSUMERS cannot be 2: sm_100 has no wgmma; it must be 0"),
        (CPU, "CONSUMERS cannot be 2: the interpreter has no wgmma; it must be 0"),
    ],
    ids=("sm_80", "sm_100", "interpreter"),
)
def test_they_are_hoppers(device, why):
    assert DW.supports(specialized(DW, 0, 128, 256, 4), problem(DW), device).startswith(why)


@every_family
@every_device
def test_the_space_of_a_device_is_what_it_supports_of_the_whole(family, device):
    some = problem(family)
    assert family.space(device) == tuple(c for c in family.space() if family.supports(c, some, device) is None)
    assert len(family.space(device)) >= (50 if family is DW else 40)


@every_family
@every_device
@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_every_permutation_leaves_configs_to_choose_from(family, device, flags):
    supported = [c for c in family.space(device) if family.supports(c, problem(family, flags=flags), device) is None]
    assert len(supported) >= (50 if family is DW else 40)
    if device in (H200, B200):  # and the side that is not permuted may still go through TMA
        assert any(config[knob] for config in supported for knob in family.variant.tma)


@every_family
def test_ranges_replace_the_values_of_a_knob(family):
    space = family.space(H200, block_m=[64], tma=[0])
    assert space == tuple(
        c for c in family.space(H200) if c["BLOCK_M"] == 64 and not any(c[knob] for knob in family.variant.tma)
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
            "block_x is not a range of the space; the ranges are block_k, block_m, block_n, consumers, group_m, num",
        ),
        ({"group_m": [0]}, "group_m must be between 1 and 1024 but is 0"),
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
    everything = dict.fromkeys(family.variant.tma, 1)
    why = family.supports(chosen(family, **everything), call, H200)
    assert why == f"{knob} must be 0 with {flag}: TMA moves adjacent rows only, and these are permuted"
    assert family.supports(chosen(family, **everything | {knob: 0}), call, H200) is None
    assert family.supports(chosen(family, **everything), problem(family), H200) is None


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_dw_sorts_permuted_rows_first_so_that_all_may_go_through_tma(flags):
    assert DW.supports(chosen(DW, **dict.fromkeys(DW.variant.tma, 1)), problem(DW, flags=flags), H200) is None


REFUSALS = {
    "no TMA": (chosen(num_stages=2), {}, A100, "sm_80 has no TMA"),
    "no TMA to load": (chosen(num_stages=2, TMA_X=0, TMA_Y=0), {}, A100, "sm_80 has no TMA"),
    "no TMA to store": (chosen(num_stages=2, TMA_X=0, TMA_W=0), {}, A100, "sm_80 has no TMA"),
    "no TMA on AMD": (chosen(num_stages=2), {}, MI300X, "gfx942 has no TMA"),
    "shared memory": (
        chosen(BLOCK_M=128, BLOCK_N=256, BLOCK_K=128, num_warps=8, num_stages=3),
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
        "BLOCK_M x BLOCK_N must be at most 4096 elements in fp32 but is 64 x 128",
    ),
    "both permutations": (
        chosen(),
        {"flags": ("permute_x", "permute_y")},
        H200,
        "a problem cannot have both flags permute_x and permute_y",
    ),
    "an unknown flag": (chosen(), {"flags": ("permute_z",)}, H200, "flag permute_z is not one of permute_x, permute_y"),
    "a block that the map does not have": (
        chosen(BLOCK_M=512, BLOCK_N=32),
        {},
        H200,
        "BLOCK_M cannot be 512: a",
    ),
    "a block that is no power of two": (chosen(BLOCK_M=48), {}, H200, "BLOCK_M cannot be 48: a power"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_refusal_says_why(case):
    config, call, device, why = REFUSALS[case]
    assert re.search(why, FORWARD.supports(config, problem(FORWARD, **call), device))


def test_what_shared_memory_cannot_hold_on_one_arch_another_may():
    """wgmma needs every stage in shared memory, the older mma one less; both need some for the output, tcgen05 less of
    it and a barrier more."""

    def smem(m, device, tma=(0, 0, 0), itemsize=2):
        return smem_bytes(FORWARD.variant, config_of(FORWARD, m, 128, 64, tma=tma, stages=3), itemsize, device)

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
        binaries.setdefault(family.binary_key(config, problem(family)), []).append(config)
    assert len(binaries) < len(family.space(H200))
    runtime = ("GROUP_M", "PROGRAMS_PER_SM")
    for first, *others in binaries.values():
        for config in others:
            assert {knob for knob in family.knobs if config[knob] != first[knob]} <= set(runtime)
    compiled = [knob for knob in family.knobs if knob not in runtime]
    assert len({tuple(config[knob] for knob in compiled) for config in family.space(H200)}) == len(binaries)
    kinds = [{}, {"dtype": "fp16"}, {"flags": ("permute_x",)}]
    assert len({family.binary_key(first, problem(family, **told)) for told in kinds}) == len(kinds)


@every_family
def test_every_config_survives_json_triton_and_pickle(family):
    for config in family.space():
        assert KernelConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
        assert KernelConfig.from_triton(config.to_triton()) == config
        assert hash(pickle.loads(pickle.dumps(config))) == hash(config)


@every_family
@every_device
def test_the_programs_of_one_sm_fit(family, device):
    space = family.space(device)
    smem_of = [smem_bytes(family.variant, config, 2, device) for config in space]
    held = [accumulator_registers(config["BLOCK_M"], config["BLOCK_N"], config.num_warps) for config in space]
    resident = resident_programs(space, smem_of, held, device)
    for config, smem, programs in zip(space, smem_of, resident, strict=True):
        assert 1 <= programs <= config["PROGRAMS_PER_SM"]
        assert programs == 1 or programs * smem <= device.smem_per_sm_bytes
