"""Checks of what a kernel family declares, and of problems and configs against it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from .config import OPTIONS, KernelConfig
from .errors import (
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
from .guard import name_of
from .problem import Problem, Ragged

if TYPE_CHECKING:
    from .family import Family

#: What a family, dimension, knob or flag may be called: they stand in commands, tables and logs.
_NAME = re.compile(r"\w[\w.:+-]*")
#: More features than any family has, and more dimensions, knobs or flags.
_MOST_FEATURES, _MOST_DECLARED = 10_000, 4 * MOST_NAMES
#: Launch options that no config has unless somebody sets them.
_UNUSUAL = ("maxnreg", "ir_override")


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


def check_problem_of(family: Family, problem: Problem) -> None:
    """Raises `ForetuneError` for a problem that is not the family's: of another one, of other dimensions, smaller than
    the family's `smallest` or larger than its `largest`, ragged otherwise than it says, or with a dtype or flag that it
    lacks. (Whether it takes a dtype for each operand, its `supports` says.)"""
    if not isinstance(problem, Problem):
        raise ForetuneError(f"a problem of {family.name} must be a Problem but is {shown(problem)}")
    if problem.family != family.name:
        raise ForetuneError(f"a problem of {family.name} was due but this one is of {problem.family}: {problem}")
    dims = dict(problem.dims)
    if dims.keys() != set(family.dims):
        usual = ", ".join(f"{dim}={size}" for dim, size in family.default_dims.items() if dim not in dims)
        raise ForetuneError(
            f"a problem of {family.name} has the dimensions {', '.join(family.dims)} but this one has "
            f"{', '.join(dims) or 'none'}" + (f" ({usual} is usual)" if usual else "")
        )
    for dim, size in problem.dims:
        if size < (least := family.smallest.get(dim, 1)):
            raise ForetuneError(f"{dim} of {family.name} must be at least {least} but is {size}")
    if problem.ragged is not None and family.ragged is not None:
        _check_ragged(family, problem, problem.ragged)
    for dim, most in family.largest.items():
        if dims[dim] > most:
            raise ForetuneError(f"{dim} of {family.name} must be at most {most} but is {dims[dim]}")
    if isinstance(problem.dtype, str) and problem.dtype not in family.dtypes:
        raise ForetuneError(f"dtype of {family.name} must be one of {', '.join(family.dtypes)} but is {problem.dtype}")
    if unknown := [flag for flag in problem.flags if flag not in family.flags]:
        raise ForetuneError(f"{unknown[0]} is no flag of {family.name}; it has {', '.join(family.flags) or 'none'}")


def _check_ragged(family: Family, problem: Problem, ragged: Ragged) -> None:
    known = family.ragged or {}
    if ragged.dim not in known:
        raise ForetuneError(
            f"{family.name} is ragged along {', '.join(known) or 'no dimension'}, not along {ragged.dim}"
        )
    counted = known[ragged.dim]
    if len(ragged.sizes) != problem[counted]:
        raise ForetuneError(
            f"there must be as many sizes along {ragged.dim} as {counted}={problem[counted]} but there are "
            f"{len(ragged.sizes)}"
        )


def not_empty(family: Family, problem: Problem) -> Problem:
    """Return the problem that stands for a launch without work: sizes of 0 are raised to the family's `smallest`.

    A launch may have nothing to do, as where no token came to a rank. It must not fail or warn, and any config will do.
    """
    if all(size or not family.smallest.get(dim, 1) for dim, size in problem.dims):
        return problem
    dims = tuple((dim, max(size, family.smallest.get(dim, 1))) for dim, size in problem.dims)
    return Problem(problem.family, dims, problem.dtype, problem.flags)


def with_defaults(family: Family, config: KernelConfig) -> KernelConfig:
    """The config with the family's `default_knobs` for those of them that it does not name; itself where it names
    all."""
    named = config.to_json()
    missing = {knob: value for knob, value in family.default_knobs.items() if knob not in named}
    return KernelConfig.of(**named, **missing) if missing else config


def wrong_knobs(family: Family, config: KernelConfig) -> str | None:
    """The reason why a config is none of the family's, whatever its values: it has a knob that the family lacks, or
    lacks one that all configs of the family's space have, or a value like 64.0 or True where they have 64 or 1, which
    are equal but compile to something else; else None."""
    named = {name for name, _ in config.meta} | {name for name in _UNUSUAL if getattr(config, name) is not None}
    unknown = sorted(named - set(family.knobs))
    missing = [knob for knob in family.knobs if knob not in named and knob not in OPTIONS]
    missing = [knob for knob in missing if all(knob in dict(one.meta) for one in family.space())]
    if not unknown and not missing:
        return _odd_value(family, config)
    parts = [f"lacks {', '.join(missing)}"] * bool(missing) + [f"has {', '.join(unknown)}"] * bool(unknown)
    return f"the knobs of {family.name} are {', '.join(family.knobs)}, but a config {' and '.join(parts)}"


def _odd_value(family: Family, config: KernelConfig) -> str | None:
    """The reason why the type of a value is wrong: all configs of the family's space have an integer there."""
    for knob, value in config.meta:
        if isinstance(value, (bool, float)) and value == int(value):
            kinds = {type(dict(one.meta).get(knob, value)) for one in family.space()}
            if kinds == {int}:
                return f"{knob} of {family.name} must be an integer but is {value!r}"
    return None
