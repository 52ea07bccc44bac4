"""Which files are the cache's own, by what is in them: no others are removed or replaced."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from ....datasets import ForetuneError
from ....datasets.files import open_regular

#: What the files of each of the cache's folders begin with, and an exported file. `{` and `"format"` may be apart.
OUR_CHOICES, OUR_FUNCTIONS, OUR_EXPORT = (
    re.compile(rb'\s*\{\s*"format"\s*:\s*"foretune ' + what + b" ")
    for what in (b"choices", b"functions", b"exported choices")
)
#: How a file is named that the cache has written: of such a one nothing is lost where it is empty.
_OUR_NAME = re.compile(r".*-[0-9a-f]{12}\.json(\.unreadable)?", re.DOTALL)
#: More than stands before the format's name, and than an empty document has.
_HEAD_BYTES = 256


def remove_own(folder: Path, begins: re.Pattern[bytes], names: Collection[str] | None) -> tuple[set[Path], list[str]]:
    """Remove a folder's files (of these names) that are ours; return them, and a line for each that is left and why."""
    if names is not None and not names:
        return set(), []
    if folder.is_symlink():
        return set(), [f"{folder} is a symbolic link: what lies there is left as it is"]
    try:
        at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return set(), []
    removed, left = set(), []
    try:
        for name in sorted(os.listdir(at) if names is None else names):
            if name.startswith("."):  # the locks and temporaries of those who write now
                continue
            if (why := _why_not_ours(at, name, begins)) is not None:
                left.append(f"{folder / name} is left as it is: {why}")
                continue
            with suppress(FileNotFoundError):  # somebody else was faster
                os.unlink(name, dir_fd=at)
            removed.add(folder / name)
    finally:
        os.close(at)
    return removed, left


def _why_not_ours(folder: int, name: str, begins: re.Pattern[bytes]) -> str | None:
    """Why a file is not to be removed: what it is instead of ours; None for ours, and for one that is gone."""
    try:
        with os.fdopen(open_regular(name, dir_fd=folder), "rb") as file:
            head = file.read(_HEAD_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        return error.strerror or type(error).__name__
    except ForetuneError as error:
        return str(error)
    is_empty = head in (b"", b"{}") and _OUR_NAME.fullmatch(name)
    is_torn = name.endswith(".unreadable") and b'{"format":"foretune '.startswith(head)
    if begins.match(head) or is_empty or is_torn:
        return None
    return "it is not a file of the cache"
