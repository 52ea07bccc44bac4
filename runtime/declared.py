"""What a `TritonFamily` declares, of the kinds that it must be; whether there is what it names, it finds out itself."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from ..datasets import ForetuneError
from ..datasets.errors import check_between, check_integer, check_word, check_words, shown
from ..datasets.problem import MOST_SIZE


def check_declared(family: type[Any]) -> None:
    """Raises `ForetuneError` naming an attribute of a family's class that is not what it must be."""
    name = family.name
    if set(check_word("name", name)) & set(": ,"):
        raise ForetuneError(f"name must be one word but is {shown(name)}")
    for what, check in _CHECKS.items():
        try:
            check(what, getattr(family, what))
        except ForetuneError as error:  # noqa: PERF203 - a dozen
            raise ForetuneError(f"{name}: {error}") from None


def _sources(what: str, value: Any) -> None:
    for source in _mapping(what, value).values():
        if not callable(source):
            check_word(f"each parameter in {what}", source)


def _dims(what: str, value: Any) -> None:
    _sources(what, value)
    if not value:
        raise ForetuneError(f"{what} must name a dimension but is {shown(value)}")


def _dtypes(what: str, value: Any) -> None:
    if not check_words(what, value):
        raise ForetuneError(f"{what} must name a dtype but is {shown(value)}")


def _tiles(what: str, value: Any) -> None:
    for dim in _mapping(what, value).values():
        check_word(f"each dimension in {what}", dim)


def _ranges(what: str, value: Any) -> None:
    for dim, sizes in _mapping(what, value).items():
        if not isinstance(sizes, (tuple, list)) or len(sizes) != 2:
            raise ForetuneError(f"{what} must have two sizes of {dim} but has {shown(sizes)}")
        for size in sizes:
            check_integer(f"{what} of {dim}", size, 0, MOST_SIZE)


def _configs(what: str, value: Any) -> None:
    if value is not None and (isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Collection)):
        raise ForetuneError(f"{what} must be a list of configs but is {shown(value)}")


def _parameter(what: str, value: Any) -> None:
    if value is not None:
        check_word(what, value)


def _mapping(what: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ForetuneError(f"{what} must be a mapping but is {shown(value)}")
    check_words(f"what {what} names", value)
    return value


_CHECKS: dict[str, Callable[[str, Any], object]] = {
    "dims_from": _dims,
    "flags_from": _sources,
    "dtype_from": _parameter,
    "dtypes": _dtypes,
    "output": check_word,
    "configs": _configs,
    "tiles": _tiles,
    "ranges": _ranges,
    "most_bytes": lambda what, value: check_between(what, value, 0.0, 1e18),
    "bucketed": check_words,
}
