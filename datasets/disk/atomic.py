"""`replacing`: a file is there whole or not at all, whatever happens while it is written."""

from __future__ import annotations

import errno
import glob
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

#: As the names that `replacing` makes.
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.tmp", re.DOTALL)


@contextmanager
def replacing(path: Path | str, *, is_cache: bool = False) -> Iterator[Path]:
    """A name beside `path` to write to: when the block ends it takes the place of `path`, flushed to the disk in one
    step, and when anything goes wrong it is removed and `path` stays as it was. Two writers at once do not meet: the
    last to end wins. What is no ordinary file (/dev/stdout, a pipe) is written as it is.

    A cache's file is its owner's alone (0600), whatever mode it had before, and nobody waits for the disk: a kill
    leaves it whole, a power cut may lose it. It takes the place of a link or a pipe, which is neither followed nor
    written to.

    Raises `OSError` naming `path`, also where the disk is full, which itself names no file.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> with replacing(folder / "a.txt") as temporary:
    ...     _ = temporary.write_text("whole")
    >>> [(path.name, path.read_text()) for path in folder.iterdir()]
    [('a.txt', 'whole')]
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not is_cache and path.exists() and not path.is_file():
        with blaming(path):
            yield path
        return
    try:
        target = path.absolute() if is_cache else path.resolve()  # a link stays one
    except RuntimeError:  # that leads to itself
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path)) from None
    temporary = target.with_name(f".{target.name[:100]}.{os.urandom(8).hex()}.tmp")
    with blaming(path, temporary):
        try:
            mode = 0o600 if is_cache else 0o666
            os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode))
            yield temporary
            if not is_cache:
                if target.exists():
                    temporary.chmod(target.stat().st_mode)
                flush(temporary)
            temporary.replace(target)
            if not is_cache:
                flush(target.parent)
        finally:
            temporary.unlink(missing_ok=True)


def remove_leftovers(folder: Path, of: str = "") -> None:
    """Removes what `replacing` left of processes that were killed: all, or what was to be the files whose names begin
    so. Only where nobody else writes to the folder, or to those files."""
    for path in folder.glob(f".{glob.escape(of[:100])}*.tmp"):
        with suppress(FileNotFoundError):  # its writer was faster
            if _TEMPORARY.fullmatch(path.name) and stat.S_ISREG(path.lstat().st_mode):
                path.unlink()


@contextmanager
def blaming(path: Path, temporary: Path | None = None) -> Iterator[None]:
    """An `OSError` of its block names `path` where it names no file, as that of a full disk does, and where it names
    one that nobody knows of: `temporary`, or what is in that."""
    try:
        yield
    except OSError as error:
        named = None if error.filename is None else Path(str(error.filename))
        if named is not None and (temporary is None or temporary not in (named, *named.parents)):
            raise  # it is about another file
        raise type(error)(error.errno or errno.EIO, error.strerror or str(error), str(path)) from error


def flush(path: Path) -> None:
    """Waits until a file, or what a folder lists, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
