"""`ConfigCache`: what was found out about a function's configs, from one process to the next."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

from ....datasets import ForetuneError
from ....datasets.errors import check_path, check_word, shown
from ..cache.kernel_cache import choices_folder
from ..cache.shared_file import MOST_BYTES, Document, SharedFile, size_of
from .key_record import records_of, shorten_largest

#: What a file says it is; a file that says otherwise is begun anew.
FORMAT = "foretune functions 1"
#: More than `text_of` makes of a key, with the function's and the device's names before it.
_LONGEST_KEY = 4000


class ConfigCache:
    """A mapping from keys (texts) to JSON objects, in a file that threads and processes share (see `SharedFile`: it
    never raises for the disk, and forgets the oldest first), or in this process's memory where there is no path. Of a
    key with thousands of configs a full file keeps the fastest, so that the other keys have room.

    >>> cache = ConfigCache()
    >>> cache.set("scale: 64", {"chosen": {"tile": 16}})
    >>> cache.get("scale: 64"), cache.keys(), len(cache)
    ({'chosen': {'tile': 16}}, ['scale: 64'], 1)
    >>> cache.clear()
    >>> cache.get("scale: 64") is None
    True
    """

    def __init__(self, path: Path | str | None = None) -> None:
        self.path = None if path is None else check_path("a cache's file", path).expanduser().absolute()
        self._file = SharedFile(self.path, check=check_document, forget=_make_room)
        #: Changes when what was read before may no longer hold.
        self.generation = 0

    @classmethod
    def of(cls, function: str) -> ConfigCache:
        """The cache of a function of that name, "module.qualname": below FORETUNE_CACHE_DIR, else ~/.cache/foretune."""
        return _opened(functions_folder(), function)

    @classmethod
    def for_function(cls, function: str, cache: Any) -> ConfigCache:
        """The cache that somebody asks for: True is the usual one of that function, False one in memory, a path a file.
        Raises `ForetuneError` for anything else."""
        if isinstance(cache, ConfigCache):
            return cache
        if isinstance(cache, bool):
            return cls.of(function) if cache else cls()
        return cls(check_path("cache", cache))

    def get(self, key: str) -> dict[str, Any] | None:
        """What is kept for a key, as a copy; None where nothing is."""
        found = self._entries().get(key)
        return None if found is None else deepcopy(found)

    def set(self, key: str, value: dict[str, Any]) -> None:
        """Keeps a JSON object. On the disk when it returns. Raises `ForetuneError` for what is none."""
        check_word("a cache's key", key, _LONGEST_KEY)
        if not isinstance(value, dict):
            raise ForetuneError(f"a cache keeps JSON objects but was given {shown(value)}")

        def change(document: Document) -> None:
            document.setdefault("format", FORMAT)
            entries = document.setdefault("entries", {})
            entries.pop(key, None)  # so that it is the newest
            entries[key] = deepcopy(value)

        try:
            self._file.update(change)
        except (TypeError, ValueError) as error:
            raise ForetuneError(f"a cache keeps JSON objects but was given {shown(value)} ({error})") from None

    def add(self, entries: Mapping[str, Mapping[str, Any]]) -> bool:
        """Adds what comes from elsewhere, as the oldest and as far as there is room; what is kept here stays. Whether
        it is on the disk."""

        def change(document: Document) -> None:
            document.setdefault("format", FORMAT)
            here = document.get("entries", {})
            room, new = MOST_BYTES - size_of(document), {}
            for key, value in reversed(list(entries.items())):  # the newest first, as far as there is room
                size = size_of({key: value})
                if key not in here and size <= room:
                    new[key] = deepcopy(dict(value))
                    room -= size
            document["entries"] = dict(reversed(new.items())) | here

        self._file.update(change)
        self.generation += 1
        return self._file.is_on_disk

    def clear(self, key: str | None = None) -> None:
        """Forgets a key; all of them for None."""

        def change(document: Document) -> None:
            if key is None:
                document.clear()
            else:
                document.get("entries", {}).pop(key, None)

        self._file.update(change)
        self.generation += 1

    def keys(self) -> list[str]:
        """Those that something is kept for, the oldest first."""
        return list(self._entries())

    def __contains__(self, key: object) -> bool:
        return key in self._entries()

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self._entries())

    def __repr__(self) -> str:
        return f"<ConfigCache of {len(self)} keys, {self.path or 'in memory'}>"

    def _entries(self) -> dict[str, dict[str, Any]]:
        entries: dict[str, dict[str, Any]] = self._file.read().get("entries", {})
        return entries


def functions_folder() -> Path | None:
    """Where the files of functions are, or would be; None where there is no home to have them in."""
    folder = choices_folder()
    return None if folder is None else folder.with_name("functions")


@lru_cache(maxsize=4096)  # one for each file, so that functions of one name, and copies, share what they know
def _opened(folder: Path | None, function: str) -> ConfigCache:
    digest = hashlib.sha256(function.encode()).hexdigest()[:12]
    name = re.sub(r"[^A-Za-z0-9.]+", "_", function)[-80:].strip("._")
    return ConfigCache(None if folder is None else folder / f"{name}-{digest}.json")


def check_document(document: Document) -> int:
    """Remove entries that are no JSON objects from a document; return their number.

    Raises:
        ForetuneError: It is not a file of a `ConfigCache`, or none of its entries is an object.
    """
    if document.get("format") != FORMAT or set(document) != {"format", "entries"}:
        raise ForetuneError(f"it is no file of {FORMAT!r}")
    entries = document["entries"]
    kept = {key: one for key, one in entries.items() if _is_entry(key, one)} if isinstance(entries, dict) else {}
    if not isinstance(entries, dict) or (entries and not kept):
        raise ForetuneError(f"entries must be objects but are {shown(entries)}")
    document["entries"] = kept
    return len(entries) - len(kept)


def _is_entry(key: str, entry: Any) -> bool:
    try:
        check_word("a cache's key", key, _LONGEST_KEY)
        size_of(entry)
    except ValueError:  # NaN or an infinite number is in it
        return False
    return isinstance(entry, dict)


def _make_room(document: Document) -> bool:
    """Shorten the largest record to its fastest configs where it takes much of the file; else forget the oldest keys.

    The newest key, which is being written, stays; False where it alone has no room."""
    entries = document.get("entries", {})
    records = [value for entry in entries.values() for _, value, _ in records_of(entry)]
    if shorten_largest(records):
        return True
    if len(entries) < 2:
        return False
    for key in list(entries)[: max(len(entries) // 4, 1)]:
        del entries[key]
    return True
