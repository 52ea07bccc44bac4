"""What a family is compared with: `contenders.py` in the folder of a family that has some."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ..datasets import Family, ForetuneError

if TYPE_CHECKING:
    from ..runtime.timing.compare import Comparison


def comparison_of(family: Family) -> Comparison:
    """The object `COMPARISON` of the module `contenders` beside the family's. Raises `ForetuneError` where there is
    none; what goes wrong while it is imported is its own error."""
    package = type(family).__module__.rpartition(".")[0]
    place = f"{package}.contenders"
    comparison: Comparison | None = None
    if package and find_spec(place):
        comparison = getattr(import_module(place), "COMPARISON", None)
    if comparison is None:
        raise ForetuneError(f"{family.name} has nothing to be compared with: no COMPARISON in {place}")
    return comparison
