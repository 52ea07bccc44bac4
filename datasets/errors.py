"""Foretune's exceptions, its warning, and the checks of argument values that raise them.

Every message names the bad value and the accepted values.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection, Iterable
from numbers import Integral, Real
from pathlib import Path
from typing import Any

#: The largest count that is accepted: columns of the Parquet tables have 32 bits.
MOST = 2**31 - 1
#: The most characters of a name: longer than any real one, and short enough for a message.
LONGEST_WORD = 200
#: The most dimensions, operands, flags or knobs: more than any kernel has.
MOST_NAMES = 64
#: The most characters of a path: PATH_MAX on Linux.
_LONGEST_PATH = 4096
#: Packages whose frames `warn` skips, because a user cannot change their code.
_NOT_THE_USERS = (__name__.partition(".")[0], "triton", "torch")


class ForetuneError(ValueError):
    """Bad input. The message names the bad value and the accepted values.

    It is a `ValueError`, and the base class of `DatasetError`, `BundleError` and `FamilyError`.

    >>> from foretune.datasets import DeviceSpec
    >>> try:
    ...     DeviceSpec.named("h300")
    ... except ForetuneError as error:
    ...     print(error)
    unknown device 'h300'; known: h100, h200
    """


class DatasetError(ForetuneError):
    """A dataset that cannot be read or written. The message names the file."""


class BundleError(ForetuneError):
    """A bundle of trained rankers that cannot be read. The message names the file."""


class FamilyError(ForetuneError):
    """A kernel family whose code raised or returned a wrong value. The message names the family and the method."""


class ForetuneWarning(UserWarning):
    """Foretune continues, but with a result that the user may not expect. The message says why."""


def warn(message: str) -> None:
    """Issue a `ForetuneWarning` at the innermost stack frame outside of Foretune, Triton and torch.

    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     warn("an example")
    >>> caught[0].category.__name__, str(caught[0].message)
    ('ForetuneWarning', 'an example')
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_THE_USERS:
        frame = frame.f_back
    where, registry = frame.f_globals, frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(
        message, ForetuneWarning, frame.f_code.co_filename, frame.f_lineno, where.get("__name__"), registry
    )


def reason_of(error: BaseException) -> str:
    """Return the text of an exception for a message, preceded by its type unless it is a `ForetuneError`.

    >>> reason_of(ForetuneError("k must be >= 1")), reason_of(KeyError("rows"))
    ('k must be >= 1', "KeyError: 'rows'")
    """
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - a __str__ may raise anything
        text = "(its message cannot be shown)"
    return text if isinstance(error, ForetuneError) else f"{type(error).__name__}: {text}"


def cause_of(error: BaseException) -> BaseException:
    """Return the exception that a `FamilyError` was raised from; any other error is returned itself."""
    return error.__cause__ if isinstance(error, FamilyError) and isinstance(error.__cause__, Exception) else error


def printable(text: str) -> str:
    r"""Return the text with control characters and line breaks escaped, so that it is safe to print on one line.

    >>> printable("a [red] card")
    'a [red] card'
    >>> print(printable(chr(27) + "[31m" + chr(10)))
    \x1b[31m\n
    """
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def abridged(text: str, most: int = 300) -> str:
    """Shorten a text to at most `most` characters, keeping its beginning and its end.

    The end matters: compilers quote the source first and give the reason last.

    >>> abridged("0123456789" * 3, most=15)
    '01234 ... 56789'
    """
    if len(text) <= most:
        return text
    head = (most - 5) // 2
    return f"{text[:head]} ... {text[head + 5 - most :]}"


def shown(value: object, most: int = 100) -> str:
    """Return the `repr` of a value for a message, shortened; never raises.

    >>> shown("fast"), shown("x" * 10_000, most=20), shown(10**5000)
    ("'fast'", "'xxxxxx ... xxxxxxx'", 'an int that cannot be shown')
    """
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - of 5,000 digits, or of a foreign class
        return f"an {type(value).__name__} that cannot be shown"
    return abridged(text, most)


def did_you_mean(word: str, known: Iterable[str], prefix: str = "") -> str:
    """Return " (did you mean 'x'?)" for the known word most similar to a misspelt one, or "" if none is similar.

    `prefix` stands before the known word: "--" for options.

    >>> did_you_mean("sofmax", ["layer_norm", "softmax"])
    " (did you mean 'softmax'?)"
    >>> did_you_mean("attention", ["layer_norm", "softmax"])
    ''
    """
    from difflib import get_close_matches

    by_lower = {name.lower(): name for name in known}
    close = get_close_matches(word[:LONGEST_WORD].lower(), by_lower, n=1, cutoff=0.55)
    return f" (did you mean {prefix + by_lower[close[0]]!r}?)" if close else ""


def check_integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    """Return a Python or NumPy integer in [low, high] as an `int`; raise `ForetuneError` for anything else.

    `high=None` means no upper bound. `name` is what the message calls the value.

    >>> check_integer("k", 0, 1)
    Traceback (most recent call last):
    foretune.datasets.errors.ForetuneError: k must be an integer >= 1 but got 0
    """
    number = _integer(value)
    if number is None or number < low or (high is not None and number > high):
        wanted = f">= {low}" if high is None else f"between {low} and {high}"
        raise ForetuneError(f"{name} must be an integer {wanted} but got {shown(value)}")
    return number


def check_between(name: str, value: Any, low: float, high: float) -> None:
    """Raise `ForetuneError` unless the value is a number with low <= value <= high (NaN and bools are refused).

    >>> check_between("k", 0, 1, 64)
    Traceback (most recent call last):
    foretune.datasets.errors.ForetuneError: k must be between 1 and 64 but got 0
    """
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not (is_number and low <= value <= high):
        raise ForetuneError(f"{name} must be between {low} and {high} but got {shown(value)}")


def check_flag(name: str, value: Any) -> bool:
    """Return the value if it is True or False; raise `ForetuneError` for anything else, 0 and 1 included.

    >>> check_flag("resume", "no")
    Traceback (most recent call last):
    foretune.datasets.errors.ForetuneError: resume must be true or false but is 'no'
    """
    if not isinstance(value, bool):
        raise ForetuneError(f"{name} must be true or false but is {shown(value)}")
    return value


def check_word(name: str, value: Any, most: int = LONGEST_WORD) -> str:
    """Return the value if it is a string of 1 to `most` printable characters; raise `ForetuneError` otherwise.

    >>> check_word("the family", "")
    Traceback (most recent call last):
    foretune.datasets.errors.ForetuneError: the family must be a non-empty string of printable characters but is ''
    """
    if not isinstance(value, str) or not value or not value.isprintable():
        raise ForetuneError(f"{name} must be a non-empty string of printable characters but is {shown(value)}")
    if len(value) > most:
        raise ForetuneError(f"{name} must have at most {most} characters but is {shown(value)}")
    return str(value)


def check_words(name: str, values: Any, most: int = MOST_NAMES) -> tuple[str, ...]:
    """Return a collection as a tuple; raise `ForetuneError` unless it is at most `most` non-empty printable strings."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Collection) or len(values) > most:
        raise ForetuneError(f"{name} must be a list of at most {most} strings but is {shown(values)}")
    return tuple(check_word(f"each of {name}", value) for value in values)


def check_path(name: str, value: Any) -> Path:
    """Return the value as a `Path` if a file could have that path; whether the file exists is not checked.

    >>> check_path("out", "")
    Traceback (most recent call last):
    foretune.datasets.errors.ForetuneError: out must be a path but is ''
    """
    if not isinstance(value, (str, Path)) or not str(value) or "\0" in str(value) or len(str(value)) > _LONGEST_PATH:
        raise ForetuneError(f"{name} must be a path but is {shown(value)}")
    return Path(value)


def _integer(value: Any) -> int | None:
    """Return a Python or NumPy integer as an `int`, and None for anything else (bools too)."""
    if type(value) is int:
        return value
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None
