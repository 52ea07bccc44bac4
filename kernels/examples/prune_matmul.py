"""Prune the configs that `triton.autotune` times for your own matrix product: `python prune_matmul.py`.

The kernel has names of its own for its knobs: `knobs` maps them to those of the shipped family `matmul`, and `fixed`
lists what the kernel does not have. Without a GPU a stub driver takes its place: everything compiles, and nothing is
launched.
"""

import contextlib
import logging

import foretune
import torch
import triton
import triton.language as tl
from foretune import Problem

configs = [
    triton.Config({"BM": m, "BN": n, "BK": k}, num_warps=warps, num_stages=stages)
    for m in (16, 32, 64, 128, 256)
    for n in (32, 64, 128, 256)
    for k in (32, 64, 128)
    for warps in (4, 8)
    for stages in (3, 4, 5)
]
pruner = foretune.prune(
    "matmul",
    k=8,
    configs=configs,
    knobs={"BM": "BLOCK_M", "BN": "BLOCK_N", "BK": "BLOCK_K"},
    fixed={"GROUP_M": 1, "SPLIT_K": 1, "PROGRAMS_PER_SM": 0, "TMA": 0, "CONSUMERS": 0, "PINGPONG": 0},
    problem=lambda call: Problem.of("matmul", m=call["M"], n=call["N"], k=call["K"], batch=1, dtype="bf16"),
)


@triton.autotune(configs, key=["M", "N", "K"], prune_configs_by={"early_config_prune": pruner})
@triton.jit
def matmul(a_ptr, b_ptr, c_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Compute a tile of c (M, N) = a (M, K) @ b (N, K).T."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        at = start + tl.arange(0, BK)
        inside = at < K
        a = tl.load(a_ptr + rows[:, None] * K + at[None, :], (rows < M)[:, None] & inside[None, :], 0.0)
        b = tl.load(b_ptr + columns[None, :] * K + at[:, None], (columns < N)[None, :] & inside[:, None], 0.0)
        total = tl.dot(a, b, total)
    c_at = c_ptr + rows[:, None] * N + columns[None, :]
    tl.store(c_at, total.to(tl.bfloat16), (rows < M)[:, None] & (columns < N)[None, :])


logging.basicConfig(level=logging.INFO, format="%(message)s")
has_gpu = torch.cuda.is_available()
with contextlib.nullcontext() if has_gpu else foretune.testing.use_stub_device("h200"):
    a, b = (torch.randn(2048, 4096, device="cuda" if has_gpu else "cpu", dtype=torch.bfloat16) for _ in range(2))
    c = torch.empty(2048, 2048, device=a.device, dtype=a.dtype)
    matmul[lambda knobs: (-(-2048 // knobs["BM"]), -(-2048 // knobs["BN"]))](a, b, c, 2048, 2048, 4096)
timed = getattr(matmul, "configs_timings", {})  # Triton times nothing if one config is left (FORETUNE_MODE=predict)
print("timed", len(timed), "of", len(configs), "- chosen:", matmul.best_config)
