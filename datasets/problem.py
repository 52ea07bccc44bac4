"""`Problem`: the shape of one kernel call, as a value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from .errors import ForetuneError

if TYPE_CHECKING:
    import torch

DTYPES = ("bf16", "fp16", "fp32")
ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4}
#: What torch calls them.
TORCH_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of one of `DTYPES`.

    >>> torch_dtype("bf16")
    torch.bfloat16
    """
    import torch

    dtype: torch.dtype = getattr(torch, TORCH_NAMES[name])
    return dtype


@dataclass(frozen=True)
class GroupSummary:
    """What a list of group sizes amounts to. `skew` is the largest group over the mean group (1.0 = balanced)."""

    groups: int
    active: int
    total: int
    mean: float
    max: int
    skew: float


@dataclass(frozen=True)
class Problem:
    """One call's shape: family, named dimensions, dtype, layout flags, and group sizes where they are known.

    At call time the group sizes are on the device and nobody waits for them: then `group_sizes` is None and
    only `dims` speak. Hashable and JSON-able.

    >>> p = Problem.of("grouped_gemm_fwd", groups=4, rows=64, n=128, k=256, group_sizes=(0, 32, 16, 16))
    >>> p["n"], p.summary.active, p.summary.skew
    (128, 3, 2.0)
    >>> Problem.from_json(p.to_json()) == p
    True
    """

    family: str
    dims: tuple[tuple[str, int], ...]  # (name, size), sorted by name
    dtype: str = "bf16"
    flags: tuple[str, ...] = ()
    group_sizes: tuple[int, ...] | None = None  # rows of each group, (groups,)

    def __post_init__(self) -> None:
        for name, size in self.dims:
            if size < 0:
                raise ForetuneError(f"dimension {name} must be >= 0 but got {size}")
        if self.dtype not in DTYPES:
            raise ForetuneError(f"dtype must be one of {', '.join(DTYPES)} but got {self.dtype!r}")
        if self.group_sizes is not None:
            self._check_group_sizes(self.group_sizes)

    def _check_group_sizes(self, sizes: tuple[int, ...]) -> None:
        dims = dict(self.dims)
        if min(sizes, default=0) < 0:
            raise ForetuneError(f"group sizes must be >= 0 but got {min(sizes)}")
        if len(sizes) != dims.get("groups", len(sizes)):
            raise ForetuneError(f"{len(sizes)} group sizes were given for groups={dims['groups']}")
        if sum(sizes) != dims.get("rows", sum(sizes)):
            raise ForetuneError(f"group sizes sum to {sum(sizes)} but rows={dims['rows']}")

    @classmethod
    def of(
        cls,
        family: str,
        *,
        dtype: str = "bf16",
        flags: tuple[str, ...] = (),
        group_sizes: tuple[int, ...] | None = None,
        **dims: int,
    ) -> Problem:
        """A problem from keyword dimensions."""
        return cls(family, tuple(sorted(dims.items())), dtype, tuple(sorted(flags)), group_sizes)

    def __getitem__(self, dim: str) -> int:
        return self._dims[dim]

    @cached_property
    def _dims(self) -> dict[str, int]:
        return dict(self.dims)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return ITEMSIZE[self.dtype]

    @property
    def summary(self) -> GroupSummary | None:
        """The summary of the group sizes, or None where they are unknown."""
        sizes = self.group_sizes
        if sizes is None:
            return None
        total, mean = sum(sizes), sum(sizes) / max(len(sizes), 1)
        largest = max(sizes, default=0)
        skew = largest / mean if mean else 1.0
        return GroupSummary(len(sizes), sum(s > 0 for s in sizes), total, mean, largest, skew)

    def without_sizes(self) -> Problem:
        """The same call as the host sees it at call time: group sizes unknown."""
        return self if self.group_sizes is None else replace(self, group_sizes=None)

    def to_json(self) -> dict[str, Any]:
        return {
            "family": self.family,
            "dims": dict(self.dims),
            "dtype": self.dtype,
            "flags": list(self.flags),
            "group_sizes": None if self.group_sizes is None else list(self.group_sizes),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Problem:
        """The inverse of `to_json`. Raises `ForetuneError` naming what is missing."""
        try:
            sizes = value["group_sizes"]
            return cls.of(
                value["family"],
                dtype=value["dtype"],
                flags=tuple(value["flags"]),
                group_sizes=None if sizes is None else tuple(sizes),
                **value["dims"],
            )
        except (KeyError, TypeError) as error:
            raise ForetuneError(f"not a problem ({error!r} missing or wrong): {json.dumps(value)[:200]}") from None

    def __str__(self) -> str:
        dims = " ".join(f"{name}={size}" for name, size in self.dims)
        return f"{self.family} {dims} {self.dtype}" + "".join(f" {flag}" for flag in self.flags)
