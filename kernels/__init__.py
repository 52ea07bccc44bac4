"""The tunable kernels, each a `Family`, and the registry that finds them by name, ours or anybody's.

Another package has its families found by name with an entry point in the group `foretune.families`:

    [project.entry-points."foretune.families"]
    row_softmax = "their_package.softmax:RowSoftmax"
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from ..datasets import Family, ForetuneError, Measurable
from .grouped_gemm import GroupedGemmDW, GroupedGemmDX, GroupedGemmForward

__all__ = ["families", "find_family", "find_measurable", "register"]

#: The entry points that name families of other packages.
GROUP = "foretune.families"
_registered: dict[str, Family] = {
    family.name: family for family in (GroupedGemmForward(), GroupedGemmDX(), GroupedGemmDW())
}


def register(family: Family | type[Family]) -> Family:
    """Makes a family known by its name in this process; returns it. A class is called without arguments first.

    Another family of that name is replaced. Raises `ForetuneError` for what is no `Family`.

    >>> register(GroupedGemmForward).name
    'grouped_gemm_fwd'
    """
    made = _made(family, "register")
    _registered[made.name] = made
    return made


def families() -> dict[str, Family]:
    """Every family by name: those of this package, those that were registered, and those of entry points.

    >>> sorted(families())[:3]
    ['grouped_gemm_dw', 'grouped_gemm_dx', 'grouped_gemm_fwd']
    """
    return {name: find_family(name) for name in _names()}


def find_family(family: str | Family | type[Family]) -> Family:
    """The family of that name, the one at "package.module:attribute", or the family itself.

    Raises `ForetuneError` saying which names there are and how to add one.

    >>> find_family("grouped_gemm_dw").knobs[:3]
    ('BLOCK_M', 'BLOCK_N', 'BLOCK_K')
    >>> find_family("foretune.kernels.grouped_gemm:GroupedGemmDW").name
    'grouped_gemm_dw'
    """
    if not isinstance(family, str):
        return _made(family, "a family")
    if family in _registered:
        return _registered[family]
    if ":" in family:
        return _at(family)
    for entry in _entry_points():
        if entry.name == family:
            return _remembered(family, _loaded(entry))
    raise ForetuneError(
        f"unknown kernel family {family!r}; known: {', '.join(_names())}. To add one: foretune.register(family), an "
        f'entry point in the group "{GROUP}", or name it as package.module:attribute'
    )


def find_measurable(family: str | Family | type[Family]) -> Measurable:
    """As `find_family`, for who wants to measure. Raises `ForetuneError` for a family that only predicts, too."""
    found = find_family(family)
    if not isinstance(found, Measurable):
        raise ForetuneError(f"{found.name} can be predicted but not collected: it is a Family and no Measurable")
    return found


def _names() -> list[str]:
    return sorted({*_registered, *(entry.name for entry in _entry_points())})


def _entry_points() -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=GROUP))


def _loaded(entry: EntryPoint) -> Family:
    try:
        return _made(entry.load(), f"the entry point {entry.name} = {entry.value}")
    except (ImportError, AttributeError) as error:
        raise ForetuneError(f"the entry point {entry.name} = {entry.value} cannot be loaded: {error}") from error


def _at(place: str) -> Family:
    """The family at package.module:attribute, of a module that is installed or lies in the working directory."""
    module, _, attribute = place.partition(":")
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)  # a console script does not have it
    try:
        found: Any = import_module(module)
        for name in attribute.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ForetuneError(f"no kernel family at {place!r}: {error}") from error
    return _remembered(place, _made(found, place))


def _remembered(place: str, family: Family) -> Family:
    """One object for a place: what is remembered of a family is remembered by its identity."""
    _registered.setdefault(family.name, family)
    return _registered[family.name] if type(_registered[family.name]) is type(family) else family


def _made(family: Any, what: str) -> Family:
    if isinstance(family, type) and issubclass(family, Family):
        try:
            family = family()
        except TypeError as error:
            raise ForetuneError(f"{what}: {family.__name__} cannot be made without arguments: {error}") from error
    if not isinstance(family, Family):
        raise ForetuneError(f"{what} must be a Family, or a name of one, but is {family!r}")
    return family
