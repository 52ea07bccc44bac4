"""What an engine runs for a layer now: the row of the tuned file that it reads, or else its default config."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ...datasets import DeviceSpec, ForetuneError, KernelConfig
from .engine_source import shipped_folder
from .engines import SCALED_BLOCK, SGLANG, VLLM, Layer, default_config, file_name, folder_name
from .space import KNOBS, TMA, in_engine_words, with_tma

#: The environment variable that names the folder in which an engine looks first.
VARIABLES = {SGLANG: "SGLANG_MOE_CONFIG_DIR", VLLM: "VLLM_TUNED_CONFIG_FOLDER"}
#: Keys of rows that are not knobs, and the value that changes nothing on a CUDA device.
_IDLE_KEYS = {"SPLIT_K": 1, "num_ctas": 1}


@dataclass(frozen=True)
class Pair:
    """The configs of both products. One sorting serves them, so they share BLOCK_SIZE_M.

    Raises `ForetuneError` where they do not.
    """

    up: KernelConfig
    down: KernelConfig

    def __post_init__(self) -> None:
        if self.up["BLOCK_SIZE_M"] != self.down["BLOCK_SIZE_M"]:
            raise ForetuneError(
                "both products share one sorting, so BLOCK_SIZE_M must be the same but is "
                f"{self.up['BLOCK_SIZE_M']} and {self.down['BLOCK_SIZE_M']}"
            )

    @classmethod
    def alike(cls, config: KernelConfig) -> Pair:
        """One config for both, as vLLM has it."""
        return cls(config, with_tma(config, 0))

    @property
    def is_alike(self) -> bool:
        return self.down == with_tma(self.up, 0)

    @property
    def words(self) -> Words:
        """Return what a tuned file says for these configs."""
        return Words(in_engine_words(self.up), in_engine_words(self.down))


class Words(NamedTuple):
    """The rows of an engine's files for both products, key by key."""

    up: Mapping[str, Any]
    down: Mapping[str, Any]


@dataclass(frozen=True)
class TunedRow:
    """One row of the file that an engine reads: what it says, and as which configs the engine launches it."""

    words: Words
    pair: Pair | None  # None where the engine launches what no KernelConfig says: such a row can only be copied


@dataclass(frozen=True)
class TunedTable:
    """The rows that an engine reads for a layer, by the number of tokens in the order of its file; empty where it reads
    no file and runs its default."""

    rows: Mapping[int, TunedRow] = field(default_factory=dict)
    file: Path | None = None
    has_down: bool = False  # whether SGLang reads a second file, for the second product


def default_pair(engine: str, layer: Layer, tokens: int) -> Pair:
    """What the engine runs where it finds no file."""
    return Pair.alike(default_config(engine, layer.dtype, tokens, layer.experts))


def table_in_force(
    engine: str, layer: Layer, device: DeviceSpec, triton: str, out: Path | str | None = None
) -> TunedTable:
    """Return the rows that an engine reads for a layer now.

    The first of these folders that has the layer's file decides: `out`, the folder that the engine's environment
    variable names, and the installed engine's own. SGLang's variable replaces its own folder. Each row is read as the
    engine launches it.

    Args:
        engine: "sglang" or "vllm".
        layer: The layer on one rank.
        device: The GPU that the file is for.
        triton: The version of Triton, which decides on SGLang's folder.
        out: The folder for new files.

    Returns:
        The table; an empty one where there is no file.

    Raises:
        ForetuneError: A file is there and is no table.
    """
    told = os.environ.get(VARIABLES[engine])
    own = None if told and engine == SGLANG else shipped_folder(engine)
    for folder in (out, told or None, own):
        if folder is None:
            continue
        file, up = _table(engine, Path(folder), file_name(engine, layer, device), triton)
        if file is None:
            continue
        down: dict[int, dict[str, Any]] = {}
        if engine == SGLANG:
            _, down = _table(engine, Path(folder), file_name(engine, layer, device, down=True), triton)
        rows = {tokens: _row(engine, layer, row, row_for(down, tokens) if down else None) for tokens, row in up.items()}
        return TunedTable(rows, file, bool(down))
    return TunedTable()


def row_for(rows: Mapping[int, Any], tokens: int) -> Any:
    """The row that an engine takes: the one nearest to the number of tokens, the first of two as near.

    >>> row_for({1: "a", 4: "b", 8: "c"}, 6), row_for({1: "a"}, 9000)
    ('b', 'a')
    """
    return rows[min(rows, key=lambda batch: abs(batch - tokens))]


def _table(engine: str, folder: Path, name: str, triton: str) -> tuple[Path | None, dict[int, dict[str, Any]]]:
    """Return the file that an engine reads in a folder, and its rows: SGLang's for this Triton, or else for the newest
    other one. None and no rows where there is none."""
    files = [folder / folder_name(engine, triton) / name]
    if engine == SGLANG:
        files += sorted(folder.glob(f"configs/triton_*/{name.replace('[', '[[]')}"), key=_version_of, reverse=True)
    for file in files:
        if not file.is_file():
            continue
        try:
            table = json.loads(file.read_text())
            return file, {int(tokens): dict(row) for tokens, row in table.items() if tokens != "triton_version"}
        except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ForetuneError(f"{file}: no tuned file of {engine}: {error}") from None
    return None, {}


def _version_of(file: Path) -> tuple[int, ...]:
    return tuple(int(part) for part in file.parent.name.removeprefix("triton_").split("_") if part.isdigit())


def _row(engine: str, layer: Layer, up: dict[str, Any], down: dict[str, Any] | None) -> TunedRow:
    """Return a row of the first product's file with that of the second's, where SGLang has one."""
    if down is None:
        words = Words(up, {TMA: False} | up if engine == SGLANG else up)
    else:  # SGLang overrides what the second says
        words = Words(up, down | {"BLOCK_SIZE_M": up["BLOCK_SIZE_M"]} if "BLOCK_SIZE_M" in up else down)
    first, second = (_config(engine, layer, row) for row in words)
    if first is None or second is None:
        return TunedRow(words, None)
    return TunedRow(words, Pair(first, with_tma(second, int(bool(words.down.get(TMA, False))))))


def _config(engine: str, layer: Layer, row: Mapping[str, Any]) -> KernelConfig | None:
    """Return a row as the config that the engine launches; launch options that it leaves out are Triton's. None for a
    row with keys of another kernel or device, or with values that no config has."""
    if any(key not in (*KNOBS, TMA) and value != _IDLE_KEYS.get(key) for key, value in row.items()):
        return None
    knobs = {knob: row[knob] for knob in KNOBS if knob in row}
    if any(type(value) is not int for value in knobs.values()):
        return None
    if engine == VLLM and layer.dtype == "fp8e4m3" and "BLOCK_SIZE_K" in knobs:
        knobs["BLOCK_SIZE_K"] = min(knobs["BLOCK_SIZE_K"], SCALED_BLOCK)
    try:
        return KernelConfig.of(**knobs) if "BLOCK_SIZE_M" in knobs else None
    except ForetuneError:
        return None
