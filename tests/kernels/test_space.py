"""The forward family without a compiler: its space, what is supported, features, problems of calls, hashes."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import random
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from foretune.datasets import DeviceSpec, ForetuneError, KernelConfig, Problem
from foretune.kernels import families, family
from foretune.kernels.grouped_gemm import forward, tiles
from foretune.kernels.grouped_gemm.routing import typical_sizes
from foretune.kernels.grouped_gemm.space import resident_programs, smem_bytes

FAMILY = family("grouped_gemm_fwd")
H200 = DeviceSpec.named("h200")
DEVICES = {
    "h200": H200,
    "sm_80": replace(H200, name="A100", arch="sm_80", sm_count=108, smem_per_block_bytes=166912),
    "sm_86": replace(H200, name="A10", arch="sm_86", sm_count=72, smem_per_block_bytes=101376),
    "sm_100": replace(H200, name="B200", arch="sm_100", sm_count=148),
    "gfx942": replace(
        H200, name="MI300X", backend="hip", arch="gfx942", warp_size=64, sm_count=304, smem_per_block_bytes=65536
    ),
}
device = pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)


def problem(*, dtype="bf16", sizes=None, **dims):
    dims = {"groups": 64, "rows": 8192, "n": 2048, "k": 1024} | dims
    return Problem.of(FAMILY.name, dtype=dtype, group_sizes=sizes, **dims)


def test_the_registry_knows_the_family_and_names_it_where_another_is_asked_for():
    assert families()["grouped_gemm_fwd"] is FAMILY
    with pytest.raises(ForetuneError, match="unknown kernel family 'gemm'; known: grouped_gemm_fwd"):
        family("gemm")


def test_the_space_is_large_and_has_no_twins():
    space = FAMILY.space(H200)
    assert len(space) >= 700
    assert len(set(space)) == len(space)
    assert len({json.dumps(config.to_json()) for config in FAMILY.space()}) == len(FAMILY.space())


def test_the_space_covers_the_knobs():
    seen = {knob: {config[knob] for config in FAMILY.space(H200)} for knob in FAMILY.knobs}
    assert seen["BLOCK_M"] == {16, 32, 64, 128, 256}
    assert seen["BLOCK_N"] == {32, 64, 128, 256}
    assert seen["BLOCK_K"] == {32, 64, 128, 256}
    assert seen["GROUP_M"] == {1, 8}
    assert seen["USE_TMA"] == {0, 1}
    assert seen["num_warps"] == {4, 8}
    assert seen["num_stages"] == {2, 3, 4, 5, 6}
    assert min(seen["PROGRAMS_PER_SM"]) == 1


@device
def test_the_space_of_a_device_is_what_it_supports_of_the_whole(device):
    some = problem()
    assert FAMILY.space(device) == tuple(c for c in FAMILY.space() if FAMILY.supports(c, some, device) is None)
    assert len(FAMILY.space(device)) >= 100


@device
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_default_is_supported_from_decode_to_training(device, dtype):
    for groups, rows in itertools.product((1, 8, 64, 512), (0, 1, 16, 512, 8192, 65536, 1 << 20)):
        call = problem(dtype=dtype, groups=groups, rows=rows)
        assert FAMILY.supports(FAMILY.default(call, device), call, device) is None


@device
def test_the_default_has_the_knobs_of_the_space(device):
    assert set(FAMILY.default(problem(), device).to_json()) == set(FAMILY.space()[0].to_json())


def chosen(**knobs):
    return KernelConfig.from_json(FAMILY.default(problem(), H200).to_json() | knobs)


REFUSALS = {
    "no TMA": (chosen(), problem(), "sm_80", "sm_80 has no TMA"),
    "no TMA on AMD": (chosen(num_stages=2), problem(), "gfx942", "gfx942 has no TMA"),
    "shared memory": (
        chosen(BLOCK_M=128, BLOCK_N=256, BLOCK_K=128, num_stages=3),
        problem(),
        "h200",
        "needs 294936 bytes of shared memory but NVIDIA H200 has 232448 a block",
    ),
    "less on an A10": (
        chosen(USE_TMA=0, num_stages=5),
        problem(),
        "sm_86",
        "needs 131072 bytes of shared memory but A10 has 101376 a block",
    ),
    "N": (chosen(), problem(n=2052), "h200", "multiples of 8 but are 2052 and 1024"),
    "K": (chosen(), problem(k=1023), "h200", "multiples of 8 but are 2048 and 1023"),
    "dtype": (chosen(), problem(dtype="fp32"), "h200", "dtype fp32 is not one of bf16, fp16"),
    "TMA coordinates": (chosen(), problem(groups=1 << 16, n=1 << 15), "h200", "32 bits but there are 2147483648"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_refusal_says_why(case):
    config, call, name, why = REFUSALS[case]
    assert why in FAMILY.supports(config, call, DEVICES[name])


def test_what_shared_memory_cannot_hold_on_one_arch_another_may():
    """wgmma needs every stage in shared memory, the older mma one less, tcgen05 a few barriers more."""
    config = chosen(BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, USE_TMA=0, num_stages=3)
    tile = 256 * 64 * 2
    assert smem_bytes(config, 2, H200) == 3 * tile
    assert smem_bytes(config, 2, DEVICES["sm_80"]) == smem_bytes(config, 2, DEVICES["gfx942"]) == 2 * tile
    assert smem_bytes(config, 2, DEVICES["sm_100"]) == 3 * tile + 16
    small = chosen(BLOCK_M=32, BLOCK_N=128, BLOCK_K=64, USE_TMA=0, num_stages=3)
    assert {smem_bytes(small, 2, spec) for spec in DEVICES.values()} == {2 * 160 * 64 * 2}


def test_configs_of_one_binary_differ_in_runtime_arguments_only():
    binaries = {}
    for config in FAMILY.space(H200):
        binaries.setdefault(FAMILY.binary_of(config), []).append(config)
    assert len(binaries) < len(FAMILY.space(H200))
    for binary, configs in binaries.items():
        assert FAMILY.binary_of(binary) == binary
        for config in configs:
            differing = {knob for knob in FAMILY.knobs if config[knob] != binary[knob]}
            assert differing <= {"GROUP_M", "PROGRAMS_PER_SM"}
    assert len({tuple(config[k] for k in FAMILY.knobs if k not in ("GROUP_M", "PROGRAMS_PER_SM"))
                for config in FAMILY.space(H200)}) == len(binaries)  # fmt: skip


def test_every_config_survives_json_triton_and_pickle():
    for config in FAMILY.space():
        assert KernelConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
        assert KernelConfig.from_triton(config.to_triton()) == config
        assert hash(pickle.loads(pickle.dumps(config))) == hash(config)


@device
def test_the_programs_of_one_sm_fit(device):
    for config in FAMILY.space(device):
        programs = resident_programs(config, 2, device)
        assert 1 <= programs <= config["PROGRAMS_PER_SM"]
        assert programs == 1 or programs * smem_bytes(config, 2, device) <= device.smem_per_sm_bytes


ODD = {
    "unknown sizes": problem(),
    "known sizes": problem(groups=3, rows=70, sizes=(0, 69, 1)),
    "one group": problem(groups=1),
    "no rows": problem(rows=0),
    "no rows, known": problem(groups=2, rows=0, sizes=(0, 0)),
    "one row": problem(rows=1),
    "896 groups": problem(groups=896),
    "more groups than rows": problem(groups=896, rows=3),
    "tiny": problem(groups=1, rows=1, n=8, k=8),
    "huge": problem(groups=1, rows=1 << 22, n=1 << 17, k=1 << 17),
    "all in one group": problem(groups=512, rows=1 << 20, sizes=(*(0,) * 511, 1 << 20)),
    "fp16": problem(dtype="fp16"),
}


@device
@pytest.mark.parametrize("name", ODD)
def test_features_are_finite_and_complete(name, device):
    space = FAMILY.space(device)
    table = FAMILY.features(ODD[name], device, space)
    assert table.shape == (len(space), len(FAMILY.feature_names))
    assert table.dtype == np.float32
    assert np.isfinite(table).all()
    assert (table[:, FAMILY.feature_names.index("roofline_us")] > 0).all()


def test_feature_names_are_unique():
    assert len(set(FAMILY.feature_names)) == len(FAMILY.feature_names)


def test_a_config_has_the_same_features_in_any_list_and_every_time():
    space = list(FAMILY.space(H200))
    table = FAMILY.features(problem(), H200, space)
    order = random.Random(0).sample(range(len(space)), 50)
    np.testing.assert_array_equal(FAMILY.features(problem(), H200, [space[i] for i in order]), table[order])
    np.testing.assert_array_equal(FAMILY.features(problem(), H200, space), table)
    np.testing.assert_array_equal(FAMILY.features(problem(), H200, space[:1]), table[:1])


def test_features_say_what_a_call_is():
    def column(name, call, config):
        return float(FAMILY.features(call, H200, [config])[0, FAMILY.feature_names.index(name)])

    config = chosen(BLOCK_M=64, BLOCK_N=128, BLOCK_K=128)
    call = problem(groups=4, rows=200, n=320, k=200, sizes=(0, 65, 135, 0))
    assert column("log_tiles", call, config) == pytest.approx(np.log2((2 + 3) * 3))
    assert column("padding_m", call, config) == pytest.approx(5 * 64 / 200)
    assert column("padding_n", call, config) == pytest.approx(384 / 320)
    assert column("padding_k", call, config) == pytest.approx(256 / 200)
    assert column("log_active", call, config) == 1
    assert column("skew", call, config) == pytest.approx(135 / 50)
    assert (column("sizes_known", call, config), column("sizes_known", call.without_sizes(), config)) == (1, 0)
    assert column("fp16", problem(dtype="fp16"), config) == 1
    assert column("smem_bytes", call, config) == smem_bytes(config, 2, H200)


def test_features_of_the_whole_space_take_milliseconds():
    space, best = FAMILY.space(H200), float("inf")
    for i in range(30):
        call = problem(rows=8192 + i)
        typical_sizes(call["rows"], call["groups"])  # kept for every later problem of that many rows
        began = time.perf_counter()
        FAMILY.features(call, H200, space)
        best = min(best, time.perf_counter() - began)
    assert best < 3e-3  # under 1 ms on a quiet 2026 core


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


def call(dtype="torch.bfloat16", **changed):
    arguments = {"x_ptr": SimpleNamespace(dtype=dtype), "rows": 4096, "groups": 64, "N8": 256, "K8": 128}
    return {**arguments, "GROUP_M": 8, "grid": None, "warmup": False, **changed}


def test_the_problem_of_a_call():
    assert FAMILY.problem_from_call(call()) == problem(rows=4096)
    assert FAMILY.problem_from_call(call("torch.float16")) == problem(rows=4096, dtype="fp16")
    assert FAMILY.problem_from_call(call(rows=0))["rows"] == 0


def test_the_problem_of_a_call_never_looks_at_tensor_contents():
    class Tensor:
        dtype = "torch.bfloat16"

        def __getattr__(self, name):
            raise AssertionError(f"{name} was asked for")

    FAMILY.problem_from_call(call(x_ptr=Tensor(), tiles_ptr=Tensor()))


@pytest.mark.parametrize("missing", [["rows"], ["N8", "K8"], ["x_ptr"]])
def test_a_call_with_other_parameter_names_is_told_so(missing):
    arguments = {name: value for name, value in call().items() if name not in missing}
    with pytest.raises(ForetuneError, match=f"has no argument {', '.join(missing)}: .*problem="):
        FAMILY.problem_from_call(arguments)


def test_a_call_with_an_unknown_dtype_is_told_so():
    with pytest.raises(ForetuneError, match=r"x_ptr must be a tensor of .*float16, .* but its dtype is torch\.int8"):
        FAMILY.problem_from_call(call("torch.int8"))
    with pytest.raises(ForetuneError, match="its dtype is None"):
        FAMILY.problem_from_call(call(x_ptr=7))


def test_a_call_with_a_negative_size_is_told_so():
    with pytest.raises(ForetuneError, match="rows must be >= 0 but got -1"):
        FAMILY.problem_from_call(call(rows=-1))


@pytest.mark.parametrize("dtype", FAMILY.dtypes)
def test_the_check_problem_has_every_edge(dtype):
    check = FAMILY.check_problem(dtype)
    assert check.dtype == dtype
    assert {0, 1} < set(check.group_sizes)
    assert max(check.group_sizes) > 256
    assert all(check["n"] % block for block in (32, 64, 128, 256))
    assert all(check["k"] % block for block in (32, 64, 128, 256))
    assert all(FAMILY.supports(config, check, H200) is None for config in FAMILY.space(H200))


def test_the_source_hash_is_the_same_in_every_process():
    script = "from foretune.kernels import family; print(family('grouped_gemm_fwd').source_hash())"
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    run = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )  # fmt: skip
    assert run.stdout.split() == [FAMILY.source_hash()]


@pytest.mark.parametrize(
    ("module", "kernel"),
    [(forward, "grouped_gemm_fwd_kernel"), (tiles, "tile_map_kernel"), (tiles, "load_tile"), (tiles, "tile_position")],
)
def test_the_source_hash_changes_with_a_kernels_source(module, kernel, monkeypatch):
    before = FAMILY.source_hash()
    monkeypatch.setattr(module, kernel, SimpleNamespace(src=getattr(module, kernel).src + "\n"))
    assert FAMILY.source_hash() != before
