"""What a family is compared with: `contenders.py` in the folder of a family that has some."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ..datasets import Family, ForetuneError

if TYPE_CHECKING:
    from ..runtime.timing.compare import Comparison


def comparison_of(family: Family) -> Comparison:
    """The object `COMPARISON` of the module `contenders` beside the family's. Raises `ForetuneError` where there is
    none."""
    place = f"{type(family).__module__.rpartition('.')[0]}.contenders"
    try:
        comparison: Comparison = import_module(place).COMPARISON
    except (ImportError, AttributeError):
        raise ForetuneError(f"{family.name} has nothing to be compared with: no COMPARISON in {place}") from None
    return comparison
