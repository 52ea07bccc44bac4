"""A folder that is not a dataset, or a damaged one, is an error that names the file and the reason."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from foretune.datasets import DatasetError, ForetuneWarning, load
from foretune.datasets.manifest import SCHEMA_VERSION
from foretune.datasets.store import read, seal_dataset
from foretune.datasets.tables import PART
from stores import SEALED, edit_manifest, rewrite, vouch


def test_a_sealed_table_torn_anywhere_is_an_error_that_names_it(sealed: Path) -> None:
    for name in SEALED:
        whole = (sealed / name).read_bytes()
        for length in range(0, len(whole), max(1, len(whole) // 30)):
            (sealed / name).write_bytes(whole[:length])
            with pytest.raises(DatasetError, match=f"{name}.*truncated"):
                read(sealed)
        (sealed / name).write_bytes(whole)


def test_a_sealed_table_with_one_bit_flipped_is_an_error_that_names_it(sealed: Path) -> None:
    for name in SEALED:
        whole = (sealed / name).read_bytes()
        for at in range(0, len(whole), max(1, len(whole) // 30)):
            (sealed / name).write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            with pytest.raises(DatasetError, match=f"{name}.*altered"):
                read(sealed)
        (sealed / name).write_bytes(whole)


@pytest.mark.parametrize("name", SEALED)
def test_a_missing_sealed_table_is_an_error_that_names_it(sealed: Path, name: str) -> None:
    (sealed / name).unlink()
    with pytest.raises(DatasetError, match=f"{name}.*missing"):
        read(sealed)


@pytest.mark.parametrize("name", SEALED)
def test_a_foreign_file_is_an_error_that_names_it(sealed: Path, name: str) -> None:
    (sealed / name).write_text("<html>404</html>")
    vouch(sealed)
    with pytest.raises(DatasetError, match=f"{name}.*not a Parquet file"):
        read(sealed)


@pytest.mark.parametrize("name", SEALED)
def test_a_foreign_table_is_an_error_that_names_what_is_missing(sealed: Path, name: str) -> None:
    pq.write_table(pa.table({"x": [1, 2]}), sealed / name)
    vouch(sealed)
    with pytest.raises(DatasetError, match=f"{name}.*columns missing: (problem|config)"):
        read(sealed)


@pytest.mark.parametrize(("column", "text"), [("time_us", "fast"), ("compile_ms", "12.5")])
def test_a_column_of_text_where_numbers_are_due_is_an_error(sealed: Path, column: str, text: str) -> None:
    """Also if a cast could parse the text."""
    rows = pq.read_table(sealed / "measurements.parquet").num_rows
    rewrite(sealed / "measurements.parquet", **{column: pa.array([text] * rows)})
    vouch(sealed)
    with pytest.raises(DatasetError, match=rf"measurements\.parquet.*{column} is text, e.g. '{text}'"):
        read(sealed)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 0.0, None])
def test_times_that_are_none_are_an_error_that_names_the_file(sealed: Path, value: float | None) -> None:
    rows = pq.read_table(sealed / "measurements.parquet").num_rows
    rewrite(sealed / "measurements.parquet", time_us=pa.array([value] * rows, pa.float32()))
    vouch(sealed)
    with pytest.raises(DatasetError, match=r"measurements\.parquet.*time_us"):
        read(sealed)


@pytest.mark.parametrize("column", [field.name for field in PART if not field.nullable])
def test_a_part_with_nothing_in_a_required_column_is_ignored_and_reported(parts: Path, column: str) -> None:
    victim = parts / "parts" / "r1-000001.parquet"
    table = pq.read_table(victim)
    rewrite(victim, **{column: pa.nulls(table.num_rows, table.schema.field(column).type)})
    assert read(parts).ignored == (victim.name,)


def test_an_unknown_status_is_an_error_that_names_it(parts: Path) -> None:
    victim = parts / "parts" / "r1-000001.parquet"
    rewrite(victim, status=pa.array(["fine"] * pq.read_table(victim).num_rows))
    with pytest.raises(DatasetError, match=rf"{victim.name}.*status fine"):
        read(parts)


@pytest.mark.parametrize("position", [-1, 10_000])
def test_readings_that_point_past_the_problems_are_an_error(sealed: Path, position: int) -> None:
    rows = pq.read_table(sealed / "drift.parquet").num_rows
    rewrite(sealed / "drift.parquet", problem=pa.array([position] * rows, pa.int32()))
    vouch(sealed)
    with pytest.raises(DatasetError, match=r"drift\.parquet.*outside of problems\.parquet"):
        read(sealed)


@pytest.mark.parametrize(("column", "table"), [("problem", "problems"), ("config", "configs")])
@pytest.mark.parametrize("position", [-1, 10_000])
def test_rows_that_point_past_their_table_are_an_error(sealed: Path, column: str, table: str, position: int) -> None:
    rows = pq.read_table(sealed / "measurements.parquet").num_rows
    rewrite(sealed / "measurements.parquet", **{column: pa.array([position] * rows, pa.int32())})
    vouch(sealed)
    with pytest.raises(DatasetError, match=rf"measurements\.parquet.*outside of {table}\.parquet"):
        read(sealed)


@pytest.mark.parametrize("text", ["", "null", "[]", "5", "{}", '{"schema_version": ', "\udcff"])
def test_a_manifest_that_is_none_is_an_error_that_names_it(parts: Path, text: str) -> None:
    (parts / "dataset.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(DatasetError, match=r"dataset\.json"):
        read(parts)


def test_a_newer_schema_is_an_error_that_says_so(parts: Path) -> None:
    edit_manifest(parts, schema_version=SCHEMA_VERSION + 1)
    with pytest.raises(DatasetError, match=r"dataset\.json.*a newer Foretune wrote it"):
        read(parts)


@pytest.mark.parametrize("devices", [[], [1], [{"name": "NVIDIA H200"}], 5])
def test_a_manifest_without_the_devices_is_an_error_that_names_it(parts: Path, devices: object) -> None:
    edit_manifest(parts, devices=devices)
    with pytest.raises(DatasetError, match=r"dataset\.json"):
        read(parts)


@pytest.mark.parametrize("problem", ["null", "[]", "{}", "rows=8", '{"family": "toy"}'])
def test_a_problem_that_is_none_is_an_error(parts: Path, problem: str) -> None:
    victim = parts / "parts" / "r1-000001.parquet"
    rewrite(victim, problem=pa.array([problem] * pq.read_table(victim).num_rows))
    with pytest.raises(DatasetError, match=str(parts)):
        read(parts)


def test_a_name_that_does_not_exist_is_an_error_that_lists_the_shipped_ones() -> None:
    with pytest.raises(DatasetError, match=r"h300: neither a folder nor a shipped dataset \(shipped: .*h200"):
        load("h300")


def test_a_folder_that_is_no_dataset_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"dataset\.json.*not a Foretune dataset"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("column", "value", "why"),
    [
        ("time_us", 1e-30, "time_us must be 0.001 to 3.6e+09 but is 1e-30"),
        ("time_us", 1e30, "time_us must be 0.001 to 3.6e+09 but is 1e+30"),
        ("timing_pass", 0, "timing_pass must be 1 to 3 but is 0"),
        ("timing_pass", 127, "timing_pass must be 1 to 3 but is 127"),
        ("samples", -1, "samples must be 0 to inf but is -1"),
        ("registers", -5, "registers must be 0 to inf but is -5"),
        ("spread", -1.0, "spread must be 0 to 3e+38 but is -1"),
        ("compile_ms", float("nan"), "compile_ms must be 0 to 3e+38 but is nan"),
    ],
)
@pytest.mark.parametrize("folder", ["parts", "sealed"])
def test_numbers_that_no_measurement_gives_are_an_error(request, folder, column, value, why) -> None:
    store = request.getfixturevalue(folder)
    victim = next(store.glob("parts/*.parquet")) if folder == "parts" else store / "measurements.parquet"
    table = pq.read_table(victim)
    values = table.column(column).to_pylist()
    values[table.column("status").to_pylist().index("ok")] = value
    rewrite(victim, **{column: pa.array(values, table.schema.field(column).type)})
    if folder == "sealed":
        vouch(store)
    with pytest.raises(DatasetError) as caught:
        read(store)
    assert f"{victim}: {why}" in str(caught.value)


def _contradict(victim: Path) -> float:
    """Add a row that contradicts the first one, and return its time."""
    table = pq.read_table(victim, partitioning=None)
    again = table.slice(0, 1)
    time_us = pa.array([again.column("time_us")[0].as_py() + 1], pa.float32())
    other = again.set_column(table.schema.get_field_index("time_us"), table.schema.field("time_us"), time_us)
    pq.write_table(pa.concat_tables([table, other]), victim)
    return float(time_us[0].as_py())


CONTRADICTED = r"1 measurements contradict .* problem 0 with config 0 in pass 1 of run r1"


def test_a_sealed_dataset_whose_run_says_two_things_of_one_cell_is_an_error(sealed: Path) -> None:
    _contradict(sealed / "measurements.parquet")
    vouch(sealed)
    with pytest.raises(DatasetError, match=CONTRADICTED):
        read(sealed)


def test_of_parts_that_say_two_things_of_one_cell_the_last_counts_with_a_warning(parts: Path, tmp_path: Path) -> None:
    rows = len(read(parts).measurements)
    told = _contradict(min(parts.glob("parts/*.parquet")))
    with pytest.warns(ForetuneWarning, match=rf"{CONTRADICTED}. The last one is used"):
        dataset = read(parts)
    assert len(dataset.measurements) == rows
    cell = dataset.measurements.query("problem == 0 and config == 0 and timing_pass == 1")
    assert cell["time_us"].tolist() == [told]
    seal_dataset(dataset, tmp_path / "again", name="again")
    assert len(read(tmp_path / "again").measurements) == rows


def test_what_is_taken_back_is_gone_also_where_it_was_said_twice(parts: Path) -> None:
    victim = min(parts.glob("parts/*.parquet"))
    table = pq.read_table(victim, partitioning=None)
    pq.write_table(pa.concat_tables([table, table.slice(0, 1)]), victim)
    told = _contradict(victim)
    with pytest.warns(ForetuneWarning, match="2 measurements contradict"):
        cell = read(parts).measurements.query("problem == 0 and config == 0 and timing_pass == 1")
    assert cell["time_us"].tolist() == [told]


@pytest.mark.parametrize("sources", ["3", '"Mixtral-8x7B/w2"', "null"])
def test_sources_that_are_no_list_are_an_error_that_names_them(parts: Path, sources: str) -> None:
    for victim in parts.glob("parts/*.parquet"):
        rewrite(victim, sources=pa.array([sources] * pq.read_metadata(victim).num_rows))
    with pytest.raises(DatasetError, match="sources must be a list of at most 4096 strings but is"):
        read(parts)


def test_a_row_that_is_there_twice_contradicts_nothing(sealed: Path) -> None:
    table = pq.read_table(sealed / "measurements.parquet")
    pq.write_table(pa.concat_tables([table, table.slice(0, 3)]), sealed / "measurements.parquet")
    vouch(sealed)
    assert len(read(sealed).measurements) == table.num_rows + 3


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"provenance": None}, "provenance must be an object but is None"),
        ({"provenance": {"runs": None}}, "provenance.runs must be an object but is None"),
        ({"provenance": {"runs": {"r1": None}}}, "provenance.runs.r1 must be an object but is None"),
        ({"name": 5}, "name must be a string but is 5"),
        ({"sealed": [1]}, r"sealed must be an object of SHA-256 by file name but is \[1\]"),
        ({"devices": {}}, "devices must be a list of device specs but is {}"),
        ({"schema_version": True}, "schema_version is True"),
        ({"schema_version": 2.0}, "schema_version is 2.0"),
        ({"schema_version": [2]}, r"schema_version is \[2\]"),
    ],
)
def test_a_manifest_of_other_things_is_an_error_that_names_them(parts: Path, changes, why) -> None:
    edit_manifest(parts, **changes)
    with pytest.raises(DatasetError, match=rf"dataset\.json: {why}"):
        read(parts)


def test_a_manifest_that_is_nested_without_end_is_an_error(parts: Path) -> None:
    (parts / "dataset.json").write_text('{"schema_version": 2, "name": ' + "[" * 100_000)
    with pytest.raises(DatasetError, match=r"dataset\.json"):
        read(parts)


def test_a_text_that_is_none_is_an_error_or_a_torn_part(parts: Path, sealed: Path) -> None:
    """The text is not UTF-8, and the checksums are right."""
    for store, victim in ((parts, parts / "parts" / "r1-000001.parquet"), (sealed, sealed / "configs.parquet")):
        table = pq.read_table(victim)
        index = table.schema.get_field_index("config")
        bad = pa.array([b"\xff\xfe"] * len(table), pa.binary()).view(pa.string())
        pq.write_table(table.set_column(index, table.schema.field(index), bad), victim)
        if store == sealed:
            vouch(store)
    assert read(parts).ignored == ("r1-000001.parquet",)
    with pytest.raises(DatasetError, match=r"configs\.parquet.*UTF"):
        read(sealed)


@pytest.mark.parametrize(("column", "value"), [("time_us", float("nan")), ("time_us", 0.0), ("at_s", -1.0)])
def test_readings_that_no_clock_gives_are_an_error(sealed: Path, column, value) -> None:
    rows = pq.read_table(sealed / "drift.parquet").num_rows
    rewrite(sealed / "drift.parquet", **{column: pa.array([value] * rows, pa.float32())})
    vouch(sealed)
    with pytest.raises(DatasetError, match=rf"drift\.parquet: {column} must be"):
        read(sealed)
