"""The file that a bundle is, as bytes: the same content always gives the same bytes, and nothing is trusted on reading.

    DIR/bundle.npz   manifest.json   what was learned from what: features, parameters, devices, dataset; SHA-256 of
                                     the arrays and of the manifest's own content
                     FAMILY/*.npy    trees, network, what binaries say, as flat arrays: no pickle, no LightGBM
                                     text

One file, so that it is replaced in one step: a reader sees one bundle or the next, never parts of both. Damage shows in
the checksums. A checksum does not stop a file made on purpose, so everything is validated besides.
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
from ..datasets.files import check_folder, few, visible_in
from ..datasets.manifest import MANIFEST as DATASET_MANIFEST
from ..datasets.manifest import check_ours

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: The file in a bundle's folder, and its member that is no array.
FILE, MANIFEST = "bundle.npz", "manifest.json"
#: Raised by one whenever a manifest key or an array changes meaning, type or name.
SCHEMA_VERSION = 8
#: No bundle has more; the shipped one has 2.4 MB, of which the manifest takes a thirtieth.
_MAX_BYTES, _MAX_MANIFEST_BYTES = 64 << 20, 8 << 20
#: Of a manifest.
_KEYS = {"schema_version", "lightgbm_version", "arrays_sha256", "families", "checksum"}
#: What Python raises for made-up values.
DAMAGE = (KeyError, TypeError, AttributeError, ValueError, OverflowError, RecursionError)
# All that `dumps` ever writes: version 1.0, numbers, at most one axis. NumPy's own reader parses Python expressions.
_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00(?P<length>..)"
    rb"(?P<text>\{'descr': '(?P<dtype>[<|][iuf][1248])', 'fortran_order': False, "
    rb"'shape': \((?P<shape>(\d{1,9},)?)\), \} *\n)",
    re.DOTALL,
)
# What zipfile and NumPy raise for bytes that somebody made up.
_NPZ_DAMAGE = (
    zipfile.BadZipFile, zlib.error, struct.error, ValueError, KeyError, EOFError, OSError, RuntimeError, TypeError,
    OverflowError,
)  # fmt: skip
#: More members than any file of ours has, and the longest list of them. zipfile makes objects of what is listed, so
#: this is looked at first.
_MAX_MEMBERS, _MAX_LIST_BYTES = 1024, 1 << 20
#: How a zip of one disk without a comment ends: signature, disks, members here and in all, bytes of their list and
#: where it begins, bytes of the comment.
_END = struct.Struct("<4s2H2H2LH")


def read(path: Path) -> bytes | None:
    """Return the content of a file, None where there is none. Raises `BundleError` naming a file that cannot be."""
    try:
        if path.exists() and not path.is_file():
            raise OSError("not a file")  # a pipe would be waited for
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL
        raise BundleError(f"{str(path)!r}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(content) > _MAX_BYTES:
        raise BundleError(f"{path}: larger than any bundle ({_MAX_BYTES >> 20} MiB)")
    return content


def manifest_of(text: bytes) -> dict[str, Any]:
    """Return a manifest of this schema whose checksum fits. Raises `BundleError` for anything else."""
    if len(text) > _MAX_MANIFEST_BYTES:
        raise BundleError(f"its manifest is larger than any ({_MAX_MANIFEST_BYTES >> 20} MiB)")
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
        raise BundleError(f"keys in its manifest that no bundle has: {', '.join(sorted(unknown))}")
    if manifest["checksum"] != checksum({key: value for key, value in manifest.items() if key != "checksum"}):
        raise BundleError("its manifest is not what its checksum vouches for")
    return manifest


def checksum(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of JSON values.

    Raises:
        BundleError: A value is not JSON: NaN, half a character, an object.
    """
    try:
        text = json.dumps(content, sort_keys=True, allow_nan=False, ensure_ascii=False).encode()
    except DAMAGE as error:
        raise BundleError(f"what a bundle says must be JSON: {error}") from None
    return hashlib.sha256(text).hexdigest()


def digest_of(arrays: Mapping[str, NDArray[Any]]) -> str:
    """Return the SHA-256 of arrays, by name; how a file holds them does not matter."""
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


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
    except _NPZ_DAMAGE as error:
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


def check_bundle_folder(path: Path | str) -> None:
    """Raises `ForetuneError`, naming the path, unless a bundle can be saved there: in a folder that is new, empty, or a
    bundle's.

    >>> check_bundle_folder("/dev/null")
    Traceback (most recent call last):
    foretune.datasets.errors.ForetuneError: /dev/null is a file: name a folder
    """
    check_folder(path := Path(path))
    check_only_bundle(path)


def check_only_bundle(path: Path) -> None:
    """Refuse a folder that holds something other than a bundle. Hidden files do not count.

    Raises:
        ForetuneError: The folder has a dataset, or files but no bundle.
    """
    is_bundle, is_dataset = _holds(path)
    if is_dataset:
        raise ForetuneError(f"{path} is the folder of a dataset: name one for the bundle alone")
    others = visible_in(path)
    if others and not is_bundle:
        raise ForetuneError(f"{path} holds what is no bundle ({few(others)}): name a folder for the bundle alone")


def check_dataset_folder(path: Path | str) -> None:
    """Raises `ForetuneError`, naming the path, unless a dataset can be written there: in a folder that is new, empty,
    or a dataset's.

    >>> check_dataset_folder("/dev/null")
    Traceback (most recent call last):
    foretune.datasets.errors.ForetuneError: /dev/null is a file: name a folder
    """
    check_folder(path := Path(path))
    is_bundle, is_dataset = _holds(path)
    if is_bundle and not is_dataset:
        raise ForetuneError(f"{path} is the folder of a bundle: name one for the dataset alone")
    check_ours(path)


def check_plots_folder(path: Path | str) -> None:
    """Refuse a folder for figures that holds something other than figures.

    Raises:
        ForetuneError: The path cannot be a folder, or it has files whose names do not end in `.svg`.
    """
    check_folder(path := Path(path))
    if others := [name for name in visible_in(path) if not name.endswith(".svg")]:
        raise ForetuneError(f"{path} holds files that are no figures ({few(others)}): name a folder for them alone")


def _holds(folder: Path) -> tuple[bool, bool]:
    """Return whether it is the folder of a bundle, and whether of a dataset."""
    return (folder / FILE).is_file(), (folder / DATASET_MANIFEST).is_file()
