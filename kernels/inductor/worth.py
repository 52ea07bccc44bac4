"""Estimate whether a template of a product can be faster than ATen's kernel, before anything is generated.

Compiling templates is nearly all that tuning adds to the time of a compilation, and for many rows they are slower than
ATen's kernel. That is also so where Inductor could fuse what follows into a template: with GELU or SwiGLU behind them,
no template made a model faster on an H100 (NOTES.md).
"""

from __future__ import annotations

import math

from ...datasets import DeviceSpec, Problem
from .matmul import is_exact

#: The time of the template ranked first over ATen's, by the lesser of m and n (up to so many): geometric means over 230
#: products in bf16 on an H100 (torch 2.11, 2026-11-26). `python tests/studies/aten_on_gpu.py` prints them by rows.
RATIOS = ((1, 1.06), (64, 0.98), (128, 1.02), (256, 1.07), (math.inf, 1.11))
#: How much faster the fastest of a few choices is expected to be than the one ranked first.
SEARCHED = 0.03
#: Dtypes and the arch for which `RATIOS` holds.
_MEASURED, _ARCH = ("bf16", "fp16"), "sm_90"
#: The slowdown of exact float32 products relative to bf16 (H100 whitepaper: 67 and 990 TFLOP/s).
_EXACT_SLOWER = 15
#: The least rows of products in exact float32 that are left to ATen. On an H100, the best known config takes 1.1 to 3.7
#: times as long as ATen on nine of the ten products of at least so many (0.8 on the other, of 8 us), and 0.6, 0.7 and
#: 2.2 on those of 6, 8 and 1 rows (tests/kernels/inductor/exact_float32_on_gpu.py).
_LEAST_EXACT_ROWS = 16
#: Microseconds of the shortest other product that is tuned. Rotary embeddings have one of 1-2 us.
_LEAST_US = 3.0


def is_slow_as_exact(problem: Problem) -> bool:
    """Return whether a product is in exact float32 and has too many rows for a template to be as fast as ATen.

    False for batched products: their templates took 0.8 to 1.05 of ATen's time in the attention of BERT and ViT.

    >>> sizes = {"batch": 1, "n": 4096, "k": 4096, "dtype": "fp32"}
    >>> [is_slow_as_exact(Problem.of("inductor_mm", m=m, **sizes)) for m in (8, 512)]
    [False, True]
    """
    return is_exact(problem) and problem["batch"] == 1 and problem["m"] >= _LEAST_EXACT_ROWS


def is_first_choice_faster(problem: Problem) -> bool:
    """Return whether the template ranked first is expected to be faster than ATen's kernel.

    >>> sizes = {"batch": 1, "n": 4096, "k": 4096}
    >>> [is_first_choice_faster(Problem.of("inductor_mm", m=m, **sizes)) for m in (8, 512)]
    [True, False]
    """
    return problem.dtype_name in _MEASURED and problem["batch"] == 1 and _ratio(problem) < 1


def is_worth_timing(problem: Problem, device: DeviceSpec) -> bool:
    """Return whether the fastest of a few templates may be faster than ATen's kernel.

    Batched products, dtypes other than bf16 and fp16, and other archs were not compared with ATen. For these the result
    is True unless the product takes very little time.

    >>> h200, sizes = DeviceSpec.named("h200"), {"batch": 1, "n": 4096, "k": 4096}
    >>> [is_worth_timing(Problem.of("inductor_mm", m=m, **sizes), h200) for m in (8, 128, 512)]
    [True, True, False]
    """
    if problem.dtype_name in _MEASURED and problem["batch"] == 1 and device.arch == _ARCH:
        return _ratio(problem) - SEARCHED < 1
    batch, m, n, k = (problem[dim] for dim in ("batch", "m", "n", "k"))
    slower = _EXACT_SLOWER if is_exact(problem) else 1
    computed_us = slower * 2 * batch * m * n * k / (1e6 * device.matrix_tflops)
    moved_us = batch * (m * n + m * k + n * k) * problem.itemsize / (1e3 * device.copy_bandwidth_gbs)
    return max(computed_us, moved_us) >= _LEAST_US


def _ratio(problem: Problem) -> float:
    return next(ratio for most, ratio in RATIOS if min(problem["m"], problem["n"]) <= most)
