"""Read winners from the tuned files that installed engines ship: the configs that an engine's tuner found fastest.

The files are read at training time, and Foretune holds no copy of them. They cover cards that Foretune was not measured
on. What is not read: rows for AMD and Intel cards, whose kernels have other knobs; dtypes that the families lack (int8,
int4, fp8 without blocks of 128); files for the second product alone; and configs outside of the tuner's space.

A file's name lacks the hidden size and the experts per token: those of a model in `grouped_gemm/models.csv` are
assumed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import cache
from math import log2
from pathlib import Path
from typing import NamedTuple

from ...datasets import DeviceSpec, ForetuneError, KernelConfig
from ...model.train import Winner
from ..workloads import load_models
from .engines import EngineMissingError, Layer, check_engine, shipped_folder, tuner_space
from .family import DOWN, UP
from .launching import with_tma, wrong_for
from .tuned_files import launched_config, rows_in

_NAME = re.compile(
    r"E=(?P<experts>\d+),N=(?P<inter>\d+),device_name=(?P<card>[^,=]+)"
    r"(?P<fp8>,dtype=fp8_w8a8,block_shape=\[128, ?128\])?\.json"
)
#: Degrees of expert and tensor parallelism that a file may be for.
_DEGREES = (1, 2, 4, 8, 16)
#: The shares of a data sheet's memory bandwidth and matrix rate that an H200 reaches (see `DeviceSpec`).
_COPY_SHARE, _MATRIX_SHARE = 0.9, 0.73


class _Sheet(NamedTuple):
    """Figures of a GPU's data sheet, used to make its `DeviceSpec`."""

    arch: str
    sm_count: int
    l2_mib: int
    clock_mhz: int
    bandwidth_gbs: int
    matrix_tflops: int  # dense, in bf16


#: Data sheets by the card's name in file names. The H100 and the H200 have a measured spec.
_SHEETS = {
    "NVIDIA_A100-SXM4-40GB": _Sheet("sm_80", 108, 40, 1410, 1555, 312),
    "NVIDIA_A100-SXM4-80GB": _Sheet("sm_80", 108, 40, 1410, 2039, 312),
    "NVIDIA_A100_80GB_PCIe": _Sheet("sm_80", 108, 40, 1410, 1935, 312),
    "NVIDIA_A800-SXM4-80GB": _Sheet("sm_80", 108, 40, 1410, 2039, 312),
    "NVIDIA_L40S": _Sheet("sm_89", 142, 96, 2520, 864, 362),
    "NVIDIA_L20": _Sheet("sm_89", 92, 96, 2520, 864, 120),
    "NVIDIA_H100_PCIe": _Sheet("sm_90", 114, 50, 1755, 2039, 756),
    "NVIDIA_H800": _Sheet("sm_90", 132, 50, 1980, 3350, 989),
    "NVIDIA_H20": _Sheet("sm_90", 78, 60, 1980, 4000, 148),
    "NVIDIA_H20-3e": _Sheet("sm_90", 78, 60, 1980, 4800, 148),
    "NVIDIA_B200": _Sheet("sm_100", 148, 126, 1965, 8000, 2250),
    "NVIDIA_GB200": _Sheet("sm_100", 152, 126, 2062, 8000, 2500),
    "NVIDIA_B300_SXM6_AC": _Sheet("sm_103", 148, 126, 2032, 8000, 2250),
    "NVIDIA_GB300": _Sheet("sm_103", 152, 126, 2062, 8000, 2500),
    "NVIDIA_RTX_PRO_6000_Blackwell_Server_Edition": _Sheet("sm_120", 188, 128, 2430, 1597, 504),
    "NVIDIA_RTX_PRO_6000_Blackwell_Max-Q_Workstation_Edition": _Sheet("sm_120", 188, 128, 2280, 1792, 438),
}
#: Shared memory of a block and of an SM in KiB, by arch (CUDA programming guide, table of compute capabilities).
_SMEM_KIB = {"sm_80": (163, 164), "sm_89": (99, 100), "sm_120": (99, 100)}
_LARGE_SMEM_KIB = (227, 228)


class _Row(NamedTuple):
    """One row of a tuned file: the config that an engine runs for a layer and a number of tokens on a device."""

    engine: str
    device: DeviceSpec
    layer: Layer
    tokens: int
    config: KernelConfig


class _Space(NamedTuple):
    """The configs that an engine's tuner measures and that a device can run, for both products."""

    up: tuple[KernelConfig, ...]
    down: tuple[KernelConfig, ...]
    members: frozenset[KernelConfig]  # of `up`


def winners_of(engines: Sequence[str]) -> dict[str, tuple[Winner, ...]]:
    """Return the winners of both families, by name, from the tuned files of installed engines.

    A file is skipped if another one has the same rows for the same card and layer, because the engines copy from each
    other. The first engine's is kept.

    Args:
        engines: "vllm", "sglang" or both.

    Raises:
        EngineMissingError: An engine is not installed.
        ForetuneError: An engine is unknown, or a file cannot be read.
    """
    found: dict[str, list[Winner]] = {UP: [], DOWN: []}
    seen = set()
    for engine in engines:
        folder = shipped_folder(check_engine(engine))
        if folder is None:
            raise EngineMissingError(f"{engine} is not installed, but its tuned files are needed: pip install {engine}")
        for file in sorted(folder.rglob("E=*.json")):
            rows = list(_rows(engine, file))
            if (key := tuple(row[1:] for row in rows)) in seen:
                continue
            seen.add(key)
            for row in rows:
                space = _space(engine, row.layer.dtype, row.device)
                if row.config in space.members:
                    problems = [row.layer.problem(name, engine, row.tokens) for name in (UP, DOWN)]
                    found[UP].append(Winner(problems[0], row.device, row.config, space.up))
                    found[DOWN].append(Winner(problems[1], row.device, with_tma(row.config, 0), space.down))
    return {name: tuple(winners) for name, winners in found.items()}


def _rows(engine: str, file: Path) -> Iterator[_Row]:
    """Yield the rows of a tuned file; none if Foretune does not know its card or dtype."""
    named = _NAME.fullmatch(file.name)
    if named is None or (device := _device(named["card"])) is None:
        return
    layer = _assumed_layer(int(named["experts"]), int(named["inter"]), "fp8e4m3" if named["fp8"] else "bf16")
    try:
        rows = rows_in(json.loads(file.read_text()))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ForetuneError(f"{file} is not a tuned file of {engine}: {error}") from None
    for tokens, row in rows.items():
        if (config := launched_config(engine, layer, row)) is not None:
            yield _Row(engine, device, layer, tokens, config)


@cache
def _device(card: str) -> DeviceSpec | None:
    """Return the spec of a card by its name in file names: shipped, or from its data sheet; None for other cards."""
    for known in map(DeviceSpec.named, DeviceSpec.names()):
        if known.card_word == card:
            return known
    if card not in _SHEETS:
        return None
    sheet = _SHEETS[card]
    of_block, of_sm = _SMEM_KIB.get(sheet.arch, _LARGE_SMEM_KIB)
    return DeviceSpec(
        name=card.replace("_", " "),
        backend="cuda",
        arch=sheet.arch,
        sm_count=sheet.sm_count,
        smem_per_block_bytes=of_block * 1024,
        smem_per_sm_bytes=of_sm * 1024,
        registers_per_sm=65536,
        l2_bytes=sheet.l2_mib << 20,
        warp_size=32,
        clock_mhz=sheet.clock_mhz,
        copy_bandwidth_gbs=round(_COPY_SHARE * sheet.bandwidth_gbs, 1),
        matrix_tflops=round(_MATRIX_SHARE * sheet.matrix_tflops, 1),
    )


@cache
def _assumed_layer(experts: int, inter: int, dtype: str) -> Layer:
    """Return a layer of these sizes, with the hidden size and top-k of the model whose ranks have the nearest sizes."""

    def octaves(size: int, other: float) -> float:
        return abs(log2(size / other))

    *_, model = min(
        (
            (octaves(experts, model.num_experts / ep) + octaves(inter, model.moe_intermediate_size / tp), ep, tp, model)
            for model in load_models()
            if model.is_gated
            for ep in _DEGREES
            for tp in _DEGREES
        ),
        key=lambda one: one[:3],
    )
    return Layer(experts, min(model.top_k, experts), model.expert_hidden_size, inter, dtype)


@cache
def _space(engine: str, dtype: str, device: DeviceSpec) -> _Space:
    """Return the configs that an engine's tuner measures and that a device can run."""
    problem = Layer(8, 2, 1024, 1024, dtype).problem(UP, engine, 64)
    up = tuple(config for config in tuner_space(engine, dtype) if wrong_for(config, problem, device) is None)
    return _Space(up, tuple(with_tma(config, 0) for config in up), frozenset(up))
