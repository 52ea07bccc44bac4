"""`TrainedFamily`: one family's ranker and where it comes from; as a bundle keeps it, JSON and flat arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ..datasets import BinaryFacts, BundleError, DeviceSpec, KernelConfig
from ..datasets.errors import check_between
from ..datasets.grid import BinaryKind
from ..datasets.problem import dtype_from_json, dtype_to_json
from .calibration.conformal import Calibration
from .calibration.extent import Extent
from .gbdt import MAX_LOG_SLOWDOWN, LightGBMRanker
from .scoring.network import Network
from .scoring.trees import Forest

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: The arrays of a family in a bundle, each as `family/array`: of its trees, and of its network where it has one.
_FOREST = tuple(one.name for one in fields(Forest))
_NETWORK = {f"network_{one.name}": one.name for one in fields(Network)}
#: One more, (n_kinds, n_configs, 3), of a family whose features look at binaries; and what it has where there is none.
_BINARIES = "binaries"
_UNKNOWN = BinaryFacts(-1, -1, -1)


@dataclass(frozen=True)
class TrainedFamily:
    """One family's ranker and where it comes from."""

    ranker: LightGBMRanker  # fitted
    devices: tuple[DeviceSpec, ...]  # that its measurements were taken on
    origin: Mapping[str, Any]  # dataset name and content hash, kernel source hash, problems; JSON values
    extent: Extent  # of the problems that it learned from
    #: See `Dataset.wrong_results`.
    wrong_results: Mapping[BinaryKind, frozenset[KernelConfig]] = field(default_factory=dict)
    #: How long a shortlist must be; None where the data were too few to say.
    calibration: Calibration | None = None

    @property
    def arrays(self) -> dict[str, NDArray[Any]]:
        """The trees and the network, and what the binaries say."""
        network = {} if self.ranker.network_ is None else self.ranker.network_.arrays()
        arrays = self.ranker.forest_.arrays() | {key: network[name] for key, name in _NETWORK.items() if network}
        if self._binary_kinds:
            known = (self.ranker.binaries_[kind] for kind in self._binary_kinds)
            facts = [of_kind.get(config, _UNKNOWN) for of_kind in known for config in self._binary_configs]
            arrays[_BINARIES] = np.array(facts, np.int32).ravel()
        return arrays

    @staticmethod
    def array_names(value: Mapping[str, Any]) -> tuple[str, ...]:
        """What `arrays` has of a family whose `to_json` is this."""
        binaries = (_BINARIES,) if value["binaries"]["kinds"] else ()
        return (*_FOREST, *binaries, *_NETWORK) if value["network"] else (*_FOREST, *binaries)

    @cached_property
    def _binary_kinds(self) -> list[BinaryKind]:
        return sorted(self.ranker.binaries_, key=str)

    @cached_property
    def _binary_configs(self) -> list[KernelConfig]:
        """Those that have a binary of some kind."""
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
                _kind_to_json(kind) | {"configs": [config.to_json() for config in sorted(configs, key=str)]}
                for kind, configs in sorted(self.wrong_results.items(), key=str)
            ],
            "binaries": {
                "kinds": list(map(_kind_to_json, self._binary_kinds)),
                "configs": [config.to_json() for config in self._binary_configs],
            },
            "calibration": None if self.calibration is None else self.calibration.to_json(),
            "extent": self.extent.to_json(),
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
            _kind_from_json(wrong): frozenset(map(KernelConfig.from_json, wrong["configs"]))
            for wrong in value["wrong_results"]
        }
        if not isinstance(value["origin"], dict):
            raise BundleError(f"origin must be an object but is {value['origin']!r}")
        calibration = value["calibration"]
        return cls(
            ranker,
            devices,
            value["origin"],
            Extent.from_json(value["extent"]),
            wrong_results,
            None if calibration is None else Calibration.from_json(calibration),
        )


def _kind_to_json(kind: BinaryKind) -> dict[str, Any]:
    dtype, flags = kind
    return {"dtype": dtype_to_json(dtype), "flags": list(flags)}


def _kind_from_json(value: Mapping[str, Any]) -> BinaryKind:
    return dtype_from_json(value["dtype"]), tuple(map(str, value["flags"]))


def _binaries(
    value: Mapping[str, Any], facts: NDArray[np.int32] | None
) -> dict[BinaryKind, dict[KernelConfig, BinaryFacts]]:
    kinds, configs = map(_kind_from_json, value["kinds"]), list(map(KernelConfig.from_json, value["configs"]))
    if facts is None:
        return {}
    if facts.dtype != np.int32:
        raise BundleError(f"what binaries say must be int32 but is {facts.dtype}")
    table = facts.reshape(len(value["kinds"]), len(configs), len(_UNKNOWN)).tolist()
    return {
        kind: {config: BinaryFacts(*row) for config, row in zip(configs, rows, strict=True) if min(row) >= 0}
        for kind, rows in zip(kinds, table, strict=True)
    }
