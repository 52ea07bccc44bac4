"""Dataset folders that somebody changed: the manifest, rows, the JSON in rows, bytes of a file; of parts and sealed,
with checksums that fit."""

from __future__ import annotations

import json
import math
import shutil
import warnings
from contextlib import suppress
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from fakes import DEVICE, FakeFamily, fake_cases
from foretune.datasets import DeviceSpec, Measurement, Status, load
from foretune.datasets.measurement import Reading
from foretune.datasets.merge import merge_datasets
from foretune.datasets.store import Writer, seal_dataset
from foretune.datasets.store.export import export_dataset
from foretune.datasets.tables import CONFIGS, DRIFT, DRIFT_PART, MEASUREMENTS, PART, PROBLEMS
from foretune.model import LightGBMRanker, cross_validate, train_bundle
from fuzz.judging import REFUSED, same, within
from fuzz.oddities import Change, changed, changes, text_of, values
from hypothesis import strategies as st

FAMILY, OTHER_DEVICE = FakeFamily(), DeviceSpec.named("h100")
#: Of two models, so that one can be held out.
CASES = fake_cases(models=2)[:7:3]
SPACE = FAMILY.space()[:4]
SCHEMAS = {"problems": PROBLEMS, "configs": CONFIGS, "measurements": MEASUREMENTS, "drift": DRIFT}
MANIFEST = "dataset.json"
JSONS = ("problem", "config", "sources")
#: Columns of measurements: what goes into a file comes out of it.
FACTS = [name for name in PART.names if name not in ("problem", "config", "sources", "scenario")]


class RowChange(NamedTuple):
    """A row of a table: a column "set" to a value, the row "twice", or twice "contradicting" itself."""

    table: int
    row: int
    column: str
    how: str
    value: Any


class TextChange(NamedTuple):
    """A change inside the JSON that a row has in a column."""

    table: int
    row: int
    column: str
    change: Change


class Altered(NamedTuple):
    sealed: bool
    says: tuple[Change, ...]
    rows: tuple[RowChange, ...]
    texts: tuple[TextChange, ...]
    bytes: tuple[tuple[int, float, int], ...]  # which file, place as a share of it, what is flipped there
    trained: bool


def _written(folder: Path) -> None:
    devices = [DEVICE, OTHER_DEVICE]
    writer = Writer(folder, "mine", devices, {"family": "fake", "torch": "2.13.0"}, run_id="2026-r1")
    for number, (case, device) in enumerate([*((case, DEVICE) for case in CASES), (CASES[0], OTHER_DEVICE)]):
        outcomes = [
            Measurement(
                case.problem, device.name, config, Status.OK, time_us=10.0 + place + 7 * number, spread=0.01, samples=5,
                timing_pass=timing_pass, registers=40, spills=0, smem_bytes=1024,
            )
            for timing_pass in (1, 2, 3)
            for place, config in enumerate(SPACE[:3])
        ]  # fmt: skip
        failed = Measurement(case.problem, device.name, SPACE[3], Status.LAUNCH_FAILED, error="no")
        writer.append(case, [*outcomes, failed])
    writer.append_drift([Reading(case.problem, "0", 1.0 * number, 100.0) for number, case in enumerate(CASES)])


@cache
def base(folder: Path) -> dict[bool, Path]:
    """The folder as parts and sealed."""
    _written(folder / "parts")
    seal_dataset(folder / "parts", folder / "sealed", name="mine")
    return {False: folder / "parts", True: folder / "sealed"}


PROBLEM_JSON, CONFIG_JSON = CASES[0].problem.to_json(), SPACE[0].to_json()
SPECS = [DEVICE.to_json(), OTHER_DEVICE.to_json()]
MANIFEST_JSON = {
    "schema_version": 2, "name": "mine", "devices": SPECS,
    "provenance": {"runs": {"2026-r1": {"family": "fake", "torch": "2.13.0"}}}, "sealed": {},
}  # fmt: skip
times = st.sampled_from([1e-30, 1e30, 0.0, -1.0, float("nan"), float("inf"), None, 10.0, 0.5, 1e5, 77, 3.25])
passes = st.sampled_from([0, 127, -1, 4, 1, 2, 3, None])
devices = st.sampled_from([DEVICE.name, OTHER_DEVICE.name, "NVIDIA H300", "", 0, 1, 2])
statuses = st.sampled_from([*(status.value for status in Status), "", "fine", None])
places = st.integers(0, 3)
by_column = st.one_of(
    st.tuples(st.just("time_us"), times),
    st.tuples(st.just("timing_pass"), passes),
    st.tuples(st.just("status"), statuses),
    st.tuples(st.just("device"), devices),
    st.tuples(st.sampled_from([*PART.names, "gpu", "at_s"]), values),
)
texts = st.one_of(
    st.builds(TextChange, places, places, st.just("problem"), changes(PROBLEM_JSON)),
    st.builds(TextChange, places, places, st.just("config"), changes(CONFIG_JSON)),
    st.builds(TextChange, places, places, st.just("sources"), changes(["A-1B/w13"])),
)
rows = st.tuples(places, places, by_column, st.sampled_from(["set", "set", "set", "twice", "contradicting"])).map(
    lambda one: RowChange(one[0], one[1], one[2][0], one[3], one[2][1])
)
inputs = st.builds(
    Altered,
    sealed=st.booleans(),
    says=st.lists(changes(MANIFEST_JSON), max_size=1).map(tuple),
    rows=st.lists(rows, max_size=2).map(tuple),
    texts=st.lists(texts, max_size=1).map(tuple),
    bytes=st.lists(st.tuples(places, st.floats(0, 1), st.integers(1, 255)), max_size=1).map(tuple),
    trained=st.integers(0, 9).map(lambda drawn: drawn == 7),
)


def check(altered: Altered, folder: Path) -> str:
    target = folder / "altered"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(base(folder)[altered.sealed], target)
    _alter_rows(target, altered)
    files = sorted(target.rglob("*.parquet"))
    for which, share, value in altered.bytes:
        path = files[which % len(files)]
        content = bytearray(path.read_bytes())
        content[min(int(share * len(content)), len(content) - 1)] ^= value
        path.write_bytes(content)
    told = _alter_manifest(target, altered)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        loaded = within(lambda: load(target))
    if loaded is REFUSED:
        return "refused"
    if isinstance(told, dict):
        same("name", told.get("name"), loaded.name)
        same("provenance", _plain(told.get("provenance")), _plain(loaded.provenance))
        for given, spec in zip(told["devices"], loaded.devices, strict=True):  # null is as left out
            given = {name: value for name, value in given.items() if value is not None}
            same("device", given, {name: value for name, value in spec.to_json().items() if name in given})
    if not loaded.ignored and not altered.bytes:
        written, found = (sorted(rows, key=repr) for rows in (_given(target, altered.sealed), rows_of(loaded)))
        if any("The last one is used" in str(warning.message) for warning in said):
            written = [row for row in written if row in found]
        same("rows", written, found)
    return "answered" if _used(loaded, folder, altered.trained) else "refused later"


def _used(loaded: Any, folder: Path, trained: bool) -> bool:
    """Whether all that a dataset is for was done, and not refused."""
    import rich.console

    out = folder / "out"
    shutil.rmtree(folder / "resealed", ignore_errors=True)  # of the input before, whose rows are not to be lost
    work = [
        lambda: rich.console.Console(file=(folder / "shown").open("w"), width=80).print(loaded),
        lambda: json.dumps(loaded.to_json()),
        lambda: export_dataset(loaded, out, "csv"),
        lambda: export_dataset(loaded, out, "t4"),
        lambda: merge_datasets([loaded, loaded], name="both"),
        lambda: seal_dataset(loaded, folder / "resealed", name="again"),
        *(partial(loaded.grid, family) for family in loaded.families),
    ]
    if trained and "fake" in loaded.families:
        few = partial(LightGBMRanker, trees=2, epochs=0, min_rows=1)
        work += [
            lambda: train_bundle(loaded, {"fake": FAMILY}, few),
            lambda: cross_validate(loaded, FAMILY, few, jobs=1),
        ]
    return REFUSED not in [within(one) for one in work]


def _alter_rows(target: Path, altered: Altered) -> None:
    if not altered.rows and not altered.texts:
        return
    tables = [
        path
        for path in sorted(target.rglob("*.parquet"))
        if altered.sealed or path.parent.name == "parts" or path.parent.name == "drift"
    ]
    contents = {path: pq.read_table(path, partitioning=None).to_pylist() for path in tables}
    for change in (*altered.rows, *altered.texts):
        having = [path for path in tables if change.column in contents[path][0]]
        if not having:
            continue
        content = contents[having[change.table % len(having)]]
        place = change.row % len(content)
        if isinstance(change, TextChange):
            try:
                value = json.loads(content[place][change.column])
            except (ValueError, TypeError):
                continue  # a position, or odd already
            content[place] = content[place] | {change.column: text_of(changed(value, change.change))}
            continue
        new = content[place] | {change.column: change.value}
        if change.how == "set":
            content[place] = new
        else:
            content.append(new if change.how == "contradicting" else content[place])
    for path, content in contents.items():
        schema = SCHEMAS[path.stem] if altered.sealed else PART if path.parent.name == "parts" else DRIFT_PART
        pq.write_table(pa.table({field.name: _column(content, field) for field in schema}), path)


def _column(content: list[dict[str, Any]], field: pa.Field) -> pa.Array:
    """A column in its own type if the values fit it, else in one that they have, else as texts."""
    given = [row[field.name] for row in content]
    for kind in (field.type, None):
        with suppress(pa.ArrowException, TypeError, ValueError, OverflowError):
            return pa.array(given, kind)
    return pa.array([None if value is None else repr(value) for value in given])


def _alter_manifest(target: Path, altered: Altered) -> Any:
    says: Any = json.loads((target / MANIFEST).read_text())
    if altered.sealed:
        says["sealed"] = {path.name: sha256(path.read_bytes()).hexdigest() for path in target.glob("*.parquet")}
    for change in altered.says:
        says = changed(says, change)
    (target / MANIFEST).write_text(text_of(says))
    return says


def _given(target: Path, sealed: bool) -> list[Any]:
    """The rows in the files: (problem, config, facts)."""
    if not sealed:
        return [
            _row(row["problem"], row["config"], row)
            for path in (target / "parts").glob("*.parquet")
            for row in pq.read_table(path, partitioning=None).to_pylist()
        ]
    problems, configs, measured = (
        pq.read_table(target / f"{name}.parquet").to_pylist() for name in ("problems", "configs", "measurements")
    )
    return [_row(problems[int(r["problem"])]["problem"], configs[int(r["config"])]["config"], r) for r in measured]


def _row(problem: str, config: str, facts: dict[str, Any]) -> Any:
    return _canonical(json.loads(problem)), _knobs(json.loads(config)), tuple(_fact(facts[name]) for name in FACTS)


def rows_of(loaded: Any) -> list[Any]:
    """The rows of a loaded dataset, as `_given` has those in its files."""
    rows = []
    for row in loaded.measurements.astype(object).to_dict("records"):
        problem, config = loaded.cases[row["problem"]].problem.to_json(), loaded.configs[row["config"]].to_json()
        rows.append((_canonical(problem), _knobs(config), tuple(_fact(row[name]) for name in FACTS)))
    return rows


def _canonical(problem: Any) -> str:
    """A problem's JSON where there are several ways to say the same: dtypes that are alike, the order of flags."""
    dtype = problem["dtype"]
    if isinstance(dtype, dict) and len(set(dtype.values())) == 1:
        problem = problem | {"dtype": next(iter(dtype.values()))}
    return _plain(problem | {"flags": sorted(problem["flags"])})


def _knobs(config: Any) -> str:
    """A config's JSON with the launch options that it leaves to Triton."""
    return _plain({"num_warps": 4, "num_stages": 3, "num_ctas": 1} | {k: v for k, v in config.items() if v is not None})


def _plain(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _fact(value: Any) -> Any:
    if value is None or value != value:
        return None
    # A float32 in the file may be a float64 in memory, a count a float where others are unknown, and a number a text.
    with suppress(TypeError, ValueError, OverflowError):
        if math.isfinite(float(value)):
            return float(f"{float(value):.6g}")
    return str(value)
