"""What the tests of the dense GEMM share: devices, problems and configs by short names."""

from __future__ import annotations

from dataclasses import replace

from foretune.datasets import DeviceSpec, KernelConfig, Problem
from foretune.kernels import find_family

MATMUL = find_family("matmul")
H200 = DeviceSpec.named("h200")
A100 = replace(H200, name="A100", arch="sm_80", sm_count=108, smem_per_block_bytes=166912)
B200 = replace(H200, name="B200", arch="sm_100", sm_count=148)
MI300X = replace(
    H200, name="MI300X", backend="hip", arch="gfx942", warp_size=64, sm_count=304, smem_per_block_bytes=65536
)
#: Where the interpreter runs. Fewer programs than tiles nearly everywhere, so that persistent ones take several.
CPU = replace(H200, backend="cpu", sm_count=3)
LAYOUTS = ((), ("a_km",), ("b_kn",), ("a_km", "b_kn"))


def problem(dtype="fp16", flags=(), batch=2, m=20, n=40, k=72):
    return Problem.of("matmul", dtype=dtype, flags=flags, batch=batch, m=m, n=n, k=k)


def config(m=16, n=32, k=32, **knobs):
    return KernelConfig.of(
        **{"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": 2, "SPLIT_K": 1, "PROGRAMS_PER_SM": 0, "TMA": 0}
        | {"CONSUMERS": 0, "PINGPONG": 0, "num_warps": 4, "num_stages": 2}
        | knobs
    )


#: CONSUMERS, PINGPONG, BLOCK_M, BLOCK_N and stages, of which each means other loops.
SPECIALIZED = (
    (2, 1, 64, 256, 5),
    (2, 1, 128, 128, 6),
    (2, 1, 128, 160, 5),
    (2, 1, 128, 192, 4),
    (2, 0, 128, 128, 6),
    (2, 0, 128, 160, 6),
    (2, 0, 128, 192, 5),
    (2, 0, 128, 256, 4),
    (3, 0, 192, 128, 5),
    (3, 0, 192, 192, 4),
)


def specialized(consumers, pingpong, m, n, stages, **knobs):
    """A config whose warps have one job each."""
    ways = {"PROGRAMS_PER_SM": 1, "TMA": 2, "CONSUMERS": consumers, "PINGPONG": pingpong, "num_stages": stages}
    return config(m, n, 64, **ways | knobs)
