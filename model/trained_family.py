"""`TrainedFamily`: one family's ranker and where it comes from; as a bundle keeps it, JSON and flat arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from ..datasets import BinaryFacts, BundleError, DeviceSpec, KernelConfig
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
        """The trees and the network."""
        network = {} if self.ranker.network_ is None else self.ranker.network_.arrays()
        return self.ranker.forest_.arrays() | {key: network[name] for key, name in _NETWORK.items() if network}

    @staticmethod
    def array_names(value: Mapping[str, Any]) -> tuple[str, ...]:
        """What `arrays` has of a family whose `to_json` is this."""
        return (*_FOREST, *_NETWORK) if value["network"] else _FOREST

    def to_json(self) -> dict[str, Any]:
        """All but the arrays."""
        return {
            "feature_names": list(self.ranker.feature_names_),
            "params": self.ranker.get_params(),
            "trees": len(self.ranker.forest_),
            "network": self.ranker.network_ is not None,
            "devices": [device.to_json() for device in self.devices],
            "origin": dict(self.origin),
            "wrong_results": [
                _kind_to_json(kind) | {"configs": [config.to_json() for config in sorted(configs, key=str)]}
                for kind, configs in sorted(self.wrong_results.items(), key=str)
            ],
            "binaries": [
                _kind_to_json(kind)
                | {
                    "configs": [
                        {"config": config.to_json()} | facts._asdict()
                        for config, facts in sorted(known.items(), key=str)
                    ]
                }
                for kind, known in sorted(self.ranker.binaries_.items(), key=str)
            ],
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
        ranker.binaries_ = {
            _kind_from_json(kind): {KernelConfig.from_json(one["config"]): _facts(one) for one in kind["configs"]}
            for kind in value["binaries"]
        }
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


def _facts(value: Mapping[str, Any]) -> BinaryFacts:
    for name in BinaryFacts._fields:
        if type(value[name]) is not int or not 0 <= value[name] < 1 << 31:
            raise BundleError(f"{name} of a binary must be a count but is {value[name]!r}")
    return BinaryFacts(*(value[name] for name in BinaryFacts._fields))
