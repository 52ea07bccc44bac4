"""`TrainingDomain`: the problems that a ranker learned from; `Distance`: how far out of distribution a problem is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, TypeAlias

from ...datasets import BundleError, DeviceSpec, Problem
from ...datasets.errors import check_word, shown
from ...datasets.grid import BinarySignature
from ...datasets.problem import MOST_SIZE, dtype_from_json, dtype_to_json

#: The least and the largest: of a dimension's size, or of one dimension over another.
Range: TypeAlias = tuple[float, float]

#: What is this little outside counts as within: call-time rounding moves a size by 4.5 %.
_WITHIN = 1.1
#: How many times as long a shortlist is for each octave, and at most: README.md has the figures that decided.
_GROWTH_AN_OCTAVE, _MOST_GROWTH = 2**0.5, 4.0
#: What counts as one octave at least: a dtype or flags, or a card, that nothing was learned on.
_NEW = 1.0
#: More pairs of dimensions than any family has: see `datasets.errors.MOST_NAMES`.
_MOST_RANGES, _MOST_KINDS = 64 * 65 // 2, 4096
#: Of what a device is to a kernel, what its rates and limits are.
_OF_DEVICES = {
    "sm_count": "SMs",
    "copy_bandwidth_gbs": "bandwidth",
    "matrix_tflops": "matrix rate",
    "smem_per_block_bytes": "shared memory",
    "l2_bytes": "L2",
}


@dataclass(frozen=True)
class Distance:
    """How far a problem on a device is from what a ranker learned.

    >>> round(Distance(2.0, "rows 4x above the data").growth, 3), Distance(0.0).growth
    (2.0, 1.0)
    """

    octaves: float  # the base-2 logarithm of the largest factor by which anything is outside; 0.0 = within
    reason: str = ""  # what is outside, the farthest first; "" = nothing

    @property
    def growth(self) -> float:
        """How many times as long a shortlist is for it: 1.0 = as long as within the data."""
        return min(math.pow(_GROWTH_AN_OCTAVE, min(self.octaves, 100.0)), _MOST_GROWTH)


@dataclass(frozen=True)
class TrainingDomain:
    """The sizes, ratios of sizes and signatures of the problems that were learned from.

    >>> domain = TrainingDomain.of([Problem.of("row_sum", rows=rows, columns=64) for rows in (64, 1024)])
    >>> domain.outside(Problem.of("row_sum", rows=12288, columns=64))
    [(3.584962500721156, 'rows 12x above the data'), (3.584962500721156, 'columns/rows 12x below the data')]
    """

    sizes: Mapping[str, Range]  # by dimension
    ratios: Mapping[str, Range]  # by "one/other", where both are dimensions, in their order
    signatures: frozenset[BinarySignature]

    @classmethod
    def of(cls, problems: Sequence[Problem]) -> TrainingDomain:
        """That of these problems, of one family."""
        dims = [_sizes_of(problem) for problem in problems]
        names = sorted(dims[0])
        pairs = list(itertools.combinations(names, 2))
        return cls(
            {name: _range([one[name] for one in dims]) for name in names},
            {f"{a}/{b}": _range([one[a] / one[b] for one in dims]) for a, b in pairs},
            frozenset((problem.dtype, problem.flags) for problem in problems),
        )

    def outside(self, problem: Problem) -> list[tuple[float, str]]:
        """What of a problem is outside: how many octaves, and in words."""
        found, sizes = [], _sizes_of(problem)
        there = [name for name in self.sizes if name in sizes]  # all, but in a bundle of the family as it once was
        for name in there:
            found += _beyond(name, sizes[name], self.sizes[name])
        for name, (one, other) in self._ratio_dims.items():
            if one in sizes and other in sizes:
                found += _beyond(name, sizes[one] / sizes[other], self.ratios[name])
        if (problem.dtype, problem.flags) not in self.signatures:
            signature = " ".join((problem.dtype_name, *problem.flags))
            found.append((_NEW, f"{signature} is not in the data"))
        return found

    @cached_property
    def _ratio_dims(self) -> dict[str, tuple[str, str]]:
        """The two dimensions of each ratio."""
        return {f"{one}/{other}": (one, other) for one, other in itertools.combinations(self.sizes, 2)}

    def __or__(self, other: TrainingDomain) -> TrainingDomain:
        """That of the problems of both, which are of one family.

        >>> one, other = (TrainingDomain.of([Problem.of("row_sum", rows=rows)]) for rows in (64, 1024))
        >>> (one | other).sizes
        {'rows': (64.0, 1024.0)}
        """
        return TrainingDomain(
            _widened(self.sizes, other.sizes), _widened(self.ratios, other.ratios), self.signatures | other.signatures
        )

    def to_json(self) -> dict[str, Any]:
        signatures = sorted(self.signatures, key=str)
        return {
            "sizes": {name: list(bounds) for name, bounds in self.sizes.items()},
            "ratios": {name: list(bounds) for name, bounds in self.ratios.items()},
            "kinds": [{"dtype": dtype_to_json(dtype), "flags": list(flags)} for dtype, flags in signatures],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TrainingDomain:
        """The inverse of `to_json`. Raises `ForetuneError`, `KeyError` or `TypeError` for what is none."""
        sizes, ratios = _ranges("sizes", value["sizes"]), _ranges("ratios", value["ratios"])
        sizes = dict(sorted(sizes.items()))  # in which order their ratios are
        if ratios.keys() != {f"{a}/{b}" for a, b in itertools.combinations(sorted(sizes), 2)}:
            raise BundleError(f"ratios must be of each two of {', '.join(sizes)} but are {shown(list(ratios))}")
        kinds = value["kinds"]
        if not isinstance(kinds, list) or not 0 < len(kinds) <= _MOST_KINDS:
            raise BundleError(f"kinds must be a list of 1 to {_MOST_KINDS} dtypes and flags but is {shown(kinds)}")
        read = ((dtype_from_json(kind["dtype"]), tuple(map(str, kind["flags"]))) for kind in kinds)
        return cls(sizes, ratios, frozenset(read))


def distance_of(
    problem: Problem, device: DeviceSpec, domain: TrainingDomain, learned_on: Sequence[DeviceSpec]
) -> Distance:
    """How far a problem on a device is from what was learned.

    >>> h200, problem = DeviceSpec.named("h200"), Problem.of("row_sum", rows=8)
    >>> distance_of(problem, h200, TrainingDomain.of([problem]), [h200]).octaves
    0.0
    """
    outside = [*domain.outside(problem), *_device_outside(device, tuple(learned_on))]
    # The farthest first; equals as they come, so that a size is named before the ratios that it is in.
    ranked = sorted(outside, key=lambda found: -round(found[0], 6))
    if not ranked:
        return Distance(0.0)
    more = f" and {len(ranked) - 2} more" if len(ranked) > 2 else ""
    return Distance(ranked[0][0], ", ".join(words for _, words in ranked[:2]) + more)


@lru_cache(maxsize=64)
def _device_outside(device: DeviceSpec, learned_on: tuple[DeviceSpec, ...]) -> Sequence[tuple[float, str]]:
    """Nothing for a device that was learned on. Of the others the one that differs least counts, by its most different
    figure."""
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
    """The figure in which two devices differ most: by how many octaves, and in words."""
    apart = []
    for name, words in _OF_DEVICES.items():
        ours, theirs = getattr(one, name), getattr(other, name)
        if ours > 0 and theirs > 0:
            apart.append((abs(math.log2(ours / theirs)), words))
    return max(apart, default=(0.0, "nothing that is known"))


def _sizes_of(problem: Problem) -> dict[str, int]:
    return {name: max(size, 1) for name, size in problem.dims}


def _range(values: Sequence[float]) -> Range:
    return float(min(values)), float(max(values))


def _widened(one: Mapping[str, Range], other: Mapping[str, Range]) -> dict[str, Range]:
    return {name: _range([*bounds, *other[name]]) for name, bounds in one.items()}


def _beyond(name: str, value: float, bounds: Range) -> list[tuple[float, str]]:
    low, high = bounds
    factor, where = (value / high, "above") if value > high else (low / value, "below")
    return [(math.log2(factor), f"{name} {factor:.2g}x {where} the data")] if factor > _WITHIN else []


def _ranges(name: str, value: Any) -> dict[str, Range]:
    if not isinstance(value, dict) or len(value) > _MOST_RANGES:
        raise BundleError(f"{name} of what was learned from must be an object but is {shown(value)}")
    for key, bounds in value.items():
        check_word(f"each of {name}", key)
        if not (
            isinstance(bounds, list)
            and len(bounds) == 2
            and all(type(bound) in (int, float) for bound in bounds)
            and 1 / MOST_SIZE <= bounds[0] <= bounds[1] <= MOST_SIZE
        ):
            raise BundleError(f"{name} of {key} must be a least and a largest but are {shown(bounds)}")
    return {key: (float(low), float(high)) for key, (low, high) in value.items()}
