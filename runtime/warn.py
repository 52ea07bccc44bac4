"""`warn_once`: a `ForetuneWarning` said once for each reason, when a prediction cannot be made."""

from __future__ import annotations

from ..datasets.errors import ForetuneWarning as ForetuneWarning
from ..datasets.errors import warn

_said: set[str] = set()


def warn_once(reason: str, consequence: str = "") -> None:
    """Warns of a reason, and what follows from it, the first time that this process meets the reason.

    >>> import warnings
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     warn_once("an example", ": one"); warn_once("an example", ": another")
    >>> len(caught)
    1
    """
    if reason not in _said:
        _said.add(reason)
        warn(reason + consequence)
