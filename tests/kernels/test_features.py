"""What the ranker sees of a grouped GEMM: features, and the group sizes that they assume."""

from __future__ import annotations

import random
import sys

import numpy as np
import pytest
from foretune.datasets import KernelConfig
from foretune.kernels.grouped_gemm.features import feature_table
from foretune.kernels.grouped_gemm.group_sizes import typical_sizes
from foretune.kernels.grouped_gemm.space import chunk_rows, smem_bytes
from grouped import A10, A100, B200, DW, DX, FAMILIES, FORWARD, H200, MI300X, problem, specialized

every_device = pytest.mark.parametrize("device", [H200, A100, A10, B200, MI300X], ids=lambda device: device.arch)
every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


def chosen(family=FORWARD, **knobs):
    return KernelConfig.from_json(family.default(problem(family), H200).to_json() | knobs)


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
        "smem_bytes": smem_bytes(family.variant, config, 2, H200),
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


def test_features_of_dw_say_what_is_written_at_once():
    """Of 10 x 3 tiles in bands of two, 132 times the resident programs run at once."""
    config = chosen(DW, BLOCK_M=64, BLOCK_N=128, BLOCK_K=32, GROUP_M=2)
    call = problem(DW, n=640, k=384)
    slots = 132 * column("programs_per_sm", call, config, DW)
    expected = {
        "log_bands_at_once": np.log2(slots / 6),
        "log_groups_at_once": np.log2(slots / 30),
        "band_left": slots / 6 % 1,
        "group_left": slots / 30 % 1,
    }
    assert {name: column(name, call, config, DW) for name in expected} == pytest.approx(expected, rel=1e-5)


@every_family
def test_features_say_how_many_warps_multiply_a_tile(family):
    jobs = [specialized(family, 1, 128, 128, 5), specialized(family, 0, 128, 256, 4)]
    table = family.features(problem(family), H200, [chosen(family, num_warps=8), *jobs])
    columns = dict(zip(family.feature_names, table.T, strict=True))
    assert columns["consumers"].tolist() == [0, 2, 2]
    assert columns["pingpong"].tolist() == [0, 1, 0]
    assert columns["num_warps"].tolist() == [8, 4, 8]
    assert columns["accumulator_registers"].tolist() == [64, 128, 128]


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
    ways = [family.variant.tma, ("tma_left", "tma_right", "tma_out")]
    for knob, name in zip(*ways, strict=True):
        assert [column(name, call, chosen(family, **{knob: on}), family) for on in (0, 1)] == [0, 1]


@every_family
def test_features_of_the_whole_space_are_one_batch(family):
    """A prediction has milliseconds for a thousand configs: nothing of a new problem is computed config by config."""
    space, called = family.space(H200), []
    family.features(problem(family, rows=8191), H200, space)  # what the configs alone say is kept
    ours = feature_table.__code__.co_filename
    sys.setprofile(lambda frame, event, argument: called.append(event == "call" and frame.f_code.co_filename == ours))
    try:
        family.features(problem(family, rows=8192), H200, space)
    finally:
        sys.setprofile(None)
    assert 0 < sum(called) < 100


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


def test_each_feature_of_each_family_has_a_line_that_says_what_it_is():
    from foretune.kernels import families
    from foretune.kernels.config_table import FEATURE_TEXTS
    from foretune.model.generic_features import feature_text

    ours = [family for family in families().values() if type(family).__module__.startswith("foretune.")]
    assert len(ours) >= 17
    assert [(one.name, name) for one in ours for name in one.feature_names if not feature_text(one, name)] == []
    assert set(FEATURE_TEXTS) <= {name for one in ours for name in one.feature_names}
