"""Flat arrays in an .npz: the same arrays always give the same bytes, and nothing is trusted on reading."""

from __future__ import annotations

import io
import math
import re
import struct
import zipfile
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..datasets import BundleError

if TYPE_CHECKING:
    from numpy.typing import NDArray

# All that `dumps` ever writes: version 1.0, numbers, at most one axis. NumPy's own reader parses Python expressions.
_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00(?P<length>..)"
    rb"(?P<text>\{'descr': '(?P<dtype>[<|][iuf][1248])', 'fortran_order': False, "
    rb"'shape': \((?P<shape>(\d{1,9},)?)\), \} *\n)",
    re.DOTALL,
)

# What zipfile and NumPy raise for bytes that somebody made up.
_DAMAGE = (
    zipfile.BadZipFile, zlib.error, struct.error, ValueError, KeyError, EOFError, OSError, RuntimeError, TypeError,
    OverflowError,
)  # fmt: skip


def dumps(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """The bytes of an uncompressed .npz, which `numpy.load` reads too; `numpy.savez` would put the time in them.

    >>> loads(dumps({"a": np.arange(3)}))["a"].tolist()
    [0, 1, 2]
    """
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in sorted(arrays):
            member = io.BytesIO()
            np.save(member, arrays[name], allow_pickle=False)
            entry = zipfile.ZipInfo(f"{name}.npy")  # dated 1980-01-01
            entry.create_system = 3  # the same on every platform
            archive.writestr(entry, member.getvalue())
    return buffer.getvalue()


def loads(content: bytes) -> dict[str, NDArray[Any]]:
    """The arrays of an .npz that `dumps` made.

    Raises `BundleError` for anything else. Nothing is unpickled, and nothing is allocated before the bytes for it are
    known to be there: no member may be compressed, and none may claim another shape than its length holds.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            entries = archive.infolist()
            packed = [entry.filename for entry in entries if entry.compress_type != zipfile.ZIP_STORED]
            if packed or sum(entry.file_size for entry in entries) > len(content):
                raise BundleError("its members must be stored uncompressed and not overlap")
            return {entry.filename.removesuffix(".npy"): _array(archive.read(entry)) for entry in entries}
    except BundleError:
        raise
    except _DAMAGE as error:
        raise BundleError(f"not an .npz of flat arrays ({type(error).__name__}: {error})") from None


def _array(content: bytes) -> NDArray[Any]:
    header = _HEADER.match(content)
    if not header or len(header["text"]) != int.from_bytes(header["length"], "little"):
        raise ValueError("a member does not begin as numpy.save writes a flat array of numbers")
    shape = tuple(int(size) for size in header["shape"].split(b",") if size)
    dtype = np.dtype(header["dtype"].decode())
    if math.prod(shape) * dtype.itemsize != len(content) - header.end():
        raise ValueError(f"an array says that its shape is {shape}, but its length differs")
    array: NDArray[Any] = np.frombuffer(content, dtype, offset=header.end()).reshape(shape)
    return array
