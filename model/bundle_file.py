"""Read and write a bundle's file. Equal bundles give equal bytes, and reading trusts nothing in the file.

    DIR/bundle.npz   manifest.json   features, parameters, devices, dataset; SHA-256 of the arrays and of the rest of
                                     the manifest
                     FAMILY/*.npy    trees, network and facts about binaries, as flat arrays: no pickle, no LightGBM
                                     text

It is a single file, so that it can be replaced atomically: a reader sees the old bundle or the new one, never parts of
both. Checksums detect accidental damage. They do not detect a manipulated file, so everything is validated as well.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..datasets import BundleError, ForetuneError
from ..datasets.files import check_folder, few, read_regular, visible_in
from ..datasets.manifest import MANIFEST as DATASET_MANIFEST

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: The file in a bundle's folder, and its only member that is not an array.
FILE, MANIFEST = "bundle.npz", "manifest.json"
#: Increased by one whenever a manifest key or an array changes its meaning, type or name.
SCHEMA_VERSION = 8
#: The largest file and manifest that are read. The shipped bundle has 2.4 MB, and its manifest a thirtieth of that.
_MAX_BYTES, _MAX_MANIFEST_BYTES = 64 << 20, 8 << 20
#: The keys of a manifest.
_KEYS = {"schema_version", "lightgbm_version", "arrays_sha256", "families", "checksum"}
#: The exceptions that invalid values in a manifest cause.
DAMAGE = (KeyError, TypeError, AttributeError, ValueError, OverflowError, RecursionError)
# The only headers that `dumps` writes: version 1.0, numbers, at most one axis. NumPy's reader parses Python literals.
_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00(?P<length>..)"
    rb"(?P<text>\{'descr': '(?P<dtype>[<|][iuf][1248])', 'fortran_order': False, "
    rb"'shape': \((?P<shape>(\d{1,9},)?)\), \} *\n)",
    re.DOTALL,
)
# The exceptions that zipfile and NumPy raise for invalid bytes.
_NPZ_DAMAGE = (
    zipfile.BadZipFile, zlib.error, struct.error, ValueError, KeyError, EOFError, OSError, RuntimeError, TypeError,
    OverflowError,
)  # fmt: skip
#: The most members, and the longest central directory in bytes. zipfile creates an object for each entry, so these are
#: checked first.
_MAX_MEMBERS, _MAX_LIST_BYTES = 1024, 1 << 20
#: The end record of a zip file: signature, disk numbers, entries on this disk and in total, size and offset of the
#: central directory, length of the comment.
_END = struct.Struct("<4s2H2H2LH")


def read(path: Path) -> bytes | None:
    """Return the content of a bundle's file, or None if the file does not exist.

    Raises:
        BundleError: The path is not a regular file, cannot be read, or is too large.
    """
    try:
        return read_regular(path, _MAX_BYTES, follow=True)
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        raise BundleError(f"{path.parent} is not a folder: name the one that has the bundle") from None
    except (OSError, ValueError) as error:  # a ForetuneError is a ValueError, like that of a path with a NUL
        raise BundleError(f"{str(path)!r}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def manifest_of(text: bytes) -> dict[str, Any]:
    """Parse the JSON text of a bundle's manifest, check it, and return it.

    Raises:
        BundleError: It is too large, not JSON, of another schema version, has wrong keys, or a wrong checksum.
    """
    if len(text) > _MAX_MANIFEST_BYTES:
        raise BundleError(f"its manifest is larger than one may be ({_MAX_MANIFEST_BYTES >> 20} MiB)")
    try:
        manifest = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"its manifest is not JSON: {error}") from None
    if not isinstance(manifest, dict) or "schema_version" not in manifest:
        raise BundleError("not a bundle's manifest: it has no schema_version")
    version = manifest["schema_version"]
    if type(version) is not int or version != SCHEMA_VERSION:
        newer = isinstance(version, int) and version > SCHEMA_VERSION
        raise BundleError(
            f"schema_version is {version!r} but this Foretune reads {SCHEMA_VERSION}"
            + ("; a newer Foretune wrote it" if newer else ": train it again")
        )
    if missing := _KEYS - manifest.keys():
        raise BundleError(f"keys missing in its manifest: {', '.join(sorted(missing))}")
    if unknown := manifest.keys() - _KEYS:
        raise BundleError(f"unknown keys in its manifest: {', '.join(sorted(unknown))}")
    if manifest["checksum"] != checksum({key: value for key, value in manifest.items() if key != "checksum"}):
        raise BundleError("its manifest does not match its checksum")
    return manifest


def checksum(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of JSON values in canonical form.

    Raises:
        BundleError: A value has no JSON form, for example NaN, a lone surrogate or an object.
    """
    try:
        text = json.dumps(content, sort_keys=True, allow_nan=False, ensure_ascii=False).encode()
    except DAMAGE as error:
        raise BundleError(f"the values of a bundle must be JSON: {error}") from None
    return hashlib.sha256(text).hexdigest()


def digest_of(arrays: Mapping[str, NDArray[Any]]) -> str:
    """Return the SHA-256 of named arrays: of names, dtypes, shapes and values, but not of how a file stores them."""
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def dumps(arrays: Mapping[str, NDArray[Any]], texts: Mapping[str, bytes] | None = None) -> bytes:
    """Return the bytes of an uncompressed .npz file, which `numpy.load` can read.

    Unlike with `numpy.savez`, the bytes do not contain the current time.

    Args:
        arrays: The arrays by name.
        texts: Other members by file name.

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
    """Return the arrays and texts of an .npz file that `dumps` wrote.

    Nothing is unpickled, and memory is allocated only for data that the file contains: members must be uncompressed,
    and an array's shape must match its length.

    Raises:
        BundleError: The bytes are not such a file.
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
    except _NPZ_DAMAGE as error:
        raise BundleError(f"not an .npz of flat arrays ({type(error).__name__}: {error})") from None
    return arrays, texts


def _check_end(content: bytes) -> None:
    """Raise `ValueError` if a zip file's end record is invalid or has too many members, before zipfile reads it."""
    if len(content) < _END.size:
        raise ValueError("it is too short")
    signature, *disks, _, members, list_bytes, _, comment = _END.unpack(content[-_END.size :])
    if signature != b"PK\x05\x06" or any(disks) or comment:
        raise ValueError("it does not end with the record of a zip file without a comment")
    extended = content[-_END.size - 20 :].startswith(b"PK\x06\x07")  # zip64: the counts are elsewhere
    if extended or members > _MAX_MEMBERS or list_bytes > _MAX_LIST_BYTES:
        raise ValueError(f"it has more than {_MAX_MEMBERS} members")


def _saved(array: NDArray[Any]) -> bytes:
    """Return an array as the bytes of an .npy file."""
    member = io.BytesIO()
    np.save(member, array, allow_pickle=False)
    return member.getvalue()


def _array(content: bytes) -> NDArray[Any]:
    """Return the array of an .npy file with at most one axis. Raises `ValueError` for other content."""
    header = _HEADER.match(content)
    if not header or len(header["text"]) != int.from_bytes(header["length"], "little"):
        raise ValueError("a member does not have the header of a flat array of numbers")
    shape = tuple(int(size) for size in header["shape"].split(b",") if size)
    dtype = np.dtype(header["dtype"].decode())
    if math.prod(shape) * dtype.itemsize != len(content) - header.end():
        raise ValueError(f"an array has the shape {shape}, but data of another length")
    array: NDArray[Any] = np.frombuffer(content, dtype, offset=header.end()).reshape(shape)
    return array


def check_bundle_folder(path: Path | str) -> None:
    """Check that a bundle can be saved in a folder: it must be new, empty, or have only a bundle.

    Raises:
        ForetuneError: It cannot; the message names the folder and the reason.

    >>> check_bundle_folder("/dev/null")
    Traceback (most recent call last):
    foretune.datasets.errors.ForetuneError: /dev/null is a file: name a folder
    """
    check_folder(path := Path(path))
    check_only_bundle(path)


def check_only_bundle(path: Path) -> None:
    """Check that a folder has nothing other than a bundle. Hidden files are ignored.

    Raises:
        ForetuneError: The folder has a dataset, or files but no bundle.
    """
    if (path / DATASET_MANIFEST).is_file():
        raise ForetuneError(f"{path} is the folder of a dataset: name one for the bundle alone")
    others = visible_in(path)
    if others and not (path / FILE).is_file():
        raise ForetuneError(f"{path} holds files but no bundle ({few(others)}): name a new or an empty folder")


def check_plots_folder(path: Path | str) -> None:
    """Check that a folder for figures has no other files. Hidden files are ignored.

    Raises:
        ForetuneError: The path cannot be a folder, or it has files whose names do not end in `.svg`.
    """
    check_folder(path := Path(path))
    if others := [name for name in visible_in(path) if not name.endswith(".svg")]:
        raise ForetuneError(f"{path} holds files that are not figures ({few(others)}): name a new or an empty folder")
