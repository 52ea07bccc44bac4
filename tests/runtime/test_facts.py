"""Facts about launches, from a kernel's source: what they count, and the features that they become."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import triton
import triton.language as tl
from foretune.datasets import DeviceSpec
from foretune.runtime.facts.interpreter import facts_of
from foretune.runtime.facts.prior import NAMES, launch_features
from foretune.runtime.launching.kernel import Kernel

HALF = SimpleNamespace(dtype="torch.float16", shape=(512, 512))
H200 = DeviceSpec.named("h200")
SLOPE = tl.constexpr(2)


@triton.jit
def rounded(x, TO: tl.constexpr):
    return x.to(TO)


@triton.jit
def product(a, b, c, M, N, K, stride, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BIAS: tl.constexpr):
    rows, columns = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    steps = tl.arange(0, BK)
    if rows.shape[0] > M:
        return
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, tl.cdiv(K, BK)):
        x = tl.load(a + rows[:, None] * stride + (k * BK + steps)[None, :], mask=rows[:, None] < M, other=0.0)
        y = tl.load(b + (k * BK + steps)[:, None] * N + columns[None, :])
        total = tl.dot(x, y, total)
    if BIAS is not None:
        total += tl.load(BIAS + columns)[None, :]
    tl.store(c + rows[:, None] * N + columns[None, :], rounded(total * SLOPE, tl.float16))


@triton.jit
def product_by_blocks(a, c, M, K, BM: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr):
    if TMA:
        x = tl.make_tensor_descriptor(a, [M, K], [K, 1], [BM, BK]).load([tl.program_id(0) * BM, 0])
    else:
        x = tl.load(tl.make_block_ptr(a, (M, K), (K, 1), (tl.program_id(0) * BM, 0), (BM, BK), (1, 0)))
    tl.store(c + tl.arange(0, BM), tl.sum(x, axis=1))


@triton.jit
def strided(x, stride, N, BLOCK: tl.constexpr):
    start, end = tl.load(x), tl.load(x + 1)
    for at in range(start, end, BLOCK):
        value = tl.load(x + (at + tl.arange(0, BLOCK)) * stride)
        tl.atomic_add(x + tl.arange(0, BLOCK), tl.exp(value))


@triton.jit
def persistent(x, tiles, BLOCK: tl.constexpr):
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        tl.store(x + tile * BLOCK + tl.arange(0, BLOCK), 0.0)


SIZES = {"a": HALF, "b": HALF, "c": HALF, "M": 512, "N": 512, "K": 500, "stride": 500, "BIAS": None}


def test_a_product_of_matrices_is_counted_tile_by_tile():
    facts = facts_of(product, {**SIZES, "BM": 64, "BN": 32, "BK": 128})
    (loop,) = facts.loops
    assert loop.trips == 4  # ceil(500 / 128)
    assert loop.load_bytes == (64 * 128 + 128 * 32) * 2
    assert loop.carried_bytes == 64 * 32 * 4
    assert facts.load_bytes == 4 * loop.load_bytes
    assert facts.dot_flops == 4 * 2 * 64 * 32 * 128
    assert facts.dot_shape == (64, 32, 128)
    assert facts.dot_itemsize == 2
    assert facts.store_bytes == 64 * 32 * 2
    assert facts.stored == {"c": 64 * 32}
    assert facts.scattered_bytes == 0


def test_a_constant_condition_decides_which_code_counts():
    config = {"BM": 64, "BN": 32, "BK": 128}
    without, with_bias = facts_of(product, {**SIZES, **config}), facts_of(product, {**SIZES, **config, "BIAS": HALF})
    assert with_bias.load_bytes - without.load_bytes == 32 * 2


@pytest.mark.parametrize("tma", [0, 1])
def test_block_pointers_and_descriptors_load_their_blocks(tma):
    facts = facts_of(product_by_blocks, {"a": HALF, "c": HALF, "M": 512, "K": 512, "BM": 16, "BK": 64, "TMA": tma})
    assert facts.load_bytes == 16 * 64 * 2
    assert facts.piece_bytes / facts.load_bytes >= 64 * 2  # rows of 128 contiguous bytes
    assert facts.reduced == 16 * 64
    assert facts.store_bytes == 16 * 2


def test_strides_tell_scattered_loads():
    near, far = (facts_of(strided, {"x": HALF, "stride": one, "N": 9, "BLOCK": 128}) for one in (1, 1000))
    assert near.scattered_bytes == 0
    assert far.scattered_bytes == far.load_bytes > 0


def test_a_loop_between_numbers_in_memory_runs_more_often_with_smaller_steps():
    trips = [facts_of(strided, {"x": HALF, "stride": 1, "N": 9, "BLOCK": one}).loops[0].trips for one in (64, 128)]
    assert trips[0] == 2 * trips[1] > 1


def test_atomics_and_special_functions_are_counted():
    facts = facts_of(strided, {"x": HALF, "stride": 1, "N": 9, "BLOCK": 128})
    assert facts.atomic_bytes == facts.load_bytes
    assert facts.special == facts.load_bytes / 2


def test_a_persistent_program_does_its_share():
    given = {"x": HALF, "tiles": 1000, "BLOCK": 128}
    assert facts_of(persistent, given, position=50, programs=100).loops[0].trips == math.ceil((1000 - 50) / 100)


def test_features_are_those_of_the_launch_and_relative_to_the_list():
    configs = [{"BM": bm, "BN": 64, "BK": 64, "num_warps": warps} for bm in (32, 128) for warps in (4, 8)]
    given = {**SIZES, "grid": lambda one: (triton.cdiv(512, one["BM"]), triton.cdiv(512, one["BN"]))}
    table = launch_features(Kernel(product), given, configs, H200)
    assert table.shape == (4, 2 * len(NAMES))
    absolute, relative = np.split(table, 2, axis=1)
    programs = NAMES.index("programs")
    assert (2 ** absolute[:, programs]).round().tolist() == [128, 128, 32, 32]
    assert np.allclose(relative, absolute - absolute.mean(axis=0))
    assert np.isfinite(table).all()


def test_without_a_grid_the_stored_elements_tell_the_number_of_programs():
    table = launch_features(Kernel(product), SIZES, [{"BM": 32, "BN": 64, "BK": 64}], H200)
    assert 2 ** table[0, NAMES.index("programs")] == pytest.approx(512 * 512 / 32 / 64)


def test_a_kernel_under_an_autotuner_and_heuristics_is_read_through_them():
    tuner = triton.autotune([triton.Config({"BM": 32}), triton.Config({"BM": 64})], key=["M"])(product)
    kernel = Kernel(triton.heuristics({"BK": lambda given: 2 * given["BM"]})(tuner))
    table = launch_features(kernel, {**SIZES, "BN": 64}, [{"BM": 32}, {"BM": 64}], H200)
    assert (2 ** table[:, NAMES.index("dot_k")]).tolist() == [64, 128]
