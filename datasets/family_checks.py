"""Checks of what a family declares, and of problems and configs against a family."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
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
from .family import Family, KernelChange
from .guard import name_of
from .problem import Problem, Ragged

#: Valid names of families, dimensions, knobs and flags. They occur in commands, tables and logs.
_NAME = re.compile(r"\w[\w.:+-]*")
#: The most features of a family, and the most dimensions, dtypes, knobs or flags: more than any family has.
_MOST_FEATURES, _MOST_DECLARED = 10_000, 4 * MOST_NAMES
#: Launch options that are None unless a config sets them.
_UNUSUAL = ("maxnreg", "ir_override")


def check_name(name: str, value: Any) -> str:
    """Return the value if it is a name: letters, digits and `_ . : + -`, starting with a letter, digit or `_`.

    Raises `ForetuneError` otherwise; `name` is what the message calls the value.

    >>> check_name("the family", "row_softmax")
    'row_softmax'
    """
    if not _NAME.fullmatch(check_word(name, value)):
        raise ForetuneError(f"{name} must consist of letters, digits and _ . : + - but is {shown(value)}")
    return str(value)


_sound: WeakValueDictionary[int, Family] = WeakValueDictionary()


def check_attributes(family: Family) -> None:
    """Check the attributes that a family declares: names, dimensions, dtypes, knobs and flags.

    Raises:
        ForetuneError: An attribute is missing, cannot be read, or has a wrong value.

    >>> from foretune.kernels import find_family
    >>> check_attributes(find_family("matmul"))
    """
    if _sound.get(id(family)) is family:
        return
    what = type(family).__name__
    if missing := [name for name in ("name", "dims", "dtypes", "knobs") if name not in dir(family)]:
        raise FamilyError(f"{what} must declare {', '.join(missing)}: see foretune.Family")
    check_name(f"the name of {what}", _read(family, "name"))
    of = f"of family {family.name}"
    for name in ("dims", "dtypes", "knobs", "flags", "bucketed", "independent"):
        for word in (words := check_words(f"{name} {of}", _read(family, name), _MOST_DECLARED)):
            check_name(f"each of {name} {of}", word)
        if not isinstance(_read(family, name), (tuple, list)) or len(set(words)) < len(words):
            raise FamilyError(f"{name} {of} must be a tuple without duplicates but is {shown(words)}")
        if not words and name in ("dims", "dtypes"):
            raise FamilyError(f"{name} {of} must not be empty")
    if "feature_names" in dir(family):
        check_words(f"feature_names {of}", _read(family, "feature_names"), _MOST_FEATURES)
    for name, names in (("default_dims", "dims"), ("largest", "dims"), ("default_knobs", "knobs")):
        values = _read(family, name)
        if not isinstance(values, Mapping):
            raise FamilyError(f"{name} {of} must be a mapping but is {shown(values)}")
        if unknown := [key for key in values if key not in getattr(family, names)]:
            raise FamilyError(f"{name} {of} may only name its {names} but has {shown(unknown[0])}")
        for key, value in values.items() if names == "dims" else ():
            check_integer(f"{name} {of}: {key}", value, 1)
    changes = _read(family, "kernel_changes")
    if not isinstance(changes, (tuple, list)) or not all(_is_change(family, change) for change in changes):
        raise FamilyError(
            f"kernel_changes {of} must be a tuple of KernelChange(before, after, knobs, saved_us, keeps_times), whose "
            f"knobs are of the family and whose saved_us is a function, or None, but is {shown(changes)}"
        )
    for name in ("bucketed", "independent"):
        if unknown := [dim for dim in getattr(family, name) if dim not in family.dims]:
            raise FamilyError(f"{name} {of} may only name its dims but has {unknown[0]}")
    check_flag(f"reads_binaries {of}", _read(family, "reads_binaries"))
    _sound[id(family)] = family


def _is_change(family: Family, change: Any) -> bool:
    """Return whether a value is a `KernelChange` of the family."""
    return (
        isinstance(change, KernelChange)
        and all(isinstance(source, str) for source in (change.before, change.after))
        and (change.knobs is None or (isinstance(change.knobs, Mapping) and set(change.knobs) <= set(family.knobs)))
        and (change.saved_us is None or callable(change.saved_us))
        and isinstance(change.keeps_times, bool)
    )


def _read(family: Family, name: str) -> Any:
    """Return an attribute of a family; raise `FamilyError` if reading it fails."""
    try:
        return getattr(family, name)
    except (Exception, SystemExit) as error:
        raise FamilyError(f"family {name_of(family)}: {name} raised {printable(abridged(reason_of(error)))}") from error


def check_problem_of(family: Family, problem: Problem) -> None:
    """Raise `ForetuneError` unless a problem fits the family's declarations.

    Checked are the family's name, the dimensions and their `smallest` and `largest` sizes, the ragged dimension, the
    dtype if all operands share one, and the flags. Different dtypes for the operands are left to `Family.supports`.

    >>> from foretune.kernels import find_family
    >>> check_problem_of(find_family("matmul"), Problem.of("matmul", batch=1, m=0, n=64, k=64))
    Traceback (most recent call last):
    foretune.datasets.errors.ForetuneError: m of matmul must be at least 1 but is 0
    """
    if not isinstance(problem, Problem):
        raise ForetuneError(f"a problem of {family.name} must be a Problem but is {shown(problem)}")
    if problem.family != family.name:
        raise ForetuneError(f"the problem must be one of {family.name} but is one of {problem.family}: {problem}")
    dims = dict(problem.dims)
    if dims.keys() != set(family.dims):
        usual = ", ".join(f"{dim}={size}" for dim, size in family.default_dims.items() if dim not in dims)
        raise ForetuneError(
            f"a problem of {family.name} must have the dimensions {', '.join(family.dims)} but this one has "
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
        raise ForetuneError(
            f"{unknown[0]} is not a flag of {family.name}, whose flags are: {', '.join(family.flags) or 'none'}"
        )


def _check_ragged(family: Family, problem: Problem, ragged: Ragged) -> None:
    """Raise `ForetuneError` unless the ragged dimension and the number of segments fit the family's declaration."""
    known = family.ragged or {}
    if ragged.dim not in known:
        raise ForetuneError(
            f"{family.name} is ragged along {', '.join(known) or 'no dimension'}, not along {ragged.dim}"
        )
    counted = known[ragged.dim]
    if len(ragged.sizes) != problem[counted]:
        raise ForetuneError(
            f"there must be {problem[counted]} sizes along {ragged.dim}, because {counted}={problem[counted]}, "
            f"but there are {len(ragged.sizes)}"
        )


def not_empty(family: Family, problem: Problem) -> Problem:
    """Return the problem with sizes of 0 raised to the family's `smallest`.

    A launch may have no work, for example an empty batch. It must not fail or warn, and any config is valid
    for it.

    >>> from foretune.kernels import find_family
    >>> str(not_empty(find_family("matmul"), Problem.of("matmul", batch=1, m=0, n=64, k=64)))
    'matmul batch=1 k=64 m=1 n=64 bf16'
    """
    if all(size or not family.smallest.get(dim, 1) for dim, size in problem.dims):
        return problem
    dims = tuple((dim, max(size, family.smallest.get(dim, 1))) for dim, size in problem.dims)
    return Problem(problem.family, dims, problem.dtype, problem.flags)


def with_defaults(family: Family, config: KernelConfig) -> KernelConfig:
    """Return the config with the family's default values (`default_knobs`) for the knobs that it lacks."""
    named = config.to_json()
    missing = {knob: value for knob, value in family.default_knobs.items() if knob not in named}
    return KernelConfig.of(**named, **missing) if missing else config


def wrong_knobs(family: Family, config: KernelConfig) -> str | None:
    """Return the reason why a config cannot belong to the family whatever its values, or None if it can.

    It cannot if it has a knob that the family lacks, if it lacks one that all configs of the family's space have, or if
    it has a value like 64.0 or True where they have an integer: these compare equal but compile to different code.

    >>> from foretune.kernels import find_family
    >>> wrong_knobs(find_family("rms_norm_rope_fwd"), KernelConfig.of(TILE=8))  # doctest: +ELLIPSIS
    'the knobs of rms_norm_rope_fwd are ..., but a config lacks ... and has TILE'
    """
    named = {name for name, _ in config.meta} | {name for name in _UNUSUAL if getattr(config, name) is not None}
    unknown = sorted(named - set(family.knobs))
    missing = [knob for knob in family.knobs if knob not in named and knob not in OPTIONS]
    missing = [knob for knob in missing if all(knob in dict(one.meta) for one in family.space())]
    if not unknown and not missing:
        return _odd_value(family, config)
    parts = [f"lacks {', '.join(missing)}"] * bool(missing) + [f"has {', '.join(unknown)}"] * bool(unknown)
    return f"the knobs of {family.name} are {', '.join(family.knobs)}, but a config {' and '.join(parts)}"


def _odd_value(family: Family, config: KernelConfig) -> str | None:
    """Return the reason why a float or bool is wrong for a knob that is an integer in all configs of the space."""
    for knob, value in config.meta:
        if isinstance(value, (bool, float)) and value == int(value):
            types = {type(dict(one.meta).get(knob, value)) for one in family.space()}
            if types == {int}:
                return f"{knob} of {family.name} must be an integer but is {value!r}"
    return None
