"""Files of the tuning cache that somebody damaged or put something else in the place of, and every command on them."""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, chdir, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import rich.console
from foretune.runtime import arguments as warn
from foretune.runtime.tuning.cache import exports, kernel_cache
from foretune.runtime.tuning.cache.cache_folder import (
    CacheContents,
    cache_contents,
    clear_cache,
    export_choices,
    import_choices,
)
from foretune.runtime.tuning.cache.document import check_choices
from foretune.runtime.tuning.cache.kernel_cache import ChoiceCache, shared_file
from foretune.runtime.tuning.cache.shared_file import SharedFile
from foretune.runtime.tuning.functions import config_cache
from foretune.runtime.tuning.functions.config_cache import ConfigCache, record_key
from fuzz.bundles import _bytes_changed
from fuzz.judging import REFUSED, TroubleError, same, within
from fuzz.oddities import DEEP, Change, changed, changes, text_of
from hypothesis import strategies as st
from remembered import CONFIGS, H200, KERNEL, problem, time_us

FUNCTION = "package.work.scale"
SIZES = (64, 1024, 4096)
FOREIGN = '{"name": "mine", "format": "nobody\'s"}'


def _choices() -> dict[str, Any]:
    file = SharedFile(None, check=check_choices, forget=lambda _: False)
    cache = ChoiceCache(file, KERNEL, "s1", H200)
    for rows in SIZES:
        cache.record_all(problem(rows), {config: time_us(rows, config) for config in CONFIGS[:3]})
        cache.choose(problem(rows), "b1", CONFIGS[0])
        arguments = {"x": {"tensor": "bfloat16", "aligned": True}, "rows": rows, "SCALE": 0.5}
        cache.saw_launch(problem(rows), ["rows"], [rows, "torch.bfloat16"], arguments)
    return json.loads(json.dumps(file.read()))


def _record(chosen: str | None) -> dict[str, Any]:
    outcomes = {'{"tile":1}': ["ok", 12.5, 0.01, 5, None], '{"tile":2}': ["launch_failed", None, None, 0, "no"]}
    software = {"driver": "1", "torch": "2", "triton": "3", "python": "3"}
    return {"problem": problem(8).to_json(), "software": software, "outcomes": outcomes, "chosen": chosen, "done": "x"}


KEYS = [record_key(FUNCTION, "a1", "here", str(size)) for size in (1, 2, 3)]
CHOICES = _choices()
FUNCTIONS: dict[str, Any] = {
    "format": config_cache.FORMAT,
    "entries": {KEYS[0]: _record('{"tile":1}'), KEYS[1]: {"sites": {"a.kernel": _record(None)}}, KEYS[2]: {"mine": 1}},
}
EXPORTED = {
    "format": "foretune exported choices 1",
    "files": [CHOICES],
    "functions": [{"function": FUNCTION, "entries": FUNCTIONS["entries"]}],
}
#: What is damaged: a file of the cache, an exported file, or what a command is to write onto.
JSONS = {"choices": CHOICES, "functions": FUNCTIONS, "exported": EXPORTED}
OUTPUTS = ("out.json", "out.py", "fla")
INSTEAD = ["pipe", "socket", "link", "link to a device", "loop", "hard link", "folder", "empty", "huge", "unreadable"]
NAMES = ["\udcff.json", "a\nb.json", "\x1b[31m.json", "[red].json", "x" * 240 + ".json", ".json", "a.json.unreadable"]


class Damaged(NamedTuple):
    file: str
    changes: tuple[Change, ...] = ()
    bytes: tuple[tuple[float, str, int], ...] = ()  # place as a share of the file, what is done there, with what
    instead: str = ""
    copy: str = ""  # the file lies there once more, under this name
    linked: bool = False  # the cache's folders are links


def _damaged(**said: st.SearchStrategy[Any]) -> st.SearchStrategy[Damaged]:
    return st.fixed_dictionaries(said).map(lambda drawn: Damaged(**drawn))


def _some(what: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(what, min_size=1, max_size=2).map(tuple)


_files = st.sampled_from([*JSONS, *OUTPUTS])
_bytes = st.tuples(st.floats(0, 1), st.sampled_from(["flip", "cut", "gap", "repeat"]), st.integers(0, 255))
_json_damage = st.sampled_from([*JSONS]).flatmap(
    lambda file: _damaged(file=st.just(file), changes=_some(changes(JSONS[file])), linked=st.booleans())
)
inputs = st.one_of(
    _json_damage,
    _json_damage,
    _damaged(file=_files, bytes=_some(_bytes)),
    # A pipe that is named as an output waits for its reader, as it should.
    _damaged(file=_files, instead=st.sampled_from(INSTEAD), linked=st.booleans()).filter(
        lambda one: one.instead != "pipe" or one.file not in ("out.json", "out.py")
    ),
    _damaged(file=st.sampled_from([*JSONS]), copy=st.sampled_from(NAMES)),
)


def check(damaged: Damaged, folder: Path) -> str:
    run = folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    places = _laid_out(run, damaged)
    outside = _snapshot(run / "outside")
    with _cache_in(run / "cache"), chdir(run):
        is_answered = [_used(damaged, run, places, outside)]
        foreign = {path: path.read_text() for path in _foreign(run)}
        for path, text in foreign.items():
            same(f"{path.name} is somebody else's", FOREIGN, text)
    same("what lies outside", outside, _snapshot(run / "outside"))
    same("what lies beside", {"cache", "outside", "out"}, {path.name for path in run.iterdir()})
    return "answered" if all(is_answered) else "refused"


def _used(damaged: Damaged, run: Path, places: dict[str, Path], outside: Any) -> bool:
    """Every command on what is there. Whether all were answered."""
    good, cache = _good(damaged), run / "cache"

    def step(name: str, work: Callable[[], Any]) -> Any:
        try:
            found = within(work)
        except TroubleError as trouble:
            if damaged.instead != "link to a device" or "No space left" not in trouble.text:  # which a command tells
                raise
            found = REFUSED
        same(f"{name}: what lies outside", outside, _snapshot(run / "outside"))
        return found

    answers = [step("show", lambda: _shown(cache_contents(None)))]
    if damaged.file != "exported":
        _all_there("show", good, answers[0])
    answers += [step("show of one", lambda name=name: _shown(cache_contents(name))) for name in (KERNEL, FUNCTION)]
    before = {name: _content(path) for name, path in places.items()}
    answers.append(step("export", lambda: export_choices(places["out.json"])))
    answers.append(step("freeze", lambda: exports.freeze_choices(KERNEL).save(places["out.py"])))
    answers.append(step("fla", partial(_tables, places)))
    if damaged.file in OUTPUTS and (damaged.bytes or damaged.instead) and not _may_be_ours(damaged.file, before):
        same(f"{damaged.file} is not ours", before[damaged.file], _content(places[damaged.file]))
    answers.append(step("a launch", partial(_launched, good if damaged.file in ("choices", "functions") else None)))
    answers.append(step("import", lambda: import_choices(places["exported"])))
    if damaged.file == "exported" and answers[-1] is not REFUSED:
        _all_there("import", good, within(lambda: cache_contents(None)))
    if answers[-1] is not REFUSED and not places["out.json"].is_symlink():
        _imported_elsewhere(run, places)
    answers += [step("clear of one", partial(clear_cache, KERNEL)), step("clear", clear_cache)]
    if damaged.linked:
        same("clear: files behind a link", True, any(cache.with_name("outside").glob("real-*/*.json")))
    return REFUSED not in answers


def _imported_elsewhere(run: Path, places: dict[str, Path]) -> None:
    """What was exported is exactly what is imported by an empty cache."""
    here = within(lambda: cache_contents(None))
    elsewhere = run / "outside" / "elsewhere"
    exported = run / "out" / "again.json"
    if within(lambda: export_choices(exported)) is REFUSED:
        return
    with _cache_in(elsewhere):
        counted = within(lambda: import_choices(exported))
        there = within(lambda: cache_contents(None))
    shutil.rmtree(elsewhere, ignore_errors=True)
    same("export and import: left", (), counted.left)
    if len(here.kernels) < 2:  # not a copy's times as well
        same("export and import: times", sum(map(_times, here.kernels)), sum(map(_times, there.kernels)))


def _times(kernel: Any) -> int:
    return sum(len(one.times_us) for one in kernel.problems)


def _launched(good: Any) -> None:
    """As a launch and a tuned function read and write."""
    cache = ChoiceCache.of(KERNEL, "s1", H200)
    for rows in SIZES:
        times = dict(cache.times(problem(rows)))
        if good is not None and rows in good[0]:
            same("a launch", good[0][rows], times)
        cache.choice(problem(rows), "b1")
    cache.problems()
    cache.record(problem(7), CONFIGS[0], 7.0)
    cache.saw_launch(problem(7), ["rows"], [7])
    same("what was recorded", {CONFIGS[0]: 7.0}, dict(cache.times(problem(7))))
    functions = ConfigCache.of(FUNCTION)
    for key in good[1] if good is not None else ():
        same("a tuned function", FUNCTIONS["entries"][key], functions.get(key))
    functions.set(KEYS[0] + "0", {"mine": 2})
    if good is not None:  # and the good ones are still there
        for rows, expected in good[0].items():
            same("after a launch", expected, dict(ChoiceCache.of(KERNEL, "s1", H200).times(problem(rows))))
        same("after a tuned function", good[1], good[1] & set(functions.keys()))


def _shown(contents: CacheContents) -> CacheContents:
    json.dumps(contents.to_json(), allow_nan=False)
    with open(os.devnull, "w") as nowhere:
        rich.console.Console(file=nowhere, width=80).print(contents)
    return contents


def _good(damaged: Damaged) -> tuple[dict[int, Any], set[str]]:
    """What no damage touches: times by the number of rows, and keys of the function."""
    times = {rows: {config: time_us(rows, config) for config in CONFIGS[:3]} for rows in SIZES}
    keys = set(KEYS)
    for part, path, how in _damage(damaged):
        match path:
            case ("entries", int(place), *_) if part == "choices":
                times.pop(SIZES[place], None)
            case ("entries", str(key), *_) if part == "functions":
                keys.discard(key)
            case ("entries" | "configs",) if how == "add":
                pass
            case _:  # the whole file: each entry names each config
                times, keys = ({}, keys) if part == "choices" else (times, set())
    return times, keys


def _damage(damaged: Damaged) -> Iterator[tuple[str, tuple[str | int, ...], str]]:
    """Where something was changed: in a file of choices or of functions, the path in its JSON, and how."""
    if damaged.file in OUTPUTS or damaged.copy:
        return
    parts = ["choices", "functions"] if damaged.file == "exported" else [damaged.file]
    is_unreadable = bool(damaged.bytes or damaged.instead) or any(
        DEEP in str(change.value) for change in damaged.changes
    )
    is_unreadable |= len(damaged.changes) > 1 and damaged.changes[0].how == "drop"  # the second's path is another place
    for change in (Change((), "set", None),) if is_unreadable else damaged.changes:
        match change.path:
            case ("files", 0, *path) if damaged.file == "exported":
                yield "choices", tuple(path), change.how
            case ("functions", 0, *path) if damaged.file == "exported":
                yield "functions", tuple(path), change.how
            case ("files" | "functions",) if damaged.file == "exported" and change.how == "add":
                pass
            case path if damaged.file != "exported":
                yield damaged.file, path, change.how
            case _:
                yield from ((part, (), "set") for part in parts)


def _all_there(what: str, good: Any, contents: CacheContents) -> None:
    found = {
        dict(one.problem.dims).get("rows"): dict(one.times_us) for kernel in contents.kernels for one in kernel.problems
    }
    for rows, times in good[0].items():
        same(f"{what}: {rows} rows", times, found.get(rows))
    entries = {key: entry for function in contents.functions for key, entry in function.entries.items()}
    for key in good[1]:
        same(f"{what}: {key}", FUNCTIONS["entries"][key], entries.get(key))


def _laid_out(run: Path, damaged: Damaged) -> dict[str, Path]:
    """Files of the cache, an exported file and earlier outputs, one of them damaged; their paths."""
    run.mkdir()
    (run / "out").mkdir()
    (run / "outside").mkdir()
    (run / "outside" / "foreign").write_text(FOREIGN)
    (run / "outside" / "ours").write_text(json.dumps(CHOICES, separators=(",", ":")))
    choices, functions = run / "cache" / "choices", run / "cache" / "functions"
    (run / "cache").mkdir()
    for place in (choices, functions):
        real = run / "outside" / f"real-{place.name}" if damaged.linked else place
        real.mkdir()
        (real / "package.json").write_text(FOREIGN)
        if damaged.linked:
            place.symlink_to(real)
    with _cache_in(run / "cache"):
        file = shared_file(choices, KERNEL, H200).path
        its_file = ConfigCache.of(FUNCTION).path
    assert file is not None
    assert its_file is not None
    places = {"choices": file, "functions": its_file, "exported": run / "out" / "exported.json"}
    places |= {"out.json": run / "out" / "out.json", "out.py": run / "out" / "out.py"}
    places |= {"fla": run / "out" / "fla" / "NVIDIA_H200" / "softmax_kernel.json"}
    for name, value in JSONS.items():
        for change in damaged.changes if name == damaged.file else ():
            value = changed(value, change)
        places[name].write_text(text_of(value))
    if damaged.file in OUTPUTS:
        with _cache_in(run / "cache"):
            export_choices(places["out.json"])
            exports.freeze_choices(KERNEL).save(places["out.py"])
            _tables(places)
    path = places[damaged.file]
    for share, how, value in damaged.bytes:
        content = path.read_bytes()
        path.write_bytes(_bytes_changed(content, int(share * len(content)), how, value))
    if damaged.copy:
        shutil.copyfile(path, os.path.join(path.parent, damaged.copy))
    if damaged.instead:
        _put_instead(path, damaged.instead, run / "outside")
    return places


def _tables(places: dict[str, Path]) -> Any:
    return exports.export_fla_tables(places["fla"].parents[1])


def _put_instead(path: Path, what: str, outside: Path) -> None:
    content = path.read_bytes()
    path.unlink()
    match what:
        case "pipe":
            os.mkfifo(path)
        case "socket":
            with socket.socket(socket.AF_UNIX) as server, chdir(path.parent), suppress(OSError):
                server.bind(path.name)  # whose path must be short
        case "link":
            path.symlink_to(outside / "ours")
        case "link to a device":
            path.symlink_to("/dev/full")
        case "loop":
            path.symlink_to(path.name)
        case "hard link":
            os.link(outside / "ours", path)
        case "folder":
            path.mkdir()
            (path / "file").write_text(FOREIGN)
        case "empty":
            path.touch()
        case "huge":
            with path.open("wb") as file:
                file.write(content[:100])
                file.truncate(1 << 36)
        case "unreadable":
            path.write_bytes(content)
            path.chmod(0)


def _may_be_ours(file: str, content: dict[str, Any]) -> bool:
    """Whether what lay there can be taken for what the command writes."""
    text = content[file]
    mark = {
        "out.json": b"foretune exported choices ",
        "out.py": b"#: Meta-parameters and launch options of each config.",
        "fla": exports.FLA_MARK,
    }
    return text is None or not isinstance(text, bytes) or text == b"" or mark[file] in text


def _content(path: Path) -> Any:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(status.st_mode):
        return stat.S_IFMT(status.st_mode)
    return path.read_bytes() if status.st_size < 1 << 24 else status.st_size


def _foreign(run: Path) -> Iterator[Path]:
    yield run / "outside" / "foreign"
    for name in ("choices", "functions"):
        yield run / "cache" / name / "package.json"


def _snapshot(folder: Path) -> dict[str, Any]:
    """Whatever lies in a folder, but for the cache's own files, which commands write."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if not path.parent.name.startswith("real-") or path.name == "package.json":
            found[str(path)] = _content(path)
    return found


@contextmanager
def _cache_in(folder: Path) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, {kernel_cache.VARIABLE: str(folder)}))
        stack.enter_context(patch.object(warn, "_warned", set()))
        for known in (kernel_cache._shared, config_cache._opened):
            known.cache_clear()
            stack.callback(known.cache_clear)
        yield
