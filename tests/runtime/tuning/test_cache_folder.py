"""What is remembered can be seen, forgotten, and carried elsewhere; nothing that comes in is taken on trust."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from commands import call, words
from foretune.datasets import ForetuneError, ForetuneWarning
from foretune.runtime.tuning.cache import kernel_cache, known
from foretune.runtime.tuning.cache.cache_folder import (
    cache_contents,
    clear_cache,
    export_choices,
    import_choices,
)
from foretune.runtime.tuning.cache.kernel_cache import ChoiceCache
from foretune.runtime.tuning.cache.known import known_kernels
from foretune.runtime.tuning.cache.shared_file import MOST_BYTES
from foretune.runtime.tuning.functions import ConfigCache, TunedFunction, config_cache
from remembered import CONFIGS, H100, H200, KERNEL, problem, remember


def test_nothing_is_shown_where_nothing_is(folder: Path) -> None:
    assert cache_contents().to_json() == {"folder": str(folder), "kernels": [], "functions": []}
    assert "There are no choices in" in call("cache show").stdout


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


def foreign_files(folder: Path, outside: Path) -> dict[Path, str]:
    """Everything that may lie in a folder of the cache and is not the cache's, by its content."""
    folder.mkdir(parents=True, exist_ok=True)
    (outside / "linked.json").write_text('{"format":"foretune choices 1"}')
    (folder / "link.json").symlink_to(outside / "linked.json")
    (folder / "folder.json").mkdir()
    os.mkfifo(folder / "pipe.json")
    texts = {
        folder / "package.json": '{"name": "mine"}',
        folder / "mine-0123456789ab.json": "{} ",
        folder / "empty.json": "",
        folder / "torn.json.unreadable": '{"name"',
        folder / "exported.json": '{"format": "foretune exported choices 1", "files": []}',
        outside / "linked.json": '{"format":"foretune choices 1"}',
    }
    for path, text in texts.items():
        path.write_text(text)
    return texts


@pytest.mark.parametrize("which", ["choices", "functions"])
def test_clearing_leaves_what_is_not_the_caches_and_says_so(which: str, folder: Path, tmp_path: Path) -> None:
    remember()
    ConfigCache.of("a.b").set("a.b#1 on here: 1", {})
    (folder.with_name("functions") / "c.d-0123456789ab.json").write_text("{}")  # as a cleared cache has it
    texts = foreign_files(folder.with_name(which), tmp_path)
    counted = json.loads(call("cache clear --json").stdout)
    assert (counted["kernels"], counted["functions"]) == (1, 2)
    assert {path: path.read_text() for path in texts} == texts
    left = {path.name for path in (*folder.iterdir(), *folder.with_name("functions").iterdir())}
    assert left == {path.name for path in texts if path.parent != tmp_path} | {"link.json", "folder.json", "pipe.json"}
    assert len(counted["left"]) == 8
    assert any("package.json was not removed: it is not a file of the cache" in one for one in counted["left"])
    assert any("link.json was not removed: it is a symbolic link" in one for one in counted["left"])


def test_nothing_is_cleared_through_a_link_in_the_folders_place(folder: Path, tmp_path: Path) -> None:
    remember()
    folder.rename(tmp_path / "real")
    folder.symlink_to(tmp_path / "real")
    (tmp_path / "real" / "package.json").write_text("{}")
    before = sorted((tmp_path / "real").iterdir())
    for kernel in (KERNEL, None):
        with pytest.warns(ForetuneWarning, match="package.json is left out"):
            counted = clear_cache(kernel)
        assert (counted.kernels, counted.left) == (
            0,
            (f"{folder} is a symbolic link: nothing in it was removed",),
        )
        assert sorted((tmp_path / "real").iterdir()) == before


def test_what_vanishes_while_it_is_exported_is_no_trouble(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a second process clears the cache meanwhile."""
    remember()
    remember(kernel="other.kernel")
    check = known.check_choices

    def clear_then_check(document: Any) -> int:
        for path in folder.iterdir():
            path.unlink()
        return check(document)

    monkeypatch.setattr(known, "check_choices", clear_then_check)
    assert export_choices(tmp_path / "choices.json").kernels == 1
    assert len(json.loads((tmp_path / "choices.json").read_text())["files"]) == 1


@pytest.mark.parametrize("content", [b'{"name": "mine"}', b"x", None])
def test_an_export_replaces_an_export_and_nothing_else(content: bytes | None, folder: Path, tmp_path: Path) -> None:
    remember()
    (cached,) = folder.iterdir()
    out = tmp_path / "out.json" if content else cached
    if content:
        out.write_bytes(content)
    before = out.read_bytes()
    result = call("cache export --out", out)
    assert (result.exit_code, out.read_bytes()) == (1, before)
    assert "is not an export of the cache, so it is not replaced" in words(result.stderr)
    for _ in range(2):  # onto an empty file, and onto an export
        (tmp_path / "again.json").touch()
        assert call("cache export --out", tmp_path / "again.json").exit_code == 0


def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As another machine has it: an empty cache."""
    monkeypatch.setenv(kernel_cache.VARIABLE, str(tmp_path / "elsewhere"))


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


def test_launches_of_a_problem_that_both_know_are_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remember()
    export_choices(tmp_path / "choices.json", KERNEL)
    elsewhere(tmp_path, monkeypatch)
    here = ChoiceCache.of(KERNEL, "s1", H200)
    here.record(problem(64), CONFIGS[0], 99.0)
    here.saw_launch(problem(64), ["rows"], [64, "torch.float16"])
    for _ in range(2):
        import_choices(tmp_path / "choices.json")
        (known,) = known_kernels(KERNEL)
        assert [launch["key"] for launch in known.problems[-1].launches] == [
            [64, 128, "torch.bfloat16", "torch.float32"],
            [64, "torch.float16"],
        ]


def test_an_import_keeps_the_newest_as_far_as_there_is_room_and_counts_what_it_kept(
    tmp_path: Path, folder: Path
) -> None:
    here = ChoiceCache.of(KERNEL, "s1", H200)
    here.record(problem(64), CONFIGS[0], 99.0)
    (path,) = folder.iterdir()
    document = json.loads(path.read_text())
    (entry,) = document["entries"]
    document["entries"] = [
        entry | {"source": "s2", "problem": problem(rows).to_json(), "times": {"0": 1.0 + rows}} for rows in range(3000)
    ]
    functions = [{"function": "a.b", "entries": {f"a.b#1 on here: {n}": {"x": "y" * 1000} for n in range(1000)}}]
    value = {"format": "foretune exported choices 1", "files": [document], "functions": functions}
    (tmp_path / "choices.json").write_text(json.dumps(value))
    counted = import_choices(tmp_path / "choices.json")
    (known,) = known_kernels(KERNEL)
    kept = [one.problem["rows"] for one in known.problems]
    assert kept == [*range(3000 - len(kept) + 1, 3000), 64]
    size = path.stat().st_size
    assert MOST_BYTES - 400 < size <= MOST_BYTES
    (function,) = cache_contents("a.b").functions
    assert list(function.entries)[-1] == "a.b#1 on here: 999"
    assert MOST_BYTES - 1100 < function.path.stat().st_size <= MOST_BYTES
    assert counted.problems == len(kept) - 1 + len(function.entries)
    gone = 3000 - len(kept) + 1
    assert counted.left == (
        f"{gone} times of {gone + 1000 - len(function.entries)} problems are left out: a file of the cache has at most "
        "512 KiB",
    )


@pytest.mark.parametrize("kind", ["a pipe", "a socket", "a device", "Is a directory"])
def test_only_a_regular_file_is_imported(kind: str, tmp_path: Path) -> None:
    path = Path("/dev/zero") if kind == "a device" else tmp_path / "x"
    with contextlib.ExitStack() as stack:
        if kind == "a pipe":
            os.mkfifo(path)
        elif kind == "a socket":
            server = stack.enter_context(socket.socket(socket.AF_UNIX))
            monkeypatch = stack.enter_context(pytest.MonkeyPatch.context())
            monkeypatch.chdir(tmp_path)  # the path of a socket must be short
            server.bind("x")
        elif kind == "Is a directory":
            path.mkdir()
        result = call("cache import", path)
    assert result.exit_code == 1
    assert f"Error: {path}: " in words(result.stderr)
    assert kind in words(result.stderr)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not exported choices: "),
        (b"[" * 100_000, "not exported choices: "),
        (b'{"format": "foretune exported choices 1"}', "not exported choices: it is not a file of format"),
        (b'{"format": "foretune choices 1", "files": []}', "not exported choices: it is not a file of format"),
        (
            b'{"format": "foretune exported choices 1", "files": [3]}',
            "not exported choices: it is not a file of format",
        ),
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


def test_a_malformed_record_is_left_out_of_an_import_and_the_others_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember()
    remember(kernel="other.kernel")
    export_choices(tmp_path / "choices.json")
    value: dict[str, Any] = json.loads((tmp_path / "choices.json").read_text())
    value["files"][1]["entries"][0]["times"]["0"] = -1
    value["files"].append({"format": "foretune choices 1"})
    (tmp_path / "choices.json").write_text(json.dumps(value))
    elsewhere(tmp_path, monkeypatch)
    counted = import_choices(tmp_path / "choices.json")
    assert (counted.problems, counted.times) == (7, 42)
    assert counted.left == ("2 malformed records are left out",)
    assert sum(len(one.problems) for one in cache_contents().kernels) == 7


def test_where_nothing_can_be_kept_importing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remember()
    export_choices(tmp_path / "choices.json")
    monkeypatch.setenv(kernel_cache.VARIABLE, "/dev/null/nowhere")
    with pytest.warns(ForetuneWarning, match="File exists"), pytest.raises(ForetuneError, match="cannot be stored"):
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
    with pytest.raises(ForetuneError, match=r"has no choices of 'no\.such', only of .*scale"):
        cache_contents("no.such")


@pytest.mark.parametrize("command", ["freeze", "export --format fla"])
def test_a_function_is_neither_frozen_nor_written_for_other_projects(
    command: str, tuned: TunedFunction, tmp_path: Path
) -> None:
    result = call(f"cache {command} {FUNCTION} --out", tmp_path / "out")
    assert result.exit_code == 1
    assert "is a tuned function: only choices of kernels can be written in this format" in words(result.stderr)


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


MALFORMED: dict[str, dict[str, Any]] = {
    "a choice that is a list": {"chosen": [1]},
    "a choice that is false": {"chosen": False},
    "a time of 400 digits": {"outcomes": {"a": ["ok", 10**400, 0.1, 3, None]}},
    "a time that is true": {"outcomes": {"a": ["ok", True, 0.1, 3, None]}},
    "a time of a failed one": {"outcomes": {"a": ["launch_failed", 1.0, None, 0, "no"]}},
    "a spread that is a text": {"outcomes": {"a": ["ok", 1.0, "x", 3, None]}},
    "an error that is a list": {"outcomes": {"a": ["launch_failed", None, None, 0, ["no"]]}},
    "outcomes that are a list": {"outcomes": []},
    "software of numbers": {"software": {"torch": 1}},
    "a problem that is a text": {"problem": "x"},
    "done that is a number": {"done": 3},
}


@pytest.mark.parametrize("wrong", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_record_of_a_function_is_told_and_the_others_are_kept(
    wrong: dict[str, Any], tuned: TunedFunction, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = tmp_path.glob("cache/functions/*.json")
    document = json.loads(path.read_text())
    first, second = document["entries"]
    document["entries"][first] |= wrong
    path.write_text(json.dumps(document))
    said = f"{path}: 1 malformed records are left out"
    shown = call(f"cache show {FUNCTION} --json")
    assert (shown.exit_code, said in words(shown.stderr)) == (0, True)
    (listed,) = json.loads(shown.stdout)["functions"]
    assert [row["key"] for row in listed["by_key"]] == [second.partition("#")[2]]
    with pytest.warns(ForetuneWarning, match="1 malformed records"):
        assert export_choices(tmp_path / "choices.json").problems == 1
    value = {"format": "foretune exported choices 1", "files": []}
    value |= {"functions": [{"function": FUNCTION, "entries": document["entries"]}]}
    (tmp_path / "damaged.json").write_text(json.dumps(value))
    with pytest.warns(ForetuneWarning, match="1 malformed records"):
        assert clear_cache(FUNCTION).functions == 1
    elsewhere(tmp_path, monkeypatch)
    counted = import_choices(tmp_path / "damaged.json")
    assert (counted.problems, counted.left) == (1, ("1 malformed records are left out",))
    assert ConfigCache.of(FUNCTION).keys() == [second]


@pytest.mark.parametrize("function", [3, {"function": "a.b"}, {"function": "a.b", "entries": {"c.d#1 on x: 1": {}}}])
def test_a_function_that_is_none_keeps_all_out(function: object, tmp_path: Path, folder: Path) -> None:
    value = {"format": "foretune exported choices 1", "files": [], "functions": [function]}
    (tmp_path / "choices.json").write_text(json.dumps(value))
    with pytest.raises(ForetuneError, match="not exported choices: "):
        import_choices(tmp_path / "choices.json")
    assert not folder.with_name("functions").exists()
