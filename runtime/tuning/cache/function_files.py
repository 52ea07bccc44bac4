"""The files of tuned functions, read as a whole: to be listed, and carried from one machine to another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....datasets import ForetuneError
from ....datasets.errors import LONGEST_WORD, abridged, check_word, shown, warn
from ....datasets.files import read_regular
from ..functions.config_cache import FORMAT, ConfigCache, check_document, functions_folder
from ..functions.key_record import KeyRecord, function_of, records_of
from .shared_file import MOST_BYTES, Document, from_json


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

    def keep(self) -> KnownFunction | None:
        """Add this to what is remembered here, as far as there is room; what is known here stays.

        Returns:
            What of it is known here now; None where that is in memory alone.
        """
        cache = ConfigCache.of(self.name)
        if not cache.add(self.entries):
            return None
        return KnownFunction(self.path, {key: entry for key, entry in self.entries.items() if key in cache})

    @classmethod
    def from_json(cls, value: Any) -> tuple[KnownFunction, int]:
        """Return what `to_json` wrote, and how many malformed records in it are left out.

        Raises `ForetuneError` for anything else."""
        if not isinstance(value, dict) or set(value) != {"function", "entries"}:
            raise ForetuneError(f"a function must have a name and entries but is {shown(value)}")
        name = check_word("function", value["function"], 4 * LONGEST_WORD)
        known, left_out = _checked(Path(name), {"format": FORMAT, "entries": value["entries"]})
        if known.entries and known.name != name:
            raise ForetuneError(f"{shown(name)}: its entries are of {shown(known.name)}")
        return known, left_out


def known_functions() -> list[KnownFunction]:
    """What is remembered of each function, by file; what cannot be read is warned of."""
    folder = functions_folder()
    paths = sorted(folder.glob("*.json")) if folder is not None else ()
    return [known for path in paths if (known := _known(path)) is not None]


def _known(path: Path) -> KnownFunction | None:
    try:
        document = from_json(read_regular(path, MOST_BYTES))
        if document == {}:  # everything in it was forgotten
            return KnownFunction(path, {})
        if not isinstance(document, dict):
            raise ForetuneError(f"it is no file of {FORMAT!r}")
        known, left_out = _checked(path, document)
    except FileNotFoundError:  # cleared meanwhile
        return None
    except (OSError, ValueError, RecursionError) as error:
        warn(f"{path} is left out: {abridged(str(error))}")
        return None
    if left_out:
        warn(f"{path}: {left_out} malformed records are left out")
    return known


def _checked(path: Path, document: Document) -> tuple[KnownFunction, int]:
    """What a document has, and how many malformed records are left out. Raises `ForetuneError` for no document."""
    left_out, entries = check_document(document), document["entries"]
    kept = {key: entry for key, entry in entries.items() if _is_well_formed(entry)}
    if entries and not kept:
        raise ForetuneError("none of its records is well-formed")
    return KnownFunction(path, kept), left_out + len(entries) - len(kept)


def _is_well_formed(entry: Mapping[str, Any]) -> bool:
    """Whether the records of keys that it has are; anything else is something that somebody else keeps."""
    sites = entry.get("sites")
    records = sites.values() if isinstance(sites, dict) else [entry]
    claimed = [one for one in records if isinstance(one, dict) and "outcomes" in one]
    return all(KeyRecord.from_json(one) is not None for one in claimed)


def _best_us(record: KeyRecord) -> float | str:
    """What was chosen takes, to the six digits that a kernel's times are kept with; nothing where it was not timed."""
    time_us = record.outcomes[record.chosen].time_us if record.chosen in record.outcomes else None
    return "" if time_us is None else float(f"{time_us:.6g}")
