"""How the outcome of a run looks, to a program and to a person."""

from __future__ import annotations

import io
import json
from dataclasses import replace

from collecting import SUMMARY
from foretune.collect.summary import Summary
from rich.console import Console


def shown(summary):
    console = Console(file=io.StringIO(), width=200)
    console.print(summary)
    return console.file.getvalue().splitlines()


def test_a_run_that_measured_all():
    assert shown(SUMMARY) == [
        "3 problems in 61 s, exhaustive plan; measurements: 90 ok, 10 early-stopped",
        "2 configs/s; GPUs: 2, busy 83 % of the time; 120 s of compiling, 4 s lost to aborts",
    ]
    assert shown(replace(SUMMARY, statuses={}))[0].endswith("measurements: none")


def test_what_went_wrong_is_said_as_it_is():
    skipped = "linear m=8: OutOfMemoryError: [bold]12 GiB[/bold]"  # no markup
    told = shown(replace(SUMMARY, drifted={"linear m=16": 1.523}, skipped=(skipped,), complete=False, interrupted=True))
    assert told[2:] == [
        f"Skipped {skipped}",
        "The GPU was up to 52.3 % slower than usual during linear m=16",
        "Interrupted.",
        "Some problems are not measured yet: run the same command again to continue.",
    ]


def test_a_program_reads_all_of_it():
    told = replace(SUMMARY, skipped=("linear m=8: no memory",)).to_json()
    assert json.loads(json.dumps(told)) == told
    assert (told["skipped"], told["statuses"]) == (["linear m=8: no memory"], {"ok": 90, "hopeless": 10})
    assert Summary(**told | {"skipped": tuple(told["skipped"])}) == replace(SUMMARY, skipped=("linear m=8: no memory",))
