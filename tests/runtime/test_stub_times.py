"""Times that no GPU measured are neither logged nor kept on disk, whoever took them."""

from __future__ import annotations

import math

import foretune
import pytest
import triton
from fakes import FakeFamily, fake_cases
from foretune.runtime import Pruner, choice, use_stub_driver
from foretune.runtime.arguments import Mode
from foretune.runtime.launching.stub_driver import measures
from foretune.runtime.timing import flywheel
from remembered import H200
from triton import knobs

pytestmark = [pytest.mark.compile, pytest.mark.usefixtures("own_cache")]
torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """Of what is logged and kept."""
    monkeypatch.setenv("FORETUNE_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("FORETUNE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(flywheel, "_logs", {})
    if hasattr(knobs.autotuning, "listener"):
        monkeypatch.setattr(knobs.autotuning, "listener", None)
    return tmp_path


def files(folder):
    flywheel._read_pending()  # as the end of the process does
    return sorted({path.parent.name for path in folder.rglob("*.json*")})


def own_bench(call, quantiles):
    call()
    return [2.0] * 3


@pytest.mark.parametrize("do_bench", [None, own_bench], ids=["the stub's", "its own"])
@pytest.mark.parametrize("way", ["autotune", "attach", "attach to a family", "prune"])
def test_a_stub_drivers_times_are_not_kept_and_those_of_a_do_bench_are(way, do_bench, toy, folder):
    options = {} if do_bench is None else {"do_bench": do_bench}
    if way == "autotune":
        kernel = foretune.autotune(toy.triton_configs()[:2], ["M", "N", "K"], workers=1, **options)(
            triton.jit(toy.matmul_kernel)
        )
    elif way == "prune":
        pruner = Pruner(toy.ToyFamily(), 2, device=toy.H200, bundle=toy.ToyBundle())
        kernel = toy.tuned(pruner, configs=toy.triton_configs(), **options)
    else:
        kernel = toy.tuned(None, configs=toy.triton_configs()[:2], **options)
        foretune.attach(kernel, toy.ToyFamily() if way.endswith("family") else None)
    with use_stub_driver(toy.H200):
        kernel[toy.grid](*toy.operands(), 64, 64, 64)
        assert kernel.best_config is not None
    kept = {"log", "parts"} | ({"choices"} if way != "prune" else set())
    assert set(files(folder)) == (kept if do_bench is own_bench else set())


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_function_that_is_tuned_under_a_stub_driver_is_tuned_again(is_whole, folder):
    tuned = foretune.tune({"tile": [1, 2]}, n_warmup=1, n_repeat=1)(lambda count, tile: count * tile)
    if is_whole:
        tuned = foretune.contextual_autotune(n_warmup=1, n_repeat=1)(lambda count, inner=tuned: inner(count))
    with use_stub_driver(H200):
        tuned(3)
    assert files(folder) == []
    tuned(4)  # which counts as another key
    assert files(folder) == ["functions"]


def test_an_op_logs_nothing_that_a_stub_driver_timed(folder, monkeypatch):
    family, case = FakeFamily(), fake_cases()[0]
    ranked = type("Ranked", (), {"predicted": True, "configs": family.space()[:2], "predicted_slowdown": (1.0, 1.0)})
    chooser = type("Chooser", (), {"choose": lambda self, near, k: ranked})
    monkeypatch.setattr(choice, "chooser_of", lambda *given: chooser())
    monkeypatch.setattr(choice, "_can_wait", lambda: True)
    monkeypatch.setattr(choice, "_measured", {})
    monkeypatch.setattr(choice, "_times_us", lambda family, configs, launch: [1.0, 2.0])
    with use_stub_driver(H200):
        choice.choose(family, case.problem, H200, Mode.SHORTLIST, lambda config: None)
    assert files(folder) == []


def test_what_the_interpreter_runs_is_not_measured(monkeypatch):
    assert measures()
    monkeypatch.setattr(knobs.runtime, "interpret", True)
    assert not measures()


def test_a_benchmarker_that_an_autotuner_keeps_is_not_the_stubs_for_ever(toy):
    with use_stub_driver(toy.H200) as stub:
        bench = stub.get_benchmarker()
        assert bench(lambda: None, quantiles=(0.5,)) == [1.0]
    active = triton.runtime.driver._active

    class Driver:
        def get_benchmarker(self):
            return lambda call, quantiles, **how: [math.pi, how]

    triton.runtime.driver.set_active(Driver())
    try:
        assert bench(lambda: None, quantiles=(0.5,), warmup=5) == [math.pi, {"warmup": 5}]
    finally:
        triton.runtime.driver.set_active(active)
