"""Kernels that a process of its own imports by name: one with a config that writes where nothing is, one that adds."""

from __future__ import annotations

import foretune
import triton
import triton.language as tl

CONFIGS = [triton.Config({"BLOCK": size, "FAR": 0}, num_warps=warps) for size in (256, 1024) for warps in (1, 4)]
#: Half a TiB further on.
FAULTY = triton.Config({"BLOCK": 256, "FAR": 1 << 37}, num_warps=2)


@foretune.autotune([FAULTY, *CONFIGS], ["n"], k=1 + len(CONFIGS), bucket=["n"], isolate=True)  # k: all are timed
@triton.jit
def scale_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr, FAR: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at + FAR, 2.0 * tl.load(x_ptr + at, mask=at < n), mask=at < n)


@foretune.autotune(CONFIGS, ["n"], restore_value=["y_ptr"])
@triton.jit
def add_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr, FAR: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at + FAR, tl.load(y_ptr + at, mask=at < n) + tl.load(x_ptr + at, mask=at < n), mask=at < n)


def launch(kernel, x, y):
    n = x.numel()
    kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, y, n)
    return y
