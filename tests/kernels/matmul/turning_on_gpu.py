"""What it costs and gains to copy float32 operands that lie across K before a product: `python turning_on_gpu.py`.

Of each size and layout, in microseconds, with a cold L2 and predicted configs: the product of the operands as they lie,
the copies, by PyTorch and by our own kernel, the product of the copied ones, PyTorch's (cuBLAS, allowed to use tf32),
and `foretune.matmul`, which copies what `worth_turning` says.
"""

from __future__ import annotations

from functools import partial

import torch
from foretune.datasets import DeviceSpec, KernelConfig, Problem
from foretune.kernels import find_family
from foretune.kernels.matmul import matmul
from foretune.kernels.matmul.space import A_KM, B_KN, worth_turning
from foretune.kernels.matmul.triton_kernels.turning import turned_copy
from foretune.runtime import make_shortlist
from foretune.runtime.timing.timer import Timer

#: M, N, K: around where it begins to pay, and what people train.
SIZES = (
    (256, 4096, 4096),
    (512, 512, 8192),
    (512, 1024, 4096),
    (1024, 512, 4096),
    (512, 4096, 4096),
    (1024, 1024, 1024),
    (1024, 1024, 2048),
    (2048, 1024, 1024),
    (2048, 2048, 1024),
    (4096, 4096, 1024),
    (4096, 4096, 4096),
    (14336, 4096, 8192),
)
LAYOUTS = ((B_KN,), (A_KM, B_KN))


def as_it_lies(problem: Problem, device: DeviceSpec) -> KernelConfig:
    """What is predicted for it: `matmul` turns nothing for a config that it is given."""
    return make_shortlist(find_family("matmul"), problem, device, k=1).configs[0]


def copied(matrix: torch.Tensor) -> torch.Tensor:
    return matrix.mT.clone(memory_format=torch.contiguous_format).mT


def main() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True
    timer, device = Timer(), DeviceSpec.live()
    heads = ("lies", "by torch", "copies", "turned", "torch", "ours")
    print(f"{'m, n, k, flags':28} {' '.join(f'{head:>8}' for head in heads)}  ours/lies, ours/torch, turned")
    for flags in LAYOUTS:
        for m, n, k in SIZES:
            problem = Problem.of("matmul", dtype="fp32", flags=flags, batch=1, m=m, n=n, k=k)
            a = torch.randn(k, m, device="cuda").mT if A_KM in flags else torch.randn(m, k, device="cuda")
            b = torch.randn(k, n, device="cuda")
            calls = [
                partial(matmul, a, b, config=as_it_lies(problem, device)),
                lambda a=a, b=b: (a.contiguous(), copied(b)),
                lambda a=a, b=b: (a if a.is_contiguous() else turned_copy(a.mT[None]), turned_copy(b[None])),
                partial(matmul, a.contiguous(), copied(b)),
                partial(torch.matmul, a, b),
                partial(matmul, a, b),
            ]
            for call in calls:
                call()
            times = [min(timer.time(call).time_us for _ in range(3)) for call in calls]
            said = " ".join(f"{time_us:8.1f}" for time_us in times)
            name = ", ".join(map(str, (m, n, k, *flags)))
            ratios = f"{times[-1] / times[0]:.2f} {times[-1] / times[-2]:.2f}"
            print(f"{name:28} {said}  {ratios} {worth_turning(problem, device)}", flush=True)


if __name__ == "__main__":
    main()
