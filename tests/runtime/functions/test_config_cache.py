"""What is remembered, for whom, and when it is not trusted."""

from __future__ import annotations

import json
import sys
import threading
import warnings

import foretune
import pytest
from foretune import ConfigCache, ForetuneError, ForetuneWarning
from foretune.runtime.tuning.functions import TunedFunction, config_cache, function_tuner


@pytest.fixture
def make(watch):
    """A tuned function, as each process makes it anew: (function, tiles that ran)."""

    def make(**options):
        calls = []

        def function(x, tile):
            calls.append(tile)
            watch.spend(tile)
            return tile

        config_cache._opened.cache_clear()
        return foretune.tune({"tile": [5, 2]}, timer=watch, **options)(function), calls

    return make


def test_another_process_measures_nothing(make, own_folder):
    first, calls = make()
    assert (first(1), len(calls)) == (2, 27)
    second, calls = make()
    assert (second(1), calls) == (2, [2])
    (file,) = (own_folder / "functions").glob("*.json")
    assert file.stat().st_mode & 0o777 == 0o600
    (key,) = second.cache.keys()
    assert key.startswith(f"{second.name}#")
    assert key.endswith('{"x":1}')


def test_another_source_or_device_is_another_function(make, watch, monkeypatch):
    make()[0](1)
    changed, calls = make()
    monkeypatch.setattr(changed, "digest", "0" * 8)
    changed(1)
    assert len(calls) == 27
    from foretune.runtime.tuning.functions import calls as reading
    from foretune.runtime.tuning.functions.calls import Place

    monkeypatch.setattr(reading, "place_of", lambda arguments, n_ranks: Place("another card", None))
    other, calls = make()
    other(1)
    assert len(calls) == 27


def test_comments_are_no_change_and_code_is():
    from foretune.runtime.tuning.functions.wrapped import identity_of

    def digest(text):
        space = {}
        exec(compile(text, "<shell>", "exec"), space)
        return identity_of(space["f"])[0]

    assert (
        digest("def f(x):\n return x + 1")
        == digest("def f(x):  # adds\n return x + 1")
        != digest("def f(x):\n return x + 2")
    )


def test_a_function_whose_file_is_another_by_now_is_told_by_its_code(tmp_path):
    from foretune.runtime.tuning.functions.wrapped import identity_of

    (tmp_path / "kernels.py").write_text("# what was open( is not\ncall(x  # closed)\n")

    def digest(text):
        space = {}
        exec(compile(text, str(tmp_path / "kernels.py"), "exec"), space)
        return identity_of(space["f"])[0]

    one, same, other = (digest(f"def f(x):\n return x + {number}") for number in (1, 1, 2))
    assert one == same != other


@pytest.mark.parametrize(("said", "measures"), [("known", False), ("strict", True), ("always", True)])
def test_what_other_versions_measured_is_used_with_a_warning_or_not_at_all(make, monkeypatch, said, measures):
    make()[0](1)
    monkeypatch.setattr(function_tuner, "software", lambda: {"torch": "99"})
    monkeypatch.setenv("FORETUNE_TUNE", said)
    later, calls = make()
    if measures:
        assert later(1) == 2
    else:
        with pytest.warns(
            ForetuneWarning, match=r"was tuned with .*: that choice runs; FORETUNE_TUNE=strict tunes again"
        ):
            assert later(1) == 2
    assert (len(calls) > 1) == measures
    calls.clear()
    assert (later(1), later.tune(1).tuned_s, calls) == (2, 0.0, [2])  # once a process
    if said == "strict":
        again, calls = make()
        assert (again(1), calls) == (2, [2])


def test_forced_tuning_measures_all_again(make):
    tuned, calls = make()
    tuned(1)
    assert tuned.tune(1).tuned_s == 0.0
    tuned.tune(1, force=True)
    assert len(calls) == 27 + 26


def test_what_is_cleared_is_tuned_again(make):
    tuned, calls = make()
    tuned(1)
    tuned.cache.clear()
    calls.clear()
    tuned(1)
    assert len(calls) == 27


def test_a_cache_may_be_a_file_or_shared_or_in_memory(make, tmp_path):
    make(cache=tmp_path / "mine.json")[0](1)
    again, calls = make(cache=str(tmp_path / "mine.json"))
    assert (again(1), calls) == (2, [2])
    shared = ConfigCache()
    make(cache=shared)[0](1)
    again, calls = make(cache=shared)
    assert (again(1), calls) == (2, [2])
    make(cache=False)[0](3)
    again, calls = make(cache=False)
    again(3)
    assert len(calls) == 27


@pytest.mark.parametrize(
    "entry",
    [
        {},
        {"outcomes": 3},
        {
            "problem": None,
            "software": {},
            "outcomes": {'{"tile":2}': ["ok", -1.0, 0, 0, None]},
            "chosen": None,
            "done": "",
        },
        {"problem": 3, "software": {}, "outcomes": {}, "chosen": None, "done": ""},
        {"problem": None, "software": {}, "outcomes": {"a": ["odd", None, 0, 0, None]}, "chosen": None, "done": ""},
    ],
)
def test_an_entry_that_is_none_is_measured_anew(make, entry, tmp_path):
    tuned, _ = make(cache=tmp_path / "mine.json")
    tuned(1)
    (key,) = tuned.cache
    tuned.cache.set(key, entry)
    again, calls = make(cache=tmp_path / "mine.json")
    again(1)
    assert len(calls) == 27


def test_a_choice_that_is_no_config_of_the_space_never_runs(make, tmp_path):
    tuned, _ = make(cache=tmp_path / "mine.json")
    tuned(1)
    (key,) = tuned.cache
    entry = tuned.cache.get(key)
    tuned.cache.set(key, entry | {"chosen": '{"tile":7}', "software": entry["software"]})
    again, calls = make(cache=tmp_path / "mine.json")
    assert (again(1), set(calls)) == (2, {2})


def test_a_foreign_file_is_begun_anew_with_one_warning(make, tmp_path):
    path = tmp_path / "mine.json"
    for text in ("[]", '{"format": "another"}', "{", json.dumps({"format": config_cache.FORMAT, "entries": {"a": 3}})):
        path.write_text(text)
        tuned, _ = make(cache=path)
        with pytest.warns(ForetuneWarning, match="cannot be read and is replaced by a new file"):
            assert tuned(1) == 2
        assert make(cache=path)[0].tune(1).tuned_s == 0.0
        foretune.runtime.arguments._warned.clear()


def test_a_disk_that_cannot_be_written_stops_nothing(make, tmp_path):
    (tmp_path / "file").write_text("")
    tuned, _ = make(cache=tmp_path / "file" / "mine.json")
    with pytest.warns(ForetuneWarning, match="kept in this process only"):
        assert tuned(1) == 2
    assert tuned.tune(1).tuned_s == 0.0


def test_a_cache_is_a_mapping_of_texts_to_objects_that_nobody_else_changes(tmp_path):
    cache = ConfigCache(tmp_path / "c.json")
    assert (cache.get("a"), cache.keys(), len(cache), "a" in cache) == (None, [], 0, False)
    value = {"x": [1]}
    cache.set("a", value)
    value["x"].append(2)
    cache.get("a")["x"].append(3)
    assert cache.get("a") == ConfigCache(tmp_path / "c.json").get("a") == {"x": [1]}
    cache.set("b", {})
    cache.set("a", {"y": None})
    assert (cache.keys(), list(cache)) == (["b", "a"], ["b", "a"])
    cache.clear("b")
    assert cache.keys() == ["a"]
    for key, wrong in (("", {}), (3, {}), ("c", 3), ("c", {"x": object()}), ("c", {"x": float("nan")})):
        with pytest.raises(ForetuneError):
            cache.set(key, wrong)
    assert "1 keys" in repr(cache)


def test_threads_lose_nothing_of_each_other(tmp_path):
    caches = [ConfigCache(tmp_path / "c.json") for _ in range(8)]

    def fill(at):
        for turn in range(5):
            caches[at].set(f"{at} {turn}", {"turn": turn})

    threads = [threading.Thread(target=fill, args=(at,)) for at in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(caches[0]) == 40


def test_a_full_file_forgets_the_oldest(tmp_path, monkeypatch):
    cache = ConfigCache(tmp_path / "c.json")
    monkeypatch.setattr(cache._file, "most_bytes", 3000)
    for at in range(100):
        cache.set(f"key {at}", {"text": "x" * 50})
    assert (tmp_path / "c.json").stat().st_size <= 3000
    assert "key 99" in cache
    assert "key 0" not in cache


def entry_of(n_configs, chosen=0):
    """A finished record of so many configs; config i takes i + 1 us."""
    outcomes = {json.dumps({"tile": at, "text": "x" * 90}): ["ok", at + 1.0, 0.0, 10, None] for at in range(n_configs)}
    return {"problem": None, "software": {}, "outcomes": outcomes, "chosen": list(outcomes)[chosen], "done": "all"}


def test_a_key_with_thousands_of_configs_keeps_its_choice_and_the_other_keys(tmp_path):
    cache = ConfigCache(tmp_path / "c.json")
    for at in range(10):
        cache.set(f"key {at}", entry_of(3))
    large = entry_of(6000, chosen=4000)
    cache.set("large", large)
    assert (tmp_path / "c.json").stat().st_size <= cache._file.most_bytes
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as for a file that cannot be read
        later = ConfigCache(tmp_path / "c.json")
        kept = later.get("large")
    assert later.keys() == [*(f"key {at}" for at in range(10)), "large"]
    assert later.get("key 0") == entry_of(3)
    assert kept["chosen"] == large["chosen"]
    assert kept["outcomes"].items() <= large["outcomes"].items()
    fastest = list(large["outcomes"])[: len(kept["outcomes"]) - 1]
    assert list(kept["outcomes"]) == [*fastest, large["chosen"]]
    assert len(fastest) > 500


def test_the_kernels_of_a_contextual_function_are_shortened_too(tmp_path):
    cache = ConfigCache(tmp_path / "c.json")
    cache.set("small", {"sites": {"a": entry_of(3)}})
    cache.set("large", {"sites": {"a": entry_of(3), "b": entry_of(6000)}})
    assert cache.get("small") == {"sites": {"a": entry_of(3)}}
    kept = cache.get("large")["sites"]
    assert (kept["a"], kept["b"]["chosen"]) == (entry_of(3), entry_of(1)["chosen"])


def test_a_value_that_has_no_room_at_all_is_not_kept_and_costs_no_other_key(tmp_path):
    cache = ConfigCache(tmp_path / "c.json")
    cache.set("key", {"x": 1})
    with pytest.warns(ForetuneWarning, match="a new value does not fit into 524288 bytes: it is not stored"):
        cache.set("large", {"text": "x" * 600_000})
    assert cache.keys() == ConfigCache(tmp_path / "c.json").keys() == ["key"]


def test_a_space_of_thousands_of_configs_is_measured_once(watch, tmp_path):
    calls = []

    def function(x, tile, text):
        calls.append(tile)
        watch.spend(10 + abs(tile - 2000) if x else 1)

    space = [{"tile": tile, "text": "x" * 200} for tile in range(2400)]
    options = {"cache": tmp_path / "c.json", "timer": watch, "n_warmup": 1, "n_repeat": 1}
    first = foretune.tune(space, **options)(function)
    first(0)
    first(1)
    calls.clear()
    again = foretune.tune(space, **options)(function)
    again(1)
    again(0)
    assert calls == [2000, 0]
    result = again.tune(1)
    assert (result.best_config["tile"], result.best_time_us, result.tuned_s) == (2000, 10.0, 0.0)
    assert len(result.trials) + result.untried == 2400


def test_bookkeeping_is_linear_in_the_number_of_configs(watch, tmp_path, monkeypatch):
    now = [0.0]

    def work_for(n_configs):
        """Bytes handed to the cache, and calls made, where every config takes a second."""
        tuned = TunedFunction(
            lambda tile: now.__setitem__(0, now[0] + 1.0),
            {"tile": range(n_configs)},
            cache=False,
            timer=watch,
            n_warmup=1,
            n_repeat=1,
            clock=lambda: now[0],
        )
        written, calls = [], [0]
        monkeypatch.setattr(tuned.cache, "set", lambda key, value: written.append(len(json.dumps(value))))

        def count(frame, event, argument):
            calls[0] += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            tuned()
        finally:
            sys.setprofile(None)
        return sum(written), calls[0]

    (few_bytes, few_calls), (many_bytes, many_calls) = work_for(150), work_for(600)
    assert many_bytes < 6 * few_bytes  # 16 times, if it were written every second
    assert many_calls < 6 * few_calls
