"""A change of structure changes no shortlist, no kernel's sources and no command: see `answers.py`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from answers import answers


@pytest.mark.filterwarnings("ignore")
def test_shortlists_sources_and_commands_are_those_on_record() -> None:
    on_record = json.loads(Path(__file__).with_name("answers.json").read_text())
    assert len(on_record["shortlists"]) >= 200
    now = answers()
    for part, values in on_record.items():
        changed = {name: value for name, value in now[part].items() if values.get(name) != value}
        assert not changed, f"{part}: if it is meant, run tests/answers.py again"
        assert now[part].keys() == values.keys()
