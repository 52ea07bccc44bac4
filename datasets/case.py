"""`Case`: a problem and where it comes from."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .problem import Problem


@dataclass(frozen=True)
class Case:
    """A problem to measure, the models whose layers have that shape, and how its rows were routed.

    `sources` are "MODEL/PROJECTION" strings, or ("random",) for a shape drawn at random.

    >>> problem = Problem.of("grouped_gemm_fwd", groups=8, rows=16, n=4096, k=14336)
    >>> Case(problem, ("Mixtral-8x7B/w2", "Qwen3-30B-A3B/w2"), "balanced").model_families
    ('Mixtral', 'Qwen')
    """

    problem: Problem
    sources: tuple[str, ...]
    routing: str  # balanced, zipf, hot or uniform: see collect.shapes

    @property
    def model_families(self) -> tuple[str, ...]:
        """The leading word of each source's model name: what evaluation splits by."""
        return tuple(sorted({re.split(r"[^A-Za-z]", source)[0] for source in self.sources}))
