"""Foretune: know the fast configs before you tune.

Predicts which configurations of a Triton kernel will be fast for a shape on a GPU, so that `triton.autotune`
measures a handful of candidates instead of hundreds::

    @triton.autotune(configs=foretune.configs("grouped_gemm_fwd"), key=[...],
                     prune_configs_by={"early_config_prune": foretune.prune("grouped_gemm_fwd", k=8)})

Every function here takes a kernel family as an object, as its name, or as "package.module:attribute". This face says
where each thing lives and leaves the work to the floors below it. Importing it is cheap: torch, triton, NumPy and the
store are imported by the call that needs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from . import datasets, runtime
    from .collect.summary import Summary
    from .datasets import (
        Case,
        DeviceSpec,
        Family,
        ForetuneError,
        ForetuneWarning,
        KernelConfig,
        Measurable,
        Measurement,
        Problem,
    )
    from .datasets.dataset import Dataset
    from .kernels import families, register, spaces
    from .kernels.by_name import FamilyLike, adapt, attach, autotune, configs, cover, prune, shortlist, tune
    from .kernels.gated_mlp import gated_mlp
    from .kernels.grouped_gemm import grouped_gemm
    from .kernels.integrations import use
    from .kernels.matmul import matmul
    from .kernels.rms_norm_rope import rms_norm_rope
    from .kernels.scaled_gemm import scaled_gemm, scaled_grouped_gemm
    from .model import load_bundle
    from .runtime import TritonFamily
    from .runtime.tuning.attach import attached, detach
    from .runtime.tuning.functions import (
        ConfigCache,
        TunedFunction,
        TuningFailed,
        contextual_autotune,
        elementwise_work,
        gemm_work,
    )
    from .runtime.tuning.ranks.agreement import agree

__all__ = [
    "Case",
    "ConfigCache",
    "DeviceSpec",
    "Family",
    "ForetuneError",
    "ForetuneWarning",
    "KernelConfig",
    "Measurable",
    "Measurement",
    "Problem",
    "TritonFamily",
    "TunedFunction",
    "TuningFailed",
    "__version__",
    "adapt",
    "agree",
    "attach",
    "attached",
    "autotune",
    "collect_dataset",
    "configs",
    "contextual_autotune",
    "cover",
    "datasets",
    "detach",
    "elementwise_work",
    "families",
    "gated_mlp",
    "gemm_work",
    "grouped_gemm",
    "load_bundle",
    "matmul",
    "prune",
    "register",
    "rms_norm_rope",
    "runtime",
    "scaled_gemm",
    "scaled_grouped_gemm",
    "shortlist",
    "spaces",
    "tune",
    "use",
]

__version__ = "0.1.0"  # pyproject.toml reads it from here

_MODULES = {"datasets": ".datasets", "runtime": ".runtime", "spaces": ".kernels.spaces"}
_HOMES = {
    **dict.fromkeys(
        (
            "Case",
            "DeviceSpec",
            "Family",
            "ForetuneError",
            "ForetuneWarning",
            "KernelConfig",
            "Measurable",
            "Measurement",
            "Problem",
        ),
        ".datasets",
    ),
    **dict.fromkeys(
        ("ConfigCache", "TunedFunction", "TuningFailed", "contextual_autotune", "elementwise_work", "gemm_work"),
        ".runtime.tuning.functions",
    ),
    **dict.fromkeys(
        ("adapt", "attach", "autotune", "configs", "cover", "prune", "shortlist", "tune"), ".kernels.by_name"
    ),
    **dict.fromkeys(("attached", "detach"), ".runtime.tuning.attach"),
    "TritonFamily": ".runtime",
    "agree": ".runtime.tuning.ranks.agreement",
    "families": ".kernels",
    "gated_mlp": ".kernels.gated_mlp",
    "grouped_gemm": ".kernels.grouped_gemm",
    "load_bundle": ".model",
    "matmul": ".kernels.matmul",
    "register": ".kernels",
    "rms_norm_rope": ".kernels.rms_norm_rope",
    **dict.fromkeys(("scaled_gemm", "scaled_grouped_gemm"), ".kernels.scaled_gemm"),
    "use": ".kernels.integrations",
}


def collect_dataset(
    family: FamilyLike | Sequence[FamilyLike],
    *,
    out: Path | str,
    cases: Sequence[Case] | None = None,
    plan: str = "exhaustive",
    known: Dataset | None = None,
    share: float | None = None,
    budget_s: float | None = None,
    gpus: int | None = None,
    resume: bool = True,
    progress: bool = True,
) -> Summary:
    """Measures the config spaces of one family or several on this machine's GPUs, into the dataset in `out`: what
    `foretune collect` does, for notebooks and scripts, with the same progress on stderr.

    `cases` are the problems to measure (left out, those that each family draws); `known` is the dataset that
    `plan="missing"` adds to, and whose problems it measures if `cases` are left out; `share` the part of each problem's
    configs that "adaptive" or "thin" tries, as 0.03. Killed or interrupted, it goes on when called again. Raises
    `ForetuneError` for a family that only predicts, and as `foretune collect` does.

    >>> collect_dataset("grouped_gemm_fwd", out="measured", budget_s=1200)  # doctest: +SKIP
    Summary(plan='exhaustive', cases=74, ...)
    """
    from .collect.campaign import collect_on_gpus
    from .collect.cases import cases_like, draw_cases
    from .collect.plan import checked_dataset
    from .datasets.errors import check_flag
    from .datasets.progress import showing_steps
    from .kernels import find_measurable

    for name, value in (("resume", resume), ("progress", progress)):
        check_flag(name, value)
    several = [family] if isinstance(family, (str, type)) or not isinstance(family, Sequence) else family
    measurable = [find_measurable(one) for one in several]
    if cases is None and known is not None:
        cases = [case for one in measurable for case in cases_like(checked_dataset(known), one.name)]
    drawn = [case for one in measurable for case in draw_cases(one)] if cases is None else cases
    with showing_steps(progress) as on_progress:
        return collect_on_gpus(
            measurable,
            drawn,
            out,
            gpus=gpus,
            plan=plan,
            known=known,
            share=share,
            budget_s=budget_s,
            resume=resume,
            on_progress=on_progress,
        )


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(_MODULES[name], __name__)
    if name in _HOMES:
        from .runtime.launching.collector import collecting_later

        with collecting_later():
            # Kept, so that the next access is an ordinary one: `grouped_gemm` is called in hot loops.
            return globals().setdefault(name, getattr(import_module(_HOMES[name], __name__), name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
