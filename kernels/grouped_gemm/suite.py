"""The problems that kernels are compared on: real layers from decode to training, routed in several ways."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ...datasets import Case, ForetuneError, Problem
from .group_sizes import drawn_sizes
from .models import Model
from .workload import PERMUTATION

#: Layers: model, projection, expert-parallel degree.
LAYERS = (
    ("Qwen3-30B-A3B", "w13", 1),
    ("Qwen3-30B-A3B", "w2", 1),
    ("Mixtral-8x7B", "w13", 1),
    ("OLMoE-1B-7B", "w2", 1),
    ("DeepSeek-V3/R1", "w2", 8),
    ("Nemotron-3-Nano-30B-A3B", "w13", 1),
)
#: Phases: tokens of the whole layer, and how they are routed. Training is also run with the permutation fused.
PHASES = {
    "decode": (64, ("uniform",)),
    "mid": (1024, ("uniform", "zipf")),
    "training": (8192, ("balanced", "zipf", "hot")),
}
#: Rows of training are cut to so many floating-point operations, so that one launch takes milliseconds.
MOST_FLOPS = 2.0e12


def suite_cases(family: str, models: Sequence[Model]) -> dict[str, Case]:
    """The suite of one family by name, "MODEL/PROJECTION phase routing"; the same in every process.

    Raises `ForetuneError` where a model is not among `models`.

    >>> from .models import load_models
    >>> cases = suite_cases("grouped_gemm_dw", load_models())
    >>> cases["OLMoE-1B-7B/w2 training balanced"].problem["rows"]
    65536
    """
    by_name = {model.model: model for model in models}
    cases = {}
    for name, projection, degree in LAYERS:
        if name not in by_name:
            raise ForetuneError(f"the suite needs the model {name} but there are {', '.join(sorted(by_name))}")
        model = by_name[name]
        n, k = model.projections()[projection]
        groups = model.num_experts // degree
        for phase, (tokens, routings) in PHASES.items():
            rows = min(tokens * model.top_k // degree, int(MOST_FLOPS / (2 * n * k)) // 1024 * 1024 or 1024)
            for routing in routings:
                layer = f"{name}/{projection}"
                rng = np.random.default_rng(zlib.crc32(f"{layer} {phase} {routing}".encode()))
                sizes = drawn_sizes(routing, rows, groups, rng)
                plain = Problem.of(family, ragged={"rows": sizes}, groups=groups, rows=rows, n=n, k=k)
                cases[f"{layer} {phase} {routing}"] = Case(plain, (layer,), routing)
                if phase == "training" and routing == "balanced":
                    flag = PERMUTATION[projection]
                    fused = replace(plain, flags=(flag,))
                    cases[f"{layer} {phase} {routing} {flag}"] = Case(fused, (layer,), routing)
    return cases
