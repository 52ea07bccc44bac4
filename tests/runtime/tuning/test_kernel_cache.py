"""What is known of a kernel is found by whoever may use it, and by nobody else."""

from __future__ import annotations

import copy
import json
import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from foretune.datasets import DeviceSpec, ForetuneError, ForetuneWarning, KernelConfig, Problem
from foretune.runtime.timing import flywheel
from foretune.runtime.timing.flywheel import Software
from foretune.runtime.tuning.cache import kernel_cache
from foretune.runtime.tuning.cache.document import check_choices
from foretune.runtime.tuning.cache.kernel_cache import ChoiceCache, choices_folder
from foretune.runtime.tuning.cache.shared_file import SharedFile

H200, H100 = DeviceSpec.named("h200"), DeviceSpec.named("h100")
SMALL, LARGE = Problem.of("toy", rows=8), Problem.of("toy", rows=64)
CONFIGS = [KernelConfig.of(BLOCK=block, num_warps=warps) for block in (16, 32, 64) for warps in (2, 4)]


def cache_of(kernel: str = "module.kernel", source: str = "s1", device: DeviceSpec = H200) -> ChoiceCache:
    """As another process finds it."""
    kernel_cache._shared.cache_clear()
    return ChoiceCache.of(kernel, source, device)


def test_times_and_choices_are_there_in_the_next_process() -> None:
    cache = cache_of()
    cache.record(SMALL, CONFIGS[0], 12.3456789)
    cache.record(SMALL, CONFIGS[1], None)
    cache.choose(SMALL, "", CONFIGS[0])
    cache.choose(SMALL, "b1", CONFIGS[2])
    again = cache_of()
    assert again.times(SMALL) == {CONFIGS[0]: 12.3457, CONFIGS[1]: None}
    assert again.times(LARGE) == {}
    chosen = [again.choice(SMALL, bundle) for bundle in ("", "b1", "b2")]
    assert chosen == [CONFIGS[0], CONFIGS[2], None]
    assert again.choice(LARGE, "") is None


def test_another_list_of_configs_finds_the_times_of_those_it_shares() -> None:
    """Each config's time is kept by itself (triton#9822)."""
    cache_of().record_all(SMALL, dict.fromkeys(CONFIGS[:3], 5.0))
    cache = cache_of()
    assert [config for config in CONFIGS[2:] if config not in cache.times(SMALL)] == CONFIGS[3:]
    cache.record(SMALL, CONFIGS[3], 6.0)
    assert dict(cache_of().times(SMALL)) == dict.fromkeys(CONFIGS[:3], 5.0) | {CONFIGS[3]: 6.0}


@pytest.mark.parametrize("what", ["source", "driver", "torch", "triton"])
def test_what_was_measured_under_something_else_is_not_seen_and_stays(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache_of().record(SMALL, CONFIGS[0], 5.0)
    cache_of().choose(SMALL, "", CONFIGS[0])
    before = Software.here()
    if what != "source":
        monkeypatch.setattr(Software, "here", classmethod(lambda cls: replace(before, **{what: "another"})))
    other = cache_of(source="s2" if what == "source" else "s1")
    assert (other.times(SMALL), other.choice(SMALL, ""), list(other.problems())) == ({}, None, [])
    other.record(SMALL, CONFIGS[0], 7.0)
    monkeypatch.setattr(Software, "here", classmethod(lambda cls: before))
    assert cache_of().times(SMALL) == {CONFIGS[0]: 5.0}


def test_there_is_a_file_for_each_kernel_and_device(folder: Path) -> None:
    part = H200.with_sms(66)
    for kernel in ("a.kernel", "b.kernel", "a kernel"):
        for device in (H200, H100, part):
            cache_of(kernel, device=device).record(SMALL, CONFIGS[0], 5.0)
    assert len(list(folder.iterdir())) == 9
    assert cache_of("a.kernel", device=part).times(SMALL)


def test_two_kernels_of_one_name_from_different_files_do_not_meet(folder: Path) -> None:
    """Two scripts' `__main__.kernel`, say: their sources differ."""
    one, other = cache_of("__main__.kernel", "s1"), cache_of("__main__.kernel", "s2")
    one.record(SMALL, CONFIGS[0], 5.0)
    other.record(SMALL, CONFIGS[0], 9.0)
    assert (one.times(SMALL), other.times(SMALL)) == ({CONFIGS[0]: 5.0}, {CONFIGS[0]: 9.0})
    assert len(list(folder.iterdir())) == 1


def test_problems_come_in_the_order_in_which_they_were_touched() -> None:
    cache = cache_of()
    for problem in (SMALL, LARGE):
        cache.record(problem, CONFIGS[0], 5.0)
    cache.choose(Problem.of("toy", rows=1), "", CONFIGS[0])  # has no times
    assert list(cache.problems()) == [SMALL, LARGE]
    cache.record(SMALL, CONFIGS[1], 5.0)
    assert list(cache_of().problems()) == [LARGE, SMALL]


@pytest.mark.parametrize("time_us", [math.inf, math.nan, -1.0, 0.0, 1e30])
def test_what_no_clock_gives_is_a_failure(time_us: float) -> None:
    cache_of().record(SMALL, CONFIGS[0], time_us)
    assert cache_of().times(SMALL) == {CONFIGS[0]: None}


def test_a_full_file_forgets_the_oldest_problems_and_their_configs(folder: Path) -> None:
    cache = cache_of()
    cache.file.most_bytes = 20_000
    cache.record(SMALL, KernelConfig.of(BLOCK=7), 5.0)
    for rows in range(100, 300):
        cache.record_all(Problem.of("toy", rows=rows), {config: float(rows) for config in CONFIGS})
    (path,) = folder.glob("*.json")
    assert path.stat().st_size <= 20_000
    left = [problem["rows"] for problem in cache_of().problems()]
    assert 20 < len(left) < 100
    assert left == list(range(300 - len(left), 300))
    assert cache_of().times(Problem.of("toy", rows=299)) == dict.fromkeys(CONFIGS, 299.0)
    assert {"BLOCK": 7, "num_warps": 4, "num_stages": 3, "num_ctas": 1} not in json.loads(path.read_text())["configs"]


def test_the_bound_is_half_a_mebibyte() -> None:
    assert cache_of().file.most_bytes == 512 * 1024


def test_true_and_one_are_kept_apart() -> None:
    yes, one = KernelConfig.of(FLAG=True), KernelConfig.of(FLAG=1)
    cache = cache_of()
    cache.choose(SMALL, "yes", yes)
    cache.choose(SMALL, "one", one)
    found = [cache_of().choice(SMALL, bundle) for bundle in ("yes", "one")]
    assert [type(config["FLAG"]) for config in found if config] == [bool, int]


def test_launches_are_kept_as_triton_knows_them(folder: Path) -> None:
    cache = cache_of()
    for _ in range(2):
        cache.saw_launch(SMALL, ["M", "N"], (8, 64, "torch.bfloat16"))
    cache.saw_launch(SMALL, ["M", "N"], (9, 64, "torch.bfloat16"))
    for odd in (object(), float("nan"), (1, 2)):
        cache.saw_launch(SMALL, ["M"], (odd,))
    for rows in range(100):
        cache.saw_launch(LARGE, ["M"], (rows,))
    (path,) = folder.glob("*.json")
    small, large = json.loads(path.read_text())["entries"]
    assert [launch["key"] for launch in small["launches"]] == [[8, 64, "torch.bfloat16"], [9, 64, "torch.bfloat16"]]
    assert [launch["key"] for launch in large["launches"]] == [[rows] for rows in range(68, 100)]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("", "s1", H200), "a kernel's name must be a word"),
        (("k\n", "s1", H200), "a kernel's name must be a word"),
        (("k", "", H200), "a kernel's source hash must be a word"),
        (("k", "s1", "h200"), "device must be a DeviceSpec but is 'h200'"),
    ],
)
def test_what_is_no_kernel_or_device_is_refused(given: Any, said: str) -> None:
    with pytest.raises(ForetuneError, match=said):
        ChoiceCache.of(*given)


def good() -> dict[str, Any]:
    """A document with everything in it."""
    cache = ChoiceCache(SharedFile(None, check=check_choices, forget=lambda _: False), "k", "s1", H200)
    cache.record_all(SMALL, dict(zip(CONFIGS, (1.0, 2.0, None), strict=False)))
    cache.choose(SMALL, "", CONFIGS[0])
    cache.saw_launch(SMALL, ["rows"], [8, "torch.bfloat16"])
    return copy.deepcopy(cache.file.read())


def spoilt() -> dict[str, dict[str, Any]]:
    """Documents, each with one thing that is not right, by what that is."""
    found: dict[str, dict[str, Any]] = {}

    def spoil(name: str, **values: Any) -> None:
        found[f"{name} {next(iter(values))}"] = good() | values

    def spoil_entry(name: str, **values: Any) -> None:
        document = good()
        document["entries"][0] |= values
        found[f"{name} {next(iter(values))}"] = document

    for key in good():
        spoil("null", **{key: None})
        found[f"no {key}"] = {name: value for name, value in good().items() if name != key}
    for key in good()["entries"][0]:
        spoil_entry("null", **{key: None})
        spoil_entry("a number as", **{key: -3})
    spoil("a word too many", more=1)
    spoil("another", format="foretune choices 2")
    spoil("none of the", device={"name": "NVIDIA H200"})
    spoil("a config of lists in", configs=[{"BLOCK": [1]}, *good()["configs"][1:]])
    spoil("a config of nothing in", configs=[None, *good()["configs"][1:]])
    spoil("an entry of nothing in", entries=[None])
    spoil_entry("of a config that is not there", times={"99": 1.0})
    spoil_entry("of a negative config", times={"-1": 1.0})
    spoil_entry("unicode digits in", times={"\u0663": 1.0})
    spoil_entry("a text in", times={"0": "fast"})
    spoil_entry("true in", times={"0": True})
    spoil_entry("too long a time in", times={"0": 1e300})
    spoil_entry("no time in", times={"0": 0})
    spoil_entry("a list in", times={"0": [1.0]})
    spoil_entry("of a config that is not there", chosen={"": 99})
    spoil_entry("of true", chosen={"": True})
    spoil_entry("of a negative config", chosen={"": -1})
    spoil_entry("one too many in", software={"driver": "", "torch": "", "triton": "", "more": ""})
    spoil_entry("a number in", software={"driver": 1, "torch": "", "triton": ""})
    spoil_entry("of another family", problem={"family": "toy"})
    spoil_entry("a deep", launches=[{"names": [], "key": [[[]]]}])
    spoil_entry("one without a key in", launches=[{"names": []}])
    spoil_entry("more names than values in", launches=[{"names": ["a"], "key": []}])
    return found


def test_what_was_written_is_right() -> None:
    check_choices(good())


@pytest.mark.parametrize("document", spoilt().values(), ids=spoilt())
def test_a_file_that_says_anything_else_is_begun_anew(document: dict[str, Any], folder: Path) -> None:
    cache_of("k").record(SMALL, CONFIGS[0], 5.0)
    (path,) = folder.glob("*.json")
    path.write_text(json.dumps(document))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cache = cache_of("k")
        assert cache.times(SMALL) == {}
        assert cache.choice(SMALL, "") is None
        assert list(cache.problems()) == []
        cache.record(SMALL, CONFIGS[1], 6.0)
        cache.saw_launch(SMALL, ["rows"], [8])
        assert cache_of("k").times(SMALL) == {CONFIGS[1]: 6.0}
    assert [one.category for one in caught] == [ForetuneWarning]
    assert "replaced by a new file" in str(caught[0].message)


@pytest.mark.parametrize(
    "name", ["a text in times", "null problem", "an entry of nothing in entries", "a deep launches"]
)
def test_a_malformed_entry_is_left_out_with_one_warning_and_the_others_stay(name: str, folder: Path) -> None:
    cache_of("k").record(SMALL, CONFIGS[0], 5.0)
    (path,) = folder.glob("*.json")
    document = good()
    document["entries"] = [*spoilt()[name]["entries"], entry_of(LARGE)]
    path.write_text(json.dumps(document))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cache = cache_of("k")
        for _ in range(2):
            assert cache.times(SMALL) == {}
            assert cache.times(LARGE) == dict(zip(CONFIGS, (1.0, 2.0, None), strict=False))
        cache.record(SMALL, CONFIGS[1], 6.0)
        assert cache.times(LARGE) == dict(zip(CONFIGS, (1.0, 2.0, None), strict=False))
        assert cache_of("k").times(SMALL) == {CONFIGS[1]: 6.0}
    assert [str(one.message) for one in caught] == [f"{path}: 1 malformed records are left out"]


def test_entries_that_name_a_malformed_config_are_left_out_and_the_others_keep_theirs(folder: Path) -> None:
    cache_of("k").record(SMALL, CONFIGS[0], 5.0)
    (path,) = folder.glob("*.json")
    document = good()
    document["entries"].append(entry_of(LARGE) | {"times": {"2": 7.0}, "chosen": {"": 2}})
    document["configs"][1] = {"BLOCK": [1]}
    path.write_text(json.dumps(document))
    with warnings.catch_warnings(record=True):
        cache = cache_of("k")
        assert (cache.times(SMALL), cache.times(LARGE)) == ({}, {CONFIGS[2]: 7.0})
        cache.record(LARGE, CONFIGS[0], 8.0)
        assert (cache.choice(LARGE, ""), cache.times(LARGE)) == (CONFIGS[2], {CONFIGS[2]: 7.0, CONFIGS[0]: 8.0})


@pytest.mark.parametrize("number", ["NaN", "1e999", "9" * 5000])
def test_a_number_that_json_has_no_word_for_costs_its_entry_alone(number: str, folder: Path) -> None:
    cache_of("k").record(SMALL, CONFIGS[0], 5.0)
    (path,) = folder.glob("*.json")
    document = good()
    document["entries"].append(entry_of(LARGE) | {"times": {"0": "NUMBER"}})
    path.write_text(json.dumps(document).replace('"NUMBER"', number))
    with pytest.warns(ForetuneWarning, match="1 malformed records are left out"):
        assert (len(cache_of("k").times(SMALL)), cache_of("k").times(LARGE)) == (3, {})


def entry_of(problem: Problem) -> dict[str, Any]:
    """A good entry of another problem."""
    return good()["entries"][0] | {"problem": problem.to_json()}


@pytest.mark.parametrize("value", ["/dev/null", "/proc/nothing", "x" * 5000, "\udcff\udcfe", "/"])
def test_a_hostile_folder_is_told_once_and_memory_does(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if value == "/":
        monkeypatch.setattr(kernel_cache, "choices_folder", lambda: Path("/dev/null/choices"))
    monkeypatch.setenv(kernel_cache.VARIABLE, value)
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kernel_cache._shared.cache_clear()
        for kernel in ("a", "b"):
            cache = ChoiceCache.of(kernel, "s1", H200)
            cache.record(SMALL, CONFIGS[0], 5.0)
            assert ChoiceCache.of(kernel, "s1", H200).times(SMALL) == {CONFIGS[0]: 5.0}
    assert len(caught) <= 1


def test_without_a_home_it_lives_in_memory_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home(self: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv(kernel_cache.VARIABLE)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "expanduser", no_home)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for kernel in ("a", "b"):
            ChoiceCache.of(kernel, "s1", H200).record(SMALL, CONFIGS[0], 5.0)
            assert ChoiceCache.of(kernel, "s1", H200).times(SMALL) == {CONFIGS[0]: 5.0}
    assert ["no home folder" in str(one.message) for one in caught] == [True]


def test_the_folder_is_where_the_environment_says_or_in_the_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for value, expected in (
        ("here", "here/choices"),
        ("~/there", "home/there/choices"),
        ("", "home/.cache/foretune/choices"),
    ):
        monkeypatch.setenv(kernel_cache.VARIABLE, value)
        assert choices_folder() == tmp_path / expected
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert choices_folder() == tmp_path / "xdg" / "foretune" / "choices"


def test_software_is_what_is_installed() -> None:
    assert flywheel._version_of("pytest") == pytest.__version__
    assert flywheel._version_of("no such package") == ""


def test_a_problem_with_thousands_of_configs_keeps_its_choice_and_the_other_problems(folder: Path) -> None:
    cache = cache_of()
    cache.file.most_bytes = 20_000
    for rows in range(10):
        cache.record_all(Problem.of("toy", rows=rows), dict.fromkeys(CONFIGS, 5.0))
    large, configs = Problem.of("toy", rows=100), [KernelConfig.of(BLOCK=block) for block in range(1000)]
    cache.record_all(large, {configs[-1]: 900.0})
    cache.choose(large, "", configs[-1])
    cache.record_all(large, {config: block + 1.0 for block, config in enumerate(configs[:-1])})
    (path,) = folder.glob("*.json")
    assert path.stat().st_size <= 20_000
    later = cache_of()
    assert [problem["rows"] for problem in later.problems()] == [*range(10), 100]
    assert later.choice(large, "") == configs[-1]
    kept = later.times(large)
    assert set(kept) == {configs[-1], *configs[: len(kept) - 1]}
    assert len(kept) > 64


def test_writing_times_one_by_one_is_linear_in_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    update = SharedFile.update

    def counted(file: SharedFile, change: Any) -> None:
        update(file, change)
        written.append(len(file._text))

    monkeypatch.setattr(SharedFile, "update", counted)

    def bytes_of(n_configs: int) -> int:
        written.clear()
        cache, problem = cache_of(), Problem.of("toy", rows=n_configs)
        for block in range(n_configs):
            cache.record(problem, KernelConfig.of(BLOCK=block), block + 1.0)
        cache.choose(problem, "", KernelConfig.of(BLOCK=0))
        assert len(cache_of().times(problem)) == n_configs
        return sum(written)

    assert bytes_of(800) < 8 * bytes_of(200)  # 16 times, if each time were written by itself


def test_what_waits_to_be_written_is_seen_here_and_there_when_the_process_ends() -> None:
    cache, configs = cache_of(), [KernelConfig.of(BLOCK=block) for block in range(kernel_cache._AT_ONCE + 2)]
    for config in configs:
        cache.record(SMALL, config, 1.0)
    assert len(cache_of().times(SMALL)) == kernel_cache._AT_ONCE
    assert len(cache.times(SMALL)) == len(cache_of().times(SMALL)) == len(configs)
    cache.record(LARGE, configs[0], 1.0)
    cache._recorded[LARGE] = 100
    cache.record(LARGE, configs[1], 1.0)
    kernel_cache._flush_all()
    assert len(cache_of().times(LARGE)) == 2


def test_failures_expire_together_and_those_of_older_files_at_once(monkeypatch):
    now = [1e9]
    monkeypatch.setattr(kernel_cache.time, "time", lambda: now[0])
    cache, (first, second, third) = cache_of("k"), CONFIGS[:3]
    cache.record_all(SMALL, {first: 1.0, second: None})
    now[0] += kernel_cache.FAILURES_LAST_S - 1
    cache.record(SMALL, third, None)
    assert cache.times(SMALL) == {first: 1.0, second: None, third: None}
    now[0] += 1
    assert cache.times(SMALL) == {first: 1.0}
    cache.record(SMALL, third, None)  # the other one is not known to fail still
    assert cache.times(SMALL) == {first: 1.0, third: None}
    now[0] -= 10  # somebody has set the clock back
    assert cache.times(SMALL) == {first: 1.0}
    now[0] += 10
    cache.file.update(lambda document: document["entries"][0].pop("failed_at"))  # as before failures had a date
    assert cache.times(SMALL) == {first: 1.0}


def test_a_launch_has_one_config_of_its_own():
    cache = cache_of("k")
    for config in CONFIGS[:2]:
        cache.saw_launch(SMALL, ["rows"], [8], {"rows": 8}, config)
    cache.saw_launch(SMALL, ["rows"], [9], {"rows": 9})
    launches = cache.file.read()["entries"][0]["launches"]
    assert [launch.get("config") for launch in launches] == [CONFIGS[1].to_json(), None]
