"""`Bundle`: trained rankers, safe to load, byte for byte the same for the same training; `bundle_file` has its file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..datasets import BinaryFacts, BundleError, DeviceSpec, KernelConfig, Problem
from ..datasets.errors import abridged, check_between, check_path, reason_of
from ..datasets.files import remove_leftovers, replacing
from ..datasets.grid import BinarySignature
from ..datasets.locks import writing
from ..datasets.problem import dtype_from_json, dtype_to_json
from .bundle_file import (
    DAMAGE,
    FILE,
    MANIFEST,
    SCHEMA_VERSION,
    check_only_bundle,
    checksum,
    digest_of,
    dumps,
    loads,
    manifest_of,
    read,
)
from .calibration.conformal import Calibration
from .calibration.training_domain import Distance, TrainingDomain, distance_of
from .gbdt import MAX_LOG_SLOWDOWN, LightGBMRanker
from .scoring.network import Network
from .scoring.trees import Forest

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: More families than any bundle has.
_MAX_FAMILIES = 64
#: The arrays of a family in a bundle, each as `family/array`: of its trees, and of its network where it has one.
_FOREST = tuple(one.name for one in fields(Forest))
_NETWORK = {f"network_{one.name}": one.name for one in fields(Network)}
#: One more, (n_signatures, n_configs, 3), of a family whose features read binaries; and its value where none is known.
_BINARIES = "binaries"
_UNKNOWN = BinaryFacts(-1, -1, -1)


@dataclass(frozen=True)
class TrainedFamily:
    """One family's ranker and where it comes from."""

    ranker: LightGBMRanker  # fitted
    devices: tuple[DeviceSpec, ...]  # that its measurements were taken on
    origin: Mapping[str, Any]  # dataset name and content hash, kernel source hash, problems; JSON values
    domain: TrainingDomain  # of the problems that it learned from
    #: See `Dataset.wrong_results`.
    wrong_results: Mapping[BinarySignature, frozenset[KernelConfig]] = field(default_factory=dict)
    #: How long a shortlist must be; None where the data were too few to say.
    calibration: Calibration | None = None

    @property
    def arrays(self) -> dict[str, NDArray[Any]]:
        """The trees and the network, and what the binaries say."""
        network = {} if self.ranker.network_ is None else self.ranker.network_.arrays()
        arrays = self.ranker.forest_.arrays() | {key: network[name] for key, name in _NETWORK.items() if network}
        if self._signatures:
            known = (self.ranker.binaries_[signature] for signature in self._signatures)
            facts = [of_kind.get(config, _UNKNOWN) for of_kind in known for config in self._binary_configs]
            arrays[_BINARIES] = np.array(facts, np.int32).ravel()
        return arrays

    @staticmethod
    def array_names(value: Mapping[str, Any]) -> tuple[str, ...]:
        """What `arrays` has of a family whose `to_json` is this."""
        binaries = (_BINARIES,) if value["binaries"]["kinds"] else ()
        return (*_FOREST, *binaries, *_NETWORK) if value["network"] else (*_FOREST, *binaries)

    @cached_property
    def _signatures(self) -> list[BinarySignature]:
        return sorted(self.ranker.binaries_, key=str)

    @cached_property
    def _binary_configs(self) -> list[KernelConfig]:
        """Those that have a known binary."""
        return sorted({config for known in self.ranker.binaries_.values() for config in known}, key=str)

    def to_json(self) -> dict[str, Any]:
        """All but the arrays."""
        return {
            "feature_names": list(self.ranker.feature_names_),
            "params": self.ranker.get_params(),
            "trees": len(self.ranker.forest_),
            "network": self.ranker.network_ is not None,
            "trust": self.ranker.trust_,
            "devices": [device.to_json() for device in self.devices],
            "origin": dict(self.origin),
            "wrong_results": [
                _signature_to_json(signature) | {"configs": [config.to_json() for config in sorted(configs, key=str)]}
                for signature, configs in sorted(self.wrong_results.items(), key=str)
            ],
            "binaries": {
                "kinds": list(map(_signature_to_json, self._signatures)),
                "configs": [config.to_json() for config in self._binary_configs],
            },
            "calibration": None if self.calibration is None else self.calibration.to_json(),
            "extent": self.domain.to_json(),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> TrainedFamily:
        """The inverse of `to_json`, with the arrays by name.

        Raises `ForetuneError`, `KeyError`, `TypeError`, `AttributeError` or `ValueError` for what is none.
        """
        ranker = LightGBMRanker(**value["params"])
        ranker.forest_ = Forest(**{name: arrays[name] for name in _FOREST})
        network = {name: arrays[key] for key, name in _NETWORK.items()} if value["network"] else None
        ranker.network_ = None if network is None else Network.restored(**network)
        if ranker.reach > MAX_LOG_SLOWDOWN:
            raise BundleError(
                f"what it predicts adds up to {ranker.reach:.3g}, and at most {MAX_LOG_SLOWDOWN:.0f} is the logarithm "
                "of a slowdown"
            )
        names = value["feature_names"]
        for part in (ranker.forest_, ranker.network_):
            if part is not None and len(names) != part.n_features:
                raise BundleError(f"{len(names)} feature names for {part.n_features} features")
        ranker.feature_names_ = tuple(map(str, names))
        ranker.binaries_ = _binaries(value["binaries"], arrays.get(_BINARIES))
        check_between("trust", value["trust"], 0.0, 1.0)
        ranker.trust_ = float(value["trust"])
        devices = tuple(map(DeviceSpec.from_json, value["devices"]))
        if not devices:
            raise BundleError("devices must name at least one that its measurements were taken on")
        wrong_results = {
            _signature_from_json(wrong): frozenset(map(KernelConfig.from_json, wrong["configs"]))
            for wrong in value["wrong_results"]
        }
        if not isinstance(value["origin"], dict):
            raise BundleError(f"origin must be an object but is {value['origin']!r}")
        calibration = value["calibration"]
        return cls(
            ranker,
            devices,
            value["origin"],
            TrainingDomain.from_json(value["extent"]),
            wrong_results,
            None if calibration is None else Calibration.from_json(calibration),
        )


def _signature_to_json(signature: BinarySignature) -> dict[str, Any]:
    dtype, flags = signature
    return {"dtype": dtype_to_json(dtype), "flags": list(flags)}


def _signature_from_json(value: Mapping[str, Any]) -> BinarySignature:
    return dtype_from_json(value["dtype"]), tuple(map(str, value["flags"]))


def _binaries(
    value: Mapping[str, Any], facts: NDArray[np.int32] | None
) -> dict[BinarySignature, dict[KernelConfig, BinaryFacts]]:
    signatures, configs = map(_signature_from_json, value["kinds"]), list(map(KernelConfig.from_json, value["configs"]))
    if facts is None:
        return {}
    if facts.dtype != np.int32:
        raise BundleError(f"what binaries say must be int32 but is {facts.dtype}")
    table = facts.reshape(len(value["kinds"]), len(configs), len(_UNKNOWN)).tolist()
    return {
        signature: {config: BinaryFacts(*row) for config, row in zip(configs, rows, strict=True) if min(row) >= 0}
        for signature, rows in zip(signatures, table, strict=True)
    }


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
        return distance_of(problem, device, trained.domain, trained.devices)

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
            "arrays_sha256": digest_of(self._arrays),
            "families": {name: self.trained[name].to_json() for name in self.families},
        }
        return content | {"checksum": checksum(content)}

    @property
    def _content(self) -> bytes:
        return dumps(self._arrays, {MANIFEST: (json.dumps(self.manifest, separators=(",", ":")) + "\n").encode()})

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
    content = read(directory / FILE)
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
            if checksum(trained.to_json()) != checksum(entry) or digest_of(trained.arrays) != digest_of(arrays):
                raise BundleError(f"manifest entry {name!r} is not in canonical form")
        return self._restored.setdefault(name, trained)  # another thread may have been faster

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def _parsed(content: bytes, path: Path) -> Bundle:
    """The bundle that the file holds, undamaged, with families that are yet to be restored."""
    with _naming(path):
        arrays, texts = loads(content)
        manifest = manifest_of(texts.pop(MANIFEST, b""))
        if texts:
            raise BundleError(f"it also holds {', '.join(map(repr, sorted(texts)))}")
        if digest_of(arrays) != manifest["arrays_sha256"]:
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


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Name the file in the error for damage found inside."""
    try:
        yield
    except DAMAGE as error:
        raise BundleError(f"{path}: not a bundle of this Foretune: {abridged(reason_of(error))}") from None
