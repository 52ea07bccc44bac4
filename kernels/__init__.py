"""The tunable kernels, each a `Family`, and their registry."""

from __future__ import annotations

from ..datasets import Family, ForetuneError
from .grouped_gemm import GroupedGemmDW, GroupedGemmDX, GroupedGemmForward

__all__ = ["families", "family"]

_FAMILIES: dict[str, Family] = {
    family.name: family for family in (GroupedGemmForward(), GroupedGemmDX(), GroupedGemmDW())
}


def families() -> dict[str, Family]:
    """Every family, by name.

    >>> sorted(families())
    ['grouped_gemm_dw', 'grouped_gemm_dx', 'grouped_gemm_fwd']
    """
    return dict(_FAMILIES)


def family(name: str) -> Family:
    """The family of that name. Raises `ForetuneError` listing the names that exist."""
    if name not in _FAMILIES:
        raise ForetuneError(f"unknown kernel family {name!r}; known: {', '.join(sorted(_FAMILIES))}")
    return _FAMILIES[name]
