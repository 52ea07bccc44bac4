"""`KERNEL`: the source of a module with an autotuned kernel, which tests write into packages."""

KERNEL = """
import triton
import triton.language as tl

CONFIGS = [triton.Config({"BLOCK": block}, num_warps=1) for block in (16, 32)]

@triton.autotune(CONFIGS, key=["n"])
@triton.jit
def kernel(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, 1.0, mask=at < n)
"""
