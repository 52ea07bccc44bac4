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
from .trees import Forest

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: The arrays of a family in a bundle, each as `family/array`.
ARRAYS = tuple(one.name for one in fields(Forest))
#: What a family's JSON did not have before version 5 of the bundle.
ADDED_IN_5 = ("calibration", "extent")


@dataclass(frozen=True)
class TrainedFamily:
    """One family's ranker and where it comes from."""

    ranker: LightGBMRanker  # fitted
    devices: tuple[DeviceSpec, ...]  # that its measurements were taken on
    origin: Mapping[str, Any]  # dataset name and content hash, kernel source hash, problems; JSON values
    #: See `Dataset.wrong_results`.
    wrong_results: Mapping[BinaryKind, frozenset[KernelConfig]] = field(default_factory=dict)
    #: How long a shortlist must be; None where the data were too few to say, and of older bundles.
    calibration: Calibration | None = None
    extent: Extent | None = None  # of the problems that it learned from; None of older bundles

    def to_json(self) -> dict[str, Any]:
        """All but the trees."""
        return {
            "feature_names": list(self.ranker.feature_names_),
            "params": self.ranker.get_params(),
            "trees": len(self.ranker.forest_),
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
            "extent": None if self.extent is None else self.extent.to_json(),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> TrainedFamily:
        """The inverse of `to_json`, with the trees by array name.

        Raises `ForetuneError`, `KeyError`, `TypeError`, `AttributeError` or `ValueError` for what is none.
        """
        ranker = LightGBMRanker(**value["params"])
        ranker.forest_ = Forest(**arrays)
        if ranker.forest_.reach > MAX_LOG_SLOWDOWN:
            raise BundleError(
                f"the leaves of its trees add up to {ranker.forest_.reach:.3g}, and at most {MAX_LOG_SLOWDOWN:.0f} is "
                "the logarithm of a slowdown"
            )
        names = value["feature_names"]
        if len(names) != ranker.forest_.n_features:
            raise BundleError(f"{len(names)} feature names for {ranker.forest_.n_features} features")
        ranker.feature_names_ = tuple(map(str, names))
        ranker.binaries_ = {
            _kind_from_json(kind): {KernelConfig.from_json(one["config"]): _facts(one) for one in kind["configs"]}
            for kind in value.get("binaries", [])  # version 2 had none
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
        calibration, extent = (value.get(key) for key in ADDED_IN_5)
        return cls(
            ranker,
            devices,
            value["origin"],
            wrong_results,
            None if calibration is None else Calibration.from_json(calibration),
            None if extent is None else Extent.from_json(extent),
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
