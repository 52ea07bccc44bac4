"""`open_regular`: opens what is a file, and nothing that reading would wait for or never end of."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

_KINDS = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))
#: Opening a pipe without it waits for a writer. (Windows has neither pipes of this kind nor the flag.)
_HOW = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


class IrregularFileError(OSError):
    """A pipe, socket, device or folder where a file was due."""

    @property
    def why(self) -> str:
        """Which of these it is, without the path."""
        return str(self.strerror)


def open_regular(path: Path | str) -> BinaryIO:
    """Open a file for reading. Links are followed.

    Args:
        path: Where the file is.

    Returns:
        The file, opened in binary mode.

    Raises:
        IrregularFileError: Something else than a regular file is there. Nothing was read or waited for.
        OSError: Nothing is there, or it cannot be opened.

    >>> open_regular("/dev/zero")
    Traceback (most recent call last):
    foretune.datasets.disk.opening.IrregularFileError: [Errno 22] it is a device, not a file: '/dev/zero'
    """
    try:
        handle = os.open(path, _HOW)
    except OSError as error:
        if error.errno != errno.ENXIO:  # a socket, or a device that is not there
            raise
        raise _irregular(path, os.stat(path).st_mode) from None
    if stat.S_ISREG(mode := os.fstat(handle).st_mode):
        return os.fdopen(handle, "rb")
    os.close(handle)
    raise _irregular(path, mode)


def _irregular(path: Path | str, mode: int) -> IrregularFileError:
    kind = next((name for matches, name in _KINDS if matches(mode)), "a device")
    return IrregularFileError(errno.EINVAL, f"it is {kind}, not a file", str(path))
