"""Tune Python functions: a function over its own knobs (`TunedFunction`), or the kernels in it (`ContextualFunction`).

Importing this package imports neither torch nor triton.
"""

from __future__ import annotations

from ..own_timings import Advisor
from ..session import TuningFailed
from .call_timer import CallTimer
from .calls import Work, elementwise_work, gemm_work
from .config_cache import ConfigCache
from .contextual import ContextualFunction, contextual_autotune
from .results import Trial, TuneResult
from .tuned_function import TunedFunction

__all__ = [
    "Advisor",
    "CallTimer",
    "ConfigCache",
    "ContextualFunction",
    "Trial",
    "TuneResult",
    "TunedFunction",
    "TuningFailed",
    "Work",
    "contextual_autotune",
    "elementwise_work",
    "gemm_work",
]
