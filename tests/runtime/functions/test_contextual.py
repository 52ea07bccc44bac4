"""Functions that are tuned as a whole: with tuned functions in them, and with kernels, in the interpreter."""

from __future__ import annotations

import functools
import threading

import foretune
import pytest
from foretune import ForetuneError, ForetuneWarning, TuningFailed
from foretune.runtime.tuning.functions import config_cache, function_tuner, in_step


@pytest.fixture
def part(watch):
    """Makes a tuned function that takes as long as `cost` says of its tile, and notes what ran."""

    def part(cost, fails=(), log=None):
        def function(x, tile):
            if log is not None:
                log.append(tile)
            if tile in fails:
                raise RuntimeError(f"no {tile}")
            watch.spend(cost[tile])
            return x + tile

        return foretune.tune({"tile": list(cost)}, cache=False, timer=watch)(function)

    return part


def whole(watch, function, **options):
    return foretune.contextual_autotune(**{"cache": False, "timer": watch, "n_warmup": 1, "n_repeat": 1} | options)(
        function
    )


def test_each_part_runs_its_configs_in_turn_while_the_others_run_their_best(part, watch):
    first_log, last_log = [], []
    first, last = part({3: 3, 1: 1}, log=first_log), part({7: 7, 5: 5, 6: 6}, log=last_log)
    function = whole(watch, lambda x: last(first(x)))
    assert function(0) == 1 + 5  # the keys of `last` follow from what `first` returns
    assert first_log[:5] == [3, 3, 3, 1, 1]
    results = function.tune(0)
    assert (results[0].best_config["tile"], results[0].tuned_s) == (1, 0.0)
    assert [trial.time_us for trial in results[0].trials] == [10.0, 8.0]
    assert "nothing was left to measure" in results[0].reason


def test_in_mode_off_each_part_runs_its_first_config(part, watch, monkeypatch):
    monkeypatch.setenv("FORETUNE_MODE", "off")
    log = []
    inner = part({3: 3, 1: 1}, log=log)
    assert whole(watch, lambda x: inner(x))(0) == 3
    assert log == [3]


def test_what_is_chosen_stays_outside_too_and_nothing_is_measured_again(part, watch):
    log = []
    inner = part({3: 3, 1: 1}, log=log)
    function = whole(watch, lambda x: inner(x) and None)
    function(0)
    log.clear()
    function(0)
    inner(0)
    assert log == [1, 1]


def test_a_part_is_judged_by_the_whole(part, watch):
    inner = part({1: 1, 2: 2})

    def function(x):
        if inner(x) - x == 1:
            watch.spend(100)  # what follows is slower then

    tuned = whole(watch, function)
    tuned(0)
    assert [one.best_config for one in tuned.tune(0)] == [{"tile": 2}]


def test_a_config_that_fails_is_replaced_so_that_the_function_ends(part, watch):
    ended = []
    inner = part({1: 1, 3: 3, 2: 2}, fails=[1])
    function = whole(watch, lambda x: ended.append(inner(x)))
    function(0)
    (result,) = function.tune(0)
    assert result.best_config == {"tile": 2}
    assert result.trials[0].error == "RuntimeError: no 1"
    assert len(ended) == 1 + 1 + 2 + 2 + 1 + 1 + 1  # none was cut short
    broken = part({1: 1, 2: 2}, fails=[1, 2])
    with pytest.raises(RuntimeError, match="no 2"):
        whole(watch, broken)(0)
    assert in_step.context_now() is None


def test_where_no_config_of_a_part_works_in_the_whole_that_is_said(part, watch):
    inner = part({1: 1, 2: 2})
    runs = []

    def function(x):
        inner(x)
        runs.append(1)
        if len(runs) > 1:
            raise errors[len(runs) % len(errors)]("after the first time")

    errors = [ValueError]
    with pytest.raises(ValueError, match="after the first time"):
        whole(watch, function)(0)
    runs.clear()
    errors = [ValueError, KeyError]
    with pytest.raises(TuningFailed, match="launch_failed: ValueError: after the first time") as failed:
        whole(watch, function)(0)
    assert type(failed.value.__cause__) in errors


def test_another_process_and_an_interrupted_one_go_on_from_what_is_known(part, watch):
    log, watch.stop = [], 3  # what the function captures is the same in both processes

    def make():
        config_cache._opened.cache_clear()
        first, last = part({2: 2, 1: 1}), part({4: 4, 3: 3})

        def function(x):
            first(x)
            last(x)
            log.append(1)
            if len(log) == watch.stop + 3:  # the first part is done by then
                raise KeyboardInterrupt

        return whole(watch, function, cache=True)

    with pytest.raises(KeyboardInterrupt):
        make()(0)
    log.clear()
    watch.stop = 1000
    make()(0)
    assert len(log) == 1 + 4 + 1 + 1  # only the last part was left
    log.clear()
    again = make()
    again(0)
    assert len(log) == 1 + 1
    assert [one.best_config["tile"] for one in again.tune(0)] == [1, 3]


@pytest.mark.parametrize(("said", "calls"), [("known", 2), ("strict", 7), ("always", 7)])
def test_other_versions(part, watch, monkeypatch, said, calls):
    log = []

    def make():
        config_cache._opened.cache_clear()
        inner = part({2: 2, 1: 1})
        return whole(watch, lambda x: log.append(inner(x)), cache=True)

    make()(0)
    log.clear()
    monkeypatch.setattr(function_tuner, "software", lambda: {"torch": "99"})
    monkeypatch.setenv("FORETUNE_TUNE", said)
    if said == "known":
        with pytest.warns(ForetuneWarning, match="was tuned with"):
            make()(0)
    else:
        make()(0)
    assert len(log) == calls


def test_side_effects_are_undone_before_every_run(part, watch):
    inner, seen = part({2: 2, 1: 1}), []

    def function(x):
        seen.append(list(x))
        inner(0)
        x.append(1)
        return len(x)

    x = [5]
    tuned = whole(watch, function, restore=["x"], key=lambda x: "")
    assert tuned(x) == 2
    assert (x, set(map(tuple, seen))) == ([5, 1], {(5,)})
    resets = []
    whole(watch, inner, reset=resets.append)(3)
    assert set(resets) == {3}


def test_what_is_new_in_every_run_is_not_tuned_for_ever(part, watch):
    function = whole(watch, lambda x: part({2: 2, 1: 1})(x))
    with pytest.warns(ForetuneWarning, match="every run launches new kernels or keys"):
        function(3)


def test_without_autotune_each_part_tunes_itself_as_ever(part, watch):
    log = []
    inner = part({2: 2, 1: 1}, log=log)
    assert whole(watch, lambda x: inner(x))(0, autotune=False) == 1
    assert len(log) == 2 * 13 + 1


def test_a_function_with_nothing_in_it_runs_and_is_told(watch):
    function = whole(watch, lambda x: x)
    with pytest.warns(ForetuneWarning, match="nothing in it is autotuned: there is nothing to tune"):
        assert function(3) == 3


def test_a_contextual_function_within_another_is_a_part_of_it(part, watch):
    inner = part({2: 2, 1: 1})
    within = whole(watch, lambda x: inner(x))
    around = whole(watch, lambda x: within(x))
    assert around(0) == 1
    assert [one.best_config for one in around.tune(0)] == [{"tile": 1}]
    tunes_within = whole(watch, lambda x: within.tune(x) and inner(x))
    with pytest.raises(ForetuneError, match="is run by a function that is being tuned as a whole"):
        tunes_within(0)


def test_another_thread_decides_for_itself_meanwhile(part, watch):
    log = []
    inner = part({2: 2, 1: 1}, log=log)
    met = []

    def function(x):
        inner(x)
        if not met:
            met.append(1)
            thread = threading.Thread(target=lambda: met.append(in_step.context_now()))
            thread.start()
            thread.join(10)

    whole(watch, function)(0)
    assert met == [1, None]


def test_threads_tune_a_function_once(part, watch):
    log = []
    inner = part({2: 2, 1: 1})
    function = whole(watch, lambda x: log.append(x) or inner(x))
    barrier, results = threading.Barrier(8), []

    def run():
        barrier.wait(10)
        results.append(function(0))

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == [1] * 8
    assert len(log) == 1 + 2 * 2 + 1 + 8


@pytest.mark.parametrize(
    "options",
    [
        {"key": 3},
        {"n_warmup": 0},
        {"n_repeat": 0},
        {"reset": 3},
        {"restore": 3},
        {"logs": 3},
        {"cache": 3},
        {"timer": 3},
    ],
)
def test_an_option_that_is_none_is_refused_where_it_is_declared(options):
    with pytest.raises(ForetuneError):
        foretune.contextual_autotune(**options)(lambda x: x)
    with pytest.raises(ForetuneError, match="autotune_pg must be a torch process group but is 3"):
        foretune.contextual_autotune(cache=False)(lambda x: x)(1, autotune_pg=3)


def test_logs_have_each_config_of_each_part(part, watch, tmp_path):
    inner = part({2: 2, 1: 1})
    whole(watch, lambda x: inner(x), logs=tmp_path / "logs")(0)
    lines = (tmp_path / "logs" / "rank-0.log").read_text().splitlines()
    assert [line.rpartition("}: ")[2] for line in lines] == [
        "1/2 tile=2: 2.0 us (best 2.0 us: tile=2)",
        "2/2 tile=1: 1.0 us (best 1.0 us: tile=1)",
    ]


@pytest.fixture
def kernel(toy):
    """The toy product's autotuner, as somebody declared it; it must never tune itself."""

    def refuse(kernel_call, quantiles):
        raise AssertionError("it tunes itself")

    return toy.tuned(lambda configs, named, **kwargs: configs[:4], do_bench=refuse)


@pytest.mark.interpret
def test_kernels_run_their_configs_in_turn_and_are_as_they_were(toy, kernel, watch):
    import torch
    import triton

    a, b, c = toy.operands(32, 32, 32)
    costs, ran = {(32, 32): 1.0}, []

    def grid(knobs):
        ran.append((knobs["BLOCK_M"], knobs["BLOCK_N"]))
        watch.spend(costs.get(ran[-1], 5.0))
        return toy.grid(knobs)

    def function(a, b, c):
        kernel[grid](a, b, c, 32, 32, 32)
        c.mul_(2)  # in place
        return c

    own_run, before = triton.runtime.Autotuner.run, [dict(vars(config)) for config in kernel.configs]
    function = whole(watch, function, cache=True)
    torch.testing.assert_close(function(a, b, c), 2 * (a.float() @ b.float()), atol=1e-2, rtol=1e-2)
    assert triton.runtime.Autotuner.run is own_run
    assert type(kernel.cache) is dict
    assert [dict(vars(config)) for config in kernel.configs] == before
    assert list(kernel.cache.values()) == [kernel.configs[3]]
    assert ran == [(16, 16)] * 3 + [(32, 16)] * 2 + [(16, 32)] * 2 + [(32, 32)] * 4
    (result,) = function.tune(a, b, c)
    assert (result.best_config["BLOCK_M"], len(result.trials)) == (32, 4)
    kernel.cache.clear()
    ran.clear()
    config_cache._opened.cache_clear()
    whole(watch, function.function, cache=True)(a, b, c)  # as in another process
    assert ran == [(32, 32)] * 2


@pytest.mark.interpret
def test_a_launch_that_fails_leaves_everything_as_it_was(toy, kernel, watch):
    import triton

    a, b, c = toy.operands(32, 32, 32)

    def grid(knobs):
        raise RuntimeError("no grid")

    own_run = triton.runtime.Autotuner.run
    with pytest.raises(RuntimeError, match="no grid"):
        whole(watch, lambda a: kernel[grid](a, b, c, 32, 32, 32))(a)
    assert triton.runtime.Autotuner.run is own_run
    assert kernel.cache == {}
    assert type(kernel.cache) is dict
    assert in_step.context_now() is None


@pytest.mark.interpret
@pytest.mark.parametrize("own_run", [False, True])
def test_an_attached_kernel_is_met_as_any_other(toy, kernel, watch, own_run):
    """Before and after, it runs attached; what is chosen is in its own cache, and nothing is learned from trials."""
    a, b, c = toy.operands(32, 32, 32)
    costs = {(32, 32): 1.0}
    if own_run:
        kernel.run = functools.partial(type(kernel).run, kernel)

    def function(a, b, c):
        kernel[lambda knobs: watch.spend(costs.get((knobs["BLOCK_M"], knobs["BLOCK_N"]), 5.0)) or toy.grid(knobs)](
            a, b, c, 32, 32, 32
        )

    function = whole(watch, function)
    with foretune.attached([kernel]) as tuners:
        function(a, b, c)
        (result,) = function.tune(a, b, c)
        assert (result.best_config["BLOCK_M"], len(result.trials)) == (32, 4)
        assert type(kernel.cache) is dict
        assert list(kernel.cache.values()) == [kernel.configs[3]]
        function(a, b, c)  # attached, and not tuned again
        assert tuners == [kernel]
    assert ("run" in kernel.__dict__) == own_run


@pytest.mark.interpret
def test_a_kernel_may_have_an_argument_of_any_name(toy, watch):
    import torch
    import triton

    configs = [triton.Config({"BLOCK_M": size}) for size in (16, 32)]
    kernel = triton.autotune(configs, ["run"])(triton.jit(toy.named_kernel))
    names = dict.fromkeys(("kernel", "attachment", "run", "args", "kwargs"), 3)
    function = whole(watch, lambda a: kernel[(1,)](a, **names))
    function(torch.zeros(64))
    assert len(function.tune(torch.zeros(64))[0].trials) == 2
    with foretune.attached([kernel]):
        function(torch.zeros(32))
        assert len(function.tune(torch.zeros(32))[0].trials) == 2


@pytest.mark.interpret
def test_an_autotuner_of_somebodys_own_class_is_met_once(toy, watch):
    import triton

    class Own(triton.runtime.Autotuner):
        runs = 0

        def run(self, *args, **kwargs):
            Own.runs += 1
            return super().run(*args, **kwargs)

    base = toy.tuned(lambda configs, named, **kwargs: configs[:2])
    kernel = Own(base.fn, base.arg_names, base.configs[:2], ["M"], None, None, do_bench=None)
    a, b, c = toy.operands(16, 16, 16)
    function = whole(
        watch, lambda a: kernel[lambda knobs: watch.spend(knobs["BLOCK_M"]) or toy.grid(knobs)](a, b, c, 16, 16, 16)
    )
    function(a)
    assert [one.best_config["BLOCK_M"] for one in function.tune(a)] == [16]
    assert list(kernel.cache.values()) == [kernel.configs[0]]


@pytest.mark.interpret
def test_a_kernel_of_foretune_autotune_is_met_as_any_other(toy, watch):
    pytest.importorskip("foretune.runtime.tuning.launches")
    a, b, c = toy.operands(16, 16, 16)
    base = toy.tuned(lambda configs, named, **kwargs: configs)
    kernel = foretune.autotune(base.configs[:3], key=["M"])(base.fn)

    def function(a):
        kernel[lambda knobs: watch.spend(100 - knobs["BLOCK_N"]) or toy.grid(knobs)](a, b, c, 16, 16, 16)

    function = whole(watch, function)
    function(a)
    (result,) = function.tune(a)
    assert (result.best_config["BLOCK_N"], [trial.time_us for trial in result.trials]) == (32, [84.0, 84.0, 68.0])
    kernel.configs_timings = None
    function(a)
    assert kernel.best_config is kernel.configs[2]
    assert kernel.configs_timings is None  # it does not tune itself now
