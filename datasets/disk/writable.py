"""Whether a result can be written, asked before the work that makes it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from ..errors import ForetuneError


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


def _try(folder: Path) -> None:
    """Writes to a folder, and leaves nothing: its rights alone do not say whether a disk is mounted to be read only."""
    with tempfile.TemporaryFile(dir=folder):
        pass
