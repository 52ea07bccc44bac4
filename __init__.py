"""Foretune: know the fast configs before you tune.

Predicts which configurations of a Triton kernel will be fast for a shape on a GPU, so that `triton.autotune`
measures a handful of candidates instead of hundreds::

    @triton.autotune(configs=foretune.configs("grouped_gemm_fwd"), key=[...],
                     prune_configs_by={"early_config_prune": foretune.prune("grouped_gemm_fwd", k=8)})

Every function here takes a kernel family as an object, as its name, or as "package.module:attribute". The public names
are in `__init__.pyi`, which type checkers read too. Importing this package is cheap: a name's module is imported when
the name is first used; torch, triton, NumPy and the store are imported by the first call that needs them.
"""

from __future__ import annotations

import os
from typing import Any

import lazy_loader

__version__ = "0.1.0"  # pyproject.toml reads it from here

_load, _, __all__ = lazy_loader.attach_stub(__name__, __file__)
__all__ = sorted([*__all__, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .runtime.launching.collector import collecting_later

    with collecting_later():
        return _load(name)


def __dir__() -> list[str]:
    return __all__


if os.environ.get("FORETUNE_ATTACH"):
    from .runtime.tuning.packages import attach_named

    attach_named()
if os.environ.get("FORETUNE_USE"):
    from .kernels.integrations import use_named

    use_named()
