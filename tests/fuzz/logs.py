"""Logs of production that somebody changed: the first line, rows, bytes of the file; alone, or in a collected dataset.

Every line is a row that is read as it was written, or counted among those that are left out.
"""

from __future__ import annotations

import json
import shutil
import warnings
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from fakes import DEVICE, FakeFamily, fake_cases
from foretune.datasets import KernelConfig, Problem, load
from foretune.datasets.log_part import read_log_part, row_line, run_line
from foretune.datasets.manifest import write_manifest
from foretune.datasets.merge import merge_datasets
from foretune.datasets.store import seal_dataset
from foretune.datasets.store.export import export_dataset
from foretune.model import LightGBMRanker, train_bundle
from fuzz.datasets import base
from fuzz.judging import REFUSED, same, within
from fuzz.oddities import Change, changed, changes, text_of
from hypothesis import strategies as st

FAMILY = FakeFamily()
CASES, SPACE = fake_cases(models=1)[:2], FAMILY.space()[:3]
FACTS = {"family": "fake", "plan": "production", "timed": "autotuner", "kernel_source": "fake-source"}
HEAD = json.loads(run_line("2026-log", FACTS, DEVICE))
ROWS = [
    json.loads(row_line(case.problem, config, None if number == 2 else 3.25 + number))
    for case in CASES
    for number, config in enumerate(SPACE)
]


class Altered(NamedTuple):
    head: tuple[Change, ...]
    rows: tuple[tuple[int, Change], ...]  # which row, and what of it
    bytes: tuple[tuple[float, int], ...]  # place as a share of the file, what is flipped there
    cut: float  # how much of the file there is
    collected: bool
    trained: bool


inputs = st.builds(
    Altered,
    head=st.lists(changes(HEAD), max_size=1).map(tuple),
    rows=st.lists(st.tuples(st.integers(0, len(ROWS) - 1), changes(ROWS[0])), max_size=3).map(tuple),
    bytes=st.lists(st.tuples(st.floats(0, 1), st.integers(1, 255)), max_size=2).map(tuple),
    cut=st.sampled_from([1.0, 1.0, 0.9, 0.5, 0.1]),
    collected=st.booleans(),
    trained=st.integers(0, 9).map(lambda drawn: drawn == 7),
)


def check(altered: Altered, folder: Path) -> str:
    target = folder / "altered"
    shutil.rmtree(target, ignore_errors=True)
    if altered.collected:
        shutil.copytree(_collected(folder), target)
    else:
        target.mkdir()
        write_manifest(target, {"name": "mine", "devices": [], "provenance": {}, "sealed": {}})
    (target / "parts").mkdir(exist_ok=True)
    path = target / "parts" / "2026-log.jsonl"
    path.write_bytes(_content(altered))
    content = path.read_bytes()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        loaded = within(lambda: load(target))
    if loaded is REFUSED:
        return "refused"
    log, left_out = read_log_part(path)
    lines = [line for line in content.split(b"\n") if line.strip()]
    read = {} if log is None else {(row.problem, row.config): row for row in log.rows}
    if log is not None:
        _accounted(lines[1:], read, sum(one.rows or 0 for one in left_out))
    same("what is left out", list(left_out), list(loaded.left_out))
    same("whether that is said", bool(left_out), any("left out" in str(warning.message) for warning in said))
    same("the file", content, path.read_bytes())
    if log is not None:
        same("rows", len(read), int((loaded.measurements["run_id"] == log.run_id).sum()))
    return "answered" if _used(loaded, folder, altered.trained) else "refused later"


@cache
def _collected(folder: Path) -> Path:
    return base(folder / "base")[False]


def _content(altered: Altered) -> bytes:
    head: Any = HEAD
    for change in altered.head:
        head = changed(head, change)
    rows: list[Any] = list(ROWS)
    for which, change in altered.rows:
        rows[which] = changed(rows[which], change)
    content = bytearray(("\n" + "\n".join(map(text_of, [head, *rows]))).encode("utf-8", "surrogatepass"))
    for share, flipped in altered.bytes:
        content[min(int(share * len(content)), len(content) - 1)] ^= flipped
    return bytes(content[: int(len(content) * altered.cut)])


def _accounted(lines: list[bytes], read: dict[Any, Any], left_out: int) -> None:
    """What was read says what was written, and all else is counted. Of several rows of one cell the last one counts."""
    valid = [line for line in map(_parsed, lines) if line is not None]
    cells = {(problem, config) for problem, config, _ in valid}
    if len(cells) == len(valid):
        same("lines", len(lines), len(read) + left_out)
        for problem, config, value in valid:
            row = read.get((problem, config))
            if row is not None:
                same("row", (value["status"], value["time_us"]), (row.status.value, row.time_us))
    same("cells", set(), read.keys() - cells)


def _parsed(line: bytes) -> tuple[Problem, KernelConfig, Any] | None:
    try:
        value = json.loads(line)
        return Problem.from_json(value["problem"]), KernelConfig.from_json(value["config"]), value
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _used(loaded: Any, folder: Path, trained: bool) -> bool:
    """Whether all that a dataset is for was done, and not refused."""
    shutil.rmtree(folder / "resealed", ignore_errors=True)
    work = [
        lambda: json.dumps(loaded.to_json()),
        lambda: export_dataset(loaded, folder / "out", "csv"),
        lambda: merge_datasets([loaded, loaded], name="both"),
        lambda: seal_dataset(loaded, folder / "resealed", name="again"),
    ]
    if trained and "fake" in loaded.families:
        work.append(
            lambda: train_bundle(loaded, {"fake": FAMILY}, lambda: LightGBMRanker(trees=2, epochs=0, min_rows=1))
        )
    return REFUSED not in [within(one) for one in work]
