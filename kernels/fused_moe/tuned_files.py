"""Tuned files of a serving engine: those that it reads now, and new ones with a verdict on their worth.

`table_in_force` returns what an engine runs for a layer now. `TunedFiles` holds new files for one layer.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from ...datasets import DeviceSpec, ForetuneError, KernelConfig
from ...datasets.console import table
from ...datasets.files import already_there, write_new
from .engines import (
    BATCH_SIZES,
    SCALED_BLOCK,
    SGLANG,
    VLLM,
    Layer,
    default_config,
    default_knobs,
    file_name,
    folder_name,
    shipped_folder,
)
from .launching import KNOBS, TMA, file_entry, with_tma

#: The environment variable with the folder that an engine searches first.
VARIABLES = {SGLANG: "SGLANG_MOE_CONFIG_DIR", VLLM: "VLLM_TUNED_CONFIG_FOLDER"}
#: Keys of rows that are not knobs, with the value that has no effect on a CUDA device.
_IDLE_KEYS = {"SPLIT_K": 1, "num_ctas": 1}


@dataclass(frozen=True)
class Pair:
    """The configs of both products. They share BLOCK_SIZE_M, because rows are sorted once for both.

    Raises:
        ForetuneError: The configs have different BLOCK_SIZE_M.
    """

    up: KernelConfig
    down: KernelConfig

    def __post_init__(self) -> None:
        if self.up["BLOCK_SIZE_M"] != self.down["BLOCK_SIZE_M"]:
            raise ForetuneError(
                "rows are sorted once for both products, so BLOCK_SIZE_M must be the same but is "
                f"{self.up['BLOCK_SIZE_M']} and {self.down['BLOCK_SIZE_M']}"
            )

    @classmethod
    def alike(cls, config: KernelConfig) -> Pair:
        """Return a pair with the same config for both products, as vLLM runs them."""
        return cls(config, with_tma(config, 0))

    @property
    def entries(self) -> FileEntries:
        """The rows of the engine's tuned files that make it run these configs."""
        return FileEntries(file_entry(self.up), file_entry(self.down))


class FileEntries(NamedTuple):
    """The rows of an engine's files for both products, as JSON objects."""

    up: Mapping[str, Any]
    down: Mapping[str, Any]


@dataclass(frozen=True)
class TunedRow:
    """One row of the file that an engine reads, and the configs that the engine launches for it."""

    entries: FileEntries
    pair: Pair | None  # None if no KernelConfig stands for the row, which then can only be copied


@dataclass(frozen=True)
class TunedTable:
    """The rows that an engine reads for a layer, by number of tokens in the file's order; empty without a file."""

    rows: Mapping[int, TunedRow] = field(default_factory=dict)
    file: Path | None = None
    has_down: bool = False  # whether SGLang reads a second file, for the second product


def default_pair(engine: str, layer: Layer, tokens: int) -> Pair:
    """Return the pair that an engine runs for a number of tokens if it finds no file."""
    return Pair.alike(default_config(engine, layer.dtype, tokens, layer.experts))


def table_in_force(
    engine: str, layer: Layer, device: DeviceSpec, triton: str, out: Path | str | None = None
) -> TunedTable:
    """Return the rows that an engine reads for a layer now.

    The file is taken from the first of these folders that has it: `out`, the folder in the engine's environment
    variable, and the installed engine's own folder. SGLang's variable replaces its own folder. Each row is interpreted
    as the engine launches it.

    Args:
        engine: "sglang" or "vllm".
        layer: The layer on one rank.
        device: The GPU that the file is for.
        triton: The version of Triton, which is part of SGLang's folder.
        out: The folder for new files.

    Returns:
        The table; an empty one if there is no file.

    Raises:
        ForetuneError: A file cannot be parsed.
    """
    variable = os.environ.get(VARIABLES[engine])
    own = None if variable and engine == SGLANG else shipped_folder(engine)
    for folder in (out, variable or None, own):
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
    """Return the row that an engine uses: that of the nearest number of tokens, and in a tie the table's first.

    >>> row_for({1: "a", 4: "b", 8: "c"}, 6), row_for({1: "a"}, 9000)
    ('b', 'a')
    """
    return rows[min(rows, key=lambda batch: abs(batch - tokens))]


def _table(engine: str, folder: Path, name: str, triton: str) -> tuple[Path | None, dict[int, dict[str, Any]]]:
    """Return the file that an engine reads in a folder, and its rows; None and no rows without a file.

    SGLang reads the file for this version of Triton, or else the one for the newest other version.
    """
    files = [folder / folder_name(engine, triton) / name]
    if engine == SGLANG:
        files += sorted(folder.glob(f"configs/triton_*/{name.replace('[', '[[]')}"), key=_version_of, reverse=True)
    for file in files:
        if not file.is_file():
            continue
        try:
            table = json.loads(file.read_text())
            return file, rows_in(table)
        except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ForetuneError(f"{file} is not a tuned file of {engine}: {error}") from None
    return None, {}


def _version_of(file: Path) -> tuple[int, ...]:
    """Return the Triton version in the name of a file's folder."""
    return tuple(int(part) for part in file.parent.name.removeprefix("triton_").split("_") if part.isdigit())


def _row(engine: str, layer: Layer, up: dict[str, Any], down: dict[str, Any] | None) -> TunedRow:
    """Return the row of both products, from rows of the first file (`up`) and of SGLang's second one (`down`)."""
    if down is None:
        entries = FileEntries(up, {TMA: False} | up if engine == SGLANG else up)
    else:  # SGLang overrides BLOCK_SIZE_M of the second file
        entries = FileEntries(up, down | {"BLOCK_SIZE_M": up["BLOCK_SIZE_M"]} if "BLOCK_SIZE_M" in up else down)
    first, second = (launched_config(engine, layer, row) for row in entries)
    if first is None or second is None:
        return TunedRow(entries, None)
    return TunedRow(entries, Pair(first, with_tma(second, int(bool(entries.down.get(TMA, False))))))


def launched_config(engine: str, layer: Layer, row: Mapping[str, Any]) -> KernelConfig | None:
    """Return the config that the engine launches for a row, with Triton's launch options where the row has none.

    None if the row has keys of another kernel or device, or values that a `KernelConfig` cannot hold.
    """
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


OURS, DEFAULT, SHIPPED = "ours", "default", "shipped"
#: Most tokens that an engine looks up at once; changes of its default beyond are not considered.
_MOST_TOKENS = 16384


@dataclass(frozen=True)
class Row:
    """One row of the tuned files that are written, and the times of the pairs of configs that were compared for it.

    A time is that of the layer's two products together.

    A row is pinned if it repeats what the engine runs now, because the best pair of configs found is not enough faster.
    `times_us` has "ours" (the best pair found, also if the row is pinned), "default", and "shipped" if the engine reads
    a file now whose row can be expressed as configs.
    """

    tokens: int
    entries: FileEntries  # the row in the file
    pinned: str  # "default" or "shipped" if the row repeats that one because ours gains too little; else ""
    times_us: Mapping[str, float]

    @property
    def gain(self) -> float:
        """Current time divided by the row's time; 1.0 if `pinned`, since the engine then runs the same as now."""
        now = SHIPPED if SHIPPED in self.times_us else DEFAULT
        return 1.0 if self.pinned else self.times_us[now] / self.times_us[OURS]


def rows_in(table: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Return the rows in the content of a tuned file, by number of tokens."""
    return {int(tokens): dict(row) for tokens, row in table.items() if tokens != "triton_version"}


@dataclass(frozen=True)
class TunedFiles:
    """The tuned files of both products of one layer, to be written for vLLM or SGLang: a row for each batch size."""

    engine: str
    layer: Layer
    device: DeviceSpec
    triton: str
    rows: tuple[Row, ...]
    measured: bool  # False: predicted
    least: float  # least reliable gain: rows below it are pinned, and files below it are not worth using
    reason: str  # how the times were predicted or measured
    now: TunedTable = field(default_factory=TunedTable)  # the file that the engine reads now

    @property
    def gain(self) -> float:
        """The geometric mean of the rows' gains."""
        return math.exp(statistics.fmean(math.log(row.gain) for row in self.rows))

    @property
    def verdict(self) -> str:
        """One sentence that says if the files are worth using, and their gain."""
        how = "measured" if self.measured else "predicted, not measured"
        now = f"{self.engine}'s default" if self.now.file is None else f"the file that {self.engine} reads now"
        best = max(self.rows, key=lambda row: row.gain)
        pinned = sum(bool(row.pinned) for row in self.rows)
        figure = (
            f"{self.gain:.3f}x over {now} in the geometric mean of {len(self.rows)} batch sizes, at most "
            f"{best.gain:.3f}x at {best.tokens} tokens; {pinned} rows are pinned to the current config ({how})"
        )
        return f"worth it: {figure}" if self.gain >= self.least else f"not worth it: {figure}"

    def tables(self) -> dict[str, dict[str, Any]]:
        """Return the files' contents by their path below the folder in the engine's environment variable.

        SGLang gets a second file for the second product if its rows differ, or if such a file exists already.
        """
        folder = folder_name(self.engine, self.triton)
        written = self._written()
        version: dict[str, Any] = (
            {"triton_version": self.triton} if self.engine != SGLANG else {}
        )  # SGLang parses each key as a number
        up = {str(tokens): dict(entries.up) for tokens, entries in written.items()}
        files = {str(Path(folder, file_name(self.engine, self.layer, self.device))): version | up}
        differ = any(entries.down != {TMA: False, **entries.up} for entries in written.values())
        if self.engine == SGLANG and (differ or self.now.has_down):
            down = {str(tokens): dict(entries.down) for tokens, entries in written.items()}
            files[str(Path(folder, file_name(self.engine, self.layer, self.device, down=True)))] = down
        return files

    def save(self, folder: Path | str, *, force: bool = False) -> list[Path]:
        """Write the files, each atomically.

        Args:
            folder: The folder that the engine's environment variable will name.
            force: Whether to replace existing files that have other contents.

        Returns:
            The paths of the files.

        Raises:
            ForetuneError: Such a file exists, and `force` is false.
        """
        contents = {name: json.dumps(rows, indent=4) + "\n" for name, rows in self.tables().items()}
        return write_new(folder, contents, force=force)

    def to_json(self) -> dict[str, Any]:
        """Return the engine, device, file names, rows, gain and verdict as JSON values."""
        return {
            "engine": self.engine,
            "device": self.device.name,
            "files": list(self.tables()),
            "variable": VARIABLES[self.engine],
            "measured": self.measured,
            "reason": self.reason,
            "verdict": self.verdict,
            "worth_it": self.gain >= self.least,
            "gain": round(self.gain, 4),
            "rows": [
                {
                    "tokens": row.tokens,
                    "pinned": row.pinned,
                    "times_us": {name: round(us, 3) for name, us in row.times_us.items()},
                    "gain": round(row.gain, 4),
                    "up": dict(row.entries.up),
                    "down": dict(row.entries.down),
                }
                for row in self.rows
            ],
        }

    def __rich__(self) -> Any:
        names = list(dict.fromkeys(name for row in self.rows for name in row.times_us))
        rows = [
            [
                row.tokens,
                *(f"{row.times_us[name]:.1f}" if name in row.times_us else "" for name in names),
                f"{row.gain:.3f}x",
                row.pinned,
                _short(row.entries.up),
                "same" if _short(row.entries.down) == _short(row.entries.up) else _short(row.entries.down),
            ]
            for row in self.rows
        ]
        layer = self.layer
        return table(
            f"{self.engine}: {layer.experts} experts, top {layer.topk}, hidden {layer.hidden}, inter {layer.inter}, "
            f"{layer.dtype}, on {self.device.name}; us of both products",
            ("tokens", *names, "gain", "pinned to", "first (M N K group warps stages)", "second"),
            rows,
            below=[self.verdict, self.reason, f"To use the files, set {VARIABLES[self.engine]}=FOLDER"],
        )

    def _written(self) -> dict[int, FileEntries]:
        """Return the rows to write by number of tokens.

        An engine uses the nearest row for a batch. Batches nearest to a pinned row, or to a row copied from the current
        file, must run what they run without these files. So rows are added on both sides of each number of tokens at
        which that would change.
        """
        rows = {row.tokens: row.entries for row in self.rows}
        rows |= {tokens: row.entries for tokens, row in self.now.rows.items() if tokens not in rows}
        pinned = rows.keys() - {row.tokens for row in self.rows if not row.pinned}
        changes = list(self._changes()) if pinned else []
        nearest = {tokens: tokens for tokens in sorted(rows)}
        while True:
            more: dict[int, FileEntries] = {}
            for last in changes:
                sides = {tokens: self._entries_now(tokens) for tokens in (last, last + 1)}
                taken = {tokens: row_for(nearest, tokens) for tokens in sides}
                affected = [tokens for tokens in sides if taken[tokens] in pinned]
                if any(rows[taken[tokens]] != sides[tokens] for tokens in affected):
                    more |= {tokens: sides[tokens] for tokens in affected if tokens not in rows}
            if not more:
                return dict(sorted(rows.items()))
            rows |= more
            pinned |= more.keys()
            nearest = {tokens: tokens for tokens in sorted(rows)}

    def _entries_now(self, tokens: int) -> FileEntries:
        """Return what the engine runs for a number of tokens without these files."""
        if self.now.rows:
            entries: FileEntries = row_for(self.now.rows, tokens).entries
            return entries
        return default_pair(self.engine, self.layer, tokens).entries

    def _changes(self) -> Iterator[int]:
        """Yield the numbers of tokens after which the engine's default config, used without a file, may change."""
        if self.now.rows:
            batches = sorted(self.now.rows)
            for low, high in pairwise(batches):
                yield from {(low + high - 1) // 2, (low + high) // 2}  # in a tie the engine uses the first in the file
        else:
            yield from _changes(self.engine, self.layer)


def check_none_there(engine: str, layer: Layer, device: DeviceSpec, triton: str, folder: Path | str) -> None:
    """Check that no file exists where one would be written for this layer.

    Args:
        engine: "sglang" or "vllm".
        layer: The layer on one rank.
        device: The GPU that the files are for.
        triton: The version of Triton that they are for.
        folder: The folder for new files.

    Raises:
        ForetuneError: There is such a file; the message names it.
    """
    for down in (False, True) if engine == SGLANG else (False,):
        path = Path(folder, folder_name(engine, triton), file_name(engine, layer, device, down=down))
        if path.exists():
            raise already_there(path)


def _changes(engine: str, layer: Layer) -> Iterable[int]:
    """Yield the numbers of tokens after which the engine's default config changes."""
    before = default_knobs(engine, layer.dtype, BATCH_SIZES[0], layer.experts)
    for tokens in range(BATCH_SIZES[0] + 1, _MOST_TOKENS + 1):
        after = default_knobs(engine, layer.dtype, tokens, layer.experts)
        if after != before:
            yield tokens - 1
        before = after


def _short(entry: Mapping[str, Any]) -> str:
    """Return the knob values of a row in a tuned file as one line of text."""
    return " ".join(str(entry.get(knob, "-")) for knob in KNOBS) + " TMA" * bool(entry.get(TMA))
