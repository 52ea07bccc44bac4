"""What `helion_seeds_on_gpu.py` does in processes of their own, because importing Helion looks for a GPU."""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import helion
import helion.language as hl
import torch
from foretune import DeviceSpec
from foretune.runtime import Timer
from helion.autotuner.metrics import register_post_autotune_hook

ROUNDS, SEED = 7, 0
#: What the results keep of Helion's own summary of a search.
SUMMARY = ("search_algorithm", "num_configs_tested", "num_compile_failures", "num_accuracy_failures", "num_generations")
Sizes = tuple[int, ...]  # (batch, m, n, k)


def matmul(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Return x @ w.T."""
    (m, k), n = x.size(), w.size(0)
    y = torch.empty([m, n], dtype=x.dtype, device=x.device)
    for rows, columns in hl.tile([m, n]):
        total = hl.zeros([rows, columns], dtype=torch.float32)
        for depth in hl.tile(k):
            total = torch.addmm(total, x[rows, depth], w[columns, depth].T)
        y[rows, columns] = total.to(y.dtype)
    return y


def matmul_bias_gelu(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return gelu(x @ w.T + bias)."""
    (m, k), n = x.size(), w.size(0)
    y = torch.empty([m, n], dtype=x.dtype, device=x.device)
    for rows, columns in hl.tile([m, n]):
        total = hl.zeros([rows, columns], dtype=torch.float32)
        for depth in hl.tile(k):
            total = torch.addmm(total, x[rows, depth], w[columns, depth].T)
        y[rows, columns] = torch.nn.functional.gelu(total + bias[columns].to(torch.float32)).to(y.dtype)
    return y


def bmm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Return x @ w.mT of each matrix of a batch."""
    (batch, m, k), n = x.size(), w.size(1)
    y = torch.empty([batch, m, n], dtype=x.dtype, device=x.device)
    for matrix, rows, columns in hl.tile([batch, m, n]):
        total = hl.zeros([matrix, rows, columns], dtype=torch.float32)
        for depth in hl.tile(k):
            total = torch.baddbmm(total, x[matrix, rows, depth], w[matrix, columns, depth].transpose(1, 2))
        y[matrix, rows, columns] = total.to(y.dtype)
    return y


KERNELS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {  # in Helion, in PyTorch
    "matmul": (matmul, torch.nn.functional.linear),
    "matmul_bias_gelu": (matmul_bias_gelu, lambda *a: torch.nn.functional.gelu(torch.nn.functional.linear(*a))),
    "bmm": (bmm, lambda x, w: torch.bmm(x, w.mT)),
}


def operands(kernel: str, dims: Sizes, device: str = "cuda") -> list[torch.Tensor]:
    """Return random operands in bf16 whose product has elements of about 1."""
    torch.manual_seed(SEED)
    batch, m, n, k = dims
    shapes = [(m, k), (n, k)] if kernel != "bmm" else [(batch, m, k), (batch, n, k)]
    drawn = [torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes]
    drawn[1] *= k**-0.5
    bias = [torch.randn(n, device=device, dtype=torch.bfloat16)] if kernel == "matmul_bias_gelu" else []
    return [*drawn, *bias]


def bound(kernel: str, args: list[torch.Tensor], **settings: Any) -> Any:
    """Return a kernel above, compiled by Helion up to the choice of its config."""
    return helion.kernel(KERNELS[kernel][0], static_shapes=True, **settings).bind(tuple(args))


def search(
    kernel: str, dims: Sizes, seeds: Callable[[DeviceSpec], list[dict[str, Any]]] | None, budget_s: int, folder: Path
) -> None:
    """Run one search, with the seeds if given; its trace and its summary are files of `folder`."""
    args, start = operands(kernel, dims), time.perf_counter()
    given = seeds(DeviceSpec.live()) if seeds else None
    ranked_s = time.perf_counter() - start
    limits = {"autotune_effort": "quick", "autotune_budget_seconds": budget_s, "autotune_random_seed": SEED}
    log = {"autotune_log": str(folder / "log"), "autotune_log_details": True, "autotune_log_level": 30}
    one_process = {"autotune_benchmark_subprocess": False}  # another one would import everything again
    bound_kernel = bound(kernel, args, autotune_seed_configs=given, **limits, **log, **one_process)
    summaries: list[dict[str, Any]] = []
    register_post_autotune_hook(lambda metrics: summaries.append(metrics.to_dict()))
    start = time.perf_counter()
    chosen = bound_kernel.autotune(args, force=True)
    found = {"search_s": time.perf_counter() - start, "ranked_s": ranked_s, "chosen": chosen.config, "seeds": given}
    (folder / "summary.json").write_text(json.dumps(found | {name: summaries[-1][name] for name in SUMMARY}))


def judge(kernel: str, dims: Sizes, configs: list[dict[str, Any]], folder: Path) -> None:
    """Time each config, Helion's default (the last) and PyTorch (-1) in turns; write microseconds, or errors."""
    args, reference = operands(kernel, dims), KERNELS[kernel][1]
    bound_kernel, expected = bound(kernel, args), reference(*args).float()
    launches: dict[int, Callable[[], Any]] = {-1: partial(reference, *args)}
    wrong: dict[int, str] = {}
    for i, config in enumerate([*configs, dict(bound_kernel.config_spec.default_config().config)]):
        try:
            launch = partial(bound_kernel.compile_config(helion.Config(**config), allow_print=False), *args)
            torch.testing.assert_close(launch().float(), expected, rtol=0.02, atol=0.05)
            launches[i] = launch
        except Exception as error:  # noqa: BLE001, PERF203 -- a config that fails is a result
            wrong[i] = f"{type(error).__name__}: {error}"[:200]
    timer, samples = Timer(), {i: list[float]() for i in launches}
    for _ in range(ROUNDS):
        for i in random.sample(list(launches), len(launches)):
            samples[i].append(timer.time(launches[i], samples=5).time_us)
    times = {i: statistics.median(found) for i, found in samples.items()}
    (folder / "judged.json").write_text(json.dumps(times | wrong))
