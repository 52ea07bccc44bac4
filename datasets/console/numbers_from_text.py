"""Numbers as people write them, in options and tables: one way to read each, and bounds that the error names."""

from __future__ import annotations

import math
import re
from typing import NoReturn

from ..errors import MOST, ForetuneError, abridged

MOST_HOURS = 10_000
_UNITS_S = 3600, 60, 1  # of hours, minutes and seconds


def whole_number(text: str, low: int = 0, high: int = MOST) -> int:
    """A whole number of plain digits, 0 to 9: neither signs, nor underscores, nor the digits of other scripts, which
    `int` would take. Raises `ForetuneError` with the bounds.

    >>> whole_number("8192", low=1)
    8192
    >>> whole_number("1e3")
    Traceback (most recent call last):
    foretune.datasets.errors.ForetuneError: must be a whole number from 0 to 2147483647 but is '1e3'
    """
    # int() of thousands of digits is an error of its own; so many are over any bound without it.
    if re.fullmatch("[0-9]+", text) and len(text.lstrip("0")) <= len(str(high)) and low <= int(text) <= high:
        return int(text)
    _refuse(text, f"a whole number from {low} to {high}")


def whole_numbers(text: str, low: int = 1, high: int = MOST, most: int = 1000) -> tuple[int, ...]:
    """Whole numbers between commas, as `whole_number` reads them, at least one and at most so many.

    >>> whole_numbers("32,64,96")
    (32, 64, 96)
    """
    parts = text.split(",")
    if len(parts) > most:
        raise ForetuneError(f"must be at most {most} numbers but there are {len(parts)}")
    try:
        return tuple(whole_number(part, low, high) for part in parts)
    except ForetuneError:
        _refuse(text, f"a list such as 32,64,96, each number from {low} to {high},")


def span(text: str) -> tuple[int, int]:
    """Two whole numbers from 1 with a colon between them, the smaller one first. Raises `ForetuneError`.

    >>> span("64:4096")
    (64, 4096)
    """
    low, colon, high = text.partition(":")
    try:
        if colon and (found := (whole_number(low, 1), whole_number(high, 1)))[0] <= found[1]:
            return found
    except ForetuneError:
        pass
    _refuse(text, "a smallest and a largest size, as in 64:4096,")


def number(text: str, low: float, high: float) -> float:
    """A number that may have a fraction. Raises `ForetuneError` with the bounds; of "nan" and "inf" too.

    >>> number("0.1", 0, 1)
    0.1
    """
    try:
        value = float(text) if text.isascii() and "_" not in text else math.nan
    except ValueError:
        value = math.nan
    if low <= value <= high:
        return value
    _refuse(text, f"a number from {low:g} to {high:g}")


def duration_s(text: str) -> float:
    """Seconds from a duration such as 90s, 20m, 1.5h or 1h30m. Raises `ForetuneError` for others, none, and years.

    >>> duration_s("1.5h"), duration_s("8m40s")
    (5400.0, 520.0)
    """
    match = re.fullmatch(r"(?:([0-9.]+)h)?(?:([0-9.]+)m)?(?:([0-9.]+)s)?", text)
    parts = match.groups("0") if match else ("0",)
    try:
        seconds = sum(float(part) * unit for part, unit in zip(parts, _UNITS_S, strict=False))
    except ValueError:  # several points
        seconds = 0.0
    if 0 < seconds <= MOST_HOURS * 3600:
        return seconds
    _refuse(text, f"a duration such as 90s, 20m or 1h30m, of at most {MOST_HOURS}h,")


def _refuse(text: str, right: str) -> NoReturn:
    raise ForetuneError(f"must be {right} but is {abridged(text, 60)!r}")
