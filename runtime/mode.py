"""`Mode`: how much of Foretune a run wants, from the environment variable FORETUNE_MODE."""

from __future__ import annotations

import os
from enum import Enum

from ..datasets import ForetuneError
from ..datasets.errors import shown

VARIABLE = "FORETUNE_MODE"


class Mode(str, Enum):
    """What is done with a prediction."""

    OFF = "off"  # nothing: every supported config goes through, in order
    SHORTLIST = "shortlist"  # the k best go through, to be measured
    PREDICT = "predict"  # only the best goes through: nothing is left to measure


def resolve_mode(asked: str | None = None, default: Mode = Mode.SHORTLIST) -> Mode:
    """The mode that the caller asks for, or else the environment does now, or else the default.

    Raises `ForetuneError` listing the valid values.

    >>> resolve_mode(), resolve_mode("predict")
    (<Mode.SHORTLIST: 'shortlist'>, <Mode.PREDICT: 'predict'>)
    """
    name, value = ("mode", asked) if asked is not None else (VARIABLE, os.environ.get(VARIABLE) or default)
    try:
        return Mode(value.lower())
    except (ValueError, AttributeError):  # AttributeError: no text
        valid = ", ".join(mode.value for mode in Mode)
        raise ForetuneError(f"{name} must be one of {valid} but got {shown(value)}") from None
