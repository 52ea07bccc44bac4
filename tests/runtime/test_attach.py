"""`attach` on an autotuner that somebody else declared, under the stub driver with real compiles."""

from __future__ import annotations

import copy
import math
import re
import sys
import threading
import types
import warnings
from functools import partial

import foretune
import pytest
import triton
from foretune.datasets import BundleError, ForetuneError, KernelConfig
from foretune.model import open_bundle
from foretune.runtime import ForetuneWarning, use_stub_driver
from foretune.runtime.tuning import known_times, session, triton_adapter
from foretune.runtime.tuning.own_timings import OwnTimings
from foretune.runtime.tuning.shortlisters import OwnShortlister

pytestmark = [pytest.mark.compile, pytest.mark.usefixtures("own_cache")]

#: Sizes to learn from, and one that is like them: 1792 / 16 is near a block of 128.
FIRST, NEXT = (1024, 2048, 1536, 3072, 4096, 2560, 1280, 3584), 1792
#: How many of the eight configs the search times for each of the first, without the prior. (A stub's configs all cost
#: the same to compile, so the counts do not depend on the clock.)
COUNTS = (7, 6, 2, 5, 4, 2, 2, 2)


@pytest.fixture(autouse=True)
def on_an_h200(toy, disk, without_prior):
    with use_stub_driver(toy.H200):
        yield


@pytest.fixture
def bench(elsewhere):
    return elsewhere.Bench()


@pytest.fixture
def kernel(elsewhere, bench):
    return elsewhere.kernel(bench)


@pytest.fixture
def learned(elsewhere, kernel, bench):
    """An attached kernel that has tuned the first eight keys."""
    foretune.attach(kernel)
    _launch_all(elsewhere, kernel, *FIRST)
    bench.timed.clear()
    return kernel


def _launch_all(elsewhere, kernel, *sizes):
    for n in sizes:
        elsewhere.launch(kernel, n)


def _blocks(bench):
    return [config.kwargs["BLOCK"] for config, _ in bench.timed]


def test_each_key_is_searched_and_later_ones_take_fewer_configs(elsewhere, kernel, bench):
    assert foretune.attach(kernel) is kernel
    counts = []
    for n in (*FIRST, NEXT, NEXT):
        bench.timed.clear()
        elsewhere.launch(kernel, n)
        counts.append(len(bench.timed))
        best = min(elsewhere.usual_cost(config, n) for config in kernel.configs)
        assert elsewhere.usual_cost(kernel.best_config, n) == best
    assert counts == [*COUNTS, 2, 0]  # the last key is known


def test_a_search_starts_with_the_first_config_and_those_far_from_it(elsewhere, kernel, bench):
    foretune.attach(kernel)
    elsewhere.launch(kernel, 1024)
    assert _blocks(bench)[0] == 16
    assert 2048 in _blocks(bench)[:3]
    bench.timed.clear()
    elsewhere.launch(kernel, 1040)
    assert _blocks(bench)[0] == 64  # the best of the nearest known key


def test_the_log_says_how_many_are_timed_and_why(elsewhere, learned, caplog):
    with caplog.at_level("INFO", logger="foretune"):
        _launch_all(elsewhere, learned, NEXT, NEXT)
    first, *_, last = (record.getMessage() for record in caplog.records)
    assert f" n={NEXT} " in first
    assert "of 8 configs: 0 timed, " in first
    assert "learned from 8 other problems" in first
    assert ", 0 to time; " in last


def test_a_length_that_is_asked_for_is_the_length(elsewhere, kernel, bench):
    foretune.attach(kernel, k=3)
    _launch_all(elsewhere, kernel, *FIRST, NEXT)
    assert len(bench.timed) == 9 * 3


@pytest.mark.parametrize(
    ("given", "count"), [({"n": 40 * NEXT}, 4), ({"n": NEXT, "SCALE": 7}, 5), ({"n": NEXT, "SCALE": True}, 7)]
)
def test_what_is_unlike_all_that_is_known_takes_more_configs(elsewhere, learned, bench, given, count):
    elsewhere.launch(learned, **given)
    assert len(bench.timed) == count  # a key like those known takes two
    best = min(elsewhere.usual_cost(config, given["n"]) for config in learned.configs)
    assert elsewhere.usual_cost(learned.best_config, given["n"]) == best


def test_detach_leaves_it_as_it_was(kernel):
    before = dict(kernel.__dict__)
    foretune.attach(kernel)
    assert kernel.__dict__ != before
    foretune.detach(kernel)
    assert kernel.__dict__ == before
    assert list(kernel.__dict__) == list(before)
    with foretune.attached([kernel, triton.heuristics({})(kernel)]) as tuners:
        assert tuners == [kernel]
        assert kernel.__dict__ != before
    assert kernel.__dict__ == before
    with foretune.attached(triton.heuristics({})(kernel)) as tuners:  # one kernel, without a list
        assert tuners == [kernel]
    assert kernel.__dict__ == before


def test_what_somebody_put_on_the_autotuner_is_given_back(elsewhere, kernel, bench):
    theirs = kernel.__dict__["run"] = partial(kernel.run)
    foretune.attach(kernel)
    elsewhere.launch(kernel, 1024)
    assert len(bench.timed) == COUNTS[0]
    foretune.detach(kernel)
    assert kernel.__dict__["run"] is theirs


def test_what_was_replaced_since_is_not_lost(kernel):
    foretune.attach(kernel)
    ours, kernel.run = kernel.run, print
    with pytest.raises(foretune.ForetuneError, match="its run was replaced by other code"):
        foretune.detach(kernel)
    kernel.run = ours
    foretune.detach(kernel)


def test_what_cannot_be_attached_is_named(kernel):
    with pytest.raises(foretune.ForetuneError, match="has none: 3"):
        foretune.attach(3)
    with pytest.raises(foretune.ForetuneError, match="fill_kernel is not attached"):
        foretune.detach(kernel)
    with pytest.raises(foretune.ForetuneError, match="k must be an integer >= 1 but got 0"):
        foretune.attach(kernel, k=0)
    foretune.attach(kernel)
    with pytest.raises(foretune.ForetuneError, match="fill_kernel is attached already"):
        foretune.attach(triton.heuristics({})(kernel))
    with pytest.raises(foretune.ForetuneError, match="a module, an autotuned kernel or a list of them but is 'fla'"):
        foretune.attached("fla").__enter__()


def test_it_may_be_under_heuristics_and_over_them(elsewhere, bench, kernel):
    above = triton.heuristics({"SCALE": lambda given: 1})(kernel)
    kernel.fn = triton.heuristics({"rows": lambda given: 3})(kernel.fn)
    foretune.attach(above)
    for n in (*FIRST, NEXT):
        above[(1,)](elsewhere.torch.zeros(n), n, rows=3)
    assert len(bench.timed) == sum(COUNTS) + 2


def test_their_own_prune_goes_first_and_their_perf_model_last(elsewhere, bench):
    seen = []

    def theirs(configs, named_args, **kwargs):
        return [config for config in configs if config.kwargs["BLOCK"] != 128]

    def perf_model(**given):
        seen.append(given["BLOCK"])
        return -given["BLOCK"]

    kernel = elsewhere.kernel(
        bench, prune_configs_by={"early_config_prune": theirs, "perf_model": perf_model, "top_k": 1}
    )
    foretune.attach(kernel, k=2)
    elsewhere.launch(kernel, NEXT)
    assert seen == [16, 32, 64, 256, 512, 1024, 2048]  # it chooses alone
    assert kernel.best_config.kwargs["BLOCK"] == max(seen)
    kernel.perf_model = None
    _launch_all(elsewhere, kernel, *FIRST)
    assert 128 not in _blocks(bench)


def test_what_their_prune_raises_is_theirs_and_an_empty_list_is_triton_s(elsewhere, bench):
    left = []

    def theirs(configs, named_args, **kwargs):
        if not left:
            raise RuntimeError("theirs")
        return left.pop()

    kernel = elsewhere.kernel(bench, prune_configs_by={"early_config_prune": theirs})
    foretune.attach(kernel)
    with pytest.raises(RuntimeError, match="theirs"):
        elsewhere.launch(kernel, 1024)
    left.append([])
    with pytest.raises(triton.runtime.errors.AutotunerError, match="No valid autotuner configs"):
        elsewhere.launch(kernel, 1024)


def test_whoever_asks_their_prune_about_a_config_of_his_own_gets_their_answer(learned):
    """As FLA's `CachedAutotuner` does with one from a file; Dynamo looks at it, too."""
    assert learned.early_config_prune is None


def test_a_config_that_fails_is_learned_as_that(elsewhere, disk):
    bench = elsewhere.Bench(
        lambda config, n: math.inf if config.kwargs["BLOCK"] == 64 else elsewhere.usual_cost(config, n)
    )
    kernel = elsewhere.kernel(bench)
    foretune.attach(kernel)
    _launch_all(elsewhere, kernel, *FIRST)
    (kept,) = disk.values()
    failed = {config["BLOCK"] for times in kept["times"].values() for config, time in times.items() if time is None}
    assert failed == {64}
    bench.timed.clear()
    elsewhere.launch(kernel, NEXT)
    assert 64 not in _blocks(bench)


def test_times_are_kept_as_they_are_measured(elsewhere, disk):
    def dies(config, n):
        if config.kwargs["BLOCK"] == 128:
            raise KeyboardInterrupt
        return elsewhere.usual_cost(config, n)

    kernel = elsewhere.kernel(elsewhere.Bench(dies))
    foretune.attach(kernel)
    with pytest.raises(KeyboardInterrupt):
        elsewhere.launch(kernel, 1024)
    ((name, source_hash, device), kept), *_ = disk.items()
    assert name.endswith("tuned_elsewhere.fill_kernel")
    assert device == "NVIDIA H200"
    assert len(source_hash) == 16
    (times,) = kept["times"].values()
    assert {config["BLOCK"]: time for config, time in times.items()} == {16: 4000.0}


def test_another_process_times_nothing_twice(elsewhere, learned, disk):
    bench = elsewhere.Bench()
    kernel = elsewhere.kernel(bench)
    foretune.attach(kernel)
    elsewhere.launch(kernel, 2048)
    assert kernel.best_config.kwargs["BLOCK"] == 128
    assert bench.timed == []  # its search has ended
    elsewhere.launch(kernel, NEXT)
    assert len(bench.timed) == 2  # the eight keys count as learned
    (kept,) = disk.values()
    assert {config["BLOCK"] for config in kept["chosen"].values()} == {64, 128, 256}


def test_what_triton_s_own_cache_knew_is_learned(elsewhere, tmp_path, monkeypatch, disk):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    plain = elsewhere.kernel(elsewhere.Bench(), cache_results=True)
    _launch_all(elsewhere, plain, *FIRST)
    bench = elsewhere.Bench()
    kernel = elsewhere.kernel(bench, cache_results=True)
    foretune.attach(kernel)
    _launch_all(elsewhere, kernel, *FIRST)
    assert bench.timed == []
    elsewhere.launch(kernel, NEXT)
    assert len(bench.timed) == 2


@pytest.mark.parametrize("broken", ["advise", "learn"])
def test_trouble_of_ours_is_one_warning_and_the_launch_goes_on(elsewhere, kernel, bench, monkeypatch, broken):
    def raises(*_, **__):
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(OwnTimings, broken, raises)
    foretune.attach(kernel)
    with pytest.warns(ForetuneWarning, match="ZeroDivisionError: ours") as caught:
        _launch_all(elsewhere, kernel, *FIRST, NEXT)
    assert len(caught) == 1
    assert len(bench.timed) == 9 * 8


def test_a_cache_that_breaks_is_one_warning(elsewhere, kernel, bench, monkeypatch):
    monkeypatch.setitem(sys.modules, "foretune.runtime.tuning.cache.kernel_cache", types.ModuleType("empty"))
    foretune.attach(kernel)
    with pytest.warns(ForetuneWarning, match="ImportError") as caught:
        _launch_all(elsewhere, kernel, *FIRST, NEXT)
    assert len(caught) == 1
    assert len(bench.timed) == sum(COUNTS) + 2


def test_the_mode_counts(elsewhere, learned, bench, monkeypatch, disk):
    monkeypatch.setenv("FORETUNE_MODE", "off")
    elsewhere.launch(learned, NEXT)
    assert len(bench.timed) == 8
    monkeypatch.setenv("FORETUNE_MODE", "predict")
    elsewhere.launch(learned, NEXT + 16)
    assert len(bench.timed) <= 8 + 1  # Triton 3.6 times a list of one
    disk.clear()
    kernel = foretune.attach(elsewhere.kernel(elsewhere.Bench()))
    with pytest.warns(ForetuneWarning, match=r"no prediction \(no timing is known\)"):
        elsewhere.launch(kernel, NEXT)


def test_in_mode_off_triton_tunes_alone(elsewhere, learned, monkeypatch, disk):
    """Nothing that is known counts, nothing is learned or stored, and what `do_bench` returns is Triton's matter."""
    monkeypatch.setenv("FORETUNE_MODE", "off")
    bench = elsewhere.Bench(lambda config, n: config.kwargs["BLOCK"] - 2000)  # no times
    kernel = elsewhere.kernel(bench)
    foretune.attach(kernel)
    before = copy.deepcopy(disk)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ForetuneWarning)
        _launch_all(elsewhere, kernel, 2048, NEXT)
    assert len(bench.timed) == 2 * 8
    assert kernel.best_config.kwargs["BLOCK"] == 16
    monkeypatch.setattr(triton_adapter, "scope", lambda: 2)  # a job of several ranks
    with foretune.agree():
        elsewhere.launch(kernel, NEXT)
    assert len(bench.timed) == 2 * 8
    assert disk == before


def test_an_invalid_mode_that_is_set_later_fails_no_launch(elsewhere, learned, bench, monkeypatch):
    monkeypatch.setenv("FORETUNE_MODE", "quick")
    with pytest.warns(ForetuneWarning, match="FORETUNE_MODE must be one of"):
        elsewhere.launch(learned, NEXT)
    assert len(bench.timed) == 8


def test_32_threads_tune_once(elsewhere, kernel, bench):
    foretune.attach(kernel)
    started, errors, chosen = threading.Barrier(32), [], []

    def run():
        try:
            started.wait()
            elsewhere.launch(kernel, 1024)
            chosen.append(kernel.cache[next(iter(kernel.cache))])
        except BaseException as error:  # noqa: BLE001 - the test fails for any
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(_blocks(bench)) == len({*_blocks(bench)}) == COUNTS[0]
    assert {id(config) for config in chosen} == {id(kernel.configs[2])}


def test_a_shortlist_is_compiled_side_by_side_before_it_is_timed(elsewhere, learned, bench, monkeypatch):
    lists = []

    def compile_ahead(jobs, workers):
        lists.append([config.kwargs["BLOCK"] for job in jobs for config in job.args])
        return [None] * len(jobs)

    monkeypatch.setattr(session, "compile_ahead", compile_ahead)
    elsewhere.launch(learned, NEXT)
    assert [block for blocks in lists for block in blocks] == _blocks(bench)
    assert len(lists[0]) == 2


def test_a_family_s_ranker_picks(toy, disk):
    timed = []

    def meter(kernel_call, quantiles):
        kernel_call()
        timed.append(1)
        return [float(len(timed))] * 3

    kernel = toy.tuned(None, do_bench=meter)
    foretune.attach(kernel, toy.ToyFamily(), k=2, bundle=toy.ToyBundle())
    a, b, c = toy.operands(64, 64, 64)
    kernel[toy.grid](a, b, c, 64, 64, 64)
    assert len(timed) == 2
    assert kernel.best_config is kernel.configs[5]
    (kept,) = disk.values()
    ((problem, times),) = kept["times"].items()
    assert problem.family == "toy"
    assert times[KernelConfig.from_triton(kernel.configs[5])] == 1000.0


def test_a_bundle_is_checked_where_it_is_given(toy, kernel, tmp_path):
    before = dict(kernel.__dict__)
    with pytest.raises(ForetuneError, match=r"^bundle needs a family, but family is None$"):
        foretune.attach(kernel, bundle=toy.ToyBundle())
    with pytest.raises(ForetuneError, match="bundle must be a Bundle or the path of its folder, but is 3"):
        foretune.attach(kernel, toy.ToyFamily(), bundle=3)
    with pytest.raises(BundleError, match="no such file"):
        foretune.attach(kernel, toy.ToyFamily(), bundle=tmp_path)
    with pytest.raises(BundleError, match="the bundle has no family 'toy'; it has "):
        foretune.attach(kernel, toy.ToyFamily(), bundle=open_bundle())
    assert kernel.__dict__ == before


def test_all_of_a_package_are_attached_and_what_fails_to_import_is_said(
    elsewhere, kernel, bench, tmp_path, monkeypatch
):
    package = tmp_path / "theirs_to_attach"
    (package / "ops").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text("raise SystemExit('it was run')")
    (package / "broken.py").write_text("import no_such_module_at_all")
    (package / "ops" / "__init__.py").write_text("")
    (package / "ops" / "fill.py").write_text(
        "import sys\nfill = sys.modules['kernel_of_this_test'].fill\nagain = fill\n"
    )
    given = types.ModuleType("kernel_of_this_test")
    given.fill = triton.heuristics({"SCALE": lambda given: 1})(kernel)
    monkeypatch.setitem(sys.modules, "kernel_of_this_test", given)
    monkeypatch.syspath_prepend(tmp_path)
    import theirs_to_attach

    before = dict(kernel.__dict__)
    context = foretune.attached(theirs_to_attach)
    with pytest.warns(
        ForetuneWarning, match=r"skipped 1 modules of theirs_to_attach that cannot be imported.*broken \(ModuleNot"
    ):
        tuners = context.__enter__()
    assert tuners == [kernel]
    assert kernel.__dict__ != before
    context.__exit__(None, None, None)
    assert kernel.__dict__ == before


def test_no_warning_where_nothing_is_wrong(elsewhere, kernel):
    with warnings.catch_warnings():
        warnings.simplefilter("error", ForetuneWarning)
        foretune.attach(kernel)
        _launch_all(elsewhere, kernel, *FIRST, NEXT)


@pytest.mark.parametrize("own_class", [False, True])
def test_our_timer_times_what_triton_would_time_its_own_way(elsewhere, kernel, monkeypatch, disk, own_class):
    """What our timer cannot take, Triton's benchmarker does: it says what is wrong with a config. And what somebody's
    class times in another way stays with it."""
    theirs = []

    def bench(kernel_call, quantiles):
        kernel_call()
        theirs.append(kernel_call)
        return [math.inf] * 3

    def time_us(launch, config, best_us):
        if config.kwargs["BLOCK"] == 64:
            raise RuntimeError("out of resources, say")
        return 1e3 * elsewhere.usual_cost(config, launch.named["n"])

    if not own_class:
        kernel = triton.runtime.Autotuner(kernel.fn, kernel.arg_names, kernel.configs, ["n"], None, None)
    kernel.__dict__.update(_do_bench=None, do_bench=bench)  # the latter as if it were the driver's
    for module in (triton_adapter, known_times):
        monkeypatch.setattr(module, "measures", lambda tuner: True)
    monkeypatch.setattr(triton_adapter.OneLaunch, "time_us", time_us)
    foretune.attach(kernel)
    elsewhere.launch(kernel, 1024)
    assert len(theirs) == (len(kernel.configs) if own_class else 1)  # all fail, or one does
    if not own_class:
        assert kernel.best_config.kwargs["BLOCK"] in (32, 128)  # next to 64, which failed
        (times,) = next(iter(disk.values()))["times"].values()
        assert {config["BLOCK"] for config, time in times.items() if time is None} == {64}


@pytest.fixture
def other(elsewhere):
    return elsewhere.kernel(elsewhere.Bench())


def test_overlapping_blocks_in_two_threads_are_counted(elsewhere, kernel, bench):
    """The second block is attached when the first one ends, and the kernel is as it was when the last one does."""
    before = dict(kernel.__dict__)
    is_open, may_end, found = threading.Event(), threading.Event(), []

    def second():
        with foretune.attached([kernel]) as tuners:
            found.append(tuners)
            is_open.set()
            may_end.wait(30)
            found.append(triton_adapter.Attachment.of(kernel) is not None)

    thread = threading.Thread(target=second)
    with foretune.attached([kernel]):
        thread.start()
        assert is_open.wait(30)
    elsewhere.launch(kernel, 1024)
    assert len(bench.timed) == COUNTS[0]
    may_end.set()
    thread.join(30)
    assert found == [[kernel], True]
    for name in ("run", "prune_configs", "_bench", "__getstate__"):
        assert (name in kernel.__dict__) == (name in before)


def test_eight_threads_never_meet_an_attachment_that_is_in_their_way(kernel):
    started, errors = threading.Barrier(8), []

    def run():
        started.wait(30)
        try:
            for _ in range(100):
                with foretune.attached([kernel]):
                    assert triton_adapter.Attachment.of(kernel) is not None
        except BaseException as error:  # noqa: BLE001 - the test fails for any
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert triton_adapter.Attachment.of(kernel) is None


def test_blocks_and_attach_leave_each_other_alone(kernel):
    foretune.attach(kernel)
    with foretune.attached([kernel]) as tuners:
        assert tuners == []
    assert triton_adapter.Attachment.of(kernel) is not None
    foretune.detach(kernel)
    with foretune.attached([kernel]), foretune.attached([kernel]):
        with pytest.raises(foretune.ForetuneError, match="is attached already"):
            foretune.attach(kernel)
        foretune.detach(kernel)  # whoever does so means it
        assert triton_adapter.Attachment.of(kernel) is None
    foretune.attach(kernel)


@pytest.mark.parametrize("name", ["run", "_bench", "prune_configs"])
def test_what_a_block_raises_is_what_is_raised_and_the_others_are_detached(kernel, other, name):
    def block(error=None):
        with foretune.attached([other, kernel]):
            setattr(kernel, name, print)
            if error is not None:
                raise error

    wanted = f"its {name} was replaced by other code after it was attached: it stays attached"
    warns = pytest.warns(ForetuneWarning, match=wanted)
    with warns, pytest.raises(ZeroDivisionError):
        block(ZeroDivisionError())
    assert "run" not in other.__dict__
    for one in ("run", "_bench", "prune_configs", "__getstate__"):
        kernel.__dict__.pop(one, None)
    with pytest.raises(foretune.ForetuneError, match=f"its {name} was replaced"):
        block()
    assert "run" not in other.__dict__


def test_a_kernel_that_cannot_be_attached_leaves_no_other_attached(kernel, other, monkeypatch):
    begin = triton_adapter.Attachment.begin

    def failing(self):
        if self.tuner is other:
            raise MemoryError
        begin(self)

    monkeypatch.setattr(triton_adapter.Attachment, "begin", failing)
    with pytest.raises(MemoryError), foretune.attached([kernel, other]):
        pass
    assert "run" not in kernel.__dict__


@pytest.mark.parametrize("own", [False, True])
def test_a_copy_is_not_attached_and_launches_itself(elsewhere, kernel, bench, own):
    if own:
        kernel.__dict__["run"] = theirs = partial(type(kernel).run, kernel)
    foretune.attach(kernel)
    elsewhere.launch(kernel, 1024)
    bench.timed.clear()
    twin = copy.copy(kernel)
    assert twin.__dict__.keys().isdisjoint({"prune_configs", "_bench", "__getstate__"})
    if own:
        assert twin.__dict__["run"] is theirs
        return
    twin.configs, twin.cache = kernel.configs[5:], {}
    bench.tuner = twin
    elsewhere.launch(twin, 1024)
    assert (_blocks(bench), twin.best_config) == ([512, 1024, 2048], kernel.configs[5])
    assert kernel.best_config is kernel.configs[2]
    foretune.attach(twin)
    foretune.detach(kernel)


def test_in_a_captured_graph_a_new_key_is_neither_timed_nor_kept(elsewhere, learned, bench, monkeypatch, disk):
    """Benchmarks wait for the device, which ends the capture. The prediction runs, and without one the first config."""
    resets = []
    learned.pre_hook = lambda arguments, reset_only=False: resets.append(reset_only)
    for n in FIRST:
        elsewhere.launch(learned, n)
    kept = repr(disk)
    monkeypatch.setattr(triton_adapter, "is_capturing", lambda: True)
    elsewhere.launch(learned, NEXT)
    assert learned.best_config.kwargs["BLOCK"] in (64, 128)  # the predicted ones
    elsewhere.launch(learned, 2048)
    assert learned.best_config.kwargs["BLOCK"] == 128  # chosen before
    assert (bench.timed, resets, len(learned.cache), repr(disk)) == ([], [], len(FIRST), kept)
    monkeypatch.undo()
    elsewhere.launch(learned, NEXT)
    assert len(bench.timed) == 2
    assert (type(learned.cache), len(learned.cache)) == (dict, len(FIRST) + 1)


def test_in_a_captured_graph_the_kernel_s_own_pruning_holds(elsewhere, bench, monkeypatch):
    prune = {"early_config_prune": lambda configs, named, **_: configs[3:]}
    kernel = foretune.attach(elsewhere.kernel(bench, prune_configs_by=prune))
    monkeypatch.setattr(triton_adapter, "is_capturing", lambda: True)
    elsewhere.launch(kernel, 1024)
    assert (kernel.best_config, bench.timed) == (kernel.configs[3], [])


def test_where_every_config_failed_a_later_launch_tries_again(elsewhere, monkeypatch):
    """In Triton alone the first of them is what is launched from then on."""
    is_full, refused = [True], triton.runtime.errors.OutOfResources(2, 1, "shared memory")
    bench = elsewhere.Bench(lambda config, n: math.inf if is_full else elsewhere.usual_cost(config, n))
    kernel = foretune.attach(elsewhere.kernel(bench))
    run = kernel.fn.run

    def launch(*args, **kwargs):
        if is_full and not kwargs.get("warmup"):
            raise refused
        return run(*args, **kwargs)

    monkeypatch.setattr(kernel.fn, "run", launch)
    for _ in range(2):
        with pytest.raises(triton.runtime.errors.OutOfResources):
            elsewhere.launch(kernel, 1024)
        assert kernel.cache == {}
    is_full.clear()
    elsewhere.launch(kernel, 1024)
    assert kernel.best_config.kwargs["BLOCK"] == 64


@pytest.mark.parametrize(
    ("wrong", "as_list"),
    [*((wrong, False) for wrong in (-1.0, 0.0, math.nan)), *((wrong, True) for wrong in (-1.0, math.nan, "1", None))],
)
def test_a_time_that_is_none_is_a_failure_of_that_config(elsewhere, wrong, as_list, disk):
    class Odd(elsewhere.Bench):
        def __call__(self, kernel_call, quantiles=None):
            (found, *_), (config, _) = super().__call__(kernel_call), self.timed[-1]
            found = wrong if config.kwargs["BLOCK"] == 2048 else found
            return [found] * 3 if as_list else found

    kernel = elsewhere.kernel(Odd())
    foretune.attach(kernel)
    with pytest.warns(ForetuneWarning, match="do_bench must return milliseconds > 0 but returned"):
        elsewhere.launch(kernel, 1024)
    assert kernel.best_config.kwargs["BLOCK"] == 64
    (times,) = next(iter(disk.values()))["times"].values()
    assert 2048 not in {config["BLOCK"] for config in times}  # it is not kept as a failure, either


def test_configs_that_differ_in_their_hook_alone_share_no_time(elsewhere, bench, disk):
    """One of two configs of the same values is slow, as its hook says."""

    def configs():
        return [
            triton.Config({"BLOCK": 64}, num_warps=1, pre_hook=lambda arguments: None),
            triton.Config({"BLOCK": 64}, num_warps=1),
            triton.Config({"BLOCK": 128}, num_warps=1),
        ]

    def cost(config, n):
        return {64: 1.0, 128: 2.0}[config.kwargs["BLOCK"]] + (9.0 if config.pre_hook else 0.0)

    for timed in (3, 3):  # with a do_bench of their own it is all times or none
        bench = elsewhere.Bench(cost)
        kernel = foretune.attach(elsewhere.kernel(bench, configs()))
        elsewhere.launch(kernel, 1024)
        assert (kernel.best_config, len(bench.timed)) == (kernel.configs[1], timed)
    (kept,) = disk.values()
    assert [{config["BLOCK"] for config in times} for times in kept["times"].values()] == [{128}]
    # In another list the same values are those of one config: nothing that is known of the first list counts.
    bench = elsewhere.Bench(cost)
    elsewhere.launch(foretune.attach(elsewhere.kernel(bench, configs()[1:])), 1024)
    assert len(bench.timed) == 2
    assert len(disk) == 2


def test_configs_that_are_none_are_refused_by_name(elsewhere, bench):
    with pytest.raises(foretune.ForetuneError, match=r"must be triton\.Configs but one is 'a'"):
        foretune.attach(elsewhere.kernel(bench, configs="ab"))


def test_configs_are_predicted_for_launches_that_are_tuned_and_for_no_others(elsewhere, kernel, monkeypatch):
    """The launches of a tuned key are compared with the one that it was tuned for, and need no prediction."""
    predicted = []
    monkeypatch.setattr(OwnShortlister, "_prior", lambda self, given: predicted.append(given["x_ptr"].numel()) or {})
    foretune.attach(kernel)
    kernel[(1,)](elsewhere.torch.zeros(1024), 1024, rows=3, SCALE=1)
    with pytest.warns(ForetuneWarning, match="too coarse"):
        kernel[(1,)](elsewhere.torch.zeros(4096), 1024, rows=3, SCALE=1)
    assert predicted == [1024]


def test_launches_of_one_key_that_differ_in_sizes_it_omits_are_one_warning(elsewhere, kernel):
    foretune.attach(kernel)

    def launch(size):
        kernel[(1,)](elsewhere.torch.zeros(size), 1024, rows=3, SCALE=1)

    with warnings.catch_warnings():
        warnings.simplefilter("error", ForetuneWarning)
        launch(1024)
        launch(1030)  # as many to the nearest power of two
    said = "fill_kernel: its key (n) is too coarse: launches with n=1024 differ in elements (1024 and 4096): the config"
    with pytest.warns(ForetuneWarning, match=re.escape(said)):
        launch(4096)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ForetuneWarning)
        launch(8192)


def test_a_key_s_later_launches_are_not_looked_at(elsewhere, kernel):
    foretune.attach(kernel)
    for _ in range(40):
        elsewhere.launch(kernel, 1024)
    assert not triton_adapter.Attachment.of(kernel)._coarse.watched
