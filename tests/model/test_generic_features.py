"""Features that nobody wrote: finite for any problem, a config's own, and told apart by what decides."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from foretune.datasets import BinaryFacts, DeviceSpec, KernelConfig, Problem
from foretune.model.generic_features import GenericFeatures

H200 = DeviceSpec.named("h200")
GENERIC = GenericFeatures(
    dims=("rows", "columns"),
    dtypes=("fp16", "fp32"),
    flags=("bias",),
    knobs=("BLOCK", "ORDER", "num_warps", "maxnreg"),
    tiles={"BLOCK": "columns"},
)
CONFIGS = tuple(
    KernelConfig.of(BLOCK=block, ORDER=order, num_warps=warps, maxnreg=limit)
    for block in (16, 64, 4096)
    for order in ("rows first", "columns first")
    for warps in (1, 8)
    for limit in (None, 64)
)
BINARIES = {config: BinaryFacts(32 * (1 + at % 8), at % 3, 1024 * at) for at, config in enumerate(CONFIGS[::2])}


def problem(rows=100, columns=1000, dtype="fp16", flags=()):
    return Problem.of("row_softmax", rows=rows, columns=columns, dtype=dtype, flags=flags)


def columns_of(of=None, configs=CONFIGS, binaries=BINARIES, programs=None, device=H200, **work):
    of = of or problem()
    programs = np.full(len(configs), 264.0) if programs is None else programs
    table = GENERIC.table(of, device, configs, programs, binaries, **work)
    assert table.shape == (len(configs), len(GENERIC.names))
    assert table.dtype == np.float32
    return dict(zip(GENERIC.names, table.T, strict=True))


def test_every_column_has_a_name_of_its_own():
    assert len(set(GENERIC.names)) == len(GENERIC.names)


@pytest.mark.parametrize("rows", [0, 1, 7, 2**40])
@pytest.mark.parametrize("columns", [0, 1, 4095, 2**40])
@pytest.mark.parametrize("work", [{}, {"flops": 1e30, "touched_bytes": 0.0}, {"flops": 0.0, "touched_bytes": 1e30}])
def test_all_is_finite_whatever_the_sizes(rows, columns, work):
    for binaries in ({}, BINARIES):
        for programs in (np.zeros(len(CONFIGS)), np.full(len(CONFIGS), 2.0**40)):
            found = columns_of(problem(rows, columns), binaries=binaries, programs=programs, **work)
            assert all(np.isfinite(column).all() for column in found.values())


def test_a_row_depends_on_its_config_alone():
    programs = np.arange(len(CONFIGS)) * 40.0
    whole = GENERIC.table(problem(), H200, CONFIGS, programs, BINARIES, flops=1e9, touched_bytes=1e6)
    order = np.random.default_rng(0).permutation(len(CONFIGS))[:5]
    some = tuple(CONFIGS[at] for at in order)
    part = GENERIC.table(problem(), H200, some, programs[order], BINARIES, flops=1e9, touched_bytes=1e6)
    np.testing.assert_array_equal(part, whole[order])
    assert GENERIC.table(problem(), H200, (), programs[:0], BINARIES).shape == (0, len(GENERIC.names))


def test_a_list_of_configs_does_as_well_as_a_tuple():
    programs = np.ones(len(CONFIGS))
    tables = [GENERIC.table(problem(), H200, configs, programs, {}) for configs in (CONFIGS, list(CONFIGS))]
    np.testing.assert_array_equal(*tables)


def test_the_problem_is_in_every_row():
    found = columns_of(problem(rows=8, columns=1024, dtype="fp32", flags=("bias",)), flops=3.0, touched_bytes=1.0)
    expected = {
        "log_rows": 3,
        "log_columns": 10,
        "log_rows_over_columns": -7,
        "itemsize": 4,
        "dtype_fp16": 0,
        "dtype_fp32": 1,
        "flag_bias": 1,
        "sm_count": 132,
        "log_flops": 2,
        "log_bytes": 1,
        "intensity": 3,
    }
    assert {name: set(found[name].tolist()) for name in expected} == {name: {value} for name, value in expected.items()}
    assert set(columns_of()["flag_bias"]) == {0}


def test_operands_of_different_dtypes_have_no_one_size():
    mixed = problem(dtype={"x": "fp16", "w": "int8"})
    found = columns_of(mixed)
    assert {found[name][0] for name in ("itemsize", "dtype_fp16", "dtype_fp32")} == {0}


def test_knobs_are_numbers_and_words_are_told_apart():
    found = columns_of()
    assert found["BLOCK"].tolist() == [config["BLOCK"] for config in CONFIGS]
    assert found["maxnreg"].tolist() == [config.maxnreg or 0 for config in CONFIGS]
    words = {config["ORDER"]: value for config, value in zip(CONFIGS, found["ORDER"].tolist(), strict=True)}
    assert len(set(words.values())) == 2
    swapped = GENERIC.table(problem(), H200, CONFIGS[::-1], np.ones(len(CONFIGS)), {})
    assert swapped[::-1, GENERIC.names.index("ORDER")].tolist() == found["ORDER"].tolist()


def test_tiles_along_a_dimension_and_what_they_pad():
    found = columns_of(problem(columns=100), configs=CONFIGS[::8])  # BLOCK of 16, 64 and 4096
    np.testing.assert_allclose(found["log_tiles_BLOCK"], np.log2([7, 2, 1]), rtol=1e-6)
    np.testing.assert_allclose(found["padding_BLOCK"], [1.12, 1.28, 40.96], rtol=1e-6)


def test_waves_follow_from_what_an_sm_holds():
    """An SM holds four programs of 8 warps and 64 registers a thread, and of 1 warp as many as there are slots."""
    configs = (KernelConfig.of(num_warps=8), KernelConfig.of(num_warps=1), KernelConfig.of(num_warps=2))
    binaries = {configs[0]: BinaryFacts(64, 0, 0), configs[1]: BinaryFacts(32, 0, 0)}
    generic = GenericFeatures((), ("fp16",), (), ("num_warps",), {})
    of, programs = Problem.of("toy", dtype="fp16"), np.full(3, 132.0 * 48)
    found = dict(zip(generic.names, generic.table(of, H200, configs, programs, binaries).T, strict=True))
    assert found["binary_known"].tolist() == [1, 1, 0]
    assert found["registers"].tolist() == [64, 32, 0]
    assert found["residency"].tolist() == [4, 32, 0]
    np.testing.assert_allclose(found["log_waves"], np.log2([12, 1.5, 48]), rtol=1e-6)
    np.testing.assert_allclose(found["wave_fill"], [1, 0.75, 1], rtol=1e-6)


def test_shared_memory_limits_what_an_sm_holds():
    configs = tuple(KernelConfig.of(BLOCK=at) for at in range(2))
    half = H200.smem_per_sm_bytes // 2 - 1024
    binaries = {configs[0]: BinaryFacts(16, 0, half), configs[1]: BinaryFacts(16, 0, half + 1)}
    generic = GenericFeatures((), ("fp16",), (), ("BLOCK",), {})
    table = generic.table(Problem.of("toy", dtype="fp16"), H200, configs, np.ones(2), binaries)
    assert table[:, generic.names.index("residency")].tolist() == [2, 1]


def test_devices_are_told_apart():
    half = replace(H200, sm_count=66)
    assert set(columns_of(device=half)["sm_count"]) == {66}
    np.testing.assert_allclose(columns_of(device=half)["log_waves"], columns_of()["log_waves"] + 1, rtol=1e-5)
