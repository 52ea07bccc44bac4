"""What an engine runs for a layer now (the row of the tuned file that it reads, or else its default config), and
`TunedFiles`: the files for one layer that it looks up, and the verdict on what they are worth."""

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
from ...datasets.files import check_folder, inside, replacing
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
from .launching import KNOBS, TMA, in_engine_words, with_tma

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


OURS, DEFAULT, SHIPPED = "ours", "default", "shipped"
#: Engines look nothing up beyond so many tokens at once that a default would change for.
_MOST_TOKENS = 16384


@dataclass(frozen=True)
class Row:
    """One row of the files, and how long both products take together with it and with what else could run.

    `times_us` has "ours" (what was found, pinned or not), "default", and "shipped" where the engine reads a file now
    whose row can be ranked.
    """

    tokens: int
    words: Words  # what the file says
    pinned: str  # "default" or "shipped" where nothing was gained, so that the row says that; else ""
    times_us: Mapping[str, float]

    @property
    def gain(self) -> float:
        """How many times as fast the row is as what the engine runs now; 1.0 for a pinned row, which says just that."""
        now = SHIPPED if SHIPPED in self.times_us else DEFAULT
        return 1.0 if self.pinned else self.times_us[now] / self.times_us[OURS]


@dataclass(frozen=True)
class TunedFiles:
    """A row for each batch size that the engines' tuners measure."""

    engine: str
    layer: Layer
    device: DeviceSpec
    triton: str
    rows: tuple[Row, ...]
    measured: bool  # else predicted
    least: float  # the gain that is believed: below it a row is pinned, and the files are not worth their upkeep
    reason: str  # who predicted, or what was measured
    now: TunedTable = field(default_factory=TunedTable)  # what the engine reads without these files

    @property
    def gain(self) -> float:
        """The geometric mean of the rows' gains."""
        return math.exp(statistics.fmean(math.log(row.gain) for row in self.rows))

    @property
    def verdict(self) -> str:
        how = "measured" if self.measured else "predicted, not measured"
        now = f"{self.engine}'s default" if self.now.file is None else f"the file that {self.engine} reads now"
        best = max(self.rows, key=lambda row: row.gain)
        pinned = sum(bool(row.pinned) for row in self.rows)
        figure = (
            f"{self.gain:.3f}x over {now} in the geometric mean of {len(self.rows)} batch sizes, at most "
            f"{best.gain:.3f}x at {best.tokens} tokens; {pinned} rows are pinned to what runs without ({how})"
        )
        return f"worth it: {figure}" if self.gain >= self.least else f"not worth it: {figure}"

    def tables(self) -> dict[str, dict[str, Any]]:
        """The files' contents by their path below the folder that the engine is told. SGLang's second product has a
        file of its own where a row of it differs from the first one's."""
        folder = folder_name(self.engine, self.triton)
        written = self._written()
        version: dict[str, Any] = (
            {"triton_version": self.triton} if self.engine != SGLANG else {}
        )  # SGLang takes each key for a number
        up = {str(tokens): dict(words.up) for tokens, words in written.items()}
        files = {str(Path(folder, file_name(self.engine, self.layer, self.device))): version | up}
        differ = any(words.down != {TMA: False, **words.up} for words in written.values())
        if self.engine == SGLANG and (differ or self.now.has_down):
            down = {str(tokens): dict(words.down) for tokens, words in written.items()}
            files[str(Path(folder, file_name(self.engine, self.layer, self.device, down=True)))] = down
        return files

    def save(self, folder: Path | str, *, force: bool = False) -> list[Path]:
        """Write the files, each whole or not at all.

        Args:
            folder: The folder that the engine will be told.
            force: Whether to replace files of other contents that lie there.

        Returns:
            Where the files lie.

        Raises:
            ForetuneError: Such a file is there, and `force` is False.
        """
        contents = {inside(folder, name): json.dumps(rows, indent=4) + "\n" for name, rows in self.tables().items()}
        for path in contents:
            check_folder(path.parent)
        if not force:
            for path, content in contents.items():
                if path.exists() and path.read_text(errors="replace") != content:
                    raise _already_there(path)
        for path, content in contents.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as temporary:
                temporary.write_text(content)
        return list(contents)

    def to_json(self) -> dict[str, Any]:
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
                    "up": dict(row.words.up),
                    "down": dict(row.words.down),
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
                _short(row.words.up),
                "same" if _short(row.words.down) == _short(row.words.up) else _short(row.words.down),
            ]
            for row in self.rows
        ]
        layer = self.layer
        return table(
            f"{self.engine}: {layer.experts} experts, top {layer.topk}, hidden {layer.hidden}, inter {layer.inter}, "
            f"{layer.dtype}, on {self.device.name}; us of both products",
            ("tokens", *names, "gain", "pinned to", "first (M N K group warps stages)", "second"),
            rows,
            below=[self.verdict, self.reason, f"Looked up with {VARIABLES[self.engine]}=FOLDER"],
        )

    def _written(self) -> dict[int, Words]:
        """Return what the files say, by the number of tokens.

        An engine gives a batch the nearest row. So that each batch that is nearest to a pinned row, or to one of the
        file in force for another number of tokens, gets what it would get without these files, there are more rows on
        both sides of a number of tokens where that changes.
        """
        rows = {row.tokens: row.words for row in self.rows}
        rows |= {tokens: row.words for tokens, row in self.now.rows.items() if tokens not in rows}
        pinned = rows.keys() - {row.tokens for row in self.rows if not row.pinned}
        changes = list(self._changes()) if pinned else []
        nearest = {tokens: tokens for tokens in sorted(rows)}
        while True:
            more: dict[int, Words] = {}
            for last in changes:
                sides = {tokens: self._words_now(tokens) for tokens in (last, last + 1)}
                taken = {tokens: row_for(nearest, tokens) for tokens in sides}
                affected = [tokens for tokens in sides if taken[tokens] in pinned]
                if any(rows[taken[tokens]] != sides[tokens] for tokens in affected):
                    more |= {tokens: sides[tokens] for tokens in affected if tokens not in rows}
            if not more:
                return dict(sorted(rows.items()))
            rows |= more
            pinned |= more.keys()
            nearest = {tokens: tokens for tokens in sorted(rows)}

    def _words_now(self, tokens: int) -> Words:
        """Return what the engine runs so many tokens with when it does not have these files."""
        if self.now.rows:
            words: Words = row_for(self.now.rows, tokens).words
            return words
        return default_pair(self.engine, self.layer, tokens).words

    def _changes(self) -> Iterator[int]:
        """Yield the numbers of tokens after which the engine may run something else without these files."""
        if self.now.rows:
            batches = sorted(self.now.rows)
            for low, high in pairwise(batches):
                yield from {(low + high - 1) // 2, (low + high) // 2}  # of two as near it takes the first of the file
        else:
            yield from _changes(self.engine, self.layer)


def check_none_there(engine: str, layer: Layer, device: DeviceSpec, triton: str, folder: Path | str) -> None:
    """Check that no file for this layer lies where one would be written.

    Args:
        engine: "sglang" or "vllm".
        layer: The layer on one rank.
        device: The GPU that the files are for.
        triton: The version of Triton that they are for.
        folder: The folder for new files.

    Raises:
        ForetuneError: There is such a file; the error names it.
    """
    for down in (False, True) if engine == SGLANG else (False,):
        path = Path(folder, folder_name(engine, triton), file_name(engine, layer, device, down=down))
        if path.exists():
            raise _already_there(path)


def _already_there(path: Path) -> ForetuneError:
    return ForetuneError(f"{path} is there already: name another folder, or replace it with --force")


def _changes(engine: str, layer: Layer) -> Iterable[int]:
    """The numbers of tokens after which the engine's default is another one."""
    before = default_knobs(engine, layer.dtype, BATCH_SIZES[0], layer.experts)
    for tokens in range(BATCH_SIZES[0] + 1, _MOST_TOKENS + 1):
        after = default_knobs(engine, layer.dtype, tokens, layer.experts)
        if after != before:
            yield tokens - 1
        before = after


def _short(words: Mapping[str, Any]) -> str:
    return " ".join(str(words.get(knob, "-")) for knob in KNOBS) + " TMA" * bool(words.get(TMA))
