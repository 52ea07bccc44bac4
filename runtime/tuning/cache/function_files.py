"""The files of tuned functions, read as a whole: to be listed, and carried from one machine to another."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....datasets import ForetuneError
from ....datasets.errors import LONGEST_WORD, abridged, check_word, shown, warn
from ..functions.config_cache import FORMAT, ConfigCache, check_document, functions_folder
from ..functions.key_record import KeyRecord, function_of, records_of
from .shared_file import MOST_BYTES, content_of


@dataclass(frozen=True)
class KnownFunction:
    """What a file has: a function, or several that share a cache under the first one's name."""

    path: Path
    entries: Mapping[str, Mapping[str, Any]]  # by `record_key`, the newest last; see `ConfigCache`

    @property
    def name(self) -> str:
        return next(map(function_of, self.entries), self.path.stem)

    @property
    def times(self) -> int:
        return sum(counts["times"] for counts in self.listed())

    def counted(self) -> dict[str, Any]:
        listed = self.listed()
        return {
            "function": self.name,
            "keys": len(self.entries),
            "times": self.times,
            "failed": sum(one["failed"] for one in listed),
            "choices": sum(bool(one["chosen"]) for one in listed),
        }

    def listed(self) -> list[dict[str, Any]]:
        """A row for each key, and in a contextual function for each kernel in it."""
        return [
            {
                "key": key.partition("#")[2],
                "kernel": kernel,
                "times": sum(one.time_us is not None for one in record.outcomes.values()),
                "failed": sum(one.time_us is None for one in record.outcomes.values()),
                "chosen": record.chosen or "",
                "best_us": _best_us(record),
                "software": " ".join(f"{name}={version}" for name, version in record.software.items()),
            }
            for key, entry in self.entries.items()
            for kernel, _, record in records_of(entry)
        ]

    def to_json(self) -> dict[str, Any]:
        """As an exported file has it."""
        return {"function": self.name, "entries": dict(self.entries)}

    def keep(self) -> bool:
        """Adds this to what is remembered here; what is known here stays. False where it is in memory alone."""
        return ConfigCache.of(self.name).add(self.entries)

    @classmethod
    def from_json(cls, value: Any) -> KnownFunction:
        """Raises `ForetuneError` for what `to_json` does not write."""
        if not isinstance(value, dict) or set(value) != {"function", "entries"}:
            raise ForetuneError(f"a function must have a name and entries but is {shown(value)}")
        check_word("function", value["function"], 4 * LONGEST_WORD)
        check_document({"format": FORMAT, "entries": value["entries"]})
        known = cls(Path(value["function"]), value["entries"])
        if known.entries and known.name != value["function"]:
            raise ForetuneError(f"{shown(value['function'])}: its entries are of {shown(known.name)}")
        return known


def known_functions() -> list[KnownFunction]:
    """What is remembered of each function, by file; what cannot be read is warned of."""
    folder = functions_folder()
    paths = sorted(folder.glob("*.json")) if folder is not None else ()
    return [known for path in paths if (known := _known(path)) is not None]


def _known(path: Path) -> KnownFunction | None:
    try:
        document = json.loads(content_of(path, MOST_BYTES))
        if document:  # else everything in it was forgotten
            check_document(document)
        return KnownFunction(path, document.get("entries", {}))
    except FileNotFoundError:  # cleared meanwhile
        return None
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        warn(f"{path} is left out: {abridged(str(error))}")
        return None


def _best_us(record: KeyRecord) -> float | str:
    """What was chosen takes, to the six digits that a kernel's times are kept with; nothing where it was not timed."""
    time_us = record.outcomes[record.chosen].time_us if record.chosen in record.outcomes else None
    return "" if time_us is None else float(f"{time_us:.6g}")
