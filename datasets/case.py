"""`Case`: a problem and where it comes from."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .errors import ForetuneError, check_word, check_words, shown
from .problem import Problem

#: More models than share a layer's shape.
_MOST_SOURCES = 4096


@dataclass(frozen=True)
class Case:
    """A problem to measure, the models whose layers have that shape, and under which scenario it was drawn.

    `sources` are "MODEL/LAYER" strings, or ("random",) for a shape drawn at random. `scenario` is a word of the
    family's own for what the dimensions do not say, as for how skewed ragged sizes were drawn; "" where there is none.

    Raises `ForetuneError` naming what is none of that.

    >>> problem = Problem.of("linear", m=16, n=4096, k=14336)
    >>> Case(problem, ("Llama-3-8B/down", "Qwen3-8B/down")).model_families
    ('Llama', 'Qwen')
    """

    problem: Problem
    sources: tuple[str, ...]
    scenario: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.problem, Problem):
            raise ForetuneError(f"the problem of a case must be a Problem but is {shown(self.problem)}")
        object.__setattr__(self, "sources", check_words("sources", self.sources, _MOST_SOURCES))
        if not isinstance(self.scenario, str) or self.scenario:
            check_word("scenario", self.scenario)

    @property
    def model_families(self) -> tuple[str, ...]:
        """The leading word of each source's model name: what evaluation splits by."""
        return tuple(sorted({re.split(r"[^A-Za-z]", source)[0] for source in self.sources}))
