"""What an engine runs for a layer as it is installed: its tuned file, or else its default."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...datasets import DeviceSpec, ForetuneError, KernelConfig
from .engine_source import shipped_folder
from .engines import SGLANG, Layer, default_config, file_name, folder_name
from .space import KNOBS, TMA, with_tma


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


def default_pair(engine: str, layer: Layer, tokens: int) -> Pair:
    """What the engine runs where it finds no file."""
    return Pair.alike(default_config(engine, layer.dtype, tokens, layer.experts))


def shipped_pairs(engine: str, layer: Layer, device: DeviceSpec, triton: str) -> dict[int, Pair]:
    """What the installed engine's own file says, by the number of tokens; empty where it ships none for this layer, and
    where it is not installed. Rows with a knob that the engine would refuse, or none of its kernel's, are left out.

    Raises `ForetuneError` for a file that is there and is no table.
    """
    folder = shipped_folder(engine)
    if folder is None:
        return {}
    up = _table(engine, folder, file_name(engine, layer, device), triton)
    down = _table(engine, folder, file_name(engine, layer, device, down=True), triton) if engine == SGLANG else {}
    pairs: dict[int, Pair] = {}
    for tokens, row in up.items():
        config = _config(row)
        if config is None:
            continue
        below = _config(row_for(down, tokens)) if down else None
        if below is None:
            pairs[tokens] = Pair.alike(config)
            continue
        tma = int(bool(row_for(down, tokens).get(TMA, False)))
        shared = KernelConfig.of(**below.to_json() | {"BLOCK_SIZE_M": config["BLOCK_SIZE_M"]})  # as the engine does
        pairs[tokens] = Pair(config, with_tma(shared, tma))
    return pairs


def row_for(rows: Mapping[int, Any], tokens: int) -> Any:
    """The row that an engine takes: the one nearest to the number of tokens, the first of two as near.

    >>> row_for({1: "a", 4: "b", 8: "c"}, 6), row_for({1: "a"}, 9000)
    ('b', 'a')
    """
    return rows[min(rows, key=lambda batch: abs(batch - tokens))]


def _table(engine: str, folder: Path, name: str, triton: str) -> dict[int, Mapping[str, Any]]:
    """The rows of a file: SGLang's for this Triton, or else for the newest other one; none where there is none."""
    files = [folder / folder_name(engine, triton) / name]
    if engine == SGLANG:
        files += sorted(folder.glob(f"configs/triton_*/{name.replace('[', '[[]')}"), key=_version_of, reverse=True)
    for file in files:
        if not file.is_file():
            continue
        try:
            table = json.loads(file.read_text())
            return {int(tokens): dict(row) for tokens, row in table.items() if tokens != "triton_version"}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise ForetuneError(f"{file}: no tuned file of {engine}: {error}") from None
    return {}


def _version_of(file: Path) -> tuple[int, ...]:
    return tuple(int(part) for part in file.parent.name.removeprefix("triton_").split("_") if part.isdigit())


def _config(row: Mapping[str, Any]) -> KernelConfig | None:
    """A row as a config; launch options that it leaves out are Triton's."""
    try:
        return KernelConfig.of(**{knob: row[knob] for knob in KNOBS if knob in row})
    except ForetuneError:
        return None
