"""When choices must be made again (`epoch`), and whether a pin file replaces predicting and tuning (`is_pinned`).

`pins.py` and `tuning/ranks/agreement.py` change this state of the process; every part of runtime/ may read it.
"""

from __future__ import annotations

import os

#: The environment variable with the path of a pin file.
PIN_VARIABLE = "FORETUNE_PIN"
#: The pins that `foretune.pinned` has put in force; the last one counts.
pins: list[object] = []
_epoch = _pin_epoch = 0


def epoch() -> int:
    """Return a counter that changes whenever `agree` or `pinned` starts or stops to apply.

    Choices of another epoch must be made again.
    """
    return _epoch


def begin_epoch() -> None:
    """Advance the counter of `epoch`, so that all choices of this process are made again."""
    global _epoch
    _epoch += 1


def pin_epoch() -> int:
    """Return a counter that changes whenever a pin file (`pinned`) starts or stops to apply."""
    return _pin_epoch


def begin_pin_epoch() -> None:
    """Advance the counters of `pin_epoch` and `epoch`, because a pin file starts or stops to apply."""
    global _pin_epoch
    _pin_epoch += 1
    begin_epoch()


def is_pinned() -> bool:
    """Return whether a pin file is in force: by `foretune.pinned` or FORETUNE_PIN.

    >>> is_pinned()
    False
    """
    return bool(pins) or bool(os.environ.get(PIN_VARIABLE))
