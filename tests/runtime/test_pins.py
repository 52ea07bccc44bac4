"""A pin file in force: what it covers runs as it says, nothing is tuned or predicted, and the rest is an error."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from types import SimpleNamespace

import foretune
import pytest
import triton
from foretune.datasets import ForetuneError, ForetuneWarning, KernelConfig, Problem
from foretune.kernels import find_family
from foretune.runtime import Mode, choice, pins, resolve_mode, use_stub_driver
from foretune.runtime.pin_file import PinError, PinFile
from foretune.runtime.tuning import autotuner, triton_adapter
from foretune.runtime.tuning.cache import kernel_cache
from foretune.runtime.tuning.cache.kernel_cache import ChoiceCache
from foretune.runtime.tuning.cache.pinning import pins_of_cache, pins_of_predictions
from pinning import DRIFT, H200, pinned_kernel, save, with_config, with_problem

pytestmark = [pytest.mark.compile, pytest.mark.usefixtures("own_cache")]
torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(kernel_cache.VARIABLE, str(tmp_path / "cache"))
    for name in (pins.PIN_VARIABLE, pins.MISSING_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    kernel_cache._shared.cache_clear()
    pins._from_environment.cache_clear()
    return tmp_path


@pytest.fixture
def bench(filler):
    with use_stub_driver(filler.H200) as driver:
        yield filler.Bench(driver)


@pytest.fixture
def lock(folder):
    return folder / "foretune.lock"


class Autotuned:
    """`foretune.autotune`, declared anew as in another process."""

    def __init__(self, filler, bench):
        self.filler, self.bench = filler, bench

    def kernel(self, **options):
        options = {"family": self.filler.Filler(), "bundle": self.filler.FillerBundle(), "k": 3} | options
        declare = foretune.autotune(self.filler.configs(), ["M", "N"], do_bench=self.bench, workers=1, **options)
        return declare(triton.jit(self.filler.fill_kernel))


class Attached(Autotuned):
    """`foretune.attach` to a kernel of Triton's autotuner."""

    def kernel(self, **options):
        tuner = triton.autotune(self.filler.configs(), ["M", "N"], do_bench=self.bench, **options)
        return foretune.attach(tuner(triton.jit(self.filler.fill_kernel)), k=3)


@pytest.fixture(params=[Autotuned, Attached])
def maker(request, filler, bench):
    return request.param(filler, bench)


def warps(kernel):
    return kernel.best_config.num_warps


def tuned_into(lock, maker):
    """Tune a kernel, pin its choice, and forget what was timed."""
    kernel = maker.kernel()
    maker.filler.launch(kernel)
    pins_of_cache().save(lock)
    maker.bench.timed.clear()
    (entry,) = PinFile.read(lock).kernels
    return warps(kernel), entry


def test_a_run_is_pinned_and_the_next_one_tunes_nothing(maker, lock, monkeypatch):
    chosen, _ = tuned_into(lock, maker)
    monkeypatch.setenv(kernel_cache.VARIABLE, str(lock.parent / "empty"))  # of another node
    monkeypatch.setenv(pins.PIN_VARIABLE, str(lock))
    kernel = maker.kernel()
    maker.filler.launch(kernel)
    maker.filler.launch(kernel)
    assert (warps(kernel), maker.bench.timed) == (chosen, [])
    assert not (lock.parent / "empty").exists()


def test_nothing_is_predicted_for_what_is_covered(filler, bench, lock, monkeypatch):
    maker = Autotuned(filler, bench)
    tuned_into(lock, maker)
    monkeypatch.setattr(filler.FillerBundle, "predict", lambda *about: pytest.fail("something was predicted"))
    with foretune.pinned(lock):
        filler.launch(maker.kernel())


def test_a_block_begins_and_ends_it_for_a_kernel_that_has_run(maker, lock):
    chosen, entry = tuned_into(lock, maker)
    save(lock, with_config(entry, KernelConfig.of(BLOCK=32, num_warps=8)))
    kernel = maker.kernel()
    maker.filler.launch(kernel)
    assert warps(kernel) == chosen
    with foretune.pinned(lock):
        maker.filler.launch(kernel)
        assert warps(kernel) == 8
    maker.filler.launch(kernel)
    assert warps(kernel) == chosen
    foretune.pinned(lock)  # without a block, until the process ends
    maker.filler.launch(kernel)
    assert warps(kernel) == 8
    pins.arguments.pins[-1].__exit__()


def test_what_triton_chose_before_is_replaced_where_a_kernel_is_attached(filler, bench, lock, monkeypatch):
    chosen, entry = tuned_into(lock, Attached(filler, bench))
    save(lock, with_config(entry, KernelConfig.of(BLOCK=32, num_warps=8)))
    kernel = triton.autotune(filler.configs(), ["M", "N"], do_bench=bench)(triton.jit(filler.fill_kernel))
    filler.launch(kernel)
    assert warps(kernel) == chosen
    monkeypatch.setenv(pins.PIN_VARIABLE, str(lock))
    foretune.attach(kernel)
    filler.launch(kernel)
    assert warps(kernel) == 8


@pytest.mark.parametrize("kind", DRIFT)
def test_what_has_changed_is_an_error_that_names_it(maker, lock, kind):
    _, entry = tuned_into(lock, maker)
    change, message = DRIFT[kind]
    save(lock, change(entry))
    with foretune.pinned(lock):
        kernel = maker.kernel()
        with pytest.raises(PinError, match=message) as raised:
            maker.filler.launch(kernel)
    assert str(lock) in str(raised.value)
    assert maker.bench.timed == []


def test_a_size_that_is_not_covered_is_an_error_that_names_it(maker, lock):
    tuned_into(lock, maker)
    with foretune.pinned(lock):
        kernel = maker.kernel()
        with pytest.raises(PinError, match=r"does not cover .*=96 .* on NVIDIA H200 .*: of .*_kernel it has 1 others"):
            maker.filler.launch(kernel, n=96)
        maker.filler.launch(kernel)  # the others still run


@pytest.mark.parametrize("kind", [*DRIFT, "a size"])
def test_what_is_not_covered_runs_its_prediction_with_one_warning(filler, bench, lock, kind, monkeypatch):
    maker = Autotuned(filler, bench)
    _, entry = tuned_into(lock, maker)
    change = (lambda one: with_problem(one, n=96)) if kind == "a size" else DRIFT[kind][0]
    save(lock, change(entry))
    monkeypatch.setenv(pins.MISSING_VARIABLE, "predict")
    with foretune.pinned(lock), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kernel = maker.kernel()
        for n in (64, 64, 128):
            filler.launch(kernel, n=n)
    assert warps(kernel) == 8  # the best predicted
    assert bench.timed == []
    (warning,) = [one for one in caught if issubclass(one.category, ForetuneWarning)]
    assert f": what the file does not cover of {entry.kernel if kind != 'a kernel that is not covered' else ''}" in str(
        warning.message
    )


def test_a_config_that_cannot_be_launched_is_not_replaced_by_another(filler, bench, lock):
    maker = Autotuned(filler, bench)
    tuned_into(lock, maker)
    kernel = maker.kernel()
    kernel.fn.run = lambda *args, **kwargs: (_ for _ in ()).throw(RuntimeError("no memory"))
    with foretune.pinned(lock), pytest.raises(RuntimeError, match="no memory"):
        filler.launch(kernel)


def test_while_a_graph_is_captured_the_pinned_config_runs(maker, lock, monkeypatch):
    chosen, _ = tuned_into(lock, maker)
    for module in (autotuner, triton_adapter):
        monkeypatch.setattr(module, "is_capturing", lambda: True)
    with foretune.pinned(lock):
        kernel = maker.kernel()
        maker.filler.launch(kernel)
    assert (warps(kernel), maker.bench.timed) == (chosen, [])


def test_the_first_launch_finds_its_tensors_reset_as_after_tuning(maker, lock):
    tuned_into(lock, maker)
    with foretune.pinned(lock):
        kernel = maker.kernel(reset_to_zero=["out_ptr"])
        out = torch.ones(64, 64)
        maker.filler.launch(kernel, out=out)
        assert not out.any()
        out += 1
        maker.filler.launch(kernel, out=out)
        assert out.all()


def test_a_hot_call_looks_nothing_up(maker, lock, monkeypatch):
    tuned_into(lock, maker)
    with foretune.pinned(lock):
        kernel = maker.kernel()
        maker.filler.launch(kernel)
        monkeypatch.setattr(pins.Pins, "config_of", lambda *about: pytest.fail("looked up again"))
        for module in (autotuner, triton_adapter):
            monkeypatch.setattr(module, "is_pinned", lambda: pytest.fail("asked again"))
        maker.filler.launch(kernel)


def test_what_is_left_is_predicted_whatever_the_mode_unless_off(lock, monkeypatch):
    with foretune.pinned(save(lock)):
        assert [resolve_mode(mode).value for mode in (None, "shortlist", "predict", "off")] == [*["predict"] * 3, "off"]
    monkeypatch.setenv(pins.PIN_VARIABLE, str(lock))
    assert resolve_mode().value == "predict"
    monkeypatch.delenv(pins.PIN_VARIABLE)
    assert resolve_mode().value == "shortlist"


def test_off_is_off(filler, bench, lock, monkeypatch):
    save(lock)
    monkeypatch.setenv("FORETUNE_MODE", "off")
    with foretune.pinned(lock):
        filler.launch(Autotuned(filler, bench).kernel())
    assert sorted(bench.timed) == [1, 2, 4, 8]


def test_the_file_is_read_once(filler, bench, lock, monkeypatch):
    maker = Autotuned(filler, bench)
    tuned_into(lock, maker)
    monkeypatch.setenv(pins.PIN_VARIABLE, str(lock))
    filler.launch(maker.kernel())
    lock.unlink()
    filler.launch(maker.kernel())


def test_the_kernel_s_own_pruner_does_not_hide_what_is_pinned(maker, lock):
    chosen, _ = tuned_into(lock, maker)
    assert chosen != 8
    filler = maker.filler
    pruner = foretune.prune(filler.Filler(), k=1, bundle=filler.FillerBundle())  # keeps 8 warps
    with foretune.pinned(lock):
        kernel = maker.kernel(prune_configs_by={"early_config_prune": pruner})
        filler.launch(kernel)
    assert (warps(kernel), maker.bench.timed) == (chosen, [])


def test_a_kernel_that_prunes_itself_has_a_config_for_each_launch(filler, bench, lock):
    """Two launches of one bucket, of which the kernel allows other configs."""

    def own(configs, named, **more):
        return [one for one in configs if (one.num_warps < 4) == (named["M"] < 1001)]

    maker = Autotuned(filler, bench)
    options = {"prune_configs_by": {"early_config_prune": own}}
    kernel = maker.kernel(**options)
    for m in (1000, 1001):
        filler.launch(kernel, m=m)
    pins_of_cache().save(lock)
    ran = []
    with foretune.pinned(lock):
        kernel = maker.kernel(**options)
        for m in (1000, 1001):
            filler.launch(kernel, m=m)
            ran.append(warps(kernel))
        with pytest.raises(PinError, match="not among the 2 configs of the launch"):
            filler.launch(kernel, m=1002 if ran[-1] < 4 else 999)
    assert ran == [1, 4]
    (entry,) = PinFile.read(lock).kernels
    (only,) = entry.choices.values()
    assert sorted(launch["key"][0] for launch in only.launches) == [1000, 1001]


def test_a_pruned_kernel_of_triton_s_gets_the_config_of_its_family(filler, bench, lock):
    family = filler.Filler()
    problem = Problem.of("filler", m=64, n=64, dtype="fp32")
    save(lock, pins_of_predictions(family, [problem], "h200", bundle=filler.FillerBundle()))
    pruner = foretune.prune(family, k=3, bundle=filler.FillerBundle())
    with foretune.pinned(lock):
        tuner = triton.autotune(
            filler.configs(), ["M", "N"], prune_configs_by={"early_config_prune": pruner}, do_bench=bench
        )(triton.jit(filler.fill_kernel))
        filler.launch(tuner)
        assert tuner.best_config.num_warps == 8
        with pytest.raises(PinError, match=r"does not cover filler m=64 n=96"):
            filler.launch(tuner, n=96)
    assert len(bench.timed) <= 1  # Triton before 3.8 times even a single config


def test_dynamo_gets_the_pinned_config_alone(maker, lock, monkeypatch):
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    chosen, _ = tuned_into(lock, maker)
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: True)
    graphs = []

    def backend(graph, inputs):
        for node in graph.graph.nodes:
            if "triton_kernel_wrapper" in str(node.target):
                kernel = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
                graphs.append([config.num_warps for config in kernel.configs])
        return graph.forward

    with foretune.pinned(lock):
        kernel = maker.kernel()

        def function(x):
            out = torch.empty_like(x)
            m, n = x.shape
            kernel[lambda meta: (triton.cdiv(m * n, meta["BLOCK"]),)](out, m, n)
            return out

        torch._dynamo.reset()
        torch.compile(function, backend=backend, fullgraph=True, dynamic=False)(torch.zeros(64, 64))
        assert graphs == [[chosen]]
        torch._dynamo.reset()
        with pytest.raises(Exception, match="does not cover"):
            torch.compile(function, backend=backend, fullgraph=True, dynamic=False)(torch.zeros(64, 96))
        torch._dynamo.reset()
        dynamic = torch.compile(function, backend=backend, dynamic=True)
        dynamic(torch.zeros(64, 64))  # the launch is outside of the graph
        assert warps(kernel) == chosen
        with pytest.raises(PinError, match="does not cover"):
            dynamic(torch.zeros(64, 96))
        assert (len(graphs), maker.bench.timed) == (1, [])
        if isinstance(maker, Attached):
            foretune.detach(kernel)
            assert kernel.early_config_prune is None


# Ops


@pytest.fixture
def product(lock, monkeypatch):
    """A problem of `foretune.matmul`, its family, and a choice that no prediction makes."""
    monkeypatch.setattr(choice, "chooser_of", lambda *about: pytest.fail("something was predicted"))
    family = find_family("matmul")
    problem = Problem.of("matmul", batch=1, m=60, n=128, k=64)
    config = family.default(problem, H200)
    save(lock, pinned_kernel("matmul", {family.at_call_time(problem): config}, source=family.source_hash()))
    return SimpleNamespace(family=family, problem=problem, config=config, lock=lock)


def choose(product, problem=None, mode=Mode.SHORTLIST):
    return choice.choose(product.family, problem or product.problem, H200, mode, lambda config: pytest.fail("timed"))


def test_an_op_runs_what_is_pinned_in_any_mode_but_off(product):
    with foretune.pinned(product.lock):
        for mode in (Mode.PREDICT, Mode.SHORTLIST):
            assert choose(product, mode=mode) == product.config
        assert choose(product, mode=Mode.OFF) == product.family.default(product.problem, H200)


@pytest.mark.parametrize("kind", DRIFT)
def test_an_op_names_what_has_changed(product, kind):
    (entry,) = PinFile.read(product.lock).kernels
    change, message = DRIFT[kind]
    save(product.lock, change(entry))
    with foretune.pinned(product.lock), pytest.raises(PinError, match=message):
        choose(product)


def test_an_op_names_the_size_and_the_reason_of_its_family(product):
    with foretune.pinned(product.lock), pytest.raises(PinError, match="does not cover matmul batch=1 k=64 m=4096"):
        choose(product, Problem.of("matmul", batch=1, m=4096, n=128, k=64))
    (entry,) = PinFile.read(product.lock).kernels
    huge = KernelConfig.from_json(product.config.to_json() | {"BLOCK_M": 256, "BLOCK_N": 256, "num_stages": 7})
    save(product.lock, with_config(entry, huge))
    with (
        foretune.pinned(product.lock),
        pytest.raises(PinError, match="which cannot run: BLOCK_M x BLOCK_N must be at most 16384"),
    ):
        choose(product)


def test_an_op_times_nothing_that_is_not_covered(product, monkeypatch):
    monkeypatch.setattr(choice, "_can_wait", lambda: True)
    ranked = [product.config, KernelConfig.from_json(product.config.to_json() | {"num_warps": 8})]
    monkeypatch.setattr(choice, "_ranked", lambda *about: tuple(ranked[: about[-1]]))
    with foretune.pinned(product.lock, missing="predict"), pytest.warns(ForetuneWarning, match="does not cover"):
        assert choose(product, Problem.of("matmul", batch=1, m=4096, n=128, k=64)) == product.config


def test_an_op_follows_the_pins_and_predicts_where_it_may(product, monkeypatch):
    """Through `foretune.matmul`, eager and compiled: calls that were alike before are chosen for again."""
    monkeypatch.setattr(
        choice,
        "chooser_of",
        lambda *about: SimpleNamespace(
            choose=lambda *more: SimpleNamespace(predicted=True, configs=(predicted,), predicted_slowdown=(1.0,))
        ),
    )
    predicted = KernelConfig.from_json(product.config.to_json() | {"num_warps": 8})
    assert predicted != product.config
    x, w = torch.zeros(60, 64, dtype=torch.bfloat16), torch.zeros(128, 64, dtype=torch.bfloat16).T
    compiled = torch.compile(lambda x, w: foretune.matmul(x, w), backend="eager")
    with use_stub_driver(H200) as driver, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")

        def ran(call=foretune.matmul, x=x):
            call(x, w)
            return driver.launches[-1].metadata.num_warps

        assert ran() == 8
        with foretune.pinned(product.lock):
            assert (ran(), ran(compiled)) == (product.config.num_warps,) * 2
            with pytest.raises(PinError, match="does not cover"):
                ran(x=torch.zeros(4096, 64, dtype=torch.bfloat16))
        with foretune.pinned(product.lock, missing="predict"):
            assert ran() == product.config.num_warps
            assert ran(x=torch.zeros(4096, 64, dtype=torch.bfloat16)) == 8
            assert ran(x=torch.zeros(2048, 64, dtype=torch.bfloat16)) == 8
        assert ran() == 8
    warned = [str(one.message) for one in caught if "cover" in str(one.message)]
    assert len(warned) == 1, warned
    assert "m=4096" in warned[0]


def test_a_run_with_a_cache_of_its_own_records_what_its_ops_run(product, monkeypatch):
    """So that its pins cover them: what is predicted, and what is timed."""
    monkeypatch.setattr(choice, "_recorded", {})
    other = KernelConfig.from_json(product.config.to_json() | {"num_warps": 8})
    ranked = [product.config]
    monkeypatch.setattr(choice, "_ranked", lambda *about: tuple(ranked))
    ran = choice.choose(product.family, product.problem, H200, Mode.PREDICT, print)
    ranked[0] = other  # of another bundle
    assert choice.choose(product.family, product.problem, H200, Mode.PREDICT, print) == other
    pins_of_cache().save(product.lock)
    with foretune.pinned(product.lock):
        assert choose(product) == other != ran
    monkeypatch.delenv(kernel_cache.VARIABLE)
    choice._recorded.clear()
    choice.choose(product.family, product.problem, H200, Mode.PREDICT, print)
    monkeypatch.setattr(choice, "measures", lambda: False)
    monkeypatch.setenv(kernel_cache.VARIABLE, "nowhere")
    choice.choose(product.family, product.problem, H200, Mode.PREDICT, print)
    assert choice._recorded == {}


def test_a_choice_that_cannot_be_recorded_runs_all_the_same(product, monkeypatch):
    monkeypatch.setattr(choice, "_recorded", {})
    monkeypatch.setattr(choice, "_ranked", lambda *about: (product.config,))
    monkeypatch.setattr(ChoiceCache, "choose", lambda *about: 1 / 0)
    with pytest.warns(ForetuneWarning, match="matmul: its choices cannot be stored"):
        assert choice.choose(product.family, product.problem, H200, Mode.PREDICT, print) == product.config


# Functions


def test_a_tuned_function_runs_what_is_pinned(lock):
    calls = []

    def declare():
        def scale(values, tile):
            calls.append(tile)
            return tile

        scale.__qualname__ = "scale"
        timer = SimpleNamespace(sample=lambda call, samples, undo: [float(call() == 16) + 1.0] * samples)
        return foretune.tune({"tile": [16, 32]}, key=["values"], timer=timer)(scale)

    assert declare()(8) == 32
    pins_of_cache().save(lock)
    calls.clear()
    text = json.loads(lock.read_text())
    (entry,) = text["functions"]
    assert list(entry["choices"].values()) == ['{"tile":32}']
    edited = PinFile.read(lock).functions[0]
    other = replace(edited, choices={key: {"": '{"tile":16}'} for key in edited.choices})
    PinFile((), (other,)).save(lock.with_name("other.lock"))
    tuned = declare()
    assert tuned(8) == 32  # known from the cache
    with foretune.pinned(lock.with_name("other.lock")):
        assert tuned(8) == 16
    assert tuned(8) == 32
    calls.clear()
    with foretune.pinned(lock):
        tuned = declare()
        assert (tuned(8), tuned(8), calls) == (32, 32, [32, 32])
        with pytest.raises(PinError, match=r"does not cover .*scale for the key .*: it has 1 others"):
            tuned(9)
    with foretune.pinned(lock, missing="predict"), pytest.warns(ForetuneWarning, match="does not cover"):
        assert declare()(9) == 16  # the first


def test_a_function_that_is_tuned_as_a_whole_runs_what_is_pinned(lock):
    calls = []
    timer = SimpleNamespace(sample=lambda call, samples, undo: [float(call() == 16) + 1.0] * samples)

    def declare():
        def scale(values, tile):
            calls.append(tile)
            return tile

        scale.__qualname__ = "scale"
        inner = foretune.tune({"tile": [16, 32]}, cache=False, timer=timer)(scale)

        def layer(values):
            return inner(values)

        layer.__qualname__ = "layer"
        return foretune.contextual_autotune(key=["values"], timer=timer)(layer)

    assert declare()(8) == 32
    pins_of_cache().save(lock)
    calls.clear()
    with foretune.pinned(lock):
        layer = declare()
        assert (layer(8), layer(8), calls) == (32, 32, [32, 32])
        with pytest.raises(PinError, match=r"does not cover .*layer for the key"):
            layer(9)


# Arguments


def test_what_is_wrong_with_the_arguments_is_named(lock, monkeypatch):
    with pytest.raises(ForetuneError, match="missing must be one of error, predict but got 'tune'"):
        foretune.pinned(lock, missing="tune")
    monkeypatch.setenv(pins.MISSING_VARIABLE, "ignore")
    with pytest.raises(ForetuneError, match="FORETUNE_PIN_MISSING must be one of error, predict but got 'ignore'"):
        foretune.pinned(lock)
    monkeypatch.delenv(pins.MISSING_VARIABLE)
    with pytest.raises(PinError, match=r"foretune\.lock: cannot be read: No such file or directory"):
        foretune.pinned(lock)
    monkeypatch.setenv(pins.PIN_VARIABLE, str(lock))
    with pytest.raises(PinError, match=r"foretune\.lock: cannot be read"):
        choice.choose(find_family("matmul"), Problem.of("matmul", batch=1, m=8, n=8, k=8), H200, Mode.PREDICT, print)
