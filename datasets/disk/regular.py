"""Opening a file where anything may lie in its place, and writing one only over a file of the same origin."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

from ..errors import ForetuneError, abridged

_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
#: More than any file that `check_replaceable` has to recognize.
_MOST_COMPARED_BYTES = 1 << 28


def open_regular(path: Path | str, flags: int = os.O_RDONLY, *, follow: bool = False, dir_fd: int | None = None) -> int:
    """Open a regular file and return its descriptor; never wait for a pipe or touch a device.

    Args:
        path: The file, below `dir_fd` where that is given.
        flags: As `os.open` takes them. With `O_CREAT` a missing file is made.
        follow: Whether the path may be a symbolic link, as one that the user named may.
        dir_fd: The descriptor of an open folder.

    Raises:
        ForetuneError: It is a link, a pipe, a socket or a device; the message says which, but not where.
        OSError: It is a folder, or cannot be opened.

    >>> open_regular("/dev/null")
    Traceback (most recent call last):
    foretune.datasets.errors.ForetuneError: it is a device, not a regular file
    """
    try:  # before it is opened: opening alone does something to some devices
        _check_regular(os.stat(path, dir_fd=dir_fd, follow_symlinks=follow), path)
    except FileNotFoundError:
        if not flags & os.O_CREAT:
            raise
    safe = os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    handle = os.open(path, flags | safe, 0o666, dir_fd=dir_fd)
    try:
        _check_regular(os.fstat(handle), path)
    except BaseException:
        os.close(handle)
        raise
    return handle


def read_regular(path: Path | str, most_bytes: int, *, follow: bool = False) -> bytes:
    """Return the bytes of a regular file.

    Raises:
        ForetuneError: It is no regular file, or has more than `most_bytes`.
        OSError: It cannot be read.
    """
    with os.fdopen(open_regular(path, follow=follow), "rb") as file:
        is_larger = os.fstat(file.fileno()).st_size > most_bytes
        content = b"" if is_larger else file.read(most_bytes + 1)
    if is_larger or len(content) > most_bytes:
        raise ForetuneError(f"it has more than {most_bytes} bytes")
    return content


def check_replaceable(path: Path | str, is_ours: Callable[[bytes], bool], what: str) -> None:
    """Raise unless writing to `path` loses nothing but an earlier result of the same kind.

    A file that is missing or empty may be written, and so may one whose content `is_ours` recognizes. What is no
    regular file (`/dev/stdout`, a pipe) has no content to lose.

    Args:
        path: The file that is to be written.
        is_ours: Whether a file with this content was written by the same command.
        what: What that command writes, for the message.

    Raises:
        ForetuneError: The file has other content, or cannot be read.
    """
    try:
        if not os.path.isfile(path):
            return
        content = read_regular(path, _MOST_COMPARED_BYTES, follow=True)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ForetuneError(f"{abridged(str(path))} cannot be read, so it is not replaced: {error.strerror}") from None
    except ForetuneError as error:
        raise ForetuneError(f"{abridged(str(path))} is not replaced: {error}") from None
    if content and not is_ours(content):
        raise ForetuneError(f"{abridged(str(path))} is not {what}, so it is not replaced: name another file")


def inside(folder: Path | str, name: str) -> Path:
    """Return the path of a file in a folder.

    Raises:
        ForetuneError: The name, or a symbolic link in the folder, leads out of it.

    >>> inside("tables", "../x")
    Traceback (most recent call last):
    foretune.datasets.errors.ForetuneError: '../x' lies outside of tables: nothing is written there
    """
    path = Path(folder, name)
    try:
        is_inside = path.resolve().is_relative_to(Path(folder).resolve())
    except (OSError, RuntimeError):  # a loop of links
        is_inside = False
    if not is_inside:
        raise ForetuneError(f"{abridged(repr(name))} lies outside of {folder}: nothing is written there")
    return path


def file_word(text: str, keep: str = "0-9A-Za-z", most: int = 80) -> str:
    """Return a text from data as a part of a file name: runs of other characters become one underscore.

    A text with nothing to keep, or with too much, gets a digest, so that different ones stay different.

    Args:
        text: Anything, such as the name of a device in an imported file.
        keep: The characters that stay, as a regular expression has them between brackets.
        most: How many characters stay.

    >>> file_word("NVIDIA H100 80GB HBM3"), file_word("../../x"), file_word("..")
    ('NVIDIA_H100_80GB_HBM3', 'x', '5ec1f7e700f3')
    """
    word = re.sub(f"[^{keep}]+", "_", text).strip("_")
    if word and len(word) <= most:
        return word
    digest = sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return f"{word[:most]}-{digest}".lstrip("-")


def refusal(error: Exception, path: Path | str) -> OSError:
    """Return a `ForetuneError` of `open_regular` as an `OSError`, for callers that go on without a disk."""
    return OSError(errno.EEXIST, str(error), str(path))


def why_irregular(error: Exception) -> str:
    """Return what lies in a file's place, of an error that `open_regular` raised."""
    return "it is a folder, not a regular file" if isinstance(error, IsADirectoryError) else str(error)


def _check_regular(status: os.stat_result, path: Path | str) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise ForetuneError(f"it is {kind}, not a regular file")
