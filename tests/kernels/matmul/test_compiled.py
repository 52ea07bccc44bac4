"""Binaries of the dense GEMM: what they take is what is said, and they are made of the instructions that they should
be. The sample is small; `-m slow` compiles one config in thirty of the space."""

from __future__ import annotations

import re

import pytest
from foretune.kernels.matmul.space import smem_bytes
from foretune.runtime import use_stub_driver
from products import A100, B200, H200, LAYOUTS, MATMUL, MI300X, SPECIALIZED, config, problem, specialized

pytestmark = [pytest.mark.compile, pytest.mark.usefixtures("own_cache")]

ALIGNED = {"m": 128, "n": 128, "k": 128}
TILE, SMALL = config(64, 64, 64, num_stages=3), config(16, 32, 64, num_stages=3)


def changed(base, **knobs):
    return type(base).from_json(base.to_json() | knobs)


#: Device, problem, config.
SAMPLE = [
    (H200, problem("bf16", ("bias", "gelu"), **ALIGNED), changed(TILE, TMA=1, PROGRAMS_PER_SM=1)),
    (H200, problem("bf16", ("a_km", "b_kn"), **ALIGNED), changed(TILE, TMA=2, PROGRAMS_PER_SM=1)),
    (H200, problem("fp16", ("b_kn",), **ALIGNED), TILE),
    (H200, problem("bf16", **ALIGNED), changed(SMALL, SPLIT_K=4)),
    (H200, problem("fp32", **ALIGNED), changed(SMALL, TMA=1)),
    (H200, problem("int8", **ALIGNED), changed(TILE, TMA=1)),
    (A100, problem("bf16", **ALIGNED), SMALL),
    (B200, problem("bf16", **ALIGNED), changed(SMALL, TMA=1)),
    (MI300X, problem("bf16", **ALIGNED), SMALL),
]


@pytest.mark.parametrize(("device", "call", "one"), SAMPLE, ids=lambda value: getattr(value, "arch", None))
def test_a_binary_is_as_expected(device, call, one):
    assert MATMUL.supports(one, call, device) is None
    with use_stub_driver(device):
        binary = MATMUL.compile(one, call)
    assert binary.metadata.shared <= smem_bytes(one, call.itemsize, device)
    if device.backend != "cuda":
        assert "v_mfma" in binary.asm["amdgcn"]
        return
    ptx, ir, stages = binary.asm["ptx"], binary.asm["ttgir"], one.num_stages
    assert ("wgmma.mma_async" in ptx) == (one["BLOCK_M"] >= 64)
    # TMA moves what the knob says and nothing else; all other loads are asynchronous copies of 16 bytes, which they
    # can only be where the compiler knows that rows are aligned; and loops are pipelined, all stages ahead.
    assert ("cp.async.bulk.tensor" in re.sub(r".*global\.shared::cta.*", "", ptx)) == (one["TMA"] > 0)
    assert ("async_tma_copy_local_to_global" in ir) == (one["TMA"] == 2)
    assert ("cp.async.cg.shared.global" in ptx) == (one["TMA"] == 0)
    assert "cp.async.ca.shared.global" not in ptx
    loads = ir.count("async_tma_copy_global_to_local") if one["TMA"] else ir.count("async_copy_global_to_local")
    assert loads >= 2 * (stages - 1)


@pytest.mark.parametrize("tma", [0, 1])
@pytest.mark.parametrize("m", [64, 128])
def test_products_of_a_wide_tile_are_not_serialized(m, tma, monkeypatch, capfd):
    """ptxas says when it makes each wait for the one before."""
    monkeypatch.setenv("TRITON_DUMP_PTXAS_LOG", "1")
    with use_stub_driver(H200):
        MATMUL.compile(config(m, 256, 64, TMA=tma, num_warps=8, num_stages=4), problem("bf16", **ALIGNED))
    log = capfd.readouterr().out
    assert "registers" in log
    assert "serialized" not in log


@pytest.mark.parametrize(("way", "flags"), [(1, ()), (5, ("a_km", "b_kn", "bias")), (9, ("a_km", "relu"))], ids=str)
def test_warps_have_one_job_each(way, flags):
    """One loads through TMA, and none waits for a product that was not issued after the one that it waits for."""
    one, call = specialized(*SPECIALIZED[way]), problem("bf16", flags, **ALIGNED)
    with use_stub_driver(H200):
        binary = MATMUL.compile(one, call)
    assert smem_bytes(one, 2, H200) - 88 <= binary.metadata.shared <= smem_bytes(one, 2, H200)
    products = 1 if one["BLOCK_N"] in (128, 256) else 2  # of a step, which are under way when it ends
    waits = set(map(int, re.findall(r"wgmma.wait_group.sync.aligned (\d+);", binary.asm["ptx"])))
    assert waits == {0, products}
    assert "cp.async.bulk.tensor" in binary.asm["ptx"]


def test_what_is_compiled_ahead_is_what_is_launched_in_every_shape(compiles):
    """Of one kind and config two binaries, of aligned rows and of others, and as many of split-K, and of its sums."""
    import torch
    from foretune.kernels.matmul.triton_kernels.launches import prepare_matmul

    with use_stub_driver(H200):
        for splits in (1, 4):
            one = changed(SMALL, num_stages=2, SPLIT_K=splits)
            for size in (128, 45):
                MATMUL.compile(one, problem("bf16", ("bias",), 1, size, size, size))
            made = len(compiles)
            assert made == (2 if splits == 1 else 6)
            for m, n, k in ((1, 16, 8), (17, 64, 72), (160, 48, 24), (5, 7, 3), (16, 15, 16)):
                x, w, y, bias = (
                    torch.empty(1, *shape, dtype=torch.bfloat16) for shape in ((m, k), (n, k), (m, n), (n,))
                )
                for band in (1, 8):
                    prepare_matmul(x, w, y, changed(one, GROUP_M=band), 132)((x, w, y, bias[0]))
            assert all(found for _, found in compiles[made:])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp32", "int8"])
@pytest.mark.parametrize("flags", LAYOUTS, ids="-".join)
def test_much_of_the_space_compiles_and_fits(flags, dtype):
    call = problem(dtype, flags, **ALIGNED)
    jobs = [specialized(*way) for way in SPECIALIZED]
    for one in (*MATMUL.space(H200)[::31], *jobs):
        if MATMUL.supports(one, call, H200) is None:
            with use_stub_driver(H200):
                shared = MATMUL.compile(one, call).metadata.shared
            assert shared <= smem_bytes(one, call.itemsize, H200), f"{one} {call}"
