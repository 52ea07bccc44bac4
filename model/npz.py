"""Flat arrays, and texts beside them, in an .npz: the same content always gives the same bytes, and nothing is trusted
on reading."""

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


#: More members than any file of ours has, and the longest list of them. zipfile makes objects of what is listed, so
#: this is looked at first.
_MAX_MEMBERS, _MAX_LIST_BYTES = 1024, 1 << 20
#: How a zip of one disk without a comment ends: signature, disks, members here and in all, bytes of their list and
#: where it begins, bytes of the comment.
_END = struct.Struct("<4s2H2H2LH")


def dumps(arrays: Mapping[str, NDArray[Any]], texts: Mapping[str, bytes] | None = None) -> bytes:
    """The bytes of an uncompressed .npz, which `numpy.load` reads too; `numpy.savez` would put the time in them.

    >>> arrays, texts = loads(dumps({"a": np.arange(3)}, {"says.txt": b"counted"}))
    >>> arrays["a"].tolist(), texts
    ([0, 1, 2], {'says.txt': b'counted'})
    """
    buffer, members = io.BytesIO(), {f"{name}.npy": _saved(array) for name, array in arrays.items()} | dict(texts or {})
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in sorted(members.items()):
            entry = zipfile.ZipInfo(name)  # dated 1980-01-01
            entry.create_system = 3  # the same on every platform
            archive.writestr(entry, content)
    return buffer.getvalue()


def loads(content: bytes) -> tuple[dict[str, NDArray[Any]], dict[str, bytes]]:
    """The arrays and the texts of an .npz that `dumps` made.

    Raises `BundleError` for anything else. Nothing is unpickled, and nothing is allocated before the bytes for it are
    known to be there: no member may be compressed, and none may claim another shape than its length holds.
    """
    try:
        _check_end(content)
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            entries = archive.infolist()
            if len({entry.filename for entry in entries}) < len(entries):
                raise ValueError("two of its members have the same name")
            packed = [entry.filename for entry in entries if entry.compress_type != zipfile.ZIP_STORED]
            if packed or sum(entry.file_size for entry in entries) > len(content):
                raise ValueError("its members must be stored uncompressed and not overlap")
            members = {entry.filename: archive.read(entry) for entry in entries}
        texts = {name: member for name, member in members.items() if not name.endswith(".npy")}
        arrays = {name.removesuffix(".npy"): _array(members[name]) for name in members.keys() - texts.keys()}
    except _DAMAGE as error:
        raise BundleError(f"not an .npz of flat arrays ({type(error).__name__}: {error})") from None
    return arrays, texts


def _check_end(content: bytes) -> None:
    if len(content) < _END.size:
        raise ValueError("it is too short")
    signature, *disks, _, members, list_bytes, _, comment = _END.unpack(content[-_END.size :])
    if signature != b"PK\x05\x06" or any(disks) or comment:
        raise ValueError("it does not end as a zip without a comment does")
    extended = content[-_END.size - 20 :].startswith(b"PK\x06\x07")  # 64-bit counts, elsewhere
    if extended or members > _MAX_MEMBERS or list_bytes > _MAX_LIST_BYTES:
        raise ValueError(f"it has more than {_MAX_MEMBERS} members")


def _saved(array: NDArray[Any]) -> bytes:
    member = io.BytesIO()
    np.save(member, array, allow_pickle=False)
    return member.getvalue()


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
