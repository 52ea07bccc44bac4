"""`foretune.autotune` under a stub driver: real compiles, no launch, and a `do_bench` that counts."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import threading
import time

import foretune
import pytest
import triton
from foretune.datasets import ForetuneError, ForetuneWarning, KernelConfig
from foretune.runtime import use_stub_driver
from foretune.runtime.tuning.session import TuningFailed

pytestmark = [pytest.mark.compile, pytest.mark.usefixtures("own_cache")]
torch = pytest.importorskip("torch")


@pytest.fixture
def bench(filler):
    with use_stub_driver(filler.H200) as driver:
        yield filler.Bench(driver)


@pytest.fixture
def tuned(filler, bench, monkeypatch, tmp_path):
    """Declares the kernel anew, as another process would, with the same memory on disk."""
    monkeypatch.setenv("FORETUNE_CACHE_DIR", str(tmp_path))

    def declare(configs=None, family=True, **options):
        options = {"do_bench": bench, "workers": 1} | options
        if family is not False:
            options = {"family": filler.Filler() if family is True else family} | options
        if family is True:
            options = {"bundle": filler.FillerBundle(), "k": 3} | options
        kernel = triton.jit(filler.fill_kernel)
        return foretune.autotune(configs or filler.configs(), ["M", "N"], **options)(kernel)

    return declare


def warps(kernel):
    return kernel.best_config.num_warps


def test_the_shortlist_is_timed_once_and_the_fastest_runs(filler, bench, tuned):
    kernel = tuned()
    for _ in range(2):
        filler.launch(kernel)
    assert bench.timed == [8, 4, 2]  # the best predicted first
    assert warps(kernel) == 2
    assert [launch.metadata.num_warps for launch in bench.driver.launches] == [8, 4, 2, 2, 2]
    assert isinstance(kernel, triton.runtime.Autotuner)
    assert kernel.configs_timings == {kernel.configs[3]: [8.0], kernel.configs[2]: [4.0], kernel.configs[1]: [2.0]}


def test_a_new_size_in_a_step_is_a_look_up_and_what_cannot_run_it_is_not_taken(filler, bench, tuned):
    kernel = tuned()
    filler.launch(kernel, m=1000)
    filler.launch(kernel, m=1001)
    assert bench.timed == [8, 4, 2]
    filler.launch(kernel, m=1200)
    assert bench.timed == [8, 4, 2] * 2
    filler.launch(kernel, m=1)
    assert warps(kernel) == 1


def test_times_of_an_earlier_process_are_not_measured_again(filler, bench, tuned):
    filler.launch(tuned(filler.configs((1, 4, 8))))
    assert bench.timed == [8, 4, 1]
    other = tuned(k=4)
    filler.launch(other)
    assert bench.timed == [8, 4, 1, 2]  # of another list, what is new
    assert warps(other) == 1


HELPERS = """
import triton
import triton.language as tl
C = tl.constexpr({constant})
@triton.jit
def act(x):
    return x * {factor}
"""
USING = """
import triton
import triton.language as tl
import helpers as U
@triton.jit
def kernel(out_ptr, M, N, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, U.act(at) + U.C, mask=at < M * N)
"""


def test_times_of_what_an_edit_of_another_module_changed_are_measured_again(filler, bench, monkeypatch, tmp_path):
    monkeypatch.setenv("FORETUNE_CACHE_DIR", str(tmp_path / "cache"))

    def launch(**edit):
        """How many configs are timed by a process that finds these helpers."""
        for name, text in (("helpers", HELPERS.format(**edit)), ("using", USING)):
            path = tmp_path / f"{'-'.join(map(str, edit.values()))}-{name}.py"
            path.write_text(text)
            spec = importlib.util.spec_from_file_location(name, path)
            monkeypatch.setitem(sys.modules, name, importlib.util.module_from_spec(spec))
            spec.loader.exec_module(sys.modules[name])
        before = len(bench.timed)
        declare = foretune.autotune(filler.configs((1, 2)), ["M", "N"], do_bench=bench, workers=1)
        filler.launch(declare(sys.modules["using"].kernel))
        return len(bench.timed) - before

    first, function, constant = {"factor": 1, "constant": 1}, {"factor": 2, "constant": 1}, {"factor": 1, "constant": 2}
    assert [launch(**edit) for edit in (first, function, constant, first)] == [2, 2, 2, 0]


@pytest.mark.parametrize("phase", ["compile", "load", "run"])
def test_a_config_that_fails_is_one_less(filler, bench, tuned, phase):
    configs = filler.configs()
    if phase == "compile":
        configs[3].kwargs["BLOCK"] = 33
    elif phase == "load":
        load = bench.driver.utils.load_binary
        refused = triton.runtime.errors.OutOfResources(2, 1, "shared memory")

        def load_binary(name, binary, shared, device):
            if b".maxntid 256" in binary or len(loads) == 0:
                loads.append(1)
                raise refused
            return load(name, binary, shared, device)

        loads = []
        bench.driver.utils.load_binary = load_binary
    else:
        bench.ms[8] = RuntimeError("an illegal instruction was encountered")
    kernel = tuned(configs)
    filler.launch(kernel)
    assert warps(kernel) == 2
    assert kernel.configs_timings[kernel.configs[3]] == [float("inf")]


def test_a_search_keeps_the_configs_that_failed_in_its_timings(filler, bench, tuned):
    bench.ms[8] = RuntimeError("an illegal instruction was encountered")
    configs = [triton.Config({"BLOCK": size}, num_warps=count) for size in (32, 64, 128) for count in filler.WARPS]
    kernel = tuned(configs, family=False)
    filler.launch(kernel)
    failed = [config for config, times in kernel.configs_timings.items() if times == [float("inf")]]
    assert {config.num_warps for config in failed} == {8}
    assert len(failed) == bench.timed.count(8)
    assert len(kernel.configs_timings) == len(bench.timed)


def test_where_the_whole_shortlist_fails_the_others_are_tried(filler, bench, tuned):
    bench.ms |= {count: RuntimeError("no") for count in (2, 4, 8)}
    kernel = tuned()
    filler.launch(kernel)
    assert warps(kernel) == 1


def test_where_all_fail_one_error_says_why_for_each(filler, bench, tuned):
    bench.ms |= {2: ValueError("two"), 4: ValueError("two"), 8: RuntimeError("eight")}
    configs = filler.configs()
    configs[0].kwargs["BLOCK"] = 33
    kernel = tuned(configs)
    with pytest.raises(TuningFailed, match="none of its 4 configs") as raised:
        filler.launch(kernel)
    for said in ("power of 2", "ValueError: two", "RuntimeError: eight", "num_warps: 4", "filler.fill_kernel"):
        assert said in str(raised.value)
    bench.ms.clear()
    filler.launch(kernel)  # what failed then is tried again
    assert warps(kernel) == 2


def test_one_config_is_not_benchmarked_and_the_next_runs_where_it_fails(filler, bench, tuned):
    kernel = tuned(k=1)
    filler.launch(kernel)
    assert (bench.timed, warps(kernel)) == ([], 8)
    configs = filler.configs()
    configs[3].kwargs["BLOCK"] = 33
    kernel = tuned(configs, k=1)
    filler.launch(kernel)
    assert (bench.timed, warps(kernel)) == ([], 4)


def test_a_wrong_call_is_an_error_that_names_it(filler, bench, tuned):
    kernel = tuned()
    with pytest.raises(TuningFailed, match="no_such"):
        filler.launch(kernel, no_such=1)
    with pytest.raises(TuningFailed, match="BLOCK"):
        filler.launch(kernel, BLOCK=16)
    filler.launch(kernel)
    assert warps(kernel) == 2


@pytest.mark.parametrize(("mode", "timed", "runs"), [("predict", [], 8), ("off", [1, 2, 4, 8], 1)])
def test_the_mode_holds_here_too(filler, bench, tuned, monkeypatch, mode, timed, runs):
    monkeypatch.setenv("FORETUNE_MODE", mode)
    kernel = tuned()
    filler.launch(kernel)
    assert (bench.timed, warps(kernel)) == (timed, runs)


def test_a_budget_of_nothing_runs_the_best_predicted(filler, bench, tuned):
    kernel = tuned(budget_s=0)
    filler.launch(kernel)
    assert (bench.timed, warps(kernel)) == ([], 8)


def test_a_budget_ends_with_the_best_so_far_whatever_the_wall_clock_does(filler, bench, tuned, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    jumps = iter([1e9, -1e9] * 1000)
    monkeypatch.setattr(time, "time", lambda: next(jumps))

    def slow(run, quantiles):
        now[0] += 6.0
        return bench(run, quantiles)

    kernel = tuned(budget_s=10.0, do_bench=slow)
    filler.launch(kernel)
    assert bench.timed == [8, 4]
    assert (warps(kernel), kernel.bench_time) == (4, 12.0)


def test_a_budget_begins_when_no_other_thread_tunes(filler, bench, tuned, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    class Busy:
        """A lock that another thread lets go of after a minute."""

        def __enter__(self):
            now[0] += 60.0

        def __exit__(self, *error):
            pass

    kernel = tuned(budget_s=10.0)
    kernel._lock = Busy()
    filler.launch(kernel)
    assert bench.timed == [8, 4, 2]


def test_a_choice_is_not_remembered_where_the_time_was_over_before_any_was_timed(filler, bench, tuned, monkeypatch):
    now, passes = [100.0], [60.0]

    def clock():
        now[0] += passes[0]
        return now[0]

    monkeypatch.setattr(time, "monotonic", clock)
    kernel = tuned(budget_s=10.0)
    filler.launch(kernel)
    assert (bench.timed, warps(kernel), kernel.cache) == ([], 8, {})
    passes[0] = 0.0
    filler.launch(kernel)
    assert (bench.timed, len(kernel.cache)) == ([8, 4, 2], 1)


def test_keyword_arguments_in_another_order_are_no_other_key(filler, bench, tuned):
    kernel, out = tuned(family=False), torch.zeros(8, 8)
    kernel[(2,)](out_ptr=out, M=8, N=8)
    kernel[(2,)](N=8, M=8, out_ptr=out)
    kernel[(2,)](out, 8, N=8)
    assert sorted(bench.timed) == [1, 2, 4, 8]
    bench.timed.clear()
    kernel[(2,)](out.half(), 8, 8)
    assert bench.timed


def test_a_bucket_without_a_family(filler, bench, tuned):
    kernel = tuned(family=False, bucket=["M"])
    for m in (1000, 1001, 999):
        filler.launch(kernel, m=m)
    assert sorted(bench.timed) == [1, 2, 4, 8]
    bench.timed.clear()
    filler.launch(kernel, m=1000, n=65)
    assert bench.timed
    with pytest.raises(ForetuneError, match="bucket must name some of key, M, N, but has K"):
        tuned(family=False, bucket=["K"])


class Effect(list):
    """Launches that write to a tensor."""

    def __init__(self, tensor):
        super().__init__()
        self.tensor = tensor

    def append(self, launch):
        super().append(launch)
        self.tensor.add_(1.0)


@pytest.mark.parametrize("fails", [False, True])
def test_tensors_are_restored_and_reset_also_where_a_config_fails(filler, bench, tuned, fails):
    out = torch.full((64, 64), 5.0)
    bench.driver.launches = Effect(out)
    kernel = tuned(restore_value=["out_ptr"])
    if fails:
        bench.ms |= {8: RuntimeError("after the launch"), 4: RuntimeError("no"), 2: RuntimeError("no")}
    filler.launch(kernel, out=out)
    assert len(bench.timed) == 3
    assert (out == 6.0).all()  # as if launched once
    kernel = tuned(reset_to_zero=["out_ptr"], family=False)
    filler.launch(kernel, out=out)
    assert (out == 1.0).all()


def test_what_a_launch_raises_is_restored_too(filler, bench, tuned):
    out = torch.full((64, 64), 5.0)

    class Failing(Effect):
        def append(self, launch):
            super().append(launch)
            if len(self) == 1:
                raise RuntimeError("midway")

    bench.driver.launches = Failing(out)
    filler.launch(tuned(restore_value=["out_ptr"]), out=out)
    assert (out == 6.0).all()


def test_thirty_two_threads_tune_once(filler, bench, tuned):
    kernel, start, chosen = tuned(), threading.Barrier(32), []

    def call():
        start.wait()
        filler.launch(kernel)
        chosen.append(kernel.cache[next(iter(kernel.cache))].num_warps)

    threads = [threading.Thread(target=call) for _ in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert bench.timed == [8, 4, 2]
    assert chosen == [2] * 32
    assert len(bench.driver.launches) == 3 + 32


@pytest.fixture
def interruptible():
    """Also where these tests were started in the background, whose processes ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_keeps_the_times_so_far(filler, bench, tuned):
    def interrupted(run, quantiles):
        if len(bench.timed) == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return bench(run, quantiles)

    out = torch.full((64, 64), 5.0)
    bench.driver.launches = Effect(out)
    kernel = tuned(do_bench=interrupted, restore_value=["out_ptr"])
    with pytest.raises(KeyboardInterrupt):
        filler.launch(kernel, out=out)
    assert (out == 5.0).all()
    for again in (kernel, tuned()):  # in this process, and in the next
        again.__dict__["do_bench"] = bench
        filler.launch(again)
        assert warps(again) == 2
    assert sorted(bench.timed) == [2, 4, 8]


def test_a_process_that_is_terminated_leaves_its_times(filler, bench, tuned):
    def terminated(run, quantiles):
        if len(bench.timed) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return bench(run, quantiles)

    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        filler.launch(tuned(do_bench=terminated))
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
    kernel = tuned()
    filler.launch(kernel)
    assert (bench.timed, warps(kernel)) == ([2], 2)


def test_a_forked_process_needs_no_lock_of_its_parents(filler, bench, tuned):
    """Forked while another thread tunes."""
    is_tuning, is_over = threading.Event(), threading.Event()

    def waiting(run, quantiles):
        is_tuning.set()
        is_over.wait()
        return bench(run, quantiles)

    kernel = tuned(do_bench=waiting)
    tuning = threading.Thread(target=filler.launch, args=(kernel,))
    tuning.start()
    is_tuning.wait()
    child = os.fork()
    if child == 0:
        is_over.set()
        filler.launch(kernel)
        os._exit(warps(kernel))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    is_over.set()
    tuning.join()
    assert warps(kernel) == 2


def test_without_a_gpu_it_is_tritons_own_error(filler, tuned):
    kernel = tuned()
    active = triton.runtime.driver._active
    triton.runtime.driver.set_active(None)
    try:
        with pytest.raises(RuntimeError, match="0 active drivers"):
            filler.launch(kernel)
    finally:
        triton.runtime.driver.set_active(active)
    filler.launch(kernel)


def test_configs_are_never_mutated_and_the_kernels_own_callbacks_count(filler, bench, tuned):
    configs, seen = filler.configs(), []
    before = [config.all_kwargs() for config in configs]

    def prune(configs, named, **kwargs):
        seen.append((named["M"], kwargs["N"]))
        return configs[:3]

    kernel = tuned(configs, prune_configs_by={"early_config_prune": prune})
    kernel[(128,)](torch.zeros(64, 64), 64, N=64)
    assert seen == [(64, 64)]
    assert bench.timed == [4, 2, 1]
    assert [config.all_kwargs() for config in configs] == before
    assert set(kernel.configs) == set(configs)
    model = {"perf_model": lambda num_warps, **_: abs(num_warps - 4), "top_k": 0.5}
    bench.timed.clear()
    filler.launch(tuned(prune_configs_by=model, family=False), m=7)
    assert sorted(bench.timed) == [2, 4]


def test_without_a_family_it_learns_from_its_own_timings(filler, bench, tuned, monkeypatch):
    filler.launch(tuned(), m=64)  # what a family says of the kernel is not its business
    bench.timed.clear()
    kernel = tuned(family=False)
    for m in range(64, 128, 8):
        filler.launch(kernel, m=m)
    assert len(bench.timed) == 18
    bench.timed.clear()
    for again in (kernel, tuned(family=False)):  # in this process, and in the next
        filler.launch(again, m=100)
        assert (len(bench.timed), warps(again)) == (2, 1)
    monkeypatch.setenv("FORETUNE_MODE", "predict")
    filler.launch(again, m=110)
    assert (len(bench.timed), warps(again)) == (2, 1)


def test_a_search_goes_on_until_no_config_pays(filler, bench, tuned):
    configs = [
        triton.Config({"BLOCK": 32}, num_warps=warps, num_stages=stages)
        for warps in (1, 2, 4, 8)
        for stages in range(9)
    ]
    filler.launch(tuned(configs, family=False), m=64)
    # More than one round, less than all. Not an exact number: configs that differ in stages alone have equal times, and
    # rounding decides between equals.
    assert 8 < len(bench.timed) < 36
    assert {*bench.timed[:8]} >= {1, 8}  # far from each other


def test_a_family_that_cannot_say_costs_the_shortlist_and_a_warning(filler, bench, tuned):
    def problem(call):
        raise ZeroDivisionError("odd")

    kernel = tuned(problem=problem)
    with pytest.warns(ForetuneWarning, match=r"no prediction \(ZeroDivisionError: odd\).*all 4 configs"):
        filler.launch(kernel)
    filler.launch(kernel)
    assert (bench.timed, warps(kernel)) == ([1, 2, 4, 8], 1)


def test_hooks_are_called_as_tritons(filler, bench, tuned):
    seen = []
    configs = filler.configs()
    configs[3].pre_hook = lambda arguments: seen.append(("config", arguments["BLOCK"]))
    kernel = tuned(
        configs,
        pre_hook=lambda arguments, reset_only=False: seen.append(("pre", reset_only)),
        post_hook=lambda arguments, exception: seen.append(("post", type(exception))),
    )
    filler.launch(kernel)
    none = type(None)
    once = [("pre", False), ("post", none)]
    assert seen == [("config", 32), ("config", 32), *once, *once, *once, ("pre", True)]


def test_a_graph_that_is_captured_is_not_tuned_in(filler, bench, tuned, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    kernel = tuned(device="h200")
    filler.launch(kernel)
    assert (bench.timed, warps(kernel)) == ([], 8)
    monkeypatch.undo()
    filler.launch(kernel)
    assert (bench.timed, warps(kernel)) == ([8, 4, 2], 2)


def test_ranks_time_only_what_they_agree_on(filler, bench, tuned, monkeypatch):
    from foretune.runtime.tuning import autotuner, known_times

    epoch, asked = [0], []

    def agreed(times_us, kernel, problem, configs):
        asked.append((times_us, kernel, problem["n"], len(configs)))
        return answer

    monkeypatch.setattr(known_times, "agreed", agreed)
    for name, what in {"may_tune": lambda: epoch[0] > 0, "epoch": lambda: epoch[0]}.items():
        monkeypatch.setattr(autotuner, name, what)
    kernel = tuned()
    filler.launch(kernel)
    assert (bench.timed, warps(kernel), asked) == ([], 8, [])
    epoch[0], answer = 1, [3.0, 2.0, None]  # the other ranks' last one fails
    filler.launch(kernel)
    assert (bench.timed, warps(kernel)) == ([8, 4, 2], 4)
    assert asked == [([8e3, 4e3, 2e3], "foretune_filler.fill_kernel", 64, 3)]
    epoch[0] = 2
    filler.launch(kernel)
    assert (len(bench.timed), len(asked), warps(kernel)) == (3, 1, 4)  # it was agreed on before
    answer = [None] * 3
    filler.launch(kernel, n=32)
    assert warps(kernel) == 8  # nobody came: the prediction


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"k": 0}, "k must be an integer >= 1 but got 0"),
        ({"k": "all"}, "k must be 'auto' or an integer >= 1 but got 'all'"),
        ({"budget_s": -1}, "budget_s must be between 0.0 and inf but got -1"),
        ({"isolate": 1}, "isolate must be true or false but is 1"),
        ({"workers": 0}, "workers must be an integer >= 1 but got 0"),
        ({"bucket": "M"}, "bucket must be a list"),
        ({"bucket": ["rows"]}, "bucket must name dimensions of filler, which has m, n, but has rows"),
        ({"family": 3}, "must be a Family"),
        ({"prune_configs_by": print}, "prune_configs_by must be a dict"),
        ({"no_such": 3}, "unknown option no_such; the options of triton.autotune are cache_results, do_bench"),
        ({"family": None, "bundle": None, "knobs": {}}, "knobs needs a family, but family is None"),
    ],
)
def test_what_is_declared_wrongly_is_refused_there(filler, tuned, wrong, said):
    with pytest.raises(ForetuneError, match=said):
        tuned(**wrong)


def test_what_is_no_kernel_and_what_are_no_configs_are_named(filler, tuned):
    with pytest.raises(ForetuneError, match=r"must be a function under triton.jit but is <function fill_kernel"):
        foretune.autotune(filler.configs(), ["M", "N"])(filler.fill_kernel)
    with pytest.raises(ForetuneError, match=r"configs must be triton.Configs but one is \{'BLOCK': 32\}"):
        tuned(configs=[{"BLOCK": 32}], family=False)
    with pytest.raises(ForetuneError, match=r"configs must be a list of triton\.Configs but is 3"):
        tuned(configs=3)


def test_a_key_that_is_no_argument_is_refused(filler):
    with pytest.raises(ValueError, match="K"):
        foretune.autotune(filler.configs(), ["K"], filler.Filler())(triton.jit(filler.fill_kernel))


def test_all_that_tritons_takes_is_taken():
    import inspect

    from foretune.runtime.tuning import autotuner

    theirs = set(inspect.signature(triton.autotune).parameters)
    assert theirs == {"configs", "key", "prune_configs_by"} | autotuner._OPTIONS


def test_each_benchmark_is_logged_once(filler, tuned, monkeypatch, tmp_path):
    from foretune.runtime.timing import flywheel

    rows = []
    monkeypatch.setenv("FORETUNE_LOG", str(tmp_path / "log"))
    monkeypatch.setattr(flywheel, "log_row", lambda *what, **how: rows.append((*what, how["timed"])))
    monkeypatch.setattr(flywheel, "expect", lambda *what: pytest.fail("ours tells by itself"))
    monkeypatch.setattr("foretune.runtime.prune.expect", flywheel.expect)
    filler.launch(tuned())
    assert [(config.num_warps, time_us, timed) for _, _, config, time_us, _, timed in rows] == [
        (8, 8e3, "autotuner"),
        (4, 4e3, "autotuner"),
        (2, 2e3, "autotuner"),
    ]
    assert {(family.name, problem["m"], device) for family, problem, _, _, device, _ in rows} == {
        ("filler", 64, filler.H200)
    }


def test_what_is_kept_is_kept_by_config(filler, bench, tuned):
    from foretune.runtime.launching.source_hash import hash_of_kernel
    from foretune.runtime.tuning.cache.kernel_cache import ChoiceCache

    kernel = tuned()
    filler.launch(kernel)
    cache = ChoiceCache.of(kernel.name, hash_of_kernel(kernel.fn), filler.H200)
    (problem,) = cache.problems()
    assert dict(cache.times(problem)) == {
        KernelConfig.of(BLOCK=32, num_warps=count): count * 1e3 for count in (8, 4, 2)
    }
    assert cache.choice(problem, "filler-bundle") == KernelConfig.of(BLOCK=32, num_warps=2)


@pytest.mark.parametrize("wrong", [-1.0, 0, float("nan"), "1.0", None, True, [], [-1.0, 1.0, 1.0], [None], 10**400, {}])
def test_what_a_do_bench_returns_must_be_a_time(filler, bench, tuned, wrong):
    def odd(run, quantiles):
        found = bench(run, quantiles)
        return wrong if bench.timed[-1] == 8 else found

    kernel = tuned(do_bench=odd)
    filler.launch(kernel)
    assert (bench.timed, warps(kernel)) == ([8, 4, 2], 2)
    assert kernel.configs_timings[kernel.configs[3]] == [float("inf")]
    bench.timed.clear()
    filler.launch(tuned())
    assert bench.timed == [8]  # it is not remembered as a failure


def test_where_all_fail_the_first_reason_is_the_cause(filler, bench, tuned):
    first = RuntimeError("disk not mounted yet")
    bench.ms |= {8: first, 4: ValueError("later"), 2: ValueError("later")}
    kernel = tuned(filler.configs((2, 4, 8)))
    with pytest.raises(TuningFailed) as raised:
        filler.launch(kernel)
    assert raised.value.__cause__ is first
    bench.ms.clear()
    filler.launch(kernel)
    assert warps(kernel) == 2


def test_kept_failures_expire(filler, bench, tuned, monkeypatch):
    """What the compiler or the device refused is tried again a day later: it may have been the machine."""
    from foretune.runtime.tuning.cache import kernel_cache

    now = [1e9]
    monkeypatch.setattr(kernel_cache.time, "time", lambda: now[0])
    bench.ms[8] = triton.runtime.errors.OutOfResources(2, 1, "shared memory")
    filler.launch(tuned())
    bench.timed.clear()
    del bench.ms[8]
    for later, timed in [(86_399, []), (86_400, [8]), (-10, [])]:
        now[0] = 1e9 + later
        kernel = tuned()
        filler.launch(kernel)
        assert (bench.timed, warps(kernel)) == (timed, 2)
        bench.timed.clear()


@pytest.mark.parametrize("option", ["reset_to_zero", "restore_value", "key"])
def test_a_name_that_is_no_argument_is_refused_where_it_is_declared(filler, option):
    declare = foretune.autotune(filler.configs(), **{"key": [], option: ["out_ptr", "M_ptr"]})
    with pytest.raises(ForetuneError, match=f"{option} names M_ptr, but the kernel's arguments are out_ptr, M, N"):
        declare(triton.jit(filler.fill_kernel))
    for wrong in ("out_ptr", [None], 3):
        with pytest.raises(ForetuneError, match=f"{option} must be"):
            foretune.autotune(filler.configs(), **{"key": [], option: wrong})


@pytest.mark.parametrize("option", ["reset_to_zero", "restore_value"])
def test_a_tensor_that_is_none_or_left_out_is_passed_over(filler, bench, option, monkeypatch, tmp_path):
    monkeypatch.setenv("FORETUNE_CACHE_DIR", str(tmp_path))
    declare = foretune.autotune(filler.configs(), ["N"], do_bench=bench, **{option: ["out_ptr", "bias_ptr"]})
    kernel = declare(triton.jit(filler.biased_kernel))
    kernel[(1,)](torch.zeros(8), 8)
    kernel[(1,)](torch.zeros(9), 9, bias_ptr=None)
    assert len(bench.timed) == 6  # all four, and two of a key that is like it


def test_a_generator_of_configs_serves_every_kernel(filler, bench):
    given = ((name for name in ["out_ptr"]), (config for config in filler.configs()))
    declare = foretune.autotune(given[1], ["M", "N"], do_bench=bench, restore_value=list(given[0]))
    kernels = [declare(triton.jit(filler.fill_kernel)) for _ in range(2)]
    assert [len(kernel.configs) for kernel in kernels] == [4, 4]


def test_configs_that_differ_in_their_hook_alone_share_no_time_on_disk(filler, bench, tuned):
    """As two configs of one kernel, and as one config whose hook is another in a later version of the program."""

    def slow(arguments):
        bench.ms[2] = 100.0

    def fast(arguments):
        bench.ms[2] = 0.5

    def configs(*hooks):
        return [*filler.configs((4,)), *(triton.Config({"BLOCK": 32}, num_warps=2, pre_hook=hook) for hook in hooks)]

    chosen = []
    for hooks in [(slow, fast), (slow, fast), (slow,), (fast,), (slow,), (fast,)]:
        bench.ms.clear()
        bench.timed.clear()
        kernel = tuned(configs(*hooks), family=False)
        filler.launch(kernel)
        chosen.append((kernel.best_config.pre_hook, sorted(bench.timed)))
    assert chosen == [
        (fast, [2, 2, 4]),
        (fast, [2, 2]),  # of the two that share their values nothing is kept
        (None, [2, 4]),
        (fast, [2, 4]),
        (None, []),
        (fast, []),
    ]


@pytest.mark.parametrize("same", [True, False])
def test_hooks_are_told_apart_by_what_they_do(filler, same):
    from functools import partial

    from foretune.runtime.launching.kernel import hash_of_tuned

    def hook(factor, other=None):
        return lambda arguments: arguments["out_ptr"].mul_(factor)

    class Hook:
        def __call__(self, arguments):
            """Nothing."""

    pairs = {
        True: [(hook(2), hook(2)), (partial(max, 1), partial(max, 1)), (Hook(), Hook()), (None, None)],
        False: [(hook(2), hook(3)), (partial(max, 1), partial(max, 2)), (Hook(), print), (None, print), (max, min)],
    }
    jit = triton.jit(filler.fill_kernel)
    for pair in pairs[same]:
        first, second = (hash_of_tuned(jit, [triton.Config({"BLOCK": 32}, pre_hook=one)]) for one in pair)
        assert (first == second) == same, pair
