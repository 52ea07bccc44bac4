"""The one error family that a caller of Foretune can cause with bad input, its one kind of warning, and how a row tells
of an error."""

from __future__ import annotations


class ForetuneError(ValueError):
    """Bad input; the message names the value and says what would be right."""


class DatasetError(ForetuneError):
    """A dataset that cannot be read as it is; the message names the file."""


class BundleError(ForetuneError):
    """A bundle that cannot be read as it is; the message names the file."""


class ForetuneWarning(UserWarning):
    """All goes on, but not as one would think; the message says why."""


def abridged(text: str, most: int = 300) -> str:
    """A text as a row has room for: both its ends, since a compiler quotes the source first and says its reason last.

    >>> abridged("0123456789" * 3, most=15)
    '01234 ... 56789'
    """
    if len(text) <= most:
        return text
    head = (most - 5) // 2
    return f"{text[:head]} ... {text[head + 5 - most :]}"
