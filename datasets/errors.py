"""The one error family that a caller of Foretune can cause with bad input, its one kind of warning, and how a row tells
of an error."""

from __future__ import annotations

import sys
import warnings

#: Whose lines no user can do anything about: ours, and those of what calls us.
_NOT_THE_USERS = (__name__.partition(".")[0], "triton", "torch")


class ForetuneError(ValueError):
    """Bad input; the message names the value and says what would be right."""


class DatasetError(ForetuneError):
    """A dataset that cannot be read as it is; the message names the file."""


class BundleError(ForetuneError):
    """A bundle that cannot be read as it is; the message names the file."""


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


def abridged(text: str, most: int = 300) -> str:
    """A text as a row has room for: both its ends, since a compiler quotes the source first and says its reason last.

    >>> abridged("0123456789" * 3, most=15)
    '01234 ... 56789'
    """
    if len(text) <= most:
        return text
    head = (most - 5) // 2
    return f"{text[:head]} ... {text[head + 5 - most :]}"
