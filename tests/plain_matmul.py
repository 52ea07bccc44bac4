"""A plain Triton matrix product and its offline compile: what the lists of `foretune.spaces` are compiled with."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from foretune.datasets import DeviceSpec, KernelConfig
from foretune.runtime import gpu_target
from triton.compiler import ASTSource


@triton.jit
def matmul_kernel(
    a_ptr,
    b_ptr,
    c_ptr,
    m,
    n,
    k,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SUM: tl.constexpr,
):
    """c (m, n) = a (m, k) @ b (n, k).T, a program a tile, bands of GROUP_M rows of tiles."""
    band = GROUP_M * tl.cdiv(n, BLOCK_N)
    top = tl.program_id(0) // band * GROUP_M
    height = min(tl.cdiv(m, BLOCK_M) - top, GROUP_M)
    within = tl.program_id(0) % band
    rows = (top + within % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = within // height * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), SUM)
    for start in range(0, k, BLOCK_K):
        at = start + tl.arange(0, BLOCK_K)
        inside = at < k
        a = tl.load(a_ptr + rows[:, None] * k + at[None, :], (rows < m)[:, None] & inside[None, :], 0.0)
        b = tl.load(b_ptr + columns[None, :] * k + at[:, None], (columns < n)[None, :] & inside[:, None], 0.0)
        total = tl.dot(a, b, total, out_dtype=SUM)
    c = total.to(c_ptr.dtype.element_ty)
    tl.store(c_ptr + rows[:, None] * n + columns[None, :], c, (rows < m)[:, None] & (columns < n)[None, :])


def compiled(config: KernelConfig, device: DeviceSpec, dtype: str = "bf16") -> Any:
    """The binary of a config for a device that need not be here; the result is bfloat16, or int32 for int8."""
    operand, result = {"bf16": ("bf16", "bf16"), "int8": ("i8", "i32"), "fp8e4m3": ("fp8e4nv", "bf16")}[dtype]
    blocks = {knob: config[knob] for knob in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP_M")}
    fixed = blocks | {"SUM": tl.int32 if dtype == "int8" else tl.float32}
    pointers = {"a_ptr": f"*{operand}", "b_ptr": f"*{operand}", "c_ptr": f"*{result}"}
    signature = pointers | dict.fromkeys(("m", "n", "k"), "i32") | dict.fromkeys(fixed, "constexpr")
    aligned = {(at,): [["tt.divisibility", 16]] for at in range(6)}
    options = {name: value for name, value in config.to_json().items() if name not in blocks}
    source = ASTSource(matmul_kernel, signature, fixed, aligned)
    return triton.compile(source, target=gpu_target(device), options=options)
