"""The one error family that a caller of Foretune can cause with bad input, its one kind of warning, and the checks of
values that raise it: each names the value and says what would do."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection, Iterable
from numbers import Integral, Real
from pathlib import Path
from typing import Any

#: Counts are 32 bits, as the store's columns are.
MOST = 2**31 - 1
#: More than any name or word is long, and short enough to show.
LONGEST_WORD = 200
#: More dimensions, operands, flags or knobs than any kernel has.
MOST_NAMES = 64
#: Of Linux: PATH_MAX.
_LONGEST_PATH = 4096
#: Whose lines no user can do anything about: ours, and those of what calls us.
_NOT_THE_USERS = (__name__.partition(".")[0], "triton", "torch")


class ForetuneError(ValueError):
    """Bad input; the message names the value and says what would be right."""


class DatasetError(ForetuneError):
    """A dataset that cannot be read as it is; the message names the file."""


class BundleError(ForetuneError):
    """A bundle that cannot be read as it is; the message names the file."""


class FamilyError(ForetuneError):
    """A kernel family whose own code fails, or gives what it must not; the message names the family and the method."""


class ForetuneWarning(UserWarning):
    """All goes on, but not as one would think; the message says why."""


def warn(message: str) -> None:
    """A `ForetuneWarning` that points at the user's line: the innermost one outside of Foretune, Triton and torch.

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
    """What an error says, for a message of ours: with its type, unless it is ours and says all there is to say.

    >>> reason_of(ForetuneError("k must be >= 1")), reason_of(KeyError("rows"))
    ('k must be >= 1', "KeyError: 'rows'")
    """
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - a __str__ may raise anything
        text = "which cannot be shown"
    return text if isinstance(error, ForetuneError) else f"{type(error).__name__}: {text}"


def cause_of(error: BaseException) -> BaseException:
    """The exception that a family's method raised, where the error reports one; else the error itself."""
    return error.__cause__ if isinstance(error, FamilyError) and isinstance(error.__cause__, Exception) else error


def printable(text: str) -> str:
    """The text on one line, with control characters, which could do anything to a terminal, written out.

    >>> printable("a [red] card")
    'a [red] card'
    >>> print(printable(chr(27) + "[31m" + chr(10)))
    \\x1b[31m\\n
    """
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def abridged(text: str, most: int = 300) -> str:
    """A text as a row has room for: both its ends, since a compiler quotes the source first and says its reason last.

    >>> abridged("0123456789" * 3, most=15)
    '01234 ... 56789'
    """
    if len(text) <= most:
        return text
    head = (most - 5) // 2
    return f"{text[:head]} ... {text[head + 5 - most :]}"


def shown(value: object, most: int = 100) -> str:
    """A value as an error shows it: short, on one line, and never an error itself.

    >>> shown("fast"), shown("x" * 10_000, most=20), shown(10**5000)
    ("'fast'", "'xxxxxx ... xxxxxxx'", 'an int that is not to be shown')
    """
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - of 5,000 digits, or of a foreign class
        return f"an {type(value).__name__} that is not to be shown"
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
    """An integer, NumPy's among them, of these bounds, as Python's own.

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
    """A number with low <= value <= high; no NaN, and neither True nor False.

    >>> check_between("k", 0, 1, 64)
    Traceback (most recent call last):
    foretune.datasets.errors.ForetuneError: k must be between 1 and 64 but got 0
    """
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not (is_number and low <= value <= high):
        raise ForetuneError(f"{name} must be between {low} and {high} but got {shown(value)}")


def check_flag(name: str, value: Any) -> bool:
    """True or False; nothing that merely counts as one.

    >>> check_flag("resume", "no")
    Traceback (most recent call last):
    foretune.datasets.errors.ForetuneError: resume must be true or false but is 'no'
    """
    if not isinstance(value, bool):
        raise ForetuneError(f"{name} must be true or false but is {shown(value)}")
    return value


def check_word(name: str, value: Any, most: int = LONGEST_WORD) -> str:
    """A text of 1 to `most` characters, all of which can be printed.

    >>> check_word("the family", "")
    Traceback (most recent call last):
    foretune.datasets.errors.ForetuneError: the family must be a word but is ''
    """
    if not isinstance(value, str) or not value or not value.isprintable():
        raise ForetuneError(f"{name} must be a word but is {shown(value)}")
    if len(value) > most:
        raise ForetuneError(f"{name} must have at most {most} characters but is {shown(value)}")
    return str(value)


def check_words(name: str, values: Any, most: int = MOST_NAMES) -> tuple[str, ...]:
    """A collection of at most so many words, in the order given."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Collection) or len(values) > most:
        raise ForetuneError(f"{name} must be a list of at most {most} words but is {shown(values)}")
    return tuple(check_word(f"each of {name}", value) for value in values)


def check_path(name: str, value: Any) -> Path:
    """A path that some file could have, whether or not one is there.

    >>> check_path("out", "")
    Traceback (most recent call last):
    foretune.datasets.errors.ForetuneError: out must be a path but is ''
    """
    if not isinstance(value, (str, Path)) or not str(value) or "\0" in str(value) or len(str(value)) > _LONGEST_PATH:
        raise ForetuneError(f"{name} must be a path but is {shown(value)}")
    return Path(value)


def _integer(value: Any) -> int | None:
    if type(value) is int:
        return value
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None
