"""The first launch of a key finds its tensors as with Triton's own autotuner, whatever is known of the configs."""

from __future__ import annotations

import foretune
import pytest
import triton
from foretune.runtime import use_stub_driver
from foretune.runtime.tuning import autotuner, triton_adapter

pytestmark = [pytest.mark.compile, pytest.mark.usefixtures("own_cache")]
torch = pytest.importorskip("torch")

#: Before 3.8 Triton times a config that is the only one left, too, and resets the tensors after it.
TIMES_ONE = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8)


class Adding(list):
    """Launches of a kernel that adds 1 to a tensor."""

    out = None

    def append(self, launch):
        super().append(launch)
        self.out.add_(1.0)


def fill_seven(arguments, reset_only=False):
    arguments["out_ptr"].fill_(7.0)


def save(arguments, reset_only=False):
    if not reset_only:
        arguments["saved"] = arguments["out_ptr"].clone()


def put_back(arguments, exception):
    arguments["out_ptr"].copy_(arguments["saved"])


#: What it makes of a tensor of fives, by the options: after the first launch, and after the second.
OPTIONS = {
    "reset_to_zero": ({"reset_to_zero": ["out_ptr"]}, [1.0, 2.0]),
    "restore_value": ({"restore_value": ["out_ptr"]}, [6.0, 7.0]),
    "both": ({"reset_to_zero": ["out_ptr"], "restore_value": ["out_ptr"]}, [1.0, 2.0]),
    "pre_hook": ({"pre_hook": fill_seven}, [8.0, 9.0]),
    "hooks": ({"pre_hook": save, "post_hook": put_back}, [6.0, 7.0]),
}


@pytest.fixture
def bench(filler, monkeypatch, tmp_path):
    monkeypatch.setenv("FORETUNE_CACHE_DIR", str(tmp_path))
    with use_stub_driver(filler.H200) as driver:
        driver.launches = Adding()
        yield filler.Bench(driver)


def stock(filler, bench, configs, **options):
    return triton.autotune(configs, ["M", "N"], do_bench=bench, **options)(triton.jit(filler.fill_kernel))


def ours(filler, bench, configs, **options):
    return foretune.autotune(configs, ["M", "N"], do_bench=bench, workers=1, **options)(triton.jit(filler.fill_kernel))


def attached(filler, bench, configs, **options):
    return foretune.attach(stock(filler, bench, configs, **options))


def results(filler, bench, kernel, m=64):
    bench.driver.launches.out = out = torch.full((m, 64), 5.0)
    found = []
    for _ in range(2):
        filler.launch(kernel, m=m, out=out)
        assert (out == out[0, 0]).all()
        found.append(out[0, 0].item())
    return found


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("known", ["nothing", "all", "some", "failed"])
def test_it_is_as_with_triton_whatever_is_known(filler, bench, option, known):
    options, expected = OPTIONS[option]
    if known == "failed":
        bench.ms[8] = triton.runtime.errors.OutOfResources(2, 1, "shared memory")
    assert results(filler, bench, stock(filler, bench, filler.configs(), **options)) == expected
    for declare in (ours, attached):
        if known != "nothing":
            before = filler.configs((1, 8) if known == "some" else filler.WARPS)
            results(filler, bench, declare(filler, bench, before, **options))
        bench.timed.clear()
        assert results(filler, bench, declare(filler, bench, filler.configs(), **options)) == expected
        if declare is ours:  # Triton's own do_bench counts for `attach` where anything is new
            assert len(bench.timed) == {"nothing": 4, "all": 0, "some": 2, "failed": 0}[known]


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("why", ["k=1", "predict", "budget", "bucket", "attach k=1"])
def test_so_it_is_where_nothing_is_timed(filler, bench, option, why, monkeypatch):
    options, expected = OPTIONS[option]
    family = {"family": filler.Filler(), "bundle": filler.FillerBundle()}
    m = 64
    if why == "attach k=1":
        kernel = foretune.attach(stock(filler, bench, filler.configs(), **options), k=1, **family)
    elif why == "bucket":
        m = 1001
        kernel = ours(filler, bench, filler.configs(), bucket=["M"], **options)
        results(filler, bench, kernel, m=1000)
    else:
        monkeypatch.setenv("FORETUNE_MODE", "predict" if why == "predict" else "shortlist")
        more = {"k=1": {"k": 1, **family}, "predict": family, "budget": {"budget_s": 0}}[why]
        kernel = ours(filler, bench, filler.configs(), **more, **options)
    bench.timed.clear()
    assert results(filler, bench, kernel, m=m) == expected
    assert len(bench.timed) <= (1 if TIMES_ONE else 0)  # an old Triton times one config, too


@pytest.mark.parametrize("declare", [stock, ours, attached])
def test_so_it_is_where_the_kernel_s_own_pruning_leaves_one(filler, bench, declare):
    prune = {"early_config_prune": lambda configs, named, **_: configs[:1]}
    kernel = declare(filler, bench, filler.configs(), prune_configs_by=prune, reset_to_zero=["out_ptr"])
    assert results(filler, bench, kernel) == ([1.0, 2.0] if TIMES_ONE else [6.0, 7.0])


def test_a_config_s_own_hook_runs_before_every_launch(filler, bench):
    found = []
    for declare in (
        stock,
        ours,
        ours,
        attached,
        attached,
    ):  # the second of each knows all times, but keeps none of them
        configs = filler.configs()
        for config in configs:
            config.pre_hook = lambda arguments: arguments["out_ptr"].fill_(3.0)
        found.append(results(filler, bench, declare(filler, bench, configs)))
    assert found == [[4.0, 4.0]] * 5


@pytest.mark.parametrize("declare", [ours, attached])
def test_what_was_launched_is_not_reset_again_in_another_epoch(filler, bench, declare, monkeypatch):
    """Where ranks agree, or stop to, keys are chosen for anew: what the caller has added up by then stays."""
    now = [0]
    for module in (autotuner, triton_adapter):
        monkeypatch.setattr(module, "epoch", lambda: now[0])
    monkeypatch.setattr(triton_adapter, "scope", lambda: now[0])
    monkeypatch.setattr(triton_adapter, "may_tune", lambda: now[0] == 0)  # then the best predicted runs
    if declare is attached:
        plain = stock(filler, bench, filler.configs(), reset_to_zero=["out_ptr"])
        kernel = foretune.attach(plain, filler.Filler(), k=2, bundle=filler.FillerBundle())
    else:
        kernel = ours(filler, bench, filler.configs(), reset_to_zero=["out_ptr"])
    assert results(filler, bench, kernel) == [1.0, 2.0]
    now[0] = 1
    if declare is attached and TIMES_ONE:
        pytest.skip("an old Triton times one config, and resets after it")
    assert results(filler, bench, kernel) == [6.0, 7.0]
