"""The claims that numerics classes rest on, in binaries for an H200 that need not be here: which instruction
multiplies, and that stages change how threads share the sum of a norm."""

from __future__ import annotations

import re

import pytest
from foretune.datasets import DeviceSpec, KernelConfig, Problem
from foretune.kernels import find_family
from foretune.kernels.numerics import instruction_of
from foretune.runtime import use_stub_driver

pytestmark = [pytest.mark.compile, pytest.mark.usefixtures("own_cache")]

H200 = DeviceSpec.named("h200")
DENSE = {"batch": 1, "m": 512, "n": 512, "k": 512}
GROUPED = {"groups": 4, "rows": 512, "n": 512, "k": 512}
PLAIN = {"CONSUMERS": 0, "PINGPONG": 0, "GROUP_M": 1}
ONE = PLAIN | {"SPLIT_K": 1, "PROGRAMS_PER_SM": 0, "TMA": 1}
#: Family, dtype, flags, dimensions, knobs: tiles on both sides of each limit, and every kernel.
PRODUCTS = [
    ("matmul", "bf16", (), DENSE, ONE | {"BLOCK_M": 32, "BLOCK_N": 128, "BLOCK_K": 128, "num_warps": 4}),
    ("matmul", "bf16", (), DENSE, ONE | {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "num_warps": 4}),
    ("matmul", "bf16", (), DENSE, ONE | {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "num_warps": 2}),
    ("matmul", "bf16", (), DENSE, ONE | {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 8, "SPLIT_K": 4}),
    ("matmul", "fp32", ("b_kn",), DENSE, ONE | {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32, "num_warps": 4}),
    ("matmul", "fp32", ("a_km",), DENSE, ONE | {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 64, "num_warps": 4, "TMA": 0}),
    (
        "matmul", "bf16", (), DENSE,
        ONE | {"BLOCK_M": 128, "BLOCK_N": 160, "BLOCK_K": 64, "TMA": 2, "CONSUMERS": 2, "PINGPONG": 1, "num_warps": 4,
               "PROGRAMS_PER_SM": 1},
    ),
    (
        "grouped_gemm_fwd", "bf16", (), GROUPED,
        PLAIN | {"BLOCK_M": 32, "BLOCK_N": 64, "BLOCK_K": 64, "PROGRAMS_PER_SM": 1, "TMA_X": 1, "TMA_W": 1, "TMA_Y": 0,
                 "num_warps": 4},
    ),
    (
        "grouped_gemm_dx", "bf16", (), GROUPED,
        PLAIN | {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "PROGRAMS_PER_SM": 1, "TMA_X": 1, "TMA_W": 1, "TMA_Y": 0,
                 "num_warps": 4},
    ),
    (
        "grouped_gemm_dw", "bf16", (), GROUPED,
        PLAIN | {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32, "PROGRAMS_PER_SM": 1, "TMA_DY": 1, "TMA_X": 1,
                 "TMA_DW": 1, "num_warps": 4},
    ),
    (
        "grouped_gemm_fwd", "fp32", (), GROUPED,
        PLAIN | {"BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_K": 32, "PROGRAMS_PER_SM": 1, "TMA_X": 0, "TMA_W": 0, "TMA_Y": 0,
                 "num_warps": 4},
    ),
    (
        "gated_mlp", "bf16", (), {"m": 512, "n": 512, "k": 512},
        {"BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_K": 64, "GROUP_M": 1, "PROGRAMS_PER_SM": 0, "TMA": 1, "num_warps": 4},
    ),
    *(
        (
            "scaled_gemm", "fp8e4m3", flags, {"m": 512, "n": 512, "k": 512},
            {"BLOCK_M": m, "BLOCK_N": 64, "BLOCK_K": 128, "GROUP_M": 1, "SPLIT_K": 1, "PROGRAMS_PER_SM": 1,
             "SWAP_AB": swap, "TMA_LOAD": 1, "TMA_STORE": 0, "CONSUMERS": 0, "num_warps": 4},
        )
        for m, swap, flags in ((16, 0, ()), (16, 1, ("blockwise",)), (64, 0, ("rowwise",)))
    ),
]  # fmt: skip


def named(value):
    if isinstance(value, dict):
        return "-".join(f"{knob}{value[knob]}" for knob in ("BLOCK_M", "SWAP_AB", "num_warps") if knob in value)
    return str(value) if isinstance(value, str) else "+".join(value)


@pytest.mark.parametrize(("name", "dtype", "flags", "dims", "knobs"), PRODUCTS, ids=named)
def test_the_instruction_is_the_one_of_the_class(name, dtype, flags, dims, knobs):
    family = find_family(name)
    config, problem = KernelConfig.of(**knobs, num_stages=3), Problem.of(name, dtype=dtype, flags=flags, **dims)
    if config.to_json().get("CONSUMERS"):
        config = KernelConfig.of(**knobs, num_stages=5)
    assert family.supports(config, problem, H200) is None
    with use_stub_driver(H200):
        ptx = family.compile(config, problem).asm["ptx"]
    rows = config["BLOCK_N"] if config.to_json().get("SWAP_AB") else config["BLOCK_M"]
    kind = instruction_of(rows, config.num_warps)
    of_class = family.numerics(config, problem)
    found = {kind for kind, text in (("warp_group", "wgmma.mma_async"), ("warp", "mma.sync")) if text in ptx}
    if dtype == "fp32" and name != "matmul":
        assert (found, of_class[0]) == (set(), "fma")
        assert "fma.rn.f32" in ptx
    else:
        assert found == {kind}
        assert of_class[0] in (kind, "tensor_core")  # which is both, where a card gave equal bits
    # No operand is rounded to tf32 on its way: then the layout of an operand would change bits.
    assert "cvt.rna.tf32" not in ptx


def test_stages_of_the_backward_pass_change_how_threads_share_it():
    family = find_family("rms_norm_rope_bwd")
    problem = Problem.of(family.name, tokens=64, q_heads=32, kv_heads=8, head_dim=128)
    found = []
    with use_stub_driver(H200):
        for stages in (1, 3):
            config = KernelConfig.of(ROWS=2, HEADS=4, STEPS=4, num_warps=4, num_stages=stages)
            found.append((layouts(family.compile(config, problem).asm["ttgir"]), family.numerics(config, problem)))
    (one, class_of_one), (three, class_of_three) = found
    assert one != three
    assert class_of_one != class_of_three


def layouts(ir):
    """The (adjacent pairs of a thread, warps along a head) of each sum over a head in the compiler's code."""
    named = dict(re.findall(r"^(#\w+) = #ttg\.(.*)$", ir, re.M))
    return {shares(named[layout]) for layout in re.findall(r"axis = 2 : i32.*?\(tensor<[^>]*, (#\w+)>\)", ir, re.S)}


def shares(layout):
    """The (adjacent pairs, warps) of a blocked layout; or of a linear one, which has a place for each power of two."""
    if layout.startswith("blocked"):
        return tuple(
            int(re.search(rf"{what} = \[\d+, \d+, (\d+)\]", layout)[1]) for what in ("sizePerThread", "warpsPerCTA")
        )
    registers, warps = (
        [int(place) for place in re.findall(r"\[\d+, \d+, (\d+)\]", part) if int(place)]
        for part in (layout.partition("lane")[0], layout.partition("warp")[2])
    )
    pairs = 1
    while pairs in registers:
        pairs *= 2
    return pairs, 2 ** len(warps)
