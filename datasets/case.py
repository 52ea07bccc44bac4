"""`Case`: a problem and where it comes from."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .problem import Problem


@dataclass(frozen=True)
class Case:
    """A problem to measure, the models whose layers have that shape, and under which scenario it was drawn.

    `sources` are "MODEL/LAYER" strings, or ("random",) for a shape drawn at random. `scenario` is a word of the
    family's own for what the dimensions do not say, as for how skewed ragged sizes were drawn; "" where there is none.

    >>> problem = Problem.of("linear", m=16, n=4096, k=14336)
    >>> Case(problem, ("Llama-3-8B/down", "Qwen3-8B/down")).model_families
    ('Llama', 'Qwen')
    """

    problem: Problem
    sources: tuple[str, ...]
    scenario: str = ""

    @property
    def model_families(self) -> tuple[str, ...]:
        """The leading word of each source's model name: what evaluation splits by."""
        return tuple(sorted({re.split(r"[^A-Za-z]", source)[0] for source in self.sources}))
