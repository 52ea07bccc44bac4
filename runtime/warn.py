"""`warn_once`: a `ForetuneWarning` said once for each reason, when a prediction cannot be made."""

from __future__ import annotations

import warnings

from ..datasets import ForetuneWarning

_said: set[str] = set()


def warn_once(reason: str) -> None:
    """Warns of a reason the first time that this process meets it.

    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     warn_once("an example"); warn_once("an example")
    >>> len(caught)
    1
    """
    if reason not in _said:
        _said.add(reason)
        warnings.warn(reason, ForetuneWarning, stacklevel=3)
