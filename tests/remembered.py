"""A cache of one kernel's times: what there is to show, freeze and export."""

from __future__ import annotations

from foretune.datasets import DeviceSpec, KernelConfig, Problem
from foretune.runtime.tuning.cache.kernel_cache import ChoiceCache

H200, H100 = DeviceSpec.named("h200"), DeviceSpec.named("h100")
KERNEL = "package.ops.softmax_kernel"
CONFIGS = tuple(KernelConfig.of(BLOCK=block, num_warps=warps) for block in (16, 64, 256) for warps in (2, 8))


def problem(rows: int, columns: int = 128) -> Problem:
    return Problem.of(KERNEL, rows=rows, columns=columns)


def time_us(rows: int, config: KernelConfig, device: DeviceSpec = H200) -> float | None:
    """Large blocks for many rows, and eight warps on the H100."""
    if config["BLOCK"] == 16 and rows > 2000:
        return None
    waste = abs(rows / 16 - config["BLOCK"]) / 64 + (config.num_warps != (2 if device is H200 else 8))
    return round(10.0 + 5 * waste, 3)


def remember(device: DeviceSpec = H200, kernel: str = KERNEL, source: str = "s1") -> ChoiceCache:
    """All configs on some problems, with the launches that had them."""
    cache = ChoiceCache.of(kernel, source, device)
    for rows in (64, 256, 1024, 4096):
        one = Problem(kernel, problem(rows).dims)
        cache.record_all(one, {config: time_us(rows, config, device) for config in CONFIGS})
        cache.saw_launch(one, ["rows", "columns"], [rows, 128, "torch.bfloat16", "torch.float32"])
    return cache
