"""A small problem of each grouped GEMM by pointers and by TMA, with sizes and indices that add up and that do not, and
training steps of the ops on them, with everything else that the ops launch.

For a tool that watches memory (`kernels/test_sanitizer.py` runs it): `compute-sanitizer python tests/sanitize.py`. The
caching allocator would hide what lies between tensors, so it is switched off.
"""

from __future__ import annotations

import os

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import sys
from dataclasses import replace

import foretune
import torch
from foretune.datasets import DeviceSpec
from grouped import FAMILIES, FLAGS, SPECIALIZED, config, expected, made, routed, specialized, tma_ways, trouble

SIZES = (37, 0, 1, 130, 16)
GARBAGE = ((90, 90, 90, 90, 90), (2**31 - 1,) * 5, (-5, 60, -(2**31), 0, 20), (0,) * 5)
#: Of the ops' steps, whose rows are more than a tile of any kernel has. Those past 2^31 are of int64.
ROWS, GROUPS, N, K = 1040, 5, 136, 80
STEP_SIZES = (
    (1000, 0, 1, 39, 0),
    (100, 0, 1, 39, 0),
    (0,) * 5,
    (ROWS,) * 5,
    (ROWS + 1, 0, 0, 0, 0),
    (2**31 - 1,) * 5,
    (-1, 2**31 - 1, -(2**31), 700, 600),
    (2**32 + 700, 2**40, -(2**63), 2**63 - 1, 2**33 + 1),
)


def main() -> None:
    device = DeviceSpec.live()
    wrong = []
    for family in FAMILIES:
        for flags in FLAGS:
            ways = tma_ways(family, flags, device)
            inputs = made(family, SIZES, n=136, k=72, flags=flags, dtype="bf16", device=device, chunk_rows=128)
            reference = expected(family, inputs)
            for tma in {min(ways, key=sum), max(ways, key=sum)}:
                chosen = config(family, 64, 64, 64, tma=tma, programs=1)
                found = trouble(family.launch(inputs, chosen), reference, "bf16")
                wrong += [f"{family.name} {flags} {chosen}: {found}"] * bool(found)
                for sizes in GARBAGE:
                    for chunk_rows in (None, 16):
                        family.launch(routed(inputs, sizes, chunk_rows), chosen)
                if flags:
                    indices = inputs.indices.clone()
                    indices[::3] = 2**31 - 1
                    indices[1::3] = -1
                    family.launch(replace(inputs, indices=indices), chosen)
        wrong += jobs_of_warps(family, device)
    steps()
    if device.arch in ("sm_89", "sm_90", "sm_100"):  # which have fp8
        steps_in_fp8()
    torch.cuda.synchronize()
    if wrong:
        sys.exit("\n".join(wrong))


def jobs_of_warps(family, device: DeviceSpec) -> list[str]:
    """Launch the kernels of CONSUMERS, where they run, and return what is wrong."""
    wrong = []
    inputs = made(family, SIZES, n=136, k=72, dtype="bf16", device=device, chunk_rows=128)
    reference = expected(family, inputs)
    for each in SPECIALIZED[family]:
        chosen = specialized(family, *each)
        if family.supports(chosen, inputs.problem, device) is not None:
            continue
        found = trouble(family.launch(inputs, chosen), reference, "bf16")
        wrong += [f"{family.name} {chosen}: {found}"] * bool(found)
        for sizes in GARBAGE:
            for chunk_rows in (None, 16):
                family.launch(routed(inputs, sizes, chunk_rows), chosen)
    return wrong


def step_sizes() -> list[torch.Tensor]:
    dtypes = (torch.int32 if max(map(abs, sizes)) <= 2**31 else torch.int64 for sizes in STEP_SIZES)
    return [torch.tensor(sizes, device="cuda", dtype=dtype) for sizes, dtype in zip(STEP_SIZES, dtypes, strict=True)]


def steps() -> None:
    """Run training steps of `foretune.grouped_gemm` with every gradient."""
    for side in ("sorted", "permute_x", "permute_y"):
        topk = 2 if side == "permute_x" else 1
        shapes = {"x": (ROWS // topk, K), "w": (GROUPS, N, K), "topk_weights": (ROWS,), "bias": (GROUPS, N)}
        leaves = {
            name: torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for name, shape in shapes.items()
        }
        indices = torch.randperm(ROWS, device="cuda")
        wild = indices.clone()
        wild[::3], wild[1::3] = 2**31 - 1, -1
        for sizes in step_sizes():
            for order in (indices, wild):
                permuted = {} if side == "sorted" else {"gather_indices": order, side: True, "topk": topk}
                y = foretune.grouped_gemm(**leaves, group_sizes=sizes, **permuted, mode="off")
                torch.autograd.grad(y.sum(), list(leaves.values()))


def steps_in_fp8() -> None:
    """Run training steps of `foretune.scaled_grouped_gemm`, with each kind of scales."""
    x, w = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for shape in ((ROWS, K), (GROUPS, 144, K))
    )
    for scales in ("blockwise", "rowwise", "tensorwise"):
        for sizes in step_sizes():
            y = foretune.scaled_grouped_gemm(x, w, sizes, scales=scales, mode="off")
            torch.autograd.grad(y.sum(), (x, w))


if __name__ == "__main__":
    main()
