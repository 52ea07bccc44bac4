"""`TunedFiles`: the files for one layer that an engine looks up, and the verdict on what they are worth."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...datasets import DeviceSpec, KernelConfig
from ...datasets.console.tables import table
from ...datasets.disk.atomic import replacing
from ...datasets.disk.regular import inside
from ...datasets.disk.writable import check_folder
from .engines import BATCH_SIZES, SGLANG, Layer, default_knobs, file_name, folder_name
from .shipped import Pair, default_pair, row_for
from .space import in_engine_words

#: What the engines call the folder that they look into first.
VARIABLES = {SGLANG: "SGLANG_MOE_CONFIG_DIR", "vllm": "VLLM_TUNED_CONFIG_FOLDER"}
OURS, DEFAULT, SHIPPED = "ours", "default", "shipped"
#: Engines look nothing up beyond so many tokens at once that a default would change for.
_MOST_TOKENS = 16384


@dataclass(frozen=True)
class Row:
    """One row of the files, and how long both products take together with it and with what else could run.

    `times_us` has "ours" (what was found, pinned or not), "default", and "shipped" where the engine ships a file.
    """

    tokens: int
    pair: Pair  # what the file says
    pinned: str  # "default" or "shipped" where nothing was gained, so that the row says that; else ""
    times_us: Mapping[str, float]

    @property
    def now(self) -> str:
        """What the engine runs without these files."""
        return SHIPPED if SHIPPED in self.times_us else DEFAULT

    @property
    def gain(self) -> float:
        """How many times as fast the row is as what the engine runs now; 1.0 for a pinned row of just that."""
        return self.times_us[self.now] / self.times_us[self.pinned or OURS]


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

    @property
    def gain(self) -> float:
        """The geometric mean of the rows' gains."""
        return math.exp(statistics.fmean(math.log(row.gain) for row in self.rows))

    @property
    def verdict(self) -> str:
        how = "measured" if self.measured else "predicted, not measured"
        now = f"{self.engine}'s own file" if self.rows[0].now == SHIPPED else f"{self.engine}'s default"
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
        pairs = self._with_changes_of_default()
        up = {str(tokens): in_engine_words(pair.up) for tokens, pair in pairs.items()}
        version: dict[str, Any] = (
            {"triton_version": self.triton} if self.engine != SGLANG else {}
        )  # SGLang takes each key for a number
        files = {str(Path(folder, file_name(self.engine, self.layer, self.device))): version | up}
        if not all(pair.is_alike for pair in pairs.values()):
            down = {str(tokens): in_engine_words(pair.down) for tokens, pair in pairs.items()}
            files[str(Path(folder, file_name(self.engine, self.layer, self.device, down=True)))] = down
        return files

    def save(self, folder: Path | str) -> list[Path]:
        """Writes the files, each whole or not at all; returns where they lie."""
        paths = []
        for name, content in self.tables().items():
            path = inside(folder, name)
            check_folder(path.parent)
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as temporary:
                temporary.write_text(json.dumps(content, indent=4) + "\n")
            paths.append(path)
        return paths

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
                    "up": in_engine_words(row.pair.up),
                    "down": in_engine_words(row.pair.down),
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
                _short(row.pair.up),
                "same" if row.pair.is_alike else _short(row.pair.down),
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

    def _with_changes_of_default(self) -> dict[int, Pair]:
        """The rows by tokens, with rows besides wherever a batch that is nearest to a row pinned to the default would
        have another default: else it would be given that row's."""
        pairs = {row.tokens: row.pair for row in self.rows}
        pinned = {row.tokens for row in self.rows if row.pinned == DEFAULT}
        if pinned:
            nearest = {tokens: tokens for tokens in pairs}
            for last in _changes(self.engine, self.layer):
                for tokens in (last, last + 1):
                    if row_for(nearest, tokens) in pinned and tokens not in pairs:
                        pairs[tokens] = default_pair(self.engine, self.layer, tokens)
        return dict(sorted(pairs.items()))


def _changes(engine: str, layer: Layer) -> Iterable[int]:
    """The numbers of tokens after which the engine's default is another one."""
    before = default_knobs(engine, layer.dtype, BATCH_SIZES[0], layer.experts)
    for tokens in range(BATCH_SIZES[0] + 1, _MOST_TOKENS + 1):
        after = default_knobs(engine, layer.dtype, tokens, layer.experts)
        if after != before:
            yield tokens - 1
        before = after


def _short(config: KernelConfig) -> str:
    words = list(in_engine_words(config).values())
    return " ".join(str(value) for value in words[:6]) + " TMA" * bool(words[6:] and words[6])
