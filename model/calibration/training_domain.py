"""`TrainingDomain`: the range of a ranker's training problems; `Distance`: how far a problem is outside of it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

from ...datasets import BundleError, DeviceSpec, Problem
from ...datasets.errors import check_word, shown
from ...datasets.grid import BinarySignature
from ...datasets.problem import MOST_SIZE, dtype_from_json, dtype_to_json

#: The smallest and the largest value, of a dimension's size or of the ratio of two dimensions.
Range: TypeAlias = tuple[float, float]

#: A value outside by at most this factor counts as within, because call-time rounding changes sizes by up to 4.5 %.
_WITHIN = 1.1
#: The growth factor of shortlists for each octave outside, and the largest one. model/NOTES.md has figures.
_GROWTH_AN_OCTAVE, _MOST_GROWTH = 2**0.5, 4.0
#: The octaves of a signature (dtype and flags) that is not in the training data, and the fewest of such a card.
_NEW = 1.0
#: Bounds for the values in a file: pairs of dimensions (see `datasets.errors.MOST_NAMES`) and signatures.
_MOST_RANGES, _MOST_SIGNATURES = 64 * 65 // 2, 4096
#: The rates and limits that are compared between devices, with their names in messages.
_DEVICE_FIGURES = {
    "sm_count": "SMs",
    "copy_bandwidth_gbs": "bandwidth",
    "matrix_tflops": "matrix rate",
    "smem_per_block_bytes": "shared memory",
    "l2_bytes": "L2",
}


@dataclass(frozen=True)
class Distance:
    """The distance of a problem and a device from a ranker's training data, in octaves (factors of 2), and the reason.

    >>> round(Distance(2.0, "rows 4x above the data").growth, 3), Distance(0.0).growth
    (2.0, 1.0)
    """

    octaves: float  # base-2 log of the factor between the farthest value and its range; 0.0 = within
    reason: str = ""  # the values that are outside, the farthest first; "" if none

    @property
    def growth(self) -> float:
        """The factor that lengthens a shortlist, relative to one for a problem within the training domain."""
        return min(math.pow(_GROWTH_AN_OCTAVE, min(self.octaves, 100.0)), _MOST_GROWTH)


@dataclass(frozen=True)
class TrainingDomain:
    """The ranges of sizes and of ratios of sizes, and the signatures, of training problems.

    >>> domain = TrainingDomain.of([Problem.of("row_sum", rows=rows, columns=64) for rows in (64, 1024)])
    >>> domain.outside(Problem.of("row_sum", rows=12288, columns=64))
    [(3.584962500721156, 'rows 12x above the data'), (3.584962500721156, 'columns/rows 12x below the data')]
    """

    sizes: Mapping[str, Range]  # by dimension
    ratios: Mapping[str, Range]  # by "a/b", for dimensions a and b in sorted order
    signatures: frozenset[BinarySignature]

    @classmethod
    def of(cls, problems: Sequence[Problem]) -> TrainingDomain:
        """Return the smallest domain that contains these problems, all of one family."""
        dims = [_sizes_of(problem) for problem in problems]
        names = sorted(dims[0])
        pairs = list(itertools.combinations(names, 2))
        return cls(
            {name: _range([one[name] for one in dims]) for name in names},
            {f"{a}/{b}": _range([one[a] / one[b] for one in dims]) for a, b in pairs},
            frozenset((problem.dtype, problem.flags) for problem in problems),
        )

    def outside(self, problem: Problem) -> list[tuple[float, str]]:
        """Return (octaves outside, description) of each size, ratio of sizes and signature outside the domain."""
        found, sizes = [], _sizes_of(problem)
        common = [name for name in self.sizes if name in sizes]  # all, unless the family's dimensions changed
        for name in common:
            found += _beyond(name, sizes[name], self.sizes[name])
        for one, other in itertools.combinations(common, 2):
            found += _beyond(name := f"{one}/{other}", sizes[one] / sizes[other], self.ratios[name])
        if (problem.dtype, problem.flags) not in self.signatures:
            signature = " ".join((problem.dtype_name, *problem.flags))
            found.append((_NEW, f"{signature} is not in the data"))
        return found

    def __or__(self, other: TrainingDomain) -> TrainingDomain:
        """Return the smallest domain that contains both, which must be of one family.

        >>> one, other = (TrainingDomain.of([Problem.of("row_sum", rows=rows)]) for rows in (64, 1024))
        >>> (one | other).sizes
        {'rows': (64.0, 1024.0)}
        """
        return TrainingDomain(
            _widened(self.sizes, other.sizes), _widened(self.ratios, other.ratios), self.signatures | other.signatures
        )

    def to_json(self) -> dict[str, Any]:
        """Return the domain as JSON values."""
        signatures = sorted(self.signatures, key=str)
        return {
            "sizes": {name: list(bounds) for name, bounds in self.sizes.items()},
            "ratios": {name: list(bounds) for name, bounds in self.ratios.items()},
            "kinds": list(map(signature_to_json, signatures)),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TrainingDomain:
        """Return the domain in a dict from `to_json`.

        Raises `ForetuneError`, `KeyError` or `TypeError` for invalid values.
        """
        sizes, ratios = _ranges("sizes", value["sizes"]), _ranges("ratios", value["ratios"])
        sizes = dict(sorted(sizes.items()))  # the order that the names of ratios have
        if ratios.keys() != {f"{a}/{b}" for a, b in itertools.combinations(sorted(sizes), 2)}:
            raise BundleError(f"ratios must be of each pair of {', '.join(sizes)} but are {shown(list(ratios))}")
        signatures = value["kinds"]
        if not isinstance(signatures, list) or not 0 < len(signatures) <= _MOST_SIGNATURES:
            most, given = _MOST_SIGNATURES, shown(signatures)
            raise BundleError(f"kinds must be a list of 1 to {most} dtypes and flags but is {given}")
        return cls(sizes, ratios, frozenset(map(signature_from_json, signatures)))


def signature_to_json(signature: BinarySignature) -> dict[str, Any]:
    """Return a signature as JSON values."""
    dtype, flags = signature
    return {"dtype": dtype_to_json(dtype), "flags": list(flags)}


def signature_from_json(value: Mapping[str, Any]) -> BinarySignature:
    """Return the signature in a dict from `signature_to_json`."""
    return dtype_from_json(value["dtype"]), tuple(map(str, value["flags"]))


def distance_of(
    problem: Problem, device: DeviceSpec, domain: TrainingDomain, learned_on: Sequence[DeviceSpec]
) -> Distance:
    """Return how far a problem and a device are from training data.

    Args:
        problem: The problem.
        device: The device.
        domain: The domain of the training problems.
        learned_on: The devices of the training data.


    >>> h200, problem = DeviceSpec.named("h200"), Problem.of("row_sum", rows=8)
    >>> distance_of(problem, h200, TrainingDomain.of([problem]), [h200]).octaves
    0.0
    """
    outside = [*domain.outside(problem), *_device_outside(device, tuple(learned_on))]
    # The farthest first. The sort is stable, so that a size is named before its ratios.
    ranked = sorted(outside, key=lambda found: -round(found[0], 6))
    if not ranked:
        return Distance(0.0)
    more = f" and {len(ranked) - 2} more" if len(ranked) > 2 else ""
    return Distance(ranked[0][0], ", ".join(words for _, words in ranked[:2]) + more)


@lru_cache(maxsize=64)
def _device_outside(device: DeviceSpec, learned_on: tuple[DeviceSpec, ...]) -> Sequence[tuple[float, str]]:
    """Return how far a device is from the most similar training device; nothing for a training device.

    The distance between two devices is the largest difference, in octaves, among `_DEVICE_FIGURES`: number of SMs,
    rates and memory sizes. The result has at most one item: the octaves and a description.
    """
    if device in learned_on:
        return ()
    near = min(learned_on, key=lambda spec: (spec.arch != device.arch, _difference(device, spec)[0]))
    octaves, name = _difference(device, near)
    apart = f"{2**octaves:.2g}x apart in {name}"
    if device.card == near.card:
        far = octaves > math.log2(_WITHIN)
        return ((octaves, f"{device.name} is not in the data ({apart} from {near.name})"),) if far else ()
    arch = "" if device.arch == near.arch else f", {device.arch} instead of {near.arch}"
    words = f"{device.card} is not in the data{arch} ({apart} from {near.name})"
    return ((_NEW * (2 if arch else 1) + octaves, words),)


def _difference(one: DeviceSpec, other: DeviceSpec) -> tuple[float, str]:
    """Return the largest difference of two devices among `_DEVICE_FIGURES`: octaves, and the figure's name."""
    apart = []
    for name, words in _DEVICE_FIGURES.items():
        ours, theirs = getattr(one, name), getattr(other, name)
        if ours > 0 and theirs > 0:
            apart.append((abs(math.log2(ours / theirs)), words))
    return max(apart, default=(0.0, "no known figure"))


def _sizes_of(problem: Problem) -> dict[str, int]:
    """Return the sizes of a problem by dimension, at least 1, so that their logs and ratios are finite."""
    return {name: max(size, 1) for name, size in problem.dims}


def _range(values: Sequence[float]) -> Range:
    """Return the smallest and the largest value."""
    return float(min(values)), float(max(values))


def _widened(one: Mapping[str, Range], other: Mapping[str, Range]) -> dict[str, Range]:
    """Return, for each name, the smallest range that contains the ranges of both mappings."""
    return {name: _range([*bounds, *other[name]]) for name, bounds in one.items()}


def _beyond(name: str, value: float, bounds: Range) -> list[tuple[float, str]]:
    """Return a value's octaves outside of a range and a description; nothing if it is within."""
    low, high = bounds
    factor, where = (value / high, "above") if value > high else (low / value, "below")
    return [(math.log2(factor), f"{name} {factor:.2g}x {where} the data")] if factor > _WITHIN else []


def _ranges(name: str, value: Any) -> dict[str, Range]:
    """Return ranges by name from JSON values. Raises `BundleError` for invalid ones."""
    if not isinstance(value, dict) or len(value) > _MOST_RANGES:
        raise BundleError(f"{name} of the training domain must be an object but is {shown(value)}")
    for key, bounds in value.items():
        check_word(f"each of {name}", key)
        if not (
            isinstance(bounds, list)
            and len(bounds) == 2
            and all(type(bound) in (int, float) for bound in bounds)
            and 1 / MOST_SIZE <= bounds[0] <= bounds[1] <= MOST_SIZE
        ):
            raise BundleError(f"{name} of {key} must be a minimum and a maximum but are {shown(bounds)}")
    return {key: (float(low), float(high)) for key, (low, high) in value.items()}
