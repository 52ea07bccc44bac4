"""Foretune: know the fast configs before you tune.

Predicts which configurations of a Triton kernel will be fast for a shape on a GPU, so that `triton.autotune`
measures a handful of candidates instead of hundreds::

    @triton.autotune(configs=foretune.configs("grouped_gemm_fwd"), key=[...],
                     prune_configs_by={"early_config_prune": foretune.prune("grouped_gemm_fwd", k=8)})

This face turns names into objects and leaves the work to the floors below it. Importing it is cheap: torch,
triton, NumPy and the store are imported by the call that needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import triton

    from . import datasets
    from .datasets import DeviceSpec, KernelConfig, Problem
    from .kernels.grouped_gemm import grouped_gemm
    from .model import Bundle, load_bundle
    from .runtime import Pruner, Shortlist

__all__ = [
    "DeviceSpec",
    "KernelConfig",
    "Problem",
    "__version__",
    "configs",
    "datasets",
    "grouped_gemm",
    "load_bundle",
    "prune",
    "shortlist",
]

__version__ = "0.1.0"  # pyproject.toml reads it from here

_HOMES = {
    "DeviceSpec": ".datasets",
    "KernelConfig": ".datasets",
    "Problem": ".datasets",
    "grouped_gemm": ".kernels.grouped_gemm",
    "load_bundle": ".model",
}


def configs(name: str) -> list[triton.Config]:
    """The whole space of a kernel family, to declare to `triton.autotune`. Fresh objects; no device is queried.

    Raises `ForetuneError` listing the families where there is none of that name.

    >>> len(configs("grouped_gemm_fwd")) > 700
    True
    """
    return [config.to_triton() for config in _family(name).space()]


def prune(
    name: str,
    k: int = 8,
    *,
    problem: Callable[[Mapping[str, Any]], Problem] | None = None,
    device: DeviceSpec | str | None = None,
    bundle: Bundle | None = None,
) -> Pruner:
    """An `early_config_prune` callback that keeps the `k` configs predicted to be fastest.

    `problem` turns a launch's arguments into a `Problem` (for a kernel whose parameters are named otherwise than
    the family's own), `device` replaces the current one. The callback never fails a launch: where it cannot
    predict, it hands every valid config through, with one warning that says why.

    >>> prune("grouped_gemm_fwd", k=4)
    <Pruner of grouped_gemm_fwd, k=4>
    """
    from .runtime import prune as callback

    return callback(_family(name), k, problem=problem, device=_spec(device), bundle=bundle)


def shortlist(
    name: str,
    problem: Problem,
    device: DeviceSpec | str,
    k: int = 8,
    *,
    configs: Sequence[KernelConfig] | None = None,
    bundle: Bundle | None = None,
) -> Shortlist:
    """The `k` configs predicted to be fastest for a problem on a device, which need not be here.

    `device` is a spec, the name of a shipped one, or a spec's JSON file; `configs` narrows the choice to these.

    >>> from foretune import Problem
    >>> problem = Problem.of("grouped_gemm_fwd", groups=64, rows=8192, n=2048, k=1024)
    >>> len(shortlist("grouped_gemm_fwd", problem, "h200", k=4).configs)
    4
    """
    from .runtime import shortlist as predict

    return predict(_family(name), problem, _spec(device), k=k, configs=configs, bundle=bundle)


def _family(name: str) -> Any:
    from .kernels import family

    return family(name)


def _spec(device: Any) -> Any:
    from .datasets import DeviceSpec

    return DeviceSpec.find(device) if isinstance(device, str) else device


def __getattr__(name: str) -> Any:
    if name == "datasets":
        return import_module(".datasets", __name__)
    if name in _HOMES:
        # Kept, so that the next access is an ordinary one: `grouped_gemm` is called in hot loops.
        return globals().setdefault(name, getattr(import_module(_HOMES[name], __name__), name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
