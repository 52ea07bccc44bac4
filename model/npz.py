"""Flat arrays in an .npz: the same arrays always give the same bytes, and nothing is trusted on reading."""

from __future__ import annotations

import io
import math
import zipfile
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib import format as npy_format

from ..datasets import BundleError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_npy: Any = npy_format  # has no type annotations

# What zipfile and the header parser raise for bytes that somebody made up.
_DAMAGE = (
    zipfile.BadZipFile, zlib.error, ValueError, KeyError, EOFError, OSError, RuntimeError, SyntaxError, TypeError
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
            _npy.write_array(member, np.ascontiguousarray(arrays[name]).reshape(arrays[name].shape), allow_pickle=False)
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
    stream = io.BytesIO(content)
    if _npy.read_magic(stream) != (1, 0):
        raise ValueError("not version 1.0 of the .npy format")
    shape, fortran_order, dtype = _npy.read_array_header_1_0(stream)
    if dtype.hasobject or dtype.kind not in "iuf" or (fortran_order and len(shape) > 1):
        raise ValueError(f"an array of {dtype} is not a flat array of numbers")
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(content) - stream.tell():
        raise ValueError(f"an array says that its shape is {shape}, but its length differs")
    array: NDArray[Any] = np.frombuffer(content, dtype, offset=stream.tell()).reshape(shape)
    return array
