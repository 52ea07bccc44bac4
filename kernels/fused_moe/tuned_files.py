"""`TunedFiles`: the files for one layer that an engine looks up, and the verdict on what they are worth."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from ...datasets import DeviceSpec, ForetuneError
from ...datasets.console import table
from ...datasets.files import check_folder, inside, replacing
from .engines import BATCH_SIZES, SGLANG, Layer, default_knobs, file_name, folder_name
from .shipped import VARIABLES, TunedTable, Words, default_pair, row_for
from .space import KNOBS, TMA

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
