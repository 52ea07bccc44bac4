"""Exporting datasets for other tools: as CSV, or as T4, the JSON format of the autotuning community."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ..dataset import Dataset
from ..errors import ForetuneError
from ..files import check_not_stored, replacing
from ..measurement import Case, Status
from ..progress import advance

#: The version of both the results and the metadata schema of T4 files
#: (https://github.com/odgaard/TuningSchema, branch T4; Kernel Tuner ships them as kernel_tuner/schema/T4/1.0.0).
T4_VERSION = "1.0.0"
_T4_INVALIDITY = {
    Status.OK: "correct",
    Status.EARLY_STOPPED: "correct",  # it ran, and has a time
    Status.INVALID: "constraints",
    Status.COMPILE_FAILED: "compile",
    Status.OUT_OF_RESOURCES: "runtime",
    Status.LAUNCH_FAILED: "runtime",
    Status.WRONG_RESULT: "correctness",
    Status.TIMEOUT: "timeout",
}
_T4_UNITS = {"time": "ms", "registers": "", "spills": "", "smem_bytes": "B"}
_COUNTS = ("registers", "spills", "smem_bytes")
#: The number of rows that are converted to text at once.
_BLOCK = 50_000


def export_dataset(
    dataset: Dataset, out: Path | str, format: str, *, family: str | None = None, problem: int | None = None
) -> int:
    """Write a dataset's measurements as one file and return the number of results in it.

    "csv" has a row for each measurement, with columns for dimensions, knobs and the other values. Segment sizes are
    summarized.

    "t4" has a result for each config on a problem and device, with times in milliseconds as in Kernel Tuner's files.
    `times.runtimes` lists the median of each pass. The measurement "time" is their mean, without the scan if there are
    confirming passes. T4 describes one search space, so each result also has the fields "problem" (an index into
    "problems") and "device". For tools that ignore these, export one problem at a time.

    Args:
        dataset: The dataset.
        out: The file to write.
        format: "csv" or "t4".
        family: Export only this family.
        problem: Export only this problem, an index into `dataset.cases`.

    Raises:
        ForetuneError: There is no such format, family or problem, or `out` is a file of a dataset or a bundle.
        OSError: `out` cannot be written.

    >>> from foretune.datasets import load
    >>> export_dataset(load("h200"), "problem-7.json", "t4", problem=7)  # doctest: +SKIP
    998
    """
    if format not in FORMATS:
        raise ForetuneError(f"format must be one of {', '.join(FORMATS)} but is {format!r}")
    rows = dataset.measurements if family is None else dataset.rows(family)
    if problem is not None:
        if not 0 <= problem < len(dataset.cases):
            raise ForetuneError(f"{dataset.label}: problem must be 0 to {len(dataset.cases) - 1} but is {problem}")
        rows = rows[rows["problem"] == problem]
    rows = rows.sort_values(["problem", "device", "config", "timing_pass"], kind="stable")
    rows = rows.astype(dict.fromkeys(_COUNTS, "Int64"))  # floats, because some are unknown
    check_not_stored(Path(out))
    with replacing(out) as temporary:
        return FORMATS[format](dataset, rows, temporary)


def _csv(dataset: Dataset, rows: pd.DataFrame, out: Path) -> int:
    """Write the rows to the file `out` as CSV, and return their number."""
    numbers = [rows[name].unique() for name in ("problem", "config")]
    described = [_describe(number, dataset.cases[number]) for number in numbers[0].tolist()]
    knobs = [dataset.configs[number].to_json() for number in numbers[1].tolist()]
    cases = pd.DataFrame(described, index=numbers[0], dtype=object)
    configs = pd.DataFrame(knobs, index=numbers[1], dtype=object)
    facts = [name for name in rows.columns if name not in ("problem", "config", "device")]
    with out.open("w", newline="", encoding="utf-8") as file:
        for number, block in enumerate(_blocks(rows)):
            parts = cases.loc[block["problem"]], block[["device"]], configs.loc[block["config"]], block[facts]
            table = pd.concat([part.set_axis(block.index) for part in parts], axis=1)
            table.to_csv(file, header=number == 0, index=False, lineterminator="\r\n", float_format=_shortest)
    return len(rows)


def _shortest(value: float) -> str:
    """Return a float32 with the fewest digits that identify it; a whole number without a point."""
    return np.format_float_positional(np.float32(value), trim="-")


def _t4(dataset: Dataset, rows: pd.DataFrame, out: Path) -> int:
    """Write the rows to the file `out` in the T4 format, and return the number of results."""
    configs = {number: config.to_json() for number, config in _used(rows, "config", dataset.configs)}
    head = {
        "schema_version": T4_VERSION,
        "metadata": _t4_metadata(dataset),
        "problems": {number: _describe(number, case) for number, case in _used(rows, "problem", dataset.cases)},
    }
    dates = {run: str(facts["date"]) for run, facts in _runs(dataset).items() if "date" in facts}
    count = 0
    with out.open("w") as file:  # line by line, because a large dataset has hundreds of megabytes as JSON
        file.write(f'{json.dumps(head)[:-1]}, "results": [')
        same = itertools.groupby(_records(rows), lambda row: (row["problem"], row["device"], row["config"]))
        for (problem, device, config), passes in same:
            result = {"problem": problem, "device": device, "configuration": configs[config]}
            result |= _t4_outcome(list(passes), dates)
            file.write(("," if count else "") + "\n" + json.dumps(result, allow_nan=False))
            count += 1
        file.write("\n]}\n")
    return count


def _t4_outcome(passes: Sequence[Mapping[str, Any]], dates: Mapping[str, str]) -> dict[str, Any]:
    """Return the result of a config in the T4 format from its passes, with the date of their run (`dates`, by run id).

    The last failed pass, if any, decides the status.
    """
    last = next((row for row in reversed(passes) if "time_us" not in row), passes[-1])
    invalidity = _T4_INVALIDITY[Status(last["status"])]
    times_ms = {row["timing_pass"]: row["time_us"] / 1000 for row in passes if "time_us" in row}
    known = {name: value for row in passes for name, value in row.items()}
    facts = {name: known[name] for name in _T4_UNITS if name in known}
    if invalidity == "correct":
        confirmed = [time_ms for timing_pass, time_ms in times_ms.items() if timing_pass > 1]
        facts = {"time": statistics.fmean(confirmed or times_ms.values())} | facts
    outcome = {
        "objectives": ["time"],
        "times": {"compilation_time": known.get("compile_ms", 0.0), "runtimes": list(times_ms.values())},
        "invalidity": invalidity,
        "correctness": float(invalidity == "correct"),
        "measurements": [{"name": name, "value": value, "unit": _T4_UNITS[name]} for name, value in facts.items()],
    }
    date = dates.get(last.get("run_id", ""))
    return outcome | ({"timestamp": date} if date else {})


def _t4_metadata(dataset: Dataset) -> dict[str, Any]:
    """Return the hardware and the environment of a dataset's runs as T4 metadata."""
    runs = _runs(dataset)
    packages = {f"{name}=={run[name]}" for run in runs.values() for name in ("torch", "triton") if run.get(name)}
    return {
        "hardware": {"hardware_description": [spec.to_json() for spec in dataset.devices]},
        "environment": {"device_query": {"runs": runs}, "requirements": sorted(packages)},
    }


#: The function that writes each format.
FORMATS: Mapping[str, Callable[[Dataset, pd.DataFrame, Path], int]] = {"t4": _t4, "csv": _csv}


def _runs(dataset: Dataset) -> dict[str, dict[str, Any]]:
    return dict(dataset.provenance.get("runs", {}))


def _describe(number: int, case: Case) -> dict[str, Any]:
    """Return the exported columns of a case by name: its number, problem, sources and scenario."""
    problem, ragged = case.problem, case.problem.ragged
    return {
        "problem": number,
        "family": problem.family,
        **dict(problem.dims),
        "dtype": problem.dtype_name,
        "flags": " ".join(problem.flags),
        **({} if ragged is None else {f"active_{ragged.dim}": ragged.active, f"largest_{ragged.dim}": ragged.max}),
        "sources": " ".join(case.sources),
        "scenario": case.scenario,
    }


def _used(rows: pd.DataFrame, column: str, values: Sequence[Any]) -> Iterable[tuple[int, Any]]:
    """Yield (index, `values[index]`) for each index that occurs in a column."""
    return ((int(number), values[number]) for number in rows[column].unique())


def _blocks(rows: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """Yield the rows in blocks, because a whole dataset as text can exceed the memory, and report progress."""
    for start in range(0, len(rows), _BLOCK):
        advance(min(_BLOCK / len(rows), 1.0))
        yield rows.iloc[start : start + _BLOCK]


def _records(rows: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Yield each row as a dict of Python values, without missing ones; floats with the seven digits of a float32."""
    for block in _blocks(rows):
        values = block.astype(object)
        for record in values.where(values.notna(), None).to_dict("records"):
            known = {str(name): value for name, value in record.items() if value is not None}
            yield {name: float(f"{one:.7g}") if isinstance(one, float) else one for name, one in known.items()}
