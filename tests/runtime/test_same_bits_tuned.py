"""`same_bits` in tuners, under the stub driver with real compiles: only configs of one numerics class are timed."""

from __future__ import annotations

import foretune
import pytest
import triton
from foretune.runtime import use_stub_driver

pytestmark = [pytest.mark.compile, pytest.mark.usefixtures("own_cache")]
pytest.importorskip("torch")


@pytest.fixture
def bench(filler, monkeypatch, tmp_path):
    monkeypatch.setenv("FORETUNE_CACHE_DIR", str(tmp_path))
    with use_stub_driver(filler.H200) as driver:
        yield filler.Bench(driver)


@pytest.fixture
def family(filler):
    """The filler, whose bits change at 4 warps; the default has 1 warp for up to 100 rows, and 4 for more."""

    class Classed(filler.Filler):
        independent = ("m",)

        def numerics(self, config, problem):
            return config.num_warps >= 4

        def default(self, problem, device):
            return self.space()[0 if problem["m"] <= 100 else 2]

    return Classed()


def declared(filler, bench, family, **options):
    options = {"do_bench": bench, "workers": 1, "bundle": filler.FillerBundle(), "k": 4, "family": family} | options
    return foretune.autotune(filler.configs(), ["M", "N"], **options)(triton.jit(filler.fill_kernel))


def test_without_it_all_classes_are_timed(filler, bench, family):
    filler.launch(declared(filler, bench, family), m=64)
    assert sorted(bench.timed) == [1, 2, 4, 8]


@pytest.mark.parametrize("how", ["option", "variable"])
def test_tuning_times_one_class(filler, bench, family, monkeypatch, how):
    if how == "variable":
        monkeypatch.setenv("FORETUNE_SAME_BITS", "1")
    kernel = declared(filler, bench, family, **({"same_bits": True} if how == "option" else {}))
    filler.launch(kernel, m=64)
    assert sorted(bench.timed) == [1, 2]
    filler.launch(kernel, m=1000)
    assert sorted(bench.timed) == [1, 2, 4, 8]
    assert kernel.best_config.num_warps == 4  # 2 warps, and 1, are faster


def test_tuning_keeps_one_class_for_all_rows(filler, bench, family):
    kernel = declared(filler, bench, family, invariant="m")
    for rows in (8, 64, 1000):
        filler.launch(kernel, m=rows)
        assert kernel.best_config.num_warps == 4
    assert set(bench.timed) == {4, 8}


def test_a_size_of_the_same_bucket_with_another_class_does_not_take_the_choice(filler, bench, family):
    kernel = declared(filler, bench, family, same_bits=True)
    assert family.at_call_time(foretune.Problem.of("filler", m=100, n=64, dtype="fp32")) == family.at_call_time(
        foretune.Problem.of("filler", m=101, n=64, dtype="fp32")
    )
    filler.launch(kernel, m=100)
    assert kernel.best_config.num_warps == 1
    filler.launch(kernel, m=101)
    assert kernel.best_config.num_warps == 4


@pytest.mark.parametrize("mode", ["shortlist", "predict", "off"])
def test_attached_kernels_time_one_class_unless_foretune_is_off(filler, bench, family, monkeypatch, mode):
    monkeypatch.setenv("FORETUNE_MODE", mode)
    tuner = triton.autotune(filler.configs(), ["M", "N"], do_bench=bench)(triton.jit(filler.fill_kernel))
    foretune.attach(tuner, family, same_bits=True)
    try:
        filler.launch(tuner, m=1000)
    finally:
        foretune.detach(tuner)
    assert (tuner.best_config.num_warps >= 4) == (mode != "off")
    assert set(bench.timed) == ({1, 2, 4, 8} if mode == "off" else {4, 8})


def test_an_attached_kernel_without_a_family_cannot_keep_bits(filler, bench):
    tuner = triton.autotune(filler.configs(), ["M", "N"], do_bench=bench)(triton.jit(filler.fill_kernel))
    with pytest.raises(foretune.ForetuneError, match="same_bits needs a family, but family is None"):
        foretune.attach(tuner, same_bits=True)


def test_a_triton_family_declares_its_knobs(filler):
    made = {
        "name": "filled",
        "kernel": triton.jit(filler.fill_kernel),
        "configs": filler.configs(),
        "dims_from": {"m": "M", "n": "N"},
        "output": "out_ptr",
        "independent": ("m",),
        "ranges": {"m": (1, 64), "n": (1, 64)},
        "arguments": lambda self, problem, where: {},
        "grid": lambda self, problem, config: (1,),
        "eager": lambda self, arguments: None,
        "dtypes": ("fp32",),
    }
    with pytest.raises(foretune.ForetuneError, match="filled: there is no knob BLOCK_Q"):
        type("Wrong", (foretune.TritonFamily,), made | {"numerics": ("BLOCK_Q",)})
    with pytest.raises(foretune.ForetuneError, match="filled: there is no dimension rows"):
        type("Wrong", (foretune.TritonFamily,), made | {"independent": ("rows",)})
    family = type("Filled", (foretune.TritonFamily,), made | {"numerics": ("BLOCK",)})()
    problem = foretune.Problem.of("filled", m=8, n=8, dtype="fp32")
    assert {family.numerics(config, problem) for config in family.space()} == {(32,)}
    alone = type("Alone", (foretune.TritonFamily,), made)()
    assert len({alone.numerics(config, problem) for config in alone.space()}) == 4
