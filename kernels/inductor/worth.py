"""Estimate whether a template of a product is worth compiling next to ATen's kernel.

Compiling templates is most of what tuning adds to the time of a compilation, and for many rows they are slower than
ATen's kernel. They pay for few rows, and where Inductor fuses the operations that follow into them. Then the product is
not written to memory and read again.
"""

from __future__ import annotations

import math
from typing import Any

from ...datasets import DeviceSpec, Problem
from .matmul import is_exact

#: The time of the template ranked first over ATen's, by the lesser of m and n (up to so many): geometric means over 230
#: products in bf16 on an H100 (torch 2.11, 2026-11-26). `python tests/studies/aten_on_gpu.py` prints them by rows.
RATIOS = ((1, 1.06), (64, 0.98), (128, 1.02), (256, 1.07), (math.inf, 1.11))
#: How much faster the fastest of a few choices is than the one ranked first.
SEARCHED = 0.03
#: Dtypes for which `RATIOS` holds.
_MEASURED = ("bf16", "fp16")


def is_first_choice_faster(problem: Problem) -> bool:
    """Return whether the template ranked first is expected to be faster than ATen's kernel, without any fusion.

    >>> sizes = {"batch": 1, "n": 4096, "k": 4096}
    >>> [is_first_choice_faster(Problem.of("inductor_mm", m=m, **sizes)) for m in (8, 512)]
    [True, False]
    """
    return not is_exact(problem) and problem["batch"] == 1 and _ratio(problem) < 1


def is_worth_timing(problem: Problem, device: DeviceSpec, fuses: bool) -> bool:
    """Return whether the fastest of a few templates may be faster than ATen's kernel.

    Args:
        problem: The product.
        device: The device.
        fuses: Whether Inductor may fuse all operations that read the product into a template.

    >>> problem, h200 = Problem.of("inductor_mm", batch=1, m=8192, n=4096, k=1024), DeviceSpec.named("h200")
    >>> is_worth_timing(problem, h200, fuses=False), is_worth_timing(problem, h200, fuses=True)
    (False, True)
    """
    if problem.dtype_name not in _MEASURED or problem["batch"] > 1:
        return True
    m, n, k = (problem[dim] for dim in "mnk")
    written_us = m * n * problem.itemsize / (1e3 * device.copy_bandwidth_gbs)
    read_us = (m + n) * k * problem.itemsize / (1e3 * device.copy_bandwidth_gbs)
    product_us = max(2 * m * n * k / (1e6 * device.matrix_tflops), written_us + read_us)
    return (_ratio(problem) - SEARCHED - 1) * product_us < (2 * written_us if fuses else 0.0)


def _ratio(problem: Problem) -> float:
    return next(ratio for most, ratio in RATIOS if min(problem["m"], problem["n"]) <= most)


def fuses_with_all_users(node: Any) -> bool:
    """Return whether all operations that read a node of an FX graph are pointwise, and none leads to a reduction.

    Those can become part of a template. Inductor fuses pointwise operations before a reduction into the reduction,
    which saves as much without a template.
    """
    import torch

    pointwise, reduction = torch.Tag.pointwise, getattr(torch.Tag, "reduction", None)
    waiting = [(user, True) for user in node.users]
    seen = set()
    while waiting:
        user, is_direct = waiting.pop()
        if (user, is_direct) in seen:
            continue
        seen.add((user, is_direct))
        tags = getattr(user.target, "tags", ())
        is_view = getattr(user.target, "is_view", False)
        if reduction in tags or (is_direct and not is_view and pointwise not in tags):
            return False
        if is_view or pointwise in tags:
            waiting += [(after, is_direct and is_view) for after in user.users]
    return bool(seen)
