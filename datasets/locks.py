"""Who may write to a dataset's folder: one collection at a time, and one process at a time its files; and `locked`, for
one file that many update.

The system's own locks (flock), on hidden files that their holder removes: a process that dies lets go of its lock,
whatever it died of, so a file that it left means nothing.

A forked process inherits open files, and with them locks. It closes them at once (`_LockFiles`). Otherwise it would
hold locks that its parent has released, and wait for itself.
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
from .files import blaming, open_regular, refusal
from .forking import renew_in_children

#: Lock files: of the process that has the folder for itself while it collects, and of one that is writing a file.
TAKEN, WRITING = ".collecting", ".writing"
#: What a lock file that is not empty begins with.
_HOLDER = "process "


@contextmanager
def taken(directory: Path) -> Iterator[None]:
    """Has a folder for itself while its block runs, as a collection does. Another process is refused with a
    `ForetuneError` that names the holder."""
    with _locked(directory / TAKEN, partial(_lock, wait=False)) as (file, _):
        with blaming(directory / TAKEN):
            file.truncate(0)
            now = datetime.datetime.now(datetime.timezone.utc)
            file.write(f"{_HOLDER}{os.getpid()} on {platform.node()}, since {now:%Y-%m-%d %H:%M:%S} UTC")
            file.flush()
        yield


@contextmanager
def writing(directory: Path) -> Iterator[bool]:
    """Waits until no other process, nor thread, writes a file of the dataset, and lets none while its block runs; False
    where the file system has no locks, so that one may. It is not to be entered twice."""
    with _locked(directory / WRITING, partial(_lock, wait=True)) as (_, is_locked):
        yield is_locked


@contextmanager
def alone(directory: Path) -> Iterator[None]:
    """Both: for what writes all files of a dataset anew."""
    with taken(directory), writing(directory):
        yield


def check_free(directory: Path) -> None:
    """Raises `ForetuneError` as `taken` does, but takes nothing: the folder may be one that is only read."""
    try:
        with _opened(directory / TAKEN, os.O_RDONLY) as file:
            _lock(file, directory / TAKEN, wait=False, shared=True)
    except (FileNotFoundError, NotADirectoryError, FileExistsError):  # the last: it is no lock file
        pass


@contextmanager
def locked(path: Path, within_s: float) -> Iterator[None]:
    """Has the lock file at `path` while its block runs: for short work that must not wait for ever, as in a launch.

    Raises `TimeoutError` where another process, or thread, does not let go of it in time, and another `OSError` where
    the file system has no locks or nothing can be written.

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
    while True:
        with _opened(path, os.O_RDWR | os.O_CREAT | os.O_APPEND) as file:
            is_locked = lock(file, path)
            if not _lies_at(path, file):
                continue  # who had it has removed it by now, so another process may lock a new one
            holder = os.getpid()
            try:
                yield file, is_locked
            finally:
                if os.getpid() == holder:  # else this is a process that was forked meanwhile: the lock is not its own
                    path.unlink(missing_ok=True)
                    _unlock(file)
            return


class _LockFiles:
    """The descriptors of lock files that are open in this process."""

    def __init__(self) -> None:
        self.handles: set[int] = set()

    def renew(self) -> None:
        """Replace the parent's lock files with /dev/null: threads of this process may still close the descriptors."""
        while self.handles:
            nothing = os.open(os.devnull, os.O_RDWR)
            os.dup2(nothing, self.handles.pop(), inheritable=False)
            os.close(nothing)


_lock_files = _LockFiles()
renew_in_children(_lock_files)


def _unlock(file: TextIO) -> None:
    """Let go of a lock, which closing alone does not while a forked process has the file as well."""
    import fcntl

    with suppress(OSError):  # a file system without locks
        fcntl.flock(file, fcntl.LOCK_UN)


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[TextIO]:
    """Yield a lock file, which no forked process keeps open.

    Raises:
        FileExistsError: Something else lies there, which is neither followed, locked nor removed.
        OSError: It cannot be opened.
    """
    try:
        handle = open_regular(path, flags)
    except ForetuneError as error:
        raise refusal(error, path) from None
    with os.fdopen(handle, "r" if flags == os.O_RDONLY else "a+", errors="replace") as file:
        if os.pread(handle, len(_HOLDER), 0) not in (b"", _HOLDER.encode()):
            raise FileExistsError(errno.EEXIST, "it is not a lock file of Foretune", str(path))
        _lock_files.handles.add(handle)
        try:
            yield file
        finally:
            _lock_files.handles.discard(handle)


def _lock_in_time(file: TextIO, path: Path, end: float) -> bool:
    import fcntl

    wait_s = 0.0005
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > end:
                raise TimeoutError(errno.ETIMEDOUT, "another process does not let go of its lock", str(path)) from None
        time.sleep(wait_s * random.random())  # so that those who wait do not come back together
        wait_s = min(2 * wait_s, 0.02)


def _lock(file: TextIO, path: Path, *, wait: bool, shared: bool = False) -> bool:
    import fcntl  # here, because datasets are also read where there is none

    how = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
    try:
        fcntl.flock(file, how)
    except BlockingIOError:
        file.seek(0)
        who = abridged(file.read(1000)) or "another process"
        raise ForetuneError(
            f"{path.parent} is being written by {who}: wait for its end, or choose another folder"
        ) from None
    except OSError as error:  # some network file systems
        warn(
            f"{path.parent}: nothing can be locked on its file system ({error.strerror}): let no other process write "
            "there meanwhile"
        )
        return False
    return True


def _lies_at(path: Path, file: TextIO) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
