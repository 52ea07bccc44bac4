"""`Bundle`: trained rankers as a directory that is safe to load, byte for byte the same for the same training.

    DIR/manifest.json   what was learned from what: features, parameters, devices, dataset; SHA-256 of the arrays
                        and of the manifest's own content
    DIR/arrays.npz      the trees as flat arrays: no pickle, no LightGBM text

Damage shows in the checksums. A checksum does not stop a file made on purpose, so everything is validated besides.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

from ..datasets import BinaryFacts, BundleError, DeviceSpec, ForetuneError, KernelConfig, Problem
from ..datasets.errors import check_path
from ..datasets.grid import BinaryKind
from ..datasets.problem import dtype_from_json, dtype_to_json
from . import npz
from .gbdt import LightGBMRanker
from .trees import Forest

#: Raised by one whenever a manifest key or an array changes meaning, type or name.
SCHEMA_VERSION = 3  # 2: wrong_results; 3: a dtype for each operand, binaries
_READ = (2, SCHEMA_VERSION)
MANIFEST, ARRAYS = "manifest.json", "arrays.npz"
#: No bundle is this large; reading stops here.
_MAX_BYTES = 256 << 20


@dataclass(frozen=True)
class TrainedFamily:
    """One family's ranker and where it comes from."""

    ranker: LightGBMRanker  # fitted
    devices: tuple[DeviceSpec, ...]  # that its measurements were taken on
    origin: Mapping[str, Any]  # dataset name and content hash, kernel source hash, problems; JSON values
    #: See `Dataset.wrong_results`.
    wrong_results: Mapping[BinaryKind, frozenset[KernelConfig]] = field(default_factory=dict)


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

    def save(self, path: Path | str) -> None:
        """Writes the directory. A new one appears whole or not at all; in an old one both files are replaced.

        Whoever reads between the two replacements sees a checksum that does not fit, never a mixture.
        """
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            _write(staging / ARRAYS, self._arrays)
            _write(staging / MANIFEST, (json.dumps(self.manifest, indent=1) + "\n").encode())
            staging.chmod(0o755)  # mkdtemp's 0700 would lock out the other users of a shared bundle
            if target.is_dir():
                for name in (ARRAYS, MANIFEST):
                    (staging / name).replace(target / name)
            else:
                staging.replace(target)
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """All but the trees, as JSON values."""
        content = {
            "schema_version": SCHEMA_VERSION,
            "lightgbm_version": self.lightgbm_version,
            "arrays_sha256": hashlib.sha256(self._arrays).hexdigest(),
            "families": {name: _describe(self.trained[name]) for name in self.families},
        }
        return content | {"checksum": _checksum(content)}

    @cached_property
    def _arrays(self) -> bytes:
        return npz.dumps(
            {
                f"{name}/{array}": values
                for name, trained in self.trained.items()
                for array, values in trained.ranker.forest_.arrays().items()
            }
        )

    def _trained(self, family: str) -> TrainedFamily:
        if family not in self.trained:
            raise BundleError(f"the bundle has no family {family!r}; it has {', '.join(self.families) or 'none'}")
        return self.trained[family]


def load_bundle(path: Path | str | None = None) -> Bundle:
    """The bundle in a directory; the shipped one where no path is given.

    Raises `BundleError` naming the file that is missing, damaged, of another schema, or not what it should be.

    >>> load_bundle("/nowhere")
    Traceback (most recent call last):
    foretune.datasets.errors.BundleError: /nowhere/manifest.json: cannot be read: No such file or directory
    """
    directory = Path(str(resources.files(__package__))) / "shipped" if path is None else check_path("bundle", path)
    manifest = _read_manifest(directory / MANIFEST)
    content = _read(directory / ARRAYS)
    if hashlib.sha256(content).hexdigest() != manifest["arrays_sha256"]:
        raise BundleError(f"{directory / ARRAYS}: its content is not what the manifest vouches for (SHA-256 differs)")
    try:
        arrays = npz.loads(content)
        return Bundle(
            {name: _restore(name, entry, arrays) for name, entry in manifest["families"].items()},
            str(manifest["lightgbm_version"]),
        )
    except (ForetuneError, KeyError, TypeError, AttributeError) as error:
        raise BundleError(f"{directory}: not a bundle of this Foretune: {error!s}") from None


def _describe(trained: TrainedFamily) -> dict[str, Any]:
    return {
        "feature_names": list(trained.ranker.feature_names_),
        "params": trained.ranker.get_params(),
        "trees": len(trained.ranker.forest_),
        "devices": [device.to_json() for device in trained.devices],
        "origin": dict(trained.origin),
        "wrong_results": [
            _kind_to_json(kind) | {"configs": [config.to_json() for config in sorted(configs, key=str)]}
            for kind, configs in sorted(trained.wrong_results.items(), key=str)
        ],
        "binaries": [
            _kind_to_json(kind)
            | {
                "configs": [
                    {"config": config.to_json()} | facts._asdict() for config, facts in sorted(known.items(), key=str)
                ]
            }
            for kind, known in sorted(trained.ranker.binaries_.items(), key=str)
        ],
    }


def _restore(name: str, entry: Mapping[str, Any], arrays: Mapping[str, Any]) -> TrainedFamily:
    prefix = f"{name}/"
    ranker = LightGBMRanker(**entry["params"])
    ranker.forest_ = Forest(**{key.removeprefix(prefix): a for key, a in arrays.items() if key.startswith(prefix)})
    ranker.feature_names_ = tuple(str(feature) for feature in entry["feature_names"])
    if len(ranker.feature_names_) != ranker.forest_.n_features:
        raise BundleError(f"{len(ranker.feature_names_)} feature names for {ranker.forest_.n_features} features")
    devices = tuple(DeviceSpec.from_json(device) for device in entry["devices"])
    wrong_results = {
        _kind_from_json(wrong): frozenset(map(KernelConfig.from_json, wrong["configs"]))
        for wrong in entry["wrong_results"]
    }
    ranker.binaries_ = {
        _kind_from_json(kind): {KernelConfig.from_json(one["config"]): _facts(one) for one in kind["configs"]}
        for kind in entry.get("binaries", [])  # version 2 had none
    }
    return TrainedFamily(ranker, devices, dict(entry["origin"]), wrong_results)


def _kind_to_json(kind: BinaryKind) -> dict[str, Any]:
    dtype, flags = kind
    return {"dtype": dtype_to_json(dtype), "flags": list(flags)}


def _kind_from_json(value: Mapping[str, Any]) -> BinaryKind:
    return dtype_from_json(value["dtype"]), tuple(map(str, value["flags"]))


def _facts(value: Mapping[str, Any]) -> BinaryFacts:
    for name in BinaryFacts._fields:
        if type(value[name]) is not int or not 0 <= value[name] < 1 << 31:
            raise BundleError(f"{name} of a binary must be a count but is {value[name]!r}")
    return BinaryFacts(*(value[name] for name in BinaryFacts._fields))


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(_read(path))
    except (ValueError, RecursionError) as error:  # BundleError is a ValueError with its own message
        raise error if isinstance(error, BundleError) else BundleError(f"{path}: not JSON: {error}") from None
    if not isinstance(manifest, dict) or "schema_version" not in manifest:
        raise BundleError(f"{path}: not a bundle's manifest: it has no schema_version")
    version = manifest["schema_version"]
    if version not in _READ:
        raise BundleError(
            f"{path}: schema_version is {version!r} but this Foretune reads {_READ[0]} to {SCHEMA_VERSION}"
            + ("; a newer Foretune wrote it" if isinstance(version, int) and version > SCHEMA_VERSION else "")
        )
    if manifest.pop("checksum", None) != _checksum(manifest):
        raise BundleError(f"{path}: its content is not what its checksum vouches for")
    if not isinstance(manifest.get("families"), dict) or not {"arrays_sha256", "lightgbm_version"} <= manifest.keys():
        raise BundleError(f"{path}: keys missing: expected families, arrays_sha256 and lightgbm_version")
    return manifest


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise BundleError(f"{path}: cannot be read: {error.strerror}") from None
    if len(content) > _MAX_BYTES:
        raise BundleError(f"{path}: larger than any bundle ({_MAX_BYTES >> 20} MiB)")
    return content


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
