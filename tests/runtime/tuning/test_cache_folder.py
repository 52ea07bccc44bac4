"""What is remembered can be seen, forgotten, and carried elsewhere; nothing that comes in is taken on trust."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import call, words
from foretune.datasets import ForetuneError, ForetuneWarning
from foretune.runtime.tuning.cache import choice_cache
from foretune.runtime.tuning.cache.cache_folder import (
    cache_contents,
    clear_cache,
    export_choices,
    import_choices,
    known_kernels,
)
from foretune.runtime.tuning.cache.choice_cache import ChoiceCache
from foretune.runtime.tuning.functions import ConfigCache, TunedFunction, config_cache
from remembered import CONFIGS, H100, H200, KERNEL, problem, remember


def test_nothing_is_shown_where_nothing_is(folder: Path) -> None:
    assert cache_contents().to_json() == {"folder": str(folder), "kernels": [], "functions": []}
    assert "Nothing is remembered in" in call("cache show").stdout


def test_each_kernel_and_device_is_shown(folder: Path) -> None:
    for device in (H200, H100):
        remember(device)
    remember(kernel="other.kernel").choose(problem(8), "", CONFIGS[0])
    listed = json.loads(call("cache show --json").stdout)
    assert listed["folder"] == str(folder)
    assert [(one["kernel"], one["device"]) for one in listed["kernels"]] == [
        ("other.kernel", "NVIDIA H200"),
        (KERNEL, "NVIDIA H100 80GB HBM3"),
        (KERNEL, "NVIDIA H200"),
    ]
    assert [list(one.values())[2:] for one in listed["kernels"]] == [
        [5, 22, 2, 1, 1],
        [4, 22, 2, 0, 1],
        [4, 22, 2, 0, 1],
    ]
    assert call("cache show").stdout.count("NVIDIA H200") == 2


def test_of_one_kernel_each_problem_is_shown_with_its_best() -> None:
    remember()
    (shown,) = json.loads(call(f"cache show {KERNEL} --json").stdout)["kernels"]
    assert [one["best"] for one in shown["by_problem"]] == [
        "BLOCK=16 num_warps=2 num_stages=3",
        "BLOCK=16 num_warps=2 num_stages=3",
        "BLOCK=64 num_warps=2 num_stages=3",
        "BLOCK=256 num_warps=2 num_stages=3",
    ]
    assert "BLOCK=256 num_warps=2" in call(f"cache show {KERNEL}").stdout


def test_what_is_forgotten_is_gone_and_the_rest_stays(folder: Path) -> None:
    remember()
    remember(kernel="other.kernel")
    (folder / "torn.json.unreadable").write_text("{")
    assert clear_cache("other.kernel").to_json() == {"kernels": 1, "functions": 0, "problems": 4, "times": 24}
    assert [one.kernel for one in cache_contents().kernels] == [KERNEL]
    assert json.loads(call("cache clear --json").stdout) == {"kernels": 1, "functions": 0, "problems": 4, "times": 24}
    assert not list(folder.iterdir())
    assert ChoiceCache.of(KERNEL, "s1", H200).times(problem(64)) == {}  # in a process that had them, too


def test_what_cannot_be_read_is_named_and_left_out(folder: Path) -> None:
    remember()
    (folder / "torn.json").write_text("{")
    (folder / "link.json").symlink_to("/etc/passwd")
    with pytest.warns(ForetuneWarning) as caught:
        assert len(cache_contents().kernels) == 1
    assert {str(one.message).partition(" is left out")[0] for one in caught} == {
        str(folder / "torn.json"),
        str(folder / "link.json"),
    }


def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As another machine has it: an empty cache."""
    monkeypatch.setenv(choice_cache.VARIABLE, str(tmp_path / "elsewhere"))


def test_what_is_exported_is_imported_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for device in (H200, H100):
        remember(device).choose(problem(64), "b1", CONFIGS[1])
    before = known_kernels(KERNEL)
    exported = json.loads(call("cache export --json --out", tmp_path / "choices.json").stdout)
    assert exported == {"kernels": 2, "functions": 0, "problems": 8, "times": 48, "out": str(tmp_path / "choices.json")}
    elsewhere(tmp_path, monkeypatch)
    assert json.loads(call("cache import --json", tmp_path / "choices.json").stdout)["times"] == 48
    assert known_kernels(KERNEL) == before
    import_choices(tmp_path / "choices.json")  # once more changes nothing
    assert known_kernels(KERNEL) == before


def test_of_what_both_have_the_one_here_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = remember()
    there.choose(problem(64), "b1", CONFIGS[1])
    there.choose(problem(64), "b2", CONFIGS[1])
    export_choices(tmp_path / "choices.json", KERNEL)
    elsewhere(tmp_path, monkeypatch)
    here = ChoiceCache.of(KERNEL, "s1", H200)
    here.record(problem(64), CONFIGS[0], 99.0)
    here.record(problem(7), CONFIGS[0], 7.0)
    here.choose(problem(64), "b1", CONFIGS[2])
    import_choices(tmp_path / "choices.json")
    assert here.times(problem(64)) == dict(there.times(problem(64))) | {CONFIGS[0]: 99.0}
    assert [here.choice(problem(64), bundle) for bundle in ("b1", "b2")] == [CONFIGS[2], CONFIGS[1]]
    assert [one["rows"] for one in here.problems()] == [256, 1024, 4096, 7, 64]  # what comes in is the oldest


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not exported choices: "),
        (b"[" * 100_000, "not exported choices: "),
        (b'{"format": "foretune exported choices 1"}', "not exported choices: it is no file of"),
        (b'{"format": "foretune choices 1", "files": []}', "not exported choices: it is no file of"),
        (b'{"format": "foretune exported choices 1", "files": [3]}', "not exported choices: it is no file of"),
        (
            b'{"format": "foretune exported choices 1", "files": [{"a": ' + b"9" * 5000 + b"}]}",
            "not exported choices: ",
        ),
    ],
)
def test_what_is_no_exported_file_is_refused_whole(content: bytes, said: str, tmp_path: Path, folder: Path) -> None:
    (tmp_path / "choices.json").write_bytes(content)
    with pytest.raises(ForetuneError) as caught:
        import_choices(tmp_path / "choices.json")
    assert str(caught.value).startswith(f"{tmp_path / 'choices.json'}: {said}")
    assert not folder.exists()


def test_one_bad_kernel_keeps_all_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remember()
    remember(kernel="other.kernel")
    export_choices(tmp_path / "choices.json")
    value: dict[str, Any] = json.loads((tmp_path / "choices.json").read_text())
    value["files"][1]["entries"][0]["times"]["0"] = -1
    (tmp_path / "choices.json").write_text(json.dumps(value))
    elsewhere(tmp_path, monkeypatch)
    with pytest.raises(ForetuneError, match="a time must be"):
        import_choices(tmp_path / "choices.json")
    assert cache_contents().kernels == ()


def test_where_nothing_can_be_kept_importing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remember()
    export_choices(tmp_path / "choices.json")
    monkeypatch.setenv(choice_cache.VARIABLE, "/dev/null/nowhere")
    with pytest.warns(ForetuneWarning, match="File exists"), pytest.raises(ForetuneError, match="cannot be kept"):
        import_choices(tmp_path / "choices.json")


FUNCTION = f"{__name__}.scale"


def scale(values: list[float], tile: int) -> list[float]:
    if tile == 3:
        raise ZeroDivisionError("a tile of three")
    return [2 * value for value in values]


@pytest.fixture
def tuned(folder: Path) -> TunedFunction:
    """A function that was tuned for two keys, one of its configs failing."""
    config_cache._opened.cache_clear()
    tuned = TunedFunction(scale, {"tile": [1, 2, 3]}, key=lambda values: len(values), n_warmup=1, n_repeat=1)
    for count in (1, 2):
        tuned([1.0] * count)
    return tuned


def test_functions_are_shown_beside_kernels(tuned: TunedFunction) -> None:
    remember()
    assert json.loads(call("cache show --json").stdout)["functions"] == [
        {"function": FUNCTION, "keys": 2, "times": 4, "failed": 2, "choices": 2}
    ]
    shown = call("cache show").stdout
    assert "Choices" in shown
    assert "Functions" in shown
    of_one = json.loads(call(f"cache show {FUNCTION} --json").stdout)
    assert of_one["kernels"] == []
    (listed,) = (one["by_key"] for one in of_one["functions"])
    assert [(one["key"][-3:], one["times"], one["failed"]) for one in listed] == [(": 1", 2, 1), (": 2", 2, 1)]
    assert all(one["chosen"] in call(f"cache show {FUNCTION}").stdout for one in listed)
    assert all(one["best_us"] == float(f"{one['best_us']:.6g}") > 0 for one in listed)  # as of a kernel
    with pytest.raises(ForetuneError, match=r"nothing is remembered of 'no\.such'.*choices of .*scale"):
        cache_contents("no.such")


@pytest.mark.parametrize("command", ["freeze", "export --format fla", "export --format megatron"])
def test_a_function_is_neither_frozen_nor_written_for_other_projects(
    command: str, tuned: TunedFunction, tmp_path: Path
) -> None:
    result = call(f"cache {command} {FUNCTION} --out", tmp_path / "out")
    assert result.exit_code == 1
    assert "is a tuned function: only a kernel's choices can be written so" in words(result.stderr)


def test_a_function_is_forgotten_by_its_name_and_with_all(tuned: TunedFunction, folder: Path) -> None:
    remember()
    assert clear_cache(FUNCTION).to_json() == {"kernels": 0, "functions": 1, "problems": 2, "times": 4}
    assert [one.kernel for one in cache_contents().kernels] == [KERNEL]
    tuned.cache.set("kept#a1 on here: 1", {})
    clear_cache()
    assert not list(folder.with_name("functions").glob("*.json"))


def test_what_a_function_found_out_is_carried_elsewhere(
    tuned: TunedFunction, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {key: tuned.cache.get(key) for key in tuned.cache}
    assert export_choices(tmp_path / "choices.json").functions == 1
    elsewhere(tmp_path, monkeypatch)
    here, (first, second) = ConfigCache.of(FUNCTION), known
    here.set(second, {"mine": 1})
    assert import_choices(tmp_path / "choices.json").times == 4
    assert {key: here.get(key) for key in here} == {first: known[first], second: {"mine": 1}}
    assert here.keys() == [first, second]  # what comes in is the oldest


@pytest.mark.parametrize("function", [3, {"function": "a.b"}, {"function": "a.b", "entries": {"c.d#1 on x: 1": {}}}])
def test_a_function_that_is_none_keeps_all_out(function: object, tmp_path: Path, folder: Path) -> None:
    value = {"format": "foretune exported choices 1", "files": [], "functions": [function]}
    (tmp_path / "choices.json").write_text(json.dumps(value))
    with pytest.raises(ForetuneError, match="not exported choices: "):
        import_choices(tmp_path / "choices.json")
    assert not folder.with_name("functions").exists()
