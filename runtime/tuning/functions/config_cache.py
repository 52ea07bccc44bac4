"""`ConfigCache`: the stored results of tuning functions, shared by processes."""

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

#: The format entry of a file; a file with another format is replaced.
FORMAT = "foretune functions 1"
#: Longest key in characters: more than the names of function and device and the longest `text_of` together.
_LONGEST_KEY = 4000


class ConfigCache:
    """A mapping from keys (strings) to JSON objects, in a file or in memory.

    Threads and processes share the file (see `SharedFile`): disk errors never raise, and a full file forgets its
    oldest keys first. If one key takes a large part of a full file, only its fastest configs are kept.

    Args:
        path: The file. If None, entries are kept in this process's memory.

    Raises:
        ForetuneError: `path` is not a path.

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
        #: Increases when entries were removed or imported, so that choices read earlier may be outdated.
        self.generation = 0

    @classmethod
    def of(cls, function: str) -> ConfigCache:
        """Return the cache of a function ("module.qualname"), in FORETUNE_CACHE_DIR or else ~/.cache/foretune."""
        return _opened(functions_folder(), function)

    @classmethod
    def for_function(cls, function: str, cache: Any) -> ConfigCache:
        """Return the cache that an option `cache` selects.

        Args:
            function: The function's name, "module.qualname".
            cache: True for the function's default file (see `of`), False for memory, a path, or a `ConfigCache`.

        Raises:
            ForetuneError: `cache` is something else.
        """
        if isinstance(cache, ConfigCache):
            return cache
        if isinstance(cache, bool):
            return cls.of(function) if cache else cls()
        return cls(check_path("cache", cache))

    def get(self, key: str) -> dict[str, Any] | None:
        """Return a copy of the entry of a key; None if there is none."""
        found = self._entries().get(key)
        return None if found is None else deepcopy(found)

    def set(self, key: str, value: dict[str, Any]) -> None:
        """Store a JSON object under a key; it is on disk when this returns.

        Raises:
            ForetuneError: The value is not a JSON object, or the key is not a string of at most 4000 characters.
        """
        check_word("a cache's key", key, _LONGEST_KEY)
        if not isinstance(value, dict):
            raise ForetuneError(f"a cache's value must be a JSON object but is {shown(value)}")

        def change(document: Document) -> None:
            document.setdefault("format", FORMAT)
            entries = document.setdefault("entries", {})
            entries.pop(key, None)  # so that it is the newest
            entries[key] = deepcopy(value)

        try:
            self._file.update(change)
        except (TypeError, ValueError) as error:
            raise ForetuneError(f"a cache's value must be a JSON object but is {shown(value)} ({error})") from None

    def add(self, entries: Mapping[str, Mapping[str, Any]]) -> bool:
        """Import entries, as the oldest ones, as far as the file has room; existing entries stay.

        Args:
            entries: JSON objects by key, the oldest first.

        Returns:
            Whether the file is on disk; False if the cache is in memory or the disk refused.
        """

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
        """Remove a key; all keys if None."""

        def change(document: Document) -> None:
            if key is None:
                document.clear()
            else:
                document.get("entries", {}).pop(key, None)

        self._file.update(change)
        self.generation += 1

    def keys(self) -> list[str]:
        """Return all keys, the oldest first."""
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
    """Return the folder of the default files; None if there is no home directory to put them in."""
    folder = choices_folder()
    return None if folder is None else folder.with_name("functions")


@lru_cache(maxsize=4096)  # one object for each file, so that functions of one name, and copies, share it
def _opened(folder: Path | None, function: str) -> ConfigCache:
    digest = hashlib.sha256(function.encode()).hexdigest()[:12]
    name = re.sub(r"[^A-Za-z0-9.]+", "_", function)[-80:].strip("._")
    return ConfigCache(None if folder is None else folder / f"{name}-{digest}.json")


def check_document(document: Document) -> int:
    """Remove entries that are not JSON objects from a document; return how many were removed.

    Raises:
        ForetuneError: The document is not one of a `ConfigCache`, or none of its entries is an object.
    """
    if document.get("format") != FORMAT or set(document) != {"format", "entries"}:
        raise ForetuneError(f"its format is not {FORMAT!r}")
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
    except ValueError:  # it contains NaN or an infinite number
        return False
    return isinstance(entry, dict)


def _make_room(document: Document) -> bool:
    """Free space: shorten a record that takes much of the file to its fastest configs, or else remove the oldest keys.

    The newest key, which is being written, stays. Return False if there is nothing to remove.
    """
    entries = document.get("entries", {})
    records = [value for entry in entries.values() for _, value, _ in records_of(entry)]
    if shorten_largest(records):
        return True
    if len(entries) < 2:
        return False
    for key in list(entries)[: max(len(entries) // 4, 1)]:
        del entries[key]
    return True
