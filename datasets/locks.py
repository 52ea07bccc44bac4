"""Locks of a dataset's folder: one collection at a time, and one process at a time that writes a file.

`locked` is a lock with a timeout for any other file that several processes update.

The locks are the operating system's (flock), on hidden files that their holder removes. A process that dies releases
its locks, so a lock file that it left has no effect.

A forked process inherits open files and thus locks. It closes them at once (`_LockFiles`); otherwise it would hold
locks that its parent has released, and could wait for itself.
"""

from __future__ import annotations

import datetime
import errno
import os
import platform
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TextIO

from .errors import ForetuneError, abridged, warn
from .files import blaming, open_regular
from .forking import renew_in_children

#: The lock files of a collection that uses the folder, and of a process that is writing a file.
TAKEN, WRITING = ".collecting", ".writing"
#: The first characters of a lock file that is not empty.
_HOLDER = "process "


@contextmanager
def taken(directory: Path) -> Iterator[None]:
    """Lock a folder for one collection while the block runs.

    Raises:
        ForetuneError: Another process holds the lock. The message names it.
    """
    with _locked(directory / TAKEN, partial(_lock, wait=False)) as (file, _):
        with blaming(directory / TAKEN):
            file.truncate(0)
            now = datetime.datetime.now(datetime.timezone.utc)
            file.write(f"{_HOLDER}{os.getpid()} on {platform.node()}, since {now:%Y-%m-%d %H:%M:%S} UTC")
            file.flush()
        yield


@contextmanager
def writing(directory: Path) -> Iterator[bool]:
    """Wait for and hold the lock for writing files of the dataset; it excludes other processes and threads.

    It is not reentrant.

    Yields:
        Whether the lock is held; False if the file system has no locks.
    """
    with _locked(directory / WRITING, partial(_lock, wait=True)) as (_, is_locked):
        yield is_locked


@contextmanager
def alone(directory: Path) -> Iterator[None]:
    """Hold a folder's lock for collecting and its lock for writing, to rewrite all files of a dataset."""
    with taken(directory), writing(directory):
        yield


def check_free(directory: Path) -> None:
    """Raise `ForetuneError` if a collection holds the folder's lock. Works in a read-only folder: it takes no lock."""
    try:
        with _opened(directory / TAKEN, os.O_RDONLY) as file:
            _lock(file, directory / TAKEN, wait=False, shared=True)
    except (FileNotFoundError, NotADirectoryError, FileExistsError):  # the last one: it is not a lock file
        pass


@contextmanager
def locked(path: Path, within_s: float) -> Iterator[None]:
    """Hold the lock file at `path` while the block runs, for short work that must not wait forever, as in a launch.

    Args:
        path: The lock file.
        within_s: The maximum number of seconds to wait.

    Raises:
        TimeoutError: Another process or thread did not release it in time.
        OSError: The file system has no locks, or cannot be written.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / ".lock"
    >>> with locked(path, 1.0):
    ...     path.exists()
    True
    """
    with _locked(path, partial(_lock_in_time, end=time.monotonic() + within_s)):
        yield


@contextmanager
def _locked(path: Path, lock: Callable[[TextIO, Path], bool]) -> Iterator[tuple[TextIO, bool]]:
    """Open a lock file, yield it and whether `lock` locked it, and remove it after the block in either case."""
    while True:
        with _opened(path, os.O_RDWR | os.O_CREAT | os.O_APPEND) as file:
            is_locked = lock(file, path)
            if not _lies_at(path, file):
                continue  # its holder has removed it, so another process may lock a new file
            holder = os.getpid()
            try:
                yield file, is_locked
            finally:
                if os.getpid() == holder:  # else this process was forked in the block and does not own the lock
                    path.unlink(missing_ok=True)
                    _unlock(file)
            return


class _LockFiles:
    """The descriptors of the lock files that this process has open."""

    def __init__(self) -> None:
        self.handles: set[int] = set()

    def renew(self) -> None:
        """Replace the parent's lock files with /dev/null: descriptors stay valid for `with` blocks that close them."""
        while self.handles:
            nothing = os.open(os.devnull, os.O_RDWR)
            os.dup2(nothing, self.handles.pop(), inheritable=False)
            os.close(nothing)


_lock_files = _LockFiles()
renew_in_children(_lock_files)


def _unlock(file: TextIO) -> None:
    """Release a lock explicitly, because closing the file does not while a forked process has it open as well."""
    import fcntl

    with suppress(OSError):  # a file system without locks
        fcntl.flock(file, fcntl.LOCK_UN)


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[TextIO]:
    """Open a lock file with these flags of `os.open`, and register it to be closed in forked processes.

    Raises:
        FileExistsError: There is something other than a lock file, which is neither followed, locked nor removed.
        OSError: It cannot be opened.
    """
    try:
        handle = open_regular(path, flags)
    except ForetuneError as error:
        raise OSError(errno.EEXIST, str(error), str(path)) from None  # some callers tolerate a missing disk
    with os.fdopen(handle, "r" if flags == os.O_RDONLY else "a+", errors="replace") as file:
        if os.pread(handle, len(_HOLDER), 0) not in (b"", _HOLDER.encode()):
            raise FileExistsError(errno.EEXIST, "it is not a lock file of Foretune", str(path))
        _lock_files.handles.add(handle)
        try:
            yield file
        finally:
            _lock_files.handles.discard(handle)


def _lock_in_time(file: TextIO, path: Path, end: float) -> bool:
    """Lock a file and return True; raise `TimeoutError` if that takes until `end` (of `time.monotonic`)."""
    import fcntl

    wait_s = 0.0005
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > end:
                raise TimeoutError(errno.ETIMEDOUT, "another process does not release its lock", str(path)) from None
        time.sleep(wait_s * random.random())  # random, so that waiting processes do not retry at the same time
        wait_s = min(2 * wait_s, 0.02)


def _lock(file: TextIO, path: Path, *, wait: bool, shared: bool = False) -> bool:
    """Lock a file, exclusively unless `shared`; return False, with a warning, if the file system has no locks.

    Raises `ForetuneError` naming the holder if the lock is held and `wait` is False.
    """
    import fcntl  # imported here, because datasets can be read on systems without it

    how = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
    try:
        fcntl.flock(file, how)
    except BlockingIOError:
        file.seek(0)
        who = abridged(file.read(1000)) or "another process"
        raise ForetuneError(
            f"{path.parent} is being written by {who}: wait until it ends, or choose another folder"
        ) from None
    except OSError as error:  # some network file systems
        warn(
            f"{path.parent}: its file system does not support locks ({error.strerror}). Make sure that no other "
            "process writes there at the same time"
        )
        return False
    return True


def _lies_at(path: Path, file: TextIO) -> bool:
    """Return whether an open file is still the one at a path."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
