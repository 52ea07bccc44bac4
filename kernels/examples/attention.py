"""Causal attention (forward), whose head dimension is a compile-time constant.

HEAD_DIM is a `tl.constexpr` parameter that is no knob: each launch passes it, and it is a dimension of the problem.
`ranges` lists the sizes that it may have.
"""

import math
from collections.abc import Mapping

import foretune
import torch
import triton
import triton.language as tl
from foretune import DeviceSpec, KernelConfig, Problem, TritonFamily
from foretune.datasets import torch_dtype


@triton.jit
def attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    o_ptr,
    n_heads,
    length,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute BLOCK_M rows of one head by online softmax; q, k, v and o are contiguous (heads, length, HEAD_DIM)."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    start = tl.program_id(1).to(tl.int64) * length * HEAD_DIM
    dims = tl.arange(0, HEAD_DIM)
    q = tl.load(q_ptr + start + rows[:, None] * HEAD_DIM + dims[None, :], mask=rows[:, None] < length, other=0.0)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    for first in range(0, tl.minimum((tl.program_id(0) + 1) * BLOCK_M, length), BLOCK_N):
        columns = first + tl.arange(0, BLOCK_N)
        inside = columns[:, None] < length
        at = start + columns[:, None] * HEAD_DIM + dims[None, :]
        k = tl.load(k_ptr + at, mask=inside, other=0.0)
        scores = tl.dot(q, tl.trans(k)) * scale
        scores = tl.where((columns[None, :] <= rows[:, None]) & (columns[None, :] < length), scores, float("-inf"))
        new = tl.maximum(highest, tl.max(scores, 1))
        powers = tl.exp(scores - new[:, None])
        shrink = tl.exp(highest - new)
        total = total * shrink + tl.sum(powers, 1)
        v = tl.load(v_ptr + at, mask=inside, other=0.0)
        out = out * shrink[:, None] + tl.dot(powers.to(v.dtype), v)
        highest = new
    out = (out / total[:, None]).to(o_ptr.dtype.element_ty)
    tl.store(o_ptr + start + rows[:, None] * HEAD_DIM + dims[None, :], out, mask=rows[:, None] < length)


class CausalAttention(TritonFamily):
    """The family of causal self-attention with `heads` heads (batch times heads), `length` tokens and `head_dim`."""

    name = "causal_attention"
    kernel = attention_kernel
    configs = [
        triton.Config({"BLOCK_M": m, "BLOCK_N": n}, num_warps=warps, num_stages=stages)
        for m in (32, 64, 128)
        for n in (32, 64, 128)
        for warps in (4, 8)
        for stages in (2, 3, 4)
    ]
    dims_from = {"heads": "n_heads", "length": "length", "head_dim": "HEAD_DIM"}
    output = "o_ptr"
    dtypes = ("fp16", "bf16")
    tiles = {"BLOCK_M": "length", "BLOCK_N": "length"}
    ranges = {"heads": (1, 256), "length": (16, 8192), "head_dim": {64, 128}}
    most_bytes = 2.0**30

    def supports(self, config: KernelConfig, problem: Problem, device: DeviceSpec) -> str | None:
        """Return why a config cannot run, or None: head_dim must be a power of two, and shared memory large enough."""
        reason = super().supports(config, problem, device)
        if reason is not None:
            return reason
        head_dim = problem["head_dim"]
        if head_dim < 16 or head_dim & (head_dim - 1):
            return f"head_dim must be a power of two of at least 16 but is {head_dim}"
        smem_bytes = (config["BLOCK_M"] + 2 * config["BLOCK_N"] * config.num_stages) * head_dim * problem.itemsize
        if smem_bytes > device.smem_per_block_bytes:
            return f"needs {smem_bytes} bytes of shared memory, more than the {device.smem_per_block_bytes} of a block"
        return None

    def flops(self, problem: Problem) -> float:
        """Return the floating-point operations of one launch: two products with the lower half of a square matrix."""
        return 2.0 * problem["heads"] * problem["length"] ** 2 * problem["head_dim"]

    def bytes(self, problem: Problem) -> float:
        """Return the bytes that one launch reads and writes."""
        return 4.0 * problem["heads"] * problem["length"] * problem["head_dim"] * problem.itemsize

    def arguments(self, problem: Problem, where: str) -> dict[str, object]:
        """Return the arguments of a launch, by parameter name, with tensors on the torch device `where`."""
        shape = (problem["heads"], problem["length"], problem["head_dim"])
        q, k, v = (torch.randn(shape, dtype=torch_dtype(problem.dtype_name), device=where) for _ in range(3))
        return {
            "q_ptr": q,
            "k_ptr": k,
            "v_ptr": v,
            "o_ptr": torch.empty_like(q),
            "n_heads": problem["heads"],
            "length": problem["length"],
            "scale": 1 / math.sqrt(problem["head_dim"]),
            "HEAD_DIM": problem["head_dim"],
        }

    def grid(self, problem: Problem, config: KernelConfig) -> tuple[int, ...]:
        """Return the grid of a launch: a program for each block of rows of each head."""
        return (-(-problem["length"] // config["BLOCK_M"]), problem["heads"])

    def eager(self, arguments: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Compute with PyTorch what the kernel should write."""
        q, k, v = (arguments[name].float() for name in ("q_ptr", "k_ptr", "v_ptr"))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def main() -> None:
    """Print how many configs can run a problem on an H200, and compile one for it. Needs no GPU."""
    family, device = CausalAttention(), DeviceSpec.named("h200")
    problem = Problem.of("causal_attention", heads=32, length=4096, head_dim=128, dtype="bf16")
    able = [config for config in family.space(device) if family.supports(config, problem, device) is None]
    with foretune.testing.use_stub_device(device):
        binary = family.compile(able[0], problem)
    print(f"{problem} on {device.name}: {len(able)} of {len(family.space())} configs can run")
    print(f"{able[0]} compiles to {len(binary.asm['ptx'].splitlines())} lines of PTX")


if __name__ == "__main__":
    main()
