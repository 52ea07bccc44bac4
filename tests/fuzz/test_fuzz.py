"""Odd inputs are answered or refused: never a traceback, a silent change, a hang or gigabytes."""

from __future__ import annotations

import os

import pytest
from fuzz.runs import KINDS, few, many

#: In all kinds together.
MANY = int(os.environ.get("FORETUNE_FUZZ", "2000"))


COUNTS = {"bundles": 120, "caches": 15, "calls": 200, "commands": 30, "datasets": 25, "exports": 12}
COUNTS |= {"families": 40, "functions": 200, "logs": 12, "pins": 40, "tuners": 60}


@pytest.mark.parametrize(("kind", "count"), COUNTS.items())
def test_a_few_the_same_in_every_run(kind, count, tmp_path):
    assert not few(kind, count, tmp_path).troubles


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many(kind, tmp_path, capsys):
    """`FORETUNE_FUZZ=20000 pytest tests/fuzz -m slow` draws 20,000, as many of each kind; FORETUNE_FUZZ_SEED draws
    others."""
    counts = many(kind, MANY // len(KINDS), int(os.environ.get("FORETUNE_FUZZ_SEED", "0")), tmp_path)
    with capsys.disabled():
        print(f"\n{kind}: {sum(counts.outcomes.values())} inputs: {dict(counts.outcomes.most_common())}")  # noqa: T201
        for trouble, given in counts.troubles.items():
            print(f"  {trouble}\n    {given}")  # noqa: T201
    assert not counts.troubles
