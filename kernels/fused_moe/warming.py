"""Compile ahead of a run what vLLM launches for a MoE layer with Foretune's plugin: `foretune warmup vllm`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...datasets import DeviceSpec, KernelConfig, Measurable, Problem
from ...runtime.tuning.warmup import WarmedUp, warm_up_launches
from .engines import BATCH_SIZES, VLLM, Layer, engine_kernel
from .launching import with_tma
from .measurable import FusedMoeDown, FusedMoeUp
from .tuned_files import launched_config, row_for, rows_in, table_in_force
from .tuning import triton_version, tune_layer


def warm_up_vllm(layer: Layer, device: DeviceSpec, *, workers: int | None = None) -> WarmedUp:
    """Compile what vLLM launches for a layer and batches of up to 4,096 tokens, into Triton's cache.

    The configs are those of the tuned file that vLLM reads, or else those that Foretune's plugin predicts. A binary
    also depends on whether sizes are multiples of 16, so that a config has several.

    Args:
        layer: The layer on one rank.
        device: The device.
        workers: The number of compiling threads; one per core if left out.

    Raises:
        EngineMissingError: vLLM is not installed.
    """
    engine_kernel(VLLM)  # raises if it is missing
    launches = list(_launches(layer, device))
    problems = {problem for _, _, problem in launches}
    return warm_up_launches(VLLM, device, len(problems), launches, workers=workers)


def _launches(layer: Layer, device: DeviceSpec) -> Iterator[tuple[Measurable, KernelConfig, Problem]]:
    """Yield one launch for each binary: its family, config and problem."""
    triton = triton_version()
    rows: Mapping[int, Mapping[str, Any]]
    rows = {tokens: row.entries.up for tokens, row in table_in_force(VLLM, layer, device, triton).rows.items()}
    if not rows:
        (table,) = tune_layer(VLLM, layer, device).tables().values()
        rows = rows_in(table)
    configs = {tokens: launched_config(VLLM, layer, row) for tokens, row in rows.items()}
    met = set()
    for tokens in range(1, BATCH_SIZES[-1] + 1):
        if (config := row_for(configs, tokens)) is None:  # a row for another kernel or device
            continue
        for family, chosen in ((FusedMoeUp(), config), (FusedMoeDown(), with_tma(config, 0))):
            problem = layer.problem(family.name, VLLM, tokens)
            binary = family.name, family.binary_key(chosen, problem)
            if binary not in met:
                met.add(binary)
                yield family, chosen, problem
