"""`Bundle`: trained rankers of several families, saved to and loaded from one file (format: `bundle_file`)."""

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
from ..datasets.files import few, remove_leftovers, replacing
from ..datasets.grid import BinarySignature
from ..datasets.locks import writing
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
from .calibration.training_domain import Distance, TrainingDomain, distance_of, signature_from_json, signature_to_json
from .gbdt import MAX_LOG_SLOWDOWN, LightGBMRanker
from .scoring.network import Network
from .scoring.trees import Forest

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: The most families that a bundle may have.
_MAX_FAMILIES = 64
#: The names of a family's arrays in a bundle, stored as `family/array`: those of the trees and of the network, if any.
_FOREST = tuple(one.name for one in fields(Forest))
_NETWORK = {f"network_{one.name}": one.name for one in fields(Network)}
#: One more array, (n_signatures, n_configs, 3), if the family's features read binaries; and its value for unknown ones.
_BINARIES = "binaries"
_UNKNOWN = BinaryFacts(-1, -1, -1)


@dataclass(frozen=True)
class TrainedFamily:
    """One family's fitted ranker, and a description of its training data."""

    ranker: LightGBMRanker  # fitted
    devices: tuple[DeviceSpec, ...]  # on which its training data were measured
    origin: Mapping[str, Any]  # dataset name and content hash, kernel source hash, problems; JSON values
    domain: TrainingDomain  # of the problems that it learned from
    #: Configs that computed wrong results, by signature; see `Dataset.wrong_results`.
    wrong_results: Mapping[BinarySignature, frozenset[KernelConfig]] = field(default_factory=dict)
    #: Determines the length of shortlists for k="auto"; None if there were too few data to calibrate.
    calibration: Calibration | None = None
    #: The measured values of each knob, as texts; None in bundles that were written before they were recorded.
    measured: Mapping[str, tuple[str, ...]] | None = None

    @property
    def arrays(self) -> dict[str, NDArray[Any]]:
        """The arrays of the trees, the network and the known `BinaryFacts`, by name."""
        network = {} if self.ranker.network_ is None else self.ranker.network_.arrays()
        arrays = self.ranker.forest_.arrays() | {key: network[name] for key, name in _NETWORK.items() if network}
        if self._signatures:
            known = (self.ranker.binaries_[signature] for signature in self._signatures)
            facts = [by_config.get(config, _UNKNOWN) for by_config in known for config in self._binary_configs]
            arrays[_BINARIES] = np.array(facts, np.int32).ravel()
        return arrays

    @staticmethod
    def array_names(value: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of a family's `arrays`, given its `to_json` value."""
        binaries = (_BINARIES,) if value["binaries"]["kinds"] else ()
        return (*_FOREST, *binaries, *_NETWORK) if value["network"] else (*_FOREST, *binaries)

    @cached_property
    def _signatures(self) -> list[BinarySignature]:
        """The (dtype, flags) of problems for which the ranker knows facts of compiled binaries, sorted."""
        return sorted(self.ranker.binaries_, key=str)

    @cached_property
    def _binary_configs(self) -> list[KernelConfig]:
        """The configs with a known binary for some signature."""
        return sorted({config for known in self.ranker.binaries_.values() for config in known}, key=str)

    def to_json(self) -> dict[str, Any]:
        """Return everything except the arrays, as JSON values."""
        return {
            "feature_names": list(self.ranker.feature_names_),
            "params": self.ranker.get_params(),
            "trees": len(self.ranker.forest_),
            "network": self.ranker.network_ is not None,
            "trust": self.ranker.trust_,
            "devices": [device.to_json() for device in self.devices],
            "origin": dict(self.origin),
            "wrong_results": [
                signature_to_json(signature) | {"configs": [config.to_json() for config in sorted(configs, key=str)]}
                for signature, configs in sorted(self.wrong_results.items(), key=str)
            ],
            "binaries": {
                "kinds": list(map(signature_to_json, self._signatures)),
                "configs": [config.to_json() for config in self._binary_configs],
            },
            "calibration": None if self.calibration is None else self.calibration.to_json(),
            "extent": self.domain.to_json(),
        } | ({} if self.measured is None else {"measured": {knob: [*one] for knob, one in self.measured.items()}})

    @classmethod
    def from_json(cls, value: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> TrainedFamily:
        """Return the trained family described by the values of `to_json` and `arrays`.

        Raises `ForetuneError`, `KeyError`, `TypeError`, `AttributeError` or `ValueError` for invalid values.
        """
        ranker = LightGBMRanker(**value["params"])
        ranker.forest_ = Forest(**{name: arrays[name] for name in _FOREST})
        network = {name: arrays[key] for key, name in _NETWORK.items()} if value["network"] else None
        ranker.network_ = None if network is None else Network.restored(**network)
        if ranker.reach > MAX_LOG_SLOWDOWN:
            raise BundleError(
                f"its predicted log slowdowns can reach {ranker.reach:.3g}, but at most {MAX_LOG_SLOWDOWN:.0f} may be"
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
            raise BundleError("devices must name at least one device")
        wrong_results = {
            signature_from_json(wrong): frozenset(map(KernelConfig.from_json, wrong["configs"]))
            for wrong in value["wrong_results"]
        }
        if not isinstance(value["origin"], dict):
            raise BundleError(f"origin must be an object but is {value['origin']!r}")
        calibration, measured = value["calibration"], value.get("measured")
        return cls(
            ranker,
            devices,
            value["origin"],
            TrainingDomain.from_json(value["extent"]),
            wrong_results,
            None if calibration is None else Calibration.from_json(calibration),
            None if measured is None else {knob: tuple(map(str, one)) for knob, one in measured.items()},
        )


def _binaries(
    value: Mapping[str, Any], facts: NDArray[np.int32] | None
) -> dict[BinarySignature, dict[KernelConfig, BinaryFacts]]:
    """Return the known `BinaryFacts`: `value` has signatures and configs as JSON, `facts` a row for each pair."""
    signatures, configs = map(signature_from_json, value["kinds"]), list(map(KernelConfig.from_json, value["configs"]))
    if facts is None:
        return {}
    if facts.dtype != np.int32:
        raise BundleError(f"the array of facts about binaries must be int32 but is {facts.dtype}")
    table = facts.reshape(len(value["kinds"]), len(configs), len(_UNKNOWN)).tolist()
    return {
        signature: {config: BinaryFacts(*row) for config, row in zip(configs, rows, strict=True) if min(row) >= 0}
        for signature, rows in zip(signatures, table, strict=True)
    }


@dataclass(frozen=True)
class Bundle:
    """Trained rankers by family name.

    `train_bundle` creates a bundle, and `load_bundle` reads a saved one.

    >>> bundle = open_bundle()  # the shipped one
    >>> bundle
    Bundle(20 families: fused_moe, fused_moe_down, gated_mlp, ...; digest ...)
    >>> sorted(device.name for device in bundle.trained_on("gated_mlp"))
    ['NVIDIA H100 80GB HBM3', 'NVIDIA H200']
    >>> bundle.ranker("row_softmax").predict(family, problem, device, configs)  # doctest: +SKIP
    array([1.24, 1.02, 3.4])
    """

    trained: Mapping[str, TrainedFamily]
    lightgbm_version: str  # of the LightGBM that trained it; predicting needs none

    def __repr__(self) -> str:
        families = "family" if len(self.trained) == 1 else "families"
        names = few(self.families) or "none"
        return f"Bundle({len(self.trained)} {families}: {names}; digest {self.digest[:12]})"

    def _repr_html_(self) -> str:
        """Return a table of the families for a notebook."""
        from ..datasets.console import table

        rows = []
        for name in self.families:
            one = self.trained[name]
            cards = ", ".join(sorted({device.card for device in one.devices}))
            parts = f"{len(one.ranker.forest_)} trees" + ", a network" * (one.ranker.network_ is not None)
            calibrated = "no" if one.calibration is None else f"on {one.calibration.problems} problems"
            rows.append((name, cards, one.origin.get("problems", ""), parts, calibrated))
        columns = ("family", "measured on", "problems", "ranker", "calibrated")
        return table(f"Bundle {self.digest[:12]}", columns, rows)._repr_html_()

    @property
    def families(self) -> tuple[str, ...]:
        """The names of the families, sorted."""
        return tuple(sorted(self.trained))

    @property
    def digest(self) -> str:
        """The SHA-256 of the bundle's contents. Bundles with the same digest predict the same."""
        return str(self.manifest["checksum"])

    def ranker(self, family: str) -> LightGBMRanker:
        """Return the fitted ranker of a family.

        Raises:
            BundleError: The bundle has no such family; the message lists its families.
        """
        return self._trained(family).ranker

    def trained_on(self, family: str) -> tuple[DeviceSpec, ...]:
        """Return the devices on which a family's training data were measured.

        Raises `BundleError` if the bundle has no such family.
        """
        return self._trained(family).devices

    def wrong_results(self, family: str, problem: Problem) -> frozenset[KernelConfig]:
        """Return the configs that computed wrong results with a problem's dtype and flags; shortlists exclude them.

        Raises `BundleError` if the bundle has no such family.
        """
        return self._trained(family).wrong_results.get((problem.dtype, problem.flags), frozenset())

    def calibration(self, family: str) -> Calibration | None:
        """Return the calibration that determines the length of a family's shortlists, or None if there is none.

        Raises `BundleError` if the bundle has no such family.
        """
        return self._trained(family).calibration

    def distance(self, family: str, problem: Problem, device: DeviceSpec) -> Distance:
        """Return how far a problem and a device are from a family's training data; 0 octaves means within.

        Raises `BundleError` if the bundle has no such family.

        >>> problem = Problem.of("row_softmax", rows=1 << 20, columns=4096)  # doctest: +SKIP
        >>> bundle.distance("row_softmax", problem, DeviceSpec.named("h200")).reason  # doctest: +SKIP
        'rows 12x above the data'
        """
        trained = self._trained(family)
        return distance_of(problem, device, trained.domain, trained.devices)

    def merged_with(self, other: Bundle) -> Bundle:
        """Return a bundle with all families of this one, and those that only `other` has.

        >>> train_bundle(dataset, families).merged_with(load_bundle()).save("my-bundle")  # doctest: +SKIP
        """
        return Bundle({**other.trained, **self.trained}, self.lightgbm_version)

    def save(self, path: Path | str) -> None:
        """Write the bundle to `bundle.npz` in a folder, creating the folder if necessary.

        The file is replaced atomically: readers see the old bundle or the new one, even if this process is killed.

        Args:
            path: The folder. It must be new, empty, or have only a bundle.

        Raises:
            OSError: The file cannot be written.
            BundleError: The bundle has values that cannot be stored.
            ForetuneError: The folder has other files or a dataset.

        >>> bundle.save("my-bundle")  # doctest: +SKIP
        """
        directory, content = Path(path), self._content
        _parsed(content, directory / FILE).restore()  # checks that it can be read
        check_only_bundle(directory)
        directory.mkdir(parents=True, exist_ok=True)
        with writing(directory) as is_alone:
            if is_alone:
                remove_leftovers(directory, of=f"{FILE}.")
            with replacing(directory / FILE) as temporary:
                temporary.write_bytes(content)

    def restore(self) -> None:
        """Parse and validate every family of a bundle that `open_bundle` opened without doing so.

        Raises:
            BundleError: A family is invalid.
        """
        for name in self.families:
            self.trained[name]

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """Everything except the arrays, as JSON values."""
        content = {
            "schema_version": SCHEMA_VERSION,
            "lightgbm_version": self.lightgbm_version,
            "arrays_sha256": digest_of(self._arrays),
            "families": {name: self.trained[name].to_json() for name in self.families},
        }
        return content | {"checksum": checksum(content)}

    @property
    def _content(self) -> bytes:
        """The bytes of the bundle's file."""
        return dumps(self._arrays, {MANIFEST: (json.dumps(self.manifest, separators=(",", ":")) + "\n").encode()})

    @property
    def _arrays(self) -> dict[str, NDArray[Any]]:
        """The arrays of all families, each named `family/array`."""
        return {f"{name}/{array}": values for name, one in self.trained.items() for array, values in one.arrays.items()}

    def without(self, family: str) -> str:
        """Return the error message for a family that the bundle lacks: which families it has, and what to do."""
        has = ", ".join(self.families) or "none"
        return (
            f"the bundle has no family {family!r}; it has {has}. Use another bundle, or train one on data of {family}"
        )

    def _trained(self, family: str) -> TrainedFamily:
        """Return a family by name; raise `BundleError` that lists the bundle's families if it is not one of them."""
        if (found := self.trained.get(family)) is None:
            raise BundleError(self.without(family))
        return found


def load_bundle(path: Path | str | None = None) -> Bundle:
    """Load a bundle and validate all of it.

    Args:
        path: The bundle's folder; the shipped bundle if left out.

    Raises:
        BundleError: The file is missing, damaged, invalid or of another schema version; the message names it.

    >>> load_bundle("/nowhere")
    Traceback (most recent call last):
    foretune.datasets.errors.BundleError: /nowhere/bundle.npz: no such file, so /nowhere has no bundle
    """
    bundle = open_bundle(path)
    bundle.restore()
    return bundle


def open_bundle(path: Path | str | None = None) -> Bundle:
    """Open a bundle without restoring its families, which is faster than `load_bundle` if few of them are needed.

    Checksums are compared at once. A family is restored and validated when it is first used; that use raises
    `BundleError` if the family is invalid.

    Args:
        path: The bundle's folder; the shipped bundle if left out.

    Raises:
        BundleError: The file is missing, damaged, or of another schema version; the message names it.

    >>> open_bundle().families == load_bundle().families
    True
    """
    directory = Path(__file__).parent / "shipped" if path is None else check_path("bundle", path)
    content = read(directory / FILE)
    if content is None:
        raise BundleError(f"{directory / FILE}: no such file, so {directory} has no bundle")
    return _parsed(content, directory / FILE)


class _Stored(Mapping[str, TrainedFamily]):
    """The families of a file, each restored and validated on first access.

    Restoring is lazy, because a program uses one or two families and its first kernel call waits for this. A family is
    valid only if `Bundle.save` would write exactly the same data, otherwise access raises `BundleError`.
    """

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
        return self._restored.setdefault(name, trained)  # keeps the value of a faster thread

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def _parsed(content: bytes, path: Path) -> Bundle:
    """Return the bundle in a file's bytes, with checksums compared and families not yet restored."""
    with _naming(path):
        arrays, texts = loads(content)
        manifest = manifest_of(texts.pop(MANIFEST, b""))
        if texts:
            raise BundleError(f"unexpected members: {', '.join(map(repr, sorted(texts)))}")
        if digest_of(arrays) != manifest["arrays_sha256"]:
            raise BundleError("the SHA-256 of its arrays differs from the one in its manifest")
        bundle = Bundle(_Stored(path, manifest["families"], _arrays_of(manifest, arrays)), manifest["lightgbm_version"])
        vars(bundle)["manifest"] = manifest  # fills the cached property, which would restore all families
    return bundle


def _arrays_of(manifest: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> dict[str, dict[str, NDArray[Any]]]:
    """Return the arrays of each family in the manifest, from arrays that are named `family/array`.

    Raises:
        BundleError: A name is invalid, or arrays are missing or belong to no family.
    """
    families, version = manifest["families"], manifest["lightgbm_version"]
    if not isinstance(families, dict) or len(families) > _MAX_FAMILIES:
        raise BundleError(f"families must be an object with at most {_MAX_FAMILIES} entries")
    for text in (version, *families):
        if not (isinstance(text, str) and text.isprintable() and 0 < len(text) <= 200):
            raise BundleError(f"names and versions must be printable text of 1 to 200 characters but one is {text!r}")
    names = {name: TrainedFamily.array_names(entry) for name, entry in families.items()}
    wanted = {f"{name}/{array}" for name, members in names.items() for array in members}
    if arrays.keys() != wanted:
        raise BundleError(f"missing or unexpected arrays: {', '.join(map(repr, sorted(arrays.keys() ^ wanted)))}")
    return {name: {array: arrays[f"{name}/{array}"] for array in members} for name, members in names.items()}


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Convert errors about invalid contents to a `BundleError` that names the file."""
    try:
        yield
    except DAMAGE as error:
        raise BundleError(f"{path}: not a bundle of this Foretune: {abridged(reason_of(error))}") from None
