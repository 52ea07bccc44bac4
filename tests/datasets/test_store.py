"""The store: reading returns what was written, and damaged files are named."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from foretune.datasets import (
    Case,
    DatasetError,
    Measurement,
    Problem,
    Ragged,
    Status,
)
from foretune.datasets.manifest import SCHEMA_VERSION
from foretune.datasets.measurement import Reading
from foretune.datasets.store import Writer, read, seal_dataset
from stores import CONFIGS, H200, PROBLEMS, SEALED, outcomes, readings, write


def test_what_was_appended_is_read(parts: Path) -> None:
    dataset = read(parts)
    assert (dataset.name, dataset.schema_version, dataset.devices) == ("mine", SCHEMA_VERSION, (H200,))
    assert tuple(case.problem for case in dataset.cases) == tuple(PROBLEMS)
    assert set(dataset.configs) == set(CONFIGS)
    assert dataset.provenance == {"runs": {"r1": {"torch": "2.13.0"}}}
    assert dataset.ignored == ()
    told = dataset.describe()["families"]["toy"]
    assert told == {
        "problems": 3,
        "measurements": 24,
        "configs": 6,
        "plans": ["exhaustive"],
        "noise_floor": 1.0,
        "devices": {H200.name: {"problems": 3, "measurements": 24}},
        "statuses": {"ok": 18, "hopeless": 3, "out_of_resources": 3},
    }


def test_the_grid_takes_confirmed_times_and_rescales_the_scan_elsewhere(parts: Path) -> None:
    grid = read(parts).grid("toy")
    first, second = (
        {config: times[0, i] for i, config in enumerate(grid.configs)} for times in (grid.first_us, grid.second_us)
    )
    assert (first.pop(CONFIGS[0]), second.pop(CONFIGS[0])) == (10.5, 11.5)
    # Confirmed at 11 on average and scanned at 10: the card was a tenth slower by then.
    expected = dict(zip(CONFIGS[1:5], (12.1, 13.2, 14.3, 990.0), strict=True))
    assert first == second == pytest.approx(expected)


def test_a_problem_of_which_nothing_was_confirmed_keeps_its_scan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No median of nothing is computed: NumPy would warn, and pandas does not silence that in threads."""
    asked, median = [], np.nanmedian

    def counted(values, axis=None, **options):
        asked.append(np.isnan(values).all(axis=axis).any())
        return median(values, axis=axis, **options)

    monkeypatch.setattr(np, "nanmedian", counted)
    confirmed, cut = PROBLEMS[:2]
    writer = Writer(tmp_path, "mine", [H200], {"torch": "2.13.0"}, run_id="r1")
    writer.append(Case(confirmed, ("Mixtral-8x7B/w2",)), outcomes(confirmed))
    writer.append(Case(cut, ("Mixtral-8x7B/w2",)), [one for one in outcomes(cut) if one.timing_pass == 1])
    grid = read(tmp_path).grid("toy")
    assert grid.first_us[1].tolist() == grid.second_us[1].tolist() == [10.0, 11.0, 12.0, 13.0, 900.0]
    assert 10.5 in grid.first_us[0]
    assert asked
    assert not any(asked)


def test_noise_is_what_the_best_of_one_pass_loses_in_the_other(parts: Path) -> None:
    grid = replace(
        read(parts).grid("toy").select([0, 1]),
        configs=tuple(CONFIGS[:3]),
        first_us=np.array([[10.0, 11.0, np.nan], [20.0, 21.0, 19.0]]),
        second_us=np.array([[10.5, 10.0, np.nan], [20.0, 22.0, 20.0]]),
    )
    assert grid.noise.tolist() == [1.05, 1.0]


def test_the_cases_during_which_the_device_was_slower_are_told(parts: Path, sealed: Path) -> None:
    for dataset in (read(parts), read(sealed)):
        assert {case.problem: worst for case, worst in dataset.drifted().items()} == {
            PROBLEMS[1]: pytest.approx(130 / 101)
        }
        assert dataset.describe()["drifted"] == {str(PROBLEMS[1]): 1.287}
        assert len(dataset.drift) == len(readings(PROBLEMS))
        assert dataset.drift["at_s"].is_monotonic_increasing


def test_of_problems_with_one_name_the_slowest_is_told(tmp_path: Path) -> None:
    even, uneven = (replace(PROBLEMS[0], ragged=Ragged("rows", sizes)) for sizes in ((4, 4), (8, 0)))
    folder = write(tmp_path / "mine", problems=[uneven, even])
    off = [Reading(uneven, "0", 9.0, 300.0), Reading(even, "0", 10.0, 200.0)]
    Writer(folder, "mine", [H200], {}, run_id="r1").append_drift(off)
    dataset = read(folder)
    assert len(dataset.drifted()) == 2
    assert dataset.describe()["drifted"] == {str(even): round(max(dataset.drifted().values()), 3)}


def test_another_card_of_a_run_and_another_run_have_a_usual_time_of_their_own(tmp_path: Path) -> None:
    folder = write(tmp_path / "mine")
    slower = [Reading(problem, "1", 5.0, 150.0) for problem in PROBLEMS]
    Writer(folder, "mine", [H200], {}, run_id="r1").append_drift(slower)
    Writer(folder, "mine", [H200], {}, run_id="r2").append_drift(replace(one, gpu="0") for one in slower)
    assert [case.problem for case in read(folder).drifted()] == [PROBLEMS[1]]


def test_readings_of_a_case_without_rows_are_left_out(tmp_path: Path) -> None:
    folder = write(tmp_path / "mine")
    stranger = Problem.of("toy", segments=1, rows=64, n=64, k=64)
    Writer(folder, "mine", [H200], {}, run_id="r1").append_drift([Reading(stranger, "0", 1.0, 900.0)])
    assert len(read(folder).drift) == len(readings(PROBLEMS))


def test_datasets_from_before_there_were_readings_have_none(sealed: Path) -> None:
    (sealed / "drift.parquet").unlink()
    manifest = json.loads((sealed / "dataset.json").read_text())
    del manifest["sealed"]["drift.parquet"]
    (sealed / "dataset.json").write_text(json.dumps(manifest))
    dataset = read(sealed)
    assert dataset.drift.empty
    assert dataset.drifted() == {}
    assert list(dataset.drift.columns) == list(read(sealed.parent / "mine").drift.columns)


def test_every_measurement_of_a_cell_is_counted_failed_ones_too(parts: Path) -> None:
    dataset = read(parts)
    grid = dataset.grid("toy")
    counts = dict(zip(grid.configs, dataset.counts(grid)[0].tolist(), strict=True))
    assert counts == {CONFIGS[0]: 3} | dict.fromkeys(CONFIGS[1:5], 1)  # the one that always fails is not in the grid
    some = dataset.counts(grid.select([2]))
    assert some.tolist() == dataset.counts(grid)[2:].tolist()


def test_wrong_results_are_told_by_what_they_were_compared_for(tmp_path: Path) -> None:
    other = replace(PROBLEMS[1], dtype="fp16", flags=("transposed",))
    folder = write(tmp_path / "mine", problems=[*PROBLEMS, other])
    writer = Writer(folder, "mine", [H200], {}, run_id="r2")
    for problem, config in ((PROBLEMS[0], CONFIGS[2]), (PROBLEMS[2], CONFIGS[2]), (other, CONFIGS[3])):
        wrong = Measurement(problem, H200.name, config, Status.WRONG_RESULT, error="relative error 0.3")
        writer.append(Case(problem, ("Mixtral-8x7B/w2",), "balanced"), [wrong])
    assert read(folder).wrong_results("toy") == {
        ("bf16", ()): {CONFIGS[2]},
        ("fp16", ("transposed",)): {CONFIGS[3]},
    }
    assert read(write(tmp_path / "right")).wrong_results("toy") == {}


def test_sealing_keeps_every_row(parts: Path, sealed: Path) -> None:
    before, after = read(parts), read(sealed)
    assert after.name == "shipped"
    assert (after.cases, set(after.configs)) == (before.cases, set(before.configs))
    assert after.describe()["families"] == before.describe()["families"]
    one, other = before.grid("toy"), after.grid("toy")
    order = [other.configs.index(config) for config in one.configs]
    np.testing.assert_array_equal(one.first_us, other.first_us[:, order])
    np.testing.assert_array_equal(one.second_us, other.second_us[:, order])
    rows = after.measurements
    assert set(rows["error"].dropna()) == {"shared memory"}
    assert rows["registers"].dropna().unique().tolist() == [100]


def test_sealing_twice_gives_the_same_bytes(parts: Path, sealed: Path, tmp_path: Path) -> None:
    seal_dataset(parts, tmp_path / "again", name="shipped")
    assert all((tmp_path / "again" / name).read_bytes() == (sealed / name).read_bytes() for name in SEALED)


def test_sealing_beside_parts_is_refused(parts: Path) -> None:
    with pytest.raises(DatasetError, match="is the source itself"):
        seal_dataset(parts, parts, name="mine")


def test_a_second_run_adds_to_the_first(parts: Path) -> None:
    more = Problem.of("toy", segments=1, rows=64, n=64, k=64)
    dataset = read(write(parts, run_id="r2", problems=[more]))
    assert len(dataset.cases) == 4
    assert set(dataset.provenance["runs"]) == {"r1", "r2"}


def test_a_run_taken_up_again_under_its_id_keeps_what_it_had(tmp_path: Path) -> None:
    write(tmp_path, problems=PROBLEMS[:2])
    assert len(read(write(tmp_path, problems=PROBLEMS[2:])).cases) == 3


def test_a_dataset_is_shown_as_a_line(parts: Path) -> None:
    dataset = read(parts)
    assert repr(dataset) == "<Dataset mine: 1 device (NVIDIA H200), 1 family (toy), 3 problems, 24 rows>"
    assert repr(replace(dataset, devices=(), cases=dataset.cases[:1])).startswith(
        "<Dataset mine: 0 devices, 1 family ("
    )
    many = tuple(replace(case, problem=replace(case.problem, family=f"f{at}")) for at, case in enumerate(dataset.cases))
    more = replace(many[0], problem=replace(many[0].problem, family="f3"))
    assert "4 families (f0, f1, f2, ...)" in repr(replace(dataset, cases=(*many, more)))


def test_a_notebook_shows_a_dataset_as_the_table_that_a_terminal_shows(parts: Path) -> None:
    dataset = replace(read(parts), name="<b>mine</b>", ignored=("a & b",))
    shown = dataset._repr_html_()
    assert "<th>family</th><th>device</th><th>problems</th><th>configs</th><th>measurements</th>" in shown
    assert "<td>&lt;b&gt;mine&lt;/b&gt;</td><td>toy</td><td>NVIDIA H200</td><td>3</td>" in shown
    assert "<p>All with plan=exhaustive</p>" in shown
    assert "ignored parts: a &amp; b</p>" in shown


def test_an_empty_dataset_is_read_and_has_no_family(tmp_path: Path) -> None:
    dataset = read(write(tmp_path, problems=[]))
    assert dataset.families == ()
    with pytest.raises(DatasetError, match="'toy'"):
        dataset.grid("toy")


def test_a_folder_named_like_a_partition_adds_no_column(tmp_path: Path) -> None:
    assert len(read(write(tmp_path / "status=invalid")).cases) == 3


KILLED = """
import sys
from pathlib import Path
sys.path.insert(0, str(Path({tests!r})))
from stores import PROBLEMS, outcomes, H200, Case, Writer
writer = Writer({folder!r}, "mine", [H200], {{}}, run_id="killed")
print("writing", flush=True)
while True:
    for problem in PROBLEMS:
        writer.append(Case(problem, ("random",), "uniform"), outcomes(problem))
"""


def test_a_killed_writer_loses_no_finished_part(tmp_path: Path) -> None:
    code = KILLED.format(tests=str(Path(__file__).parents[1]), folder=str(tmp_path / "mine"))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"writing\n"
        while len(list((tmp_path / "mine" / "parts").glob("*.parquet"))) < 5:
            time.sleep(0.01)
        writer.send_signal(signal.SIGKILL)
    finished = len(list((tmp_path / "mine" / "parts").glob("*.parquet")))
    dataset = read(tmp_path / "mine")
    assert len(dataset.measurements) == finished * len(outcomes(PROBLEMS[0]))
    assert all(name.endswith(".tmp") for name in dataset.ignored)


def test_a_half_written_part_is_ignored_and_reported(parts: Path) -> None:
    whole = next((parts / "parts").glob("*.parquet")).read_bytes()
    (parts / "parts" / "r9-000000.parquet.tmp").write_bytes(whole[: len(whole) // 2])
    dataset = read(parts)
    assert dataset.ignored == ("r9-000000.parquet.tmp",)
    assert len(dataset.cases) == 3


def test_a_part_torn_anywhere_is_ignored_and_reported(parts: Path) -> None:
    victim = parts / "parts" / "r1-000001.parquet"
    whole = victim.read_bytes()
    for length in range(0, len(whole), max(1, len(whole) // 60)):
        victim.write_bytes(whole[:length])
        dataset = read(parts)
        assert dataset.ignored == (victim.name,), length
        assert len(dataset.cases) == 2
