"""Shortlists at run time: prune callbacks, choosing and launching for an op, timing, and parts of a GPU.

Importing this imports neither torch nor triton, and of runtime/ only what is asked for: first calls wait for imports.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..datasets import ForetuneWarning
    from .arguments import Mode, resolve_mode, warn_once
    from .launching.stub_driver import gpu_target, stubbed, use_stub_driver
    from .prune import Pruner
    from .shortlist import Shortlist, make_shortlist
    from .timing.partition import sm_partition
    from .timing.timer import Timer, Timing
    from .triton_family import TritonFamily

__all__ = [
    "ForetuneWarning",
    "Mode",
    "Pruner",
    "Shortlist",
    "Timer",
    "Timing",
    "TritonFamily",
    "gpu_target",
    "make_shortlist",
    "resolve_mode",
    "sm_partition",
    "stubbed",
    "use_stub_driver",
    "warn_once",
]

_HOMES = {
    "ForetuneWarning": "..datasets",
    "Pruner": ".prune",
    "TritonFamily": ".triton_family",
    "sm_partition": ".timing.partition",
    "warn_once": ".arguments",
    **dict.fromkeys(("Mode", "resolve_mode"), ".arguments"),
    **dict.fromkeys(("Shortlist", "make_shortlist"), ".shortlist"),
    **dict.fromkeys(("Timer", "Timing"), ".timing.timer"),
    **dict.fromkeys(("gpu_target", "stubbed", "use_stub_driver"), ".launching.stub_driver"),
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return globals().setdefault(name, getattr(import_module(_HOMES[name], __name__), name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
