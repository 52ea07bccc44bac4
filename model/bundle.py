"""`Bundle`: trained rankers as a file that is safe to load, byte for byte the same for the same training.

    DIR/bundle.npz   manifest.json   what was learned from what: features, parameters, devices, dataset; SHA-256 of
                                     the arrays and of the manifest's own content
                     FAMILY/*.npy    trees, network, what binaries say, as flat arrays: no pickle, no LightGBM
                                     text

One file, so that it is replaced in one step: whoever reads sees one bundle or the next, never parts of both. Damage
shows in the checksums. A checksum does not stop a file made on purpose, so everything is validated besides, and says
nothing but what this Foretune would write.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..datasets import BundleError, DeviceSpec, KernelConfig, Problem
from ..datasets.errors import abridged, check_path, reason_of
from ..datasets.files import remove_leftovers, replacing
from ..datasets.locks import writing
from . import npz
from .calibration.conformal import Calibration
from .calibration.extent import Distance, distance_of
from .folders import FILE, check_only_bundle
from .gbdt import LightGBMRanker
from .trained_family import TrainedFamily

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Raised by one whenever a manifest key or an array changes meaning, type or name.
SCHEMA_VERSION = 8
MANIFEST = "manifest.json"
#: No bundle has more; the shipped one has 2.4 MB, of which the manifest takes a thirtieth.
_MAX_BYTES, _MAX_MANIFEST_BYTES, _MAX_FAMILIES = 64 << 20, 8 << 20, 64
#: Of a manifest.
_KEYS = {"schema_version", "lightgbm_version", "arrays_sha256", "families", "checksum"}
#: What Python raises for values that somebody made up.
_DAMAGE = (KeyError, TypeError, AttributeError, ValueError, OverflowError, RecursionError)


@dataclass(frozen=True)
class Bundle:
    """Trained rankers by family name. Made by `train`, read by `load_bundle`.

    >>> bundle = load_bundle("my-bundle")  # doctest: +SKIP
    >>> bundle.ranker("row_softmax").predict(family, problem, device, configs)  # doctest: +SKIP
    array([1.24, 1.02, 3.4])
    """

    trained: Mapping[str, TrainedFamily]
    lightgbm_version: str  # that trained it; none is needed to predict

    @property
    def families(self) -> tuple[str, ...]:
        return tuple(sorted(self.trained))

    @property
    def digest(self) -> str:
        """SHA-256 of all that is in the bundle: the same digest gives the same predictions."""
        return str(self.manifest["checksum"])

    def ranker(self, family: str) -> LightGBMRanker:
        """The fitted ranker of a family, by name. Raises `BundleError` listing the families that are in it."""
        return self._trained(family).ranker

    def trained_on(self, family: str) -> tuple[DeviceSpec, ...]:
        """The devices that a family's measurements were taken on. Raises `BundleError` as `ranker` does."""
        return self._trained(family).devices

    def wrong_results(self, family: str, problem: Problem) -> frozenset[KernelConfig]:
        """The configs of a family that computed a wrong result when they were measured with this problem's dtype and
        flags: no shortlist has them. Raises `BundleError` as `ranker` does."""
        return self._trained(family).wrong_results.get((problem.dtype, problem.flags), frozenset())

    def calibration(self, family: str) -> Calibration | None:
        """What says how long a family's shortlists must be; None where nothing does. Raises `BundleError` as `ranker`
        does."""
        return self._trained(family).calibration

    def distance(self, family: str, problem: Problem, device: DeviceSpec) -> Distance:
        """How far a problem on a device is from what the family's ranker learned: 0 octaves within. Raises
        `BundleError` as `ranker` does.

        >>> problem = Problem.of("row_softmax", rows=1 << 20, columns=4096)  # doctest: +SKIP
        >>> bundle.distance("row_softmax", problem, DeviceSpec.named("h200")).reason  # doctest: +SKIP
        'rows 12x above the data'
        """
        trained = self._trained(family)
        return distance_of(problem, device, trained.extent, trained.devices)

    def beside(self, other: Bundle) -> Bundle:
        """This bundle's families, and of another bundle those that it lacks.

        >>> train_bundle(dataset, families).beside(load_bundle()).save("my-bundle")  # doctest: +SKIP
        """
        return Bundle({**other.trained, **self.trained}, self.lightgbm_version)

    def save(self, path: Path | str) -> None:
        """Writes `bundle.npz` into a folder, which is made where there is none, in one step: whoever reads meanwhile,
        or after this process was killed, has the old bundle or this one.

        Raises `OSError` naming what could not be written, `BundleError` for what no bundle may hold, and
        `ForetuneError` for a folder that holds something else.

        >>> bundle.save("my-bundle")  # doctest: +SKIP
        """
        directory, content = Path(path), self._content
        _parsed(content, directory / FILE).restore()  # what is written can be read
        check_only_bundle(directory)
        directory.mkdir(parents=True, exist_ok=True)
        with writing(directory) as is_alone:
            if is_alone:
                remove_leftovers(directory, of=f"{FILE}.")
            with replacing(directory / FILE) as temporary:
                temporary.write_bytes(content)

    def restore(self) -> None:
        """Asks for every family, so that nothing is left to be found wrong with what `open_bundle` read."""
        for name in self.families:
            self.trained[name]

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """All but the arrays, as JSON values."""
        content = {
            "schema_version": SCHEMA_VERSION,
            "lightgbm_version": self.lightgbm_version,
            "arrays_sha256": _digest(self._arrays),
            "families": {name: self.trained[name].to_json() for name in self.families},
        }
        return content | {"checksum": _checksum(content)}

    @property
    def _content(self) -> bytes:
        return npz.dumps(self._arrays, {MANIFEST: (json.dumps(self.manifest, separators=(",", ":")) + "\n").encode()})

    @property
    def _arrays(self) -> dict[str, NDArray[Any]]:
        return {
            f"{name}/{array}": values
            for name, trained in self.trained.items()
            for array, values in trained.arrays.items()
        }

    def _trained(self, family: str) -> TrainedFamily:
        if family not in self.trained:
            raise BundleError(f"the bundle has no family {family!r}; it has {', '.join(self.families) or 'none'}")
        return self.trained[family]


def load_bundle(path: Path | str | None = None) -> Bundle:
    """The bundle in a folder; the shipped one where no path is given.

    Raises `BundleError` naming the file that is missing, damaged, of another schema, or not what it should be.

    >>> load_bundle("/nowhere")
    Traceback (most recent call last):
    foretune.datasets.errors.BundleError: /nowhere/bundle.npz: no such file, so /nowhere has no bundle
    """
    bundle = open_bundle(path)
    bundle.restore()
    return bundle


def open_bundle(path: Path | str | None = None) -> Bundle:
    """`load_bundle` for who needs a family or two: checksums are compared, and a family is restored, and found to be
    what it should be, when it is first asked for. What asks for it raises `BundleError` then, naming the file.

    >>> open_bundle().families == load_bundle().families
    True
    """
    directory = Path(__file__).parent / "shipped" if path is None else check_path("bundle", path)
    content = _read(directory / FILE)
    if content is None:
        raise BundleError(f"{directory / FILE}: no such file, so {directory} has no bundle")
    return _parsed(content, directory / FILE)


class _Stored(Mapping[str, TrainedFamily]):
    """The families that a file holds, each restored when it is first asked for, if it is what `Bundle.save` would write
    of it; else a `BundleError`. A program uses one or two of them, and a first call waits for this."""

    def __init__(
        self, path: Path, entries: Mapping[str, Mapping[str, Any]], arrays: Mapping[str, Mapping[str, NDArray[Any]]]
    ) -> None:
        self._path, self._entries, self._arrays = path, entries, arrays
        self._restored: dict[str, TrainedFamily] = {}

    def __getitem__(self, name: str) -> TrainedFamily:
        known = self._restored.get(name)
        if known is not None:
            return known
        entry, arrays = self._entries[name], self._arrays[name]
        with _naming(self._path):
            trained = TrainedFamily.from_json(entry, arrays)
            if _checksum(trained.to_json()) != _checksum(entry) or _digest(trained.arrays) != _digest(arrays):
                raise BundleError(f"its manifest says of {name!r} what this Foretune would not write, or less")
        return self._restored.setdefault(name, trained)  # another thread may have been faster

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def _parsed(content: bytes, path: Path) -> Bundle:
    """The bundle that the file holds, undamaged, with families that are yet to be restored."""
    with _naming(path):
        arrays, texts = npz.loads(content)
        manifest = _manifest(texts.pop(MANIFEST, b""))
        if texts:
            raise BundleError(f"it also holds {', '.join(map(repr, sorted(texts)))}")
        if _digest(arrays) != manifest["arrays_sha256"]:
            raise BundleError("its arrays are not what the manifest vouches for (SHA-256 differs)")
        bundle = Bundle(_Stored(path, manifest["families"], _arrays_of(manifest, arrays)), manifest["lightgbm_version"])
        vars(bundle)["manifest"] = manifest  # it need not be made of all families then
    return bundle


def _arrays_of(manifest: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> dict[str, dict[str, NDArray[Any]]]:
    """Those of each family. Raises `BundleError` for names that cannot be, and arrays that are nobody's."""
    families, version = manifest["families"], manifest["lightgbm_version"]
    if not isinstance(families, dict) or len(families) > _MAX_FAMILIES:
        raise BundleError(f"families must be an object of at most {_MAX_FAMILIES}")
    for text in (version, *families):
        if not (isinstance(text, str) and text.isprintable() and 0 < len(text) <= 200):
            raise BundleError(f"names and versions must be plain words but one is {text!r}")
    names = {name: TrainedFamily.array_names(entry) for name, entry in families.items()}
    wanted = {f"{name}/{array}" for name, of_it in names.items() for array in of_it}
    if arrays.keys() != wanted:
        raise BundleError(f"arrays missing or not its own: {', '.join(map(repr, sorted(arrays.keys() ^ wanted)))}")
    return {name: {array: arrays[f"{name}/{array}"] for array in of_it} for name, of_it in names.items()}


def _manifest(text: bytes) -> dict[str, Any]:
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
    if manifest["checksum"] != _checksum({key: value for key, value in manifest.items() if key != "checksum"}):
        raise BundleError("its manifest is not what its checksum vouches for")
    return manifest


def _checksum(content: Mapping[str, Any]) -> str:
    """Raises `BundleError` for what is not JSON: numbers that are none, half characters, objects."""
    try:
        text = json.dumps(content, sort_keys=True, allow_nan=False, ensure_ascii=False).encode()
    except _DAMAGE as error:
        raise BundleError(f"what a bundle says must be JSON: {error}") from None
    return hashlib.sha256(text).hexdigest()


def _digest(arrays: Mapping[str, NDArray[Any]]) -> str:
    """SHA-256 of arrays, by name; how a file holds them does not matter."""
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _read(path: Path) -> bytes | None:
    """None where there is no such file."""
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


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """What is wrong inside is told with the name of the file."""
    try:
        yield
    except _DAMAGE as error:
        raise BundleError(f"{path}: not a bundle of this Foretune: {abridged(reason_of(error))}") from None
