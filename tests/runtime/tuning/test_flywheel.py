"""Benchmarks that tuning does anyway are rows to learn from, and logging them never hurts anybody."""

from __future__ import annotations

import datetime
import errno
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import foretune
import pytest
import triton
from fakes import FakeFamily, fake_cases
from foretune.datasets import ForetuneWarning, KernelConfig, load
from foretune.datasets.log_part import read_log_part
from foretune.datasets.merge import merge_datasets
from foretune.datasets.store import seal_dataset
from foretune.kernels import find_family
from foretune.runtime import Pruner, use_stub_driver
from foretune.runtime.launching.source_hash import hash_of_kernel
from foretune.runtime.timing import flywheel
from foretune.runtime.timing.flywheel import log_row
from foretune.runtime.tuning import known_times, triton_adapter
from remembered import CONFIGS, H100, H200, KERNEL, problem


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(flywheel.VARIABLE, str(tmp_path / "log"))
    return tmp_path / "log"


def log_three(rows: int = 64, timed: str = "autotuner", **more: Any) -> None:
    for config, time_us in zip(CONFIGS, (3.5, 2.5, None), strict=False):
        log_row(KERNEL, problem(rows), config, time_us, more.get("device", H200), timed=timed, source_hash="s1")


def rows_of(log: Path) -> set[tuple[int, KernelConfig, str, str, float | None]]:
    dataset = load(log)
    return {
        (
            dataset.cases[row.problem].problem["rows"],
            dataset.configs[row.config],
            row.device,
            row.status,
            None if row.time_us != row.time_us else round(row.time_us, 3),
        )
        for row in dataset.measurements.itertuples()
    }


def test_nothing_is_logged_unless_it_is_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    log_three()
    monkeypatch.setenv(flywheel.VARIABLE, "")
    log_three()
    assert not list(tmp_path.iterdir())


def test_a_log_is_a_dataset(log: Path) -> None:
    log_three()
    log_three(device=H100)
    names = [(H200.name, config) for config in CONFIGS[:3]] + [(H100.name, config) for config in CONFIGS[:3]]
    outcomes = [("ok", 3.5), ("ok", 2.5), ("launch_failed", None)] * 2
    assert rows_of(log) == {(64, config, name, *out) for (name, config), out in zip(names, outcomes, strict=True)}
    dataset = load(log)
    assert set(dataset.devices) == {H200, H100}
    assert dataset.kernel_sources(KERNEL) == {"s1"}
    assert dataset.plans(KERNEL) == {"production"}
    assert {run["timed"] for run in dataset.provenance["runs"].values()} == {"autotuner"}
    assert dataset.ignored == ()


def test_rows_say_how_they_were_timed(log: Path) -> None:
    for timed in ("cold", "autotuner", "warm"):
        log_three(timed=timed)
    dataset = load(log)
    runs = dataset.provenance["runs"]
    assert {runs[run]["timed"]: len(rows) for run, rows in dataset.measurements.groupby("run_id", observed=True)} == {
        "cold": 3,
        "autotuner": 3,
        "warm": 3,
    }


def test_a_log_is_sealed_and_merged_as_any_dataset(log: Path, tmp_path: Path) -> None:
    log_three()
    seal_dataset(log, tmp_path / "sealed", name="mine")
    sealed, logged = load(tmp_path / "sealed"), load(log)
    assert sealed.provenance == logged.provenance
    assert len(sealed.measurements) == len(logged.measurements) == 3


def test_of_what_is_timed_again_in_one_process_the_last_counts_and_nobody_is_warned(log: Path) -> None:
    log_three()
    log_row(KERNEL, problem(64), CONFIGS[0], 9.0, H200, timed="autotuner", source_hash="s1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (64, CONFIGS[0], H200.name, "ok", 9.0) in rows_of(log)
    assert len(load(log).measurements) == 3


def test_many_processes_and_threads_at_once_lose_nothing(log: Path) -> None:
    fork = multiprocessing.get_context("fork")
    ready = fork.Barrier(16)

    def write(number: int) -> None:
        ready.wait()
        threads = [threading.Thread(target=log_three, args=(100 * number + one,)) for one in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        os._exit(0)

    log_three(rows=1)  # the parent's file is not the children's
    writers = [fork.Process(target=write, args=(number,)) for number in range(1, 17)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    dataset = load(log)
    assert len(dataset.measurements) == 3 * (16 * 4 + 1)
    assert dataset.ignored == ()
    assert len(list((log / "parts").iterdir())) == 17


def test_what_a_kill_tears_off_costs_one_row(log: Path) -> None:
    log_three()
    (path,) = (log / "parts").iterdir()
    whole = path.read_bytes()
    lines = whole.split(b"\n")[1:]
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        part, _ = read_log_part(path)
        if length < 1 + len(lines[0]):
            assert part is None  # nobody knows what it is of
            continue
        assert part is not None
        complete = sum(length >= sum(1 + len(line) for line in lines[: number + 1]) for number in range(1, 4))
        assert (len(part.rows), part.is_complete) == (complete, True)


def test_a_process_that_goes_on_after_a_torn_row_starts_a_new_line(log: Path) -> None:
    log_three()
    (path,) = (log / "parts").iterdir()
    with path.open("ab") as file:
        file.write(b'\n{"problem": {"fam')
    log_row(KERNEL, problem(64), CONFIGS[3], 7.0, H200, timed="autotuner", source_hash="s1")
    dataset = load(log)
    assert len(dataset.measurements) == 4
    assert dataset.ignored == (path.name,)  # it has a line that is no row, and says so


def test_a_kill_while_rows_are_written_leaves_a_dataset(log: Path) -> None:
    code = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from remembered import CONFIGS, H200, KERNEL, problem
from foretune.runtime.timing.flywheel import log_row
for config, time_us in zip(CONFIGS, (1.0, 2.0)):
    log_row(KERNEL, problem(64), config, time_us, H200, timed="cold")
write = os.write
os.write = lambda handle, text: (write(handle, text[: len(text) // 2]), os.kill(os.getpid(), signal.SIGKILL))
log_row(KERNEL, problem(64), CONFIGS[2], 3.0, H200, timed="cold")
"""
    killed = subprocess.run([sys.executable, "-c", code, str(Path(__file__).parents[2])], capture_output=True)
    assert killed.returncode == -9, killed.stderr
    assert {(config, time_us) for _, config, _, _, time_us in rows_of(log)} == {(CONFIGS[0], 1.0), (CONFIGS[1], 2.0)}


@pytest.mark.parametrize("trouble", ["full", "half a row", "read only"])
def test_a_disk_that_takes_nothing_is_one_warning_and_later_rows_are_whole(
    trouble: str, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_three()
    write, open_ = os.write, os.open

    def full(handle: int, text: bytes) -> int:
        if trouble == "half a row":
            return write(handle, text[: len(text) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def closed(path: Any, how: int, *mode: Any, **more: Any) -> int:
        if str(path).startswith(str(log)) and how & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return open_(path, how, *mode, **more)

    with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setattr(os, *(("open", closed) if trouble == "read only" else ("write", full)))
        log_three(rows=65)
        log_three(rows=66, device=H100)
    said = [str(one.message) for one in caught]
    assert len(said) == 1
    assert said[0].startswith(f"FORETUNE_LOG: '{log}': ")
    assert ("Read-only" if trouble == "read only" else "No space left") in said[0]
    log_three(rows=67)
    log_three(rows=68, device=H100)
    dataset = load(log)
    assert sorted(case.problem["rows"] for case in dataset.cases) == [64, 67, 68]
    assert (len(dataset.measurements), dataset.ignored) == (9, ())


@pytest.mark.parametrize("value", ["/dev/null", "/proc/nothing", "x" * 5000, "/dev/full/x", "a\udcffb" * 100])
def test_a_hostile_folder_is_one_warning(value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(flywheel.VARIABLE, value)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        log_three()
        log_three(rows=65)
    assert [one.category for one in caught] == [ForetuneWarning]
    assert len(str(caught[0].message)) < 600


def test_odd_rows_are_one_warning_and_hurt_nobody(log: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        log_row(KERNEL, problem(64), CONFIGS[0], 1.0, H200, timed="quickly")
        log_row(None, problem(64), CONFIGS[0], 1.0, H200, timed="cold")  # type: ignore[arg-type]
        log_row(KERNEL, None, CONFIGS[0], 1.0, H200, timed="cold")  # type: ignore[arg-type]
    assert all(one.category is ForetuneWarning for one in caught)
    assert "timed must be one of cold, autotuner, warm, refined but is 'quickly'" in str(caught[0].message)
    for time_us in (float("inf"), float("nan"), -1.0, 0.0, 1e300):
        log_row(KERNEL, problem(64), CONFIGS[0], time_us, H200, timed="cold")
        assert [row[3:] for row in rows_of(log)] == [("launch_failed", None)]


HOSTILE_LINES = (
    b"[" * 100_000,
    b'{"a": ' + b"9" * 5000 + b"}",
    b"null",
    b"[]",
    b"\xff",
    b'{"problem": 3, "config": {}, "status": "ok", "time_us": 1.0}',
    b'{"problem": null, "config": null, "status": "none", "time_us": NaN}',
)


@pytest.mark.parametrize("line", HOSTILE_LINES, ids=range(len(HOSTILE_LINES)))
def test_whatever_a_log_says_is_left_out_and_named(line: bytes, log: Path) -> None:
    log_three()
    (path,) = (log / "parts").iterdir()
    whole = path.read_bytes()
    head, *rows = whole.split(b"\n")[1:]
    path.write_bytes(b"\n".join([b"", head, line, *rows]))
    (path.parent / "other.jsonl").write_bytes(b"\n" + line + b"\n".join([b"", *rows]))
    dataset = load(log)
    assert len(dataset.measurements) == 3
    assert sorted(dataset.ignored) == sorted([path.name, "other.jsonl"])


@pytest.mark.parametrize(
    "spoilt", [{"timed": "quickly"}, {"timed": None}, None, []], ids=["a word", "nothing", "no facts", "a list"]
)
def test_a_run_that_does_not_say_how_it_timed_is_left_out(spoilt: Any, log: Path) -> None:
    log_three()
    (path,) = (log / "parts").iterdir()
    head, *rows = path.read_bytes().split(b"\n")[1:]
    path.write_bytes(b"\n".join([b"", json.dumps(json.loads(head) | {"facts": spoilt}).encode(), *rows]))
    assert (len(load(log).measurements), load(log).ignored) == (0, (path.name,))


def test_a_clock_that_jumps_back_loses_nothing(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock(datetime.datetime):
        at = datetime.datetime(2030, 1, 1, tzinfo=datetime.timezone.utc)

        @classmethod
        def now(cls, tz: Any = None) -> datetime.datetime:
            cls.at -= datetime.timedelta(days=1)
            return cls.at

    monkeypatch.setattr(flywheel.datetime, "datetime", Clock)
    log_three(rows=64)
    log_three(rows=65, device=H100)
    log_three(rows=66)
    assert len(load(log).measurements) == 9


def test_a_ranker_learns_from_production_beside_what_was_collected(log: Path) -> None:
    """`foretune train --data h200 --data DIR`: the merged dataset has both, each for what it is."""
    from fakes import fake_dataset
    from foretune.model import LightGBMRanker
    from foretune.model.train import train_bundle

    family = FakeFamily()
    old, new = fake_cases(models=2)[:4], fake_cases(models=4)[-6:-3]
    for case in new:
        for config in family.space()[:8]:
            log_row(family, case.problem, config, family.time_us(case.problem, config, timing_pass=1), H200,
                    timed="autotuner")  # fmt: skip
    logged = load(log)
    both = merge_datasets([fake_dataset(old), logged], name="both")
    grid = both.grid("fake")
    assert len(grid) == len(old) + len(new)
    assert grid.weights is not None
    counted = {case.problem: set(weights[times == times]) for case, weights, times in
               zip(grid.cases, grid.weights, grid.times_us, strict=True)}  # fmt: skip
    assert counted == {case.problem: {1.0} for case in old} | {case.problem: {0.5} for case in new}
    bundle = train_bundle(both, {"fake": family}, lambda: LightGBMRanker(trees=4, epochs=0, min_rows=2))
    assert bundle.families == ("fake",)
    alone = train_bundle(logged, {"fake": family}, lambda: LightGBMRanker(trees=4, epochs=0, min_rows=2))
    assert alone.families == ("fake",)


def tuned(toy: Any, k: int = 2, **options: Any) -> Any:
    times_ms = iter([0.5, 0.25, 0.125, 0.0625] * 4)

    def meter(kernel_call: Any, quantiles: Any) -> list[float]:
        kernel_call()
        return [next(times_ms)] * 3

    return toy.tuned(Pruner(toy.ToyFamily(), k, device=toy.H200, bundle=toy.ToyBundle()), do_bench=meter, **options)


@pytest.mark.compile
@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("listens", [True, False])
def test_what_an_autotuner_with_our_pruner_measures_is_logged(
    listens: bool, toy: Any, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its listener, and before Triton 3.8 from what the autotuner keeps."""
    from triton import knobs

    heard: list[Any] = []
    if not hasattr(knobs.autotuning, "listener"):
        if listens:
            pytest.skip("this Triton has no listener")
    elif listens:
        monkeypatch.setattr(knobs.autotuning, "listener", lambda **said: heard.append(said))
    else:
        monkeypatch.setattr(flywheel, "_listens", lambda: False)
    kernel = tuned(toy)
    with use_stub_driver(toy.H200):
        for m in (64, 32):
            a, b, c = toy.operands(m)
            for _ in range(2):
                kernel[toy.grid](a, b, c, m, 64, 64)
    if not listens:
        flywheel._read_pending()  # as the end of the process does
    found = {(rows, config, time_us) for rows, config, _, _, time_us in rows_of(log)}
    first, second = (KernelConfig.from_triton(kernel.configs[at]) for at in (5, 4))
    assert found == {(64, first, 500.0), (64, second, 250.0), (32, first, 125.0), (32, second, 62.5)}
    runs = load(log).provenance["runs"].values()
    assert {(run["timed"], run["kernel_source"]) for run in runs} == {("autotuner", hash_of_kernel(kernel.fn))}
    assert len(heard) == 2 * listens  # whoever listened before still does


@pytest.mark.compile
@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("timed", ["cold", "autotuner"])
@pytest.mark.parametrize("listens", [True, False])
@pytest.mark.parametrize("has_family", [True, False])
def test_what_an_attached_autotuner_measures_is_logged_with_its_source(
    has_family: bool, listens: bool, timed: str, toy: Any, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton import knobs

    if not listens:
        monkeypatch.setattr(flywheel, "_listens", lambda: False)
    elif hasattr(knobs.autotuning, "listener"):
        monkeypatch.setattr(knobs.autotuning, "listener", None)
    kernel = toy.tuned(None, configs=toy.triton_configs()[:2], do_bench=lambda call, quantiles: [0.5] * 3)
    if timed == "cold":  # by our timer, as where the kernel has no do_bench of its own
        kernel._do_bench = None
        for module in (triton_adapter, known_times, flywheel):
            monkeypatch.setattr(module, "measures", lambda tuner: True)
        monkeypatch.setattr(triton_adapter.OneLaunch, "time_us", lambda launch, config: 500.0)
    with use_stub_driver(toy.H200), warnings.catch_warnings():
        warnings.simplefilter("ignore", ForetuneWarning)  # no bundle has a ranker of this family
        foretune.attach(kernel, toy.ToyFamily() if has_family else None)
        kernel[toy.grid](*toy.operands(), 64, 64, 64)
    flywheel._read_pending()
    dataset = load(log)
    assert dataset.families == (toy.ToyFamily.name if has_family else f"{toy.matmul_kernel.__module__}.matmul_kernel",)
    assert (len(dataset.measurements), dataset.kernel_sources(dataset.families[0])) == (2, {hash_of_kernel(kernel.fn)})
    assert {run["timed"] for run in dataset.provenance["runs"].values()} == {timed}


def test_what_ran_is_the_familys_where_its_package_has_the_kernel(toy: Any) -> None:
    family = find_family("matmul")
    own = import_module("foretune.kernels.matmul.triton_kernels.gemm").matmul_kernel
    assert flywheel.source_that_ran(family, own) == family.source_hash() != hash_of_kernel(own)
    assert flywheel.source_that_ran(family, other := triton.jit(toy.matmul_kernel)) == hash_of_kernel(other)


@pytest.mark.compile
@pytest.mark.usefixtures("own_cache")
def test_what_somebody_elses_autotuner_measures_is_not_taken_for_ours(
    toy: Any, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton import knobs

    if not hasattr(knobs.autotuning, "listener"):
        pytest.skip("this Triton has no listener")
    monkeypatch.setattr(knobs.autotuning, "listener", None)
    configs = toy.triton_configs()
    ours = tuned(toy, k=1, configs=configs)  # of a shortlist of one, nothing is benchmarked
    theirs = toy.tuned(lambda configs, named_args, **kwargs: configs[:2], configs=configs,
                       do_bench=lambda call, quantiles: [1.0] * 3)  # fmt: skip
    with use_stub_driver(toy.H200):
        for kernel in (ours, theirs):
            kernel[toy.grid](*toy.operands(), 64, 64, 64)
    assert not log.exists()


def test_an_ops_own_benchmarks_are_logged_as_cold(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from foretune.runtime import choice
    from foretune.runtime.arguments import Mode

    family, case = FakeFamily(), fake_cases()[0]
    fast, slow = family.space()[:2]
    ranked = type("Ranked", (), {"predicted": True, "configs": (fast, slow), "predicted_slowdown": (1.0, 1.1)})
    chooser = type("Chooser", (), {"choose": lambda self, near, k: ranked})
    monkeypatch.setattr(choice, "chooser_of", lambda *given: chooser())
    monkeypatch.setattr(choice, "_can_wait", lambda: True)
    monkeypatch.setattr(choice, "_measured", {})
    monkeypatch.setattr(choice, "_times_us", lambda family, configs, launch: [1.0, 2.0])
    for _ in range(2):
        assert choice.choose(family, case.problem, H200, Mode.SHORTLIST, lambda config: None) == fast
    dataset = load(log)
    assert {(dataset.configs[row.config], row.time_us) for row in dataset.measurements.itertuples()} == {
        (fast, 1.0),
        (slow, 2.0),
    }
    assert [run["timed"] for run in dataset.provenance["runs"].values()] == ["cold"]
    assert {run["kernel_source"] for run in dataset.provenance["runs"].values()} == {"fake-source"}


@pytest.mark.parametrize("name", ["notes.txt", "dataset.json"])
def test_nothing_is_logged_in_a_folder_of_something_else(name: str, log: Path) -> None:
    log.mkdir()
    (log / name).write_text("somebody else's")
    with pytest.warns(ForetuneWarning, match="benchmarks are not logged there"):
        log_three()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        log_three(rows=65)
    assert [path.name for path in log.iterdir()] == [name]


def test_nothing_is_logged_in_a_sealed_dataset(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log_three()
    seal_dataset(log, tmp_path / "sealed", name="mine")
    before = {path.name for path in (tmp_path / "sealed").iterdir()}
    monkeypatch.setenv(flywheel.VARIABLE, str(tmp_path / "sealed"))
    with pytest.warns(ForetuneWarning, match="a sealed dataset must not change"):
        log_three(rows=65)
    assert {path.name for path in (tmp_path / "sealed").iterdir()} == before


def test_what_is_logged_in_a_collected_dataset_is_read_with_it(log: Path) -> None:
    from writers import append

    append(log, "mine")
    before = len(load(log).measurements)
    log_three()
    assert len(load(log).measurements) == before + 3
