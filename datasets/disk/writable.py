"""Whether a result can be written, asked before the work that makes it."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from ..errors import ForetuneError

#: Files that datasets and bundles consist of. (`manifest.MANIFEST` and the bundle's `FILE`.)
_STORED = ("dataset.json", "bundle.npz")


def check_file(path: Path | str) -> None:
    """Raises `ForetuneError`, naming the path, where no file can be written there as `replacing` does it: a folder lies
    there, the folder that it would be in is missing, or may not be written to.

    >>> check_file("/nowhere/measured.csv")
    Traceback (most recent call last):
    foretune.datasets.errors.ForetuneError: /nowhere/measured.csv cannot be written: make the folder /nowhere first
    """
    path = Path(path)
    try:
        if path.is_dir():
            raise ForetuneError(f"{path} is a folder: name a file, in it or elsewhere")
        if path.is_socket():
            raise ForetuneError(f"{path} is a socket: name a file")
        if path.exists() and not path.is_file():  # /dev/stdout, a pipe: written as it is
            return
        parent = path.resolve().parent  # of what a link points to
        if not parent.is_dir():
            raise ForetuneError(f"{path} cannot be written: make the folder {parent} first")
        check_not_stored(path)
        _try(parent)
    except OSError as error:
        raise ForetuneError(f"{path} cannot be written: {error.strerror}") from None
    except RuntimeError:  # of `resolve`
        raise ForetuneError(f"{path} cannot be written: it is a symbolic link that leads to itself") from None


def check_folder(path: Path | str) -> None:
    """Raises `ForetuneError`, naming the path, where no folder is or can be made, or nothing can be written in it.

    >>> check_folder("/dev/null/measured")
    Traceback (most recent call last):
    foretune.datasets.errors.ForetuneError: /dev/null/measured cannot be a folder: /dev/null is a file
    """
    path = Path(path)
    try:
        there = next(one for one in (path, *path.parents) if one.exists())
        if there == path and not path.is_dir():
            raise ForetuneError(f"{path} is a file: name a folder")
        if not there.is_dir():
            raise ForetuneError(f"{path} cannot be a folder: {there} is a file")
        _try(there)
    except OSError as error:
        raise ForetuneError(f"{path} cannot be written: {error.strerror}") from None


def visible_in(folder: Path) -> list[str]:
    """Return the names of a folder's entries, sorted, without the hidden ones; none where there is no folder."""
    return sorted(path.name for path in folder.glob("[!.]*"))


def check_not_stored(path: Path) -> None:
    """Refuse to replace a file that a dataset or a bundle consists of.

    Raises:
        ForetuneError: `path` is there, and is such a file.
    """
    path = path.resolve()
    folder = path.parent.parent if path.parent.name in ("parts", "drift") else path.parent
    is_stored = path.suffix == ".parquet" or folder != path.parent
    if path.is_file() and (path.name in _STORED or (is_stored and (folder / _STORED[0]).is_file())):
        raise ForetuneError(f"{path} is a file of the dataset or bundle in {folder}: name another file")


def few(names: Sequence[str]) -> str:
    """Return at most three of the names, as an error lists them.

    >>> few(["a", "b", "c", "d"])
    'a, b, c, ...'
    """
    return ", ".join(names[:3]) + ", ..." * (len(names) > 3)


def _try(folder: Path) -> None:
    """Writes to a folder, and leaves nothing: its rights alone do not say whether a disk is mounted to be read only."""
    with tempfile.TemporaryFile(dir=folder):
        pass
