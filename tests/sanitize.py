"""A small problem of each grouped GEMM by pointers and by TMA, with sizes and indices that add up and that do not.

For a tool that watches memory (`kernels/test_sanitizer.py` runs it): `compute-sanitizer python tests/sanitize.py`. The
caching allocator would hide what lies between tensors, so it is switched off.
"""

from __future__ import annotations

import os

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import sys
from dataclasses import replace

from foretune.datasets import DeviceSpec
from grouped import FAMILIES, FLAGS, config, expected, made, routed, tma_ways, trouble

SIZES = (37, 0, 1, 130, 16)
GARBAGE = ((90, 90, 90, 90, 90), (2**31 - 1,) * 5, (-5, 60, -(2**31), 0, 20), (0,) * 5)


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
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
