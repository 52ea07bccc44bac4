"""What a kernel family declares, checked once, where it is handed over."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from ..errors import (
    MOST_NAMES,
    FamilyError,
    ForetuneError,
    abridged,
    check_flag,
    check_integer,
    check_word,
    check_words,
    printable,
    reason_of,
    shown,
)
from .methods import name_of

if TYPE_CHECKING:
    from ..family import Family

#: What a family, dimension, knob or flag may be called: they stand in commands, tables and logs.
_NAME = re.compile(r"\w[\w.:+-]*")
#: More features than any family has, and more dimensions, knobs or flags.
_MOST_FEATURES, _MOST_DECLARED = 10_000, 4 * MOST_NAMES


def check_name(name: str, value: Any) -> str:
    """Check that a value can be a name: letters, digits and `_ . : + -`, of which the first is no sign.

    >>> check_name("the family", "row_softmax")
    'row_softmax'
    """
    if not _NAME.fullmatch(check_word(name, value)):
        raise ForetuneError(f"{name} must be of letters, digits and _ . : + - but is {shown(value)}")
    return str(value)


_sound: WeakValueDictionary[int, Family] = WeakValueDictionary()


def check_attributes(family: Family) -> None:
    """Check what a family declares: names, dimensions, dtypes, knobs and flags.

    Raises:
        ForetuneError: An attribute is missing, cannot be read, or is not what it must be.
    """
    if _sound.get(id(family)) is family:
        return
    what = type(family).__name__
    if missing := [name for name in ("name", "dims", "dtypes", "knobs") if not _has(family, name)]:
        raise FamilyError(f"{what} must say its {', '.join(missing)}: see foretune.Family")
    check_name(f"the name of {what}", _read(family, "name"))
    of = f"of family {family.name}"
    for name in ("dims", "dtypes", "knobs", "flags", "bucketed"):
        for word in (words := check_words(f"{name} {of}", _read(family, name), _MOST_DECLARED)):
            check_name(f"each of {name} {of}", word)
        if not isinstance(_read(family, name), (tuple, list)) or len(set(words)) < len(words):
            raise FamilyError(f"{name} {of} must be a tuple of different names but is {shown(words)}")
        if not words and name in ("dims", "dtypes"):
            raise FamilyError(f"{name} {of} must not be empty")
    if _has(family, "feature_names"):
        check_words(f"feature_names {of}", _read(family, "feature_names"), _MOST_FEATURES)
    for name, names in (("default_dims", "dims"), ("largest", "dims"), ("default_knobs", "knobs")):
        values = _read(family, name)
        if not isinstance(values, Mapping):
            raise FamilyError(f"{name} {of} must be a mapping but is {shown(values)}")
        if unknown := [key for key in values if key not in getattr(family, names)]:
            raise FamilyError(f"{name} {of} must be of its {names} but has {shown(unknown[0])}")
        for key, value in values.items() if names == "dims" else ():
            check_integer(f"{name} {of}: {key}", value, 1)
    if unknown := [dim for dim in family.bucketed if dim not in family.dims]:
        raise FamilyError(f"bucketed {of} must be of its dims but has {unknown[0]}")
    check_flag(f"reads_binaries {of}", _read(family, "reads_binaries"))
    _sound[id(family)] = family


def _has(family: Family, name: str) -> bool:
    try:
        return hasattr(family, name)
    except (Exception, SystemExit):  # noqa: BLE001 - there is something, and it fails
        return True


def _read(family: Family, name: str) -> Any:
    try:
        return getattr(family, name)
    except (Exception, SystemExit) as error:
        raise FamilyError(f"family {name_of(family)}: {name} raised {printable(abridged(reason_of(error)))}") from error
