"""Rates: what is made of a meter's readings (a meter of our own, on a CPU) and what the card gives (on a GPU)."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from foretune.datasets import DeviceSpec
from foretune.datasets.device import MATRIX_DTYPES
from foretune.runtime import use_stub_driver
from foretune.runtime.timing.device_rates import l2_knee, measured

MIB = 1 << 20
H200 = DeviceSpec.named("h200")


class FakeMeter:
    """A device with a cache of `cache_bytes` in front of a memory that gives 4000 GB/s."""

    def __init__(self, cache_bytes=40 * MIB, most_bytes=2048 * MIB):
        self.cache_bytes, self.most_bytes, self.read = cache_bytes, most_bytes, []

    def read_gbs(self, set_bytes):
        self.read.append(set_bytes)
        return 7000.0 if set_bytes <= self.cache_bytes else 4000.0

    def copy_gbs(self):
        return 3900.04

    def matrix_tflops(self, dtype):
        return {"bf16": 800.04, "fp16": 790.0, "fp32": 50.0}[dtype]


def test_the_spec_has_what_was_measured_and_keeps_the_limits():
    spec = measured(H200, FakeMeter())
    assert (spec.copy_bandwidth_gbs, spec.read_bandwidth_gbs, spec.rates_measured) == (3900.0, 4000.0, True)
    assert spec.matrix_tflops == 800.0
    assert dict(spec.matrix_tflops_by_dtype) == {"bf16": 800.0, "fp16": 790.0, "fp32": 50.0}
    assert DeviceSpec.from_json(spec.to_json()) == spec
    for limit in ("name", "arch", "sm_count", "smem_per_block_bytes", "l2_bytes", "clock_mhz"):
        assert getattr(spec, limit) == getattr(H200, limit)


@pytest.mark.parametrize("cache_mib", [20, 33, 60, 100])
def test_the_sweep_sees_the_cache_within_one_step(cache_mib):
    seen = measured(H200, FakeMeter(cache_mib * MIB)).l2_seen_bytes
    assert cache_mib * MIB / 2**0.25 < seen < cache_mib * MIB * 2**0.25


def test_no_set_is_larger_than_the_meter_can_read():
    meter = FakeMeter(most_bytes=64 * MIB)
    assert measured(H200, meter).l2_seen_bytes is not None
    assert max(meter.read) <= 64 * MIB
    assert measured(H200, FakeMeter(most_bytes=MIB)).l2_seen_bytes is None  # less than any set of the sweep


SIZES = [round(MIB * 2 ** (step / 4)) for step in range(12, 33)]  # 8 to 256 MiB


def rates(capacity_mib, *, replacement="lru", seed=0, noise=0.02, ramp_mib=0.0):
    """What a cache of 7000 GB/s before a memory of 4300 gives, if sets are read over and over."""
    random = np.random.default_rng(seed)
    sizes = np.array(SIZES) / MIB
    share = np.where(sizes <= capacity_mib, 1.0, 0.0 if replacement == "lru" else capacity_mib / sizes)
    inside = 7000 * sizes / (sizes + ramp_mib)  # small sets keep fewer SMs busy
    return (random.normal(1, noise, len(sizes)) / (share / inside + (1 - share) / 4300)).tolist()


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("capacity", [24, 40, 50, 100])
@pytest.mark.parametrize("ramp_mib", [0.0, 4.0])
def test_the_knee_of_a_noisy_sharp_edge_is_found(capacity, seed, ramp_mib):
    assert l2_knee(SIZES, rates(capacity, seed=seed, ramp_mib=ramp_mib)) / MIB == pytest.approx(capacity, rel=0.25)


@pytest.mark.parametrize("seed", range(10))
def test_a_gentle_edge_is_found_where_it_starts(seed):
    assert 40 * 0.9 < l2_knee(SIZES, rates(40, replacement="random", seed=seed)) / MIB < 40 * 1.5


@pytest.mark.parametrize("capacity", [1, 1000])
def test_without_an_edge_there_is_no_knee(capacity):
    assert l2_knee(SIZES, rates(capacity)) is None


def test_no_sizes_have_no_knee():
    assert l2_knee([], []) is None


@pytest.mark.interpret
@pytest.mark.parametrize(("blocks", "passes", "programs"), [(1, 1, 1), (3, 2, 4), (5, 3, 4), (2, 1, 7)])
def test_every_block_is_read_as_often_as_asked(blocks, passes, programs):
    import torch
    from foretune.runtime.timing.read_kernel import BLOCK, read_blocks_kernel

    x = torch.arange(8 * BLOCK, dtype=torch.float32) / BLOCK
    sums = torch.full((programs,), float("nan"))
    read_blocks_kernel[(programs,)](x, sums, blocks, passes, BLOCK=BLOCK)
    assert float(sums.sum()) == pytest.approx(passes * float(x[: blocks * BLOCK].sum()), rel=1e-4)


@pytest.mark.compile
@pytest.mark.usefixtures("own_cache")
def test_the_reading_kernel_loads_16_bytes_a_thread_past_the_l1():
    import torch
    from foretune.runtime.timing.read_kernel import BLOCK, read_blocks_kernel

    with use_stub_driver(H200):
        binary = read_blocks_kernel.warmup(torch.float32, torch.float32, 64, 2, BLOCK=BLOCK, num_warps=4, grid=(1,))
    ptx = binary.asm["ptx"]
    assert "ld.global.cg.v4" in ptx
    assert "ld.global.v" not in ptx


@pytest.mark.gpu
def test_the_card_reaches_what_it_can_and_no_more():
    """Plausible, repeatable, and in the order that physics has them."""
    live = DeviceSpec.live()
    spec, again = measured(live), measured(live)
    print(spec.to_json())  # noqa: T201
    print(again.to_json())  # noqa: T201
    by_dtype = dict(spec.matrix_tflops_by_dtype)
    assert set(by_dtype) == set(MATRIX_DTYPES)
    assert by_dtype["fp32"] < by_dtype["bf16"] == pytest.approx(by_dtype["fp16"], rel=0.3)
    assert spec.read_bandwidth_gbs == pytest.approx(spec.copy_bandwidth_gbs, rel=0.3)
    for rate in ("copy_bandwidth_gbs", "read_bandwidth_gbs", "matrix_tflops"):
        assert getattr(spec, rate) == pytest.approx(getattr(again, rate), rel=0.05)
    if live.rates_measured:  # a card whose rates are shipped
        assert spec.copy_bandwidth_gbs == pytest.approx(live.copy_bandwidth_gbs, rel=0.1)
        assert spec.matrix_tflops == pytest.approx(live.matrix_tflops, rel=0.1)
    assert 0.2 * live.l2_bytes < spec.l2_seen_bytes <= 1.5 * live.l2_bytes


@pytest.mark.gpu
def test_the_sweep_falls_from_the_cache_to_the_memory():
    from foretune.runtime.timing.device_rates import CudaRateMeter, _sweep

    live = DeviceSpec.live()
    meter = CudaRateMeter(live)
    sweep = [(size, meter.read_gbs(size)) for size in _sweep(live.l2_bytes)]
    for size, rate in sweep:
        print(f"{size / MIB:7.1f} MiB {rate:7.0f} GB/s")  # noqa: T201
    fastest = max(rate for _, rate in sweep)
    assert fastest > 1.2 * meter.read_gbs(meter.most_bytes)
    assert sweep[-1][1] == pytest.approx(meter.read_gbs(meter.most_bytes), rel=0.25)
    assert all(later < 1.2 * earlier for (_, earlier), (_, later) in itertools.pairwise(sweep[8:]))
