"""Run the grouped GEMM's three products once each under Nsight Compute, next to torch's:

    ncu --clock-control none --profile-from-start off --set full -o rows python tests/kernels/counters_on_gpu.py
    ncu --import rows.ncu-rep --page raw --csv

The order of the kernels is forward, dX and dW of `foretune.grouped_gemm`, then forward, dW and dX of
`torch._grouped_mm`, for a layer that is bound by arithmetic and for one that is bound by memory. Only these launches
are profiled, after three calls that warm up.
"""

from __future__ import annotations

import foretune
import torch

#: Rows, groups, N and K.
LAYERS = ((65536, 64, 2816, 2048), (16384, 128, 2816, 4096))


def main() -> None:
    random = torch.Generator("cuda").manual_seed(0)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, generator=random)

    for rows, groups, n, k in LAYERS:
        x, w = made(rows, k).requires_grad_(), made(groups, n, k).mul_(k**-0.5).requires_grad_()
        sizes = torch.full((groups,), rows // groups, device="cuda", dtype=torch.int32)
        ends, dy = torch.cumsum(sizes, 0, dtype=torch.int32), made(rows, n)
        for product in (
            lambda: foretune.grouped_gemm(x, w, sizes),  # noqa: B023 - called in this turn
            lambda: torch._grouped_mm(x, w.transpose(-2, -1), offs=ends),  # noqa: B023
        ):
            for call in range(4):
                x.grad = w.grad = None
                if call == 3:
                    torch.cuda.synchronize()
                    torch.cuda.profiler.start()
                product().backward(dy)
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()


if __name__ == "__main__":
    main()
