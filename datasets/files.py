"""Opening files safely, replacing them atomically, and checking beforehand whether they can be written."""

from __future__ import annotations

import errno
import glob
import os
import re
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

from .errors import ForetuneError, abridged

#: File types -> their name in messages.
_FILE_TYPES = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
#: The largest file that `check_replaceable` reads: larger than any file that it must recognize.
_MOST_COMPARED_BYTES = 1 << 28


def find_modules_here() -> None:
    """Append the working directory, which console scripts lack, to `sys.path`, to import modules from it."""
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)


def open_regular(path: Path | str, flags: int = os.O_RDONLY, *, follow: bool = False, dir_fd: int | None = None) -> int:
    """Open a regular file and return its descriptor; never wait for a pipe or open a device.

    Args:
        path: The file, relative to `dir_fd` if that is given.
        flags: The flags of `os.open`. With `O_CREAT` a missing file is created.
        follow: Whether the path may be a symbolic link, which is right for paths that the user named.
        dir_fd: The descriptor of an open folder.

    Raises:
        ForetuneError: It is a link, a pipe, a socket or a device. The message says which, but has no path.
        OSError: It is a folder, or cannot be opened.

    >>> open_regular("/dev/null")
    Traceback (most recent call last):
    foretune.datasets.errors.ForetuneError: it is a device, not a regular file
    """
    try:  # checked before opening, because opening alone has effects on some devices
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


def read_regular(path: Path | str, most_bytes: int | None = None, *, follow: bool = False) -> bytes:
    """Return the bytes of a regular file; with `follow`, the path may be a symbolic link to one.

    Raises:
        ForetuneError: It is not a regular file, or has more than `most_bytes`.
        OSError: It cannot be read.
    """
    with os.fdopen(open_regular(path, follow=follow), "rb") as file:
        is_larger = most_bytes is not None and os.fstat(file.fileno()).st_size > most_bytes
        content = b"" if is_larger else file.read(-1 if most_bytes is None else most_bytes + 1)
    if is_larger or (most_bytes is not None and len(content) > most_bytes):
        raise ForetuneError(f"it has more than {most_bytes} bytes")
    return content


def check_replaceable(path: Path | str, is_ours: Callable[[bytes], bool], what: str) -> None:
    """Raise if writing to `path` would replace anything but an earlier result of the same command.

    A missing or empty file may be written, and so may one whose content `is_ours` recognizes, and anything that is not
    a regular file (`/dev/stdout`, a pipe).

    Args:
        path: The file to write.
        is_ours: Returns whether a file with this content was written by the same command.
        what: What the message calls a file of that command.

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
        raise ForetuneError(f"{abridged(str(path))} is not {what}, so it is not replaced: choose another file")


def inside(folder: Path | str, name: str) -> Path:
    """Return the path of a file in a folder; raise if it would be outside.

    Raises:
        ForetuneError: The name, or a symbolic link in the folder, leads out of the folder.

    >>> inside("tables", "../x")
    Traceback (most recent call last):
    foretune.datasets.errors.ForetuneError: '../x' is outside of tables, so it is not written
    """
    path = Path(folder, name)
    try:
        is_inside = path.resolve().is_relative_to(Path(folder).resolve())
    except (OSError, RuntimeError):  # a loop of links
        is_inside = False
    if not is_inside:
        raise ForetuneError(f"{abridged(repr(name))} is outside of {folder}, so it is not written")
    return path


def file_word(text: str, keep: str = "0-9A-Za-z", most: int = 80) -> str:
    """Return a text as a part of a file name: runs of other characters become one underscore.

    If nothing or too much remains, a digest of the text is added, so that different texts stay different.

    Args:
        text: Any text, such as the name of a device in an imported file.
        keep: The characters to keep, as in the brackets of a regular expression.
        most: The maximum number of characters to keep.

    >>> file_word("NVIDIA H100 80GB HBM3"), file_word("../../x"), file_word("..")
    ('NVIDIA_H100_80GB_HBM3', 'x', '5ec1f7e700f3')
    """
    word = re.sub(f"[^{keep}]+", "_", text).strip("_")
    if word and len(word) <= most:
        return word
    digest = sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return f"{word[:most]}-{digest}".lstrip("-")


def write_new(folder: Path | str, contents: Mapping[str, str], *, force: bool = False) -> list[Path]:
    """Write files below a folder, each atomically, and return their paths.

    Args:
        folder: The folder; it and the folders in the names are created.
        contents: The text of each file, by its path below the folder.
        force: Whether to replace existing files that have other contents.

    Raises:
        ForetuneError: Such a file exists and `force` is false, or a folder cannot be written.
    """
    texts = {inside(folder, name): text for name, text in contents.items()}
    for path in texts:
        check_folder(path.parent)
    if not force:
        for path, text in texts.items():
            if path.exists() and path.read_text(errors="replace") != text:
                raise already_there(path)
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_text(text)
    return list(texts)


def already_there(path: Path) -> ForetuneError:
    """Return the error to raise for an existing file that would be replaced."""
    return ForetuneError(f"{path} exists already: pass another folder, or --force to replace it")


def why_irregular(error: Exception) -> str:
    """Return the reason why a file is not a regular one, from an error of `open_regular`."""
    return "it is a folder, not a regular file" if isinstance(error, IsADirectoryError) else str(error)


def _check_regular(status: os.stat_result, path: Path | str) -> None:
    """Raise `IsADirectoryError` for a folder's status, and `ForetuneError` for that of anything but a regular file."""
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        file_type = _FILE_TYPES.get(stat.S_IFMT(status.st_mode), "something else")
        raise ForetuneError(f"it is {file_type}, not a regular file")


#: The names of the temporary files of `replacing`.
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.tmp", re.DOTALL)


@contextmanager
def replacing(path: Path | str, *, is_cache: bool = False) -> Iterator[Path]:
    """Yield a temporary file in the same folder that atomically replaces `path` when the block ends.

    The file is flushed to the disk first. If the block fails, the temporary file is removed and `path` does not change.
    Two writers do not interfere; the last one to end wins. Anything that is not a regular file (/dev/stdout, a pipe) is
    yielded itself.

    Args:
        path: The file to replace.
        is_cache: Write the file of a cache: only the owner may read it (mode 0600, whatever it was before), and it is
            not flushed, so a killed process leaves it intact but a power cut may lose it. A link or a pipe at `path` is
            replaced, and neither followed nor written to.

    Raises:
        OSError: The file cannot be written. The error names `path`, also if the disk is full.

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
    if not is_cache:
        _reach(path)
    target = path.absolute() if is_cache else path.resolve()  # a symbolic link stays a link
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
    """Remove temporary files of `replacing` that killed processes left; no other process may be writing these files.

    Args:
        folder: The folder.
        of: Only remove those for files whose names start with this.
    """
    for path in folder.glob(f".{glob.escape(of[:100])}*.tmp"):
        with suppress(FileNotFoundError):  # its writer finished meanwhile
            if _TEMPORARY.fullmatch(path.name) and stat.S_ISREG(path.lstat().st_mode):
                path.unlink()


@contextmanager
def blaming(path: Path, temporary: Path | None = None) -> Iterator[None]:
    """Make each `OSError` of the block name `path` if it names no file, or only the temporary one.

    The error of a full disk names no file, and users do not know the names of temporary files.

    Args:
        path: The file that the user named.
        temporary: A temporary file or folder.
    """
    try:
        yield
    except OSError as error:
        named = None if error.filename is None else Path(str(error.filename))
        if named is not None and (temporary is None or temporary not in (named, *named.parents)):
            raise  # it is about another file
        raise type(error)(error.errno or errno.EIO, error.strerror or str(error), str(path)) from error


def flush(path: Path) -> None:
    """Wait until a file's content, or a folder's list of entries, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


#: The files that identify the folder of a dataset and of a bundle.
_MANIFEST, BUNDLE = "dataset.json", "bundle.npz"


def check_file(path: Path | str) -> None:
    """Raise `ForetuneError`, naming the path, unless `replacing` can write a file there.

    Refused are folders, files of a dataset or bundle, and files whose folder is missing or not writable.

    >>> check_file("/nowhere/measured.csv")
    Traceback (most recent call last):
    foretune.datasets.errors.ForetuneError: /nowhere/measured.csv cannot be written: make the folder /nowhere first
    """
    path = Path(path)
    try:
        _reach(path)
        if path.is_dir():
            raise ForetuneError(f"{path} is a folder: name a file")
        if path.is_socket():
            raise ForetuneError(f"{path} is a socket: name a file")
        if path.exists() and not path.is_file():  # /dev/stdout, a pipe: written directly
            return
        parent = path.resolve().parent  # follows a symbolic link
        if not parent.is_dir():
            raise ForetuneError(f"{path} cannot be written: make the folder {parent} first")
        check_not_stored(path)
        _try(parent)
    except OSError as error:
        raise ForetuneError(f"{path} cannot be written: {error.strerror}") from None


def check_folder(path: Path | str) -> None:
    """Raise `ForetuneError`, naming the path, unless it is or can become a folder that can be written.

    >>> check_folder("/dev/null/measured")
    Traceback (most recent call last):
    foretune.datasets.errors.ForetuneError: /dev/null/measured cannot be a folder: /dev/null is a file
    """
    path = Path(path)
    try:
        _reach(path)
        there = next(one for one in (path, *path.parents) if one.exists())
        if there == path and not path.is_dir():
            raise ForetuneError(f"{path} is a file: name a folder")
        if not there.is_dir():
            raise ForetuneError(f"{path} cannot be a folder: {there} is a file")
        _try(there)
    except OSError as error:
        raise ForetuneError(f"{path} cannot be written: {error.strerror}") from None


def visible_in(folder: Path) -> list[str]:
    """Return the names of a folder's entries, sorted and without hidden ones; [] if there is no folder."""
    return sorted(path.name for path in folder.glob("[!.]*"))


def check_not_stored(path: Path) -> None:
    """Raise `ForetuneError` if a path is an existing file of a dataset or a bundle, which must not be replaced."""
    path = path.resolve()
    folder = path.parent.parent if path.parent.name in ("parts", "drift") else path.parent
    is_stored = path.suffix == ".parquet" or folder != path.parent
    if path.is_file() and (path.name in (_MANIFEST, BUNDLE) or (is_stored and (folder / _MANIFEST).is_file())):
        raise ForetuneError(f"{path} is a file of the dataset or bundle in {folder}: name another file")


def few(names: Sequence[str]) -> str:
    """Return the first three names as text, for a message.

    >>> few(["a", "b", "c", "d"])
    'a, b, c, ...'
    """
    return ", ".join(names[:3]) + ", ..." * (len(names) > 3)


def _reach(path: Path) -> None:
    """Raise `OSError` if a path is a link that leads to itself, has too long a name, or may not be looked up.

    Since Python 3.14 `Path.exists` and similar methods ignore these errors, and since 3.13 `Path.resolve`.
    """
    with suppress(FileNotFoundError, NotADirectoryError):
        path.stat()


def _try(folder: Path) -> None:
    """Raise `OSError` if no temporary file can be written to a folder, which its permissions alone do not tell."""
    with tempfile.TemporaryFile(dir=folder):
        pass
