"""The one error family that a caller of Foretune can cause with bad input, and its one kind of warning."""

from __future__ import annotations


class ForetuneError(ValueError):
    """Bad input; the message names the value and says what would be right."""


class DatasetError(ForetuneError):
    """A dataset that cannot be read as it is; the message names the file."""


class BundleError(ForetuneError):
    """A bundle that cannot be read as it is; the message names the file."""


class ForetuneWarning(UserWarning):
    """All goes on, but not as one would think; the message says why."""
