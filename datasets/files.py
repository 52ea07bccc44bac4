"""Files of any content: open them safely, replace them in one step, and check beforehand if they can be written."""

from __future__ import annotations

import errno
import glob
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

from .errors import ForetuneError, abridged

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


#: As the names that `replacing` makes.
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.tmp", re.DOTALL)


@contextmanager
def replacing(path: Path | str, *, is_cache: bool = False) -> Iterator[Path]:
    """A name beside `path` to write to: when the block ends it takes the place of `path`, flushed to the disk in one
    step, and when anything goes wrong it is removed and `path` stays as it was. Two writers at once do not meet: the
    last to end wins. What is no ordinary file (/dev/stdout, a pipe) is written as it is.

    A cache's file is its owner's alone (0600), whatever mode it had before, and is not flushed to the disk: a kill
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
    so. Only where no other process writes to the folder, or to those files."""
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


#: The files that datasets and bundles are known by.
_MANIFEST, BUNDLE = "dataset.json", "bundle.npz"


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
    if path.is_file() and (path.name in (_MANIFEST, BUNDLE) or (is_stored and (folder / _MANIFEST).is_file())):
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
