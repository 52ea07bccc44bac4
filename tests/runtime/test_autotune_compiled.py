"""`Pruner` under the real `triton.autotune` with real compiles, and the stub driver that makes them possible."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from foretune.datasets import DeviceSpec, ForetuneError
from foretune.runtime import ForetuneWarning, Pruner, gpu_target, use_stub_driver

pytestmark = [pytest.mark.compile, pytest.mark.usefixtures("own_cache")]


@pytest.fixture
def small_device(toy):
    """A device of which the toy's config 4 needs too much shared memory."""
    return replace(toy.H200, smem_per_block_bytes=48 * 1024)


def _launch(kernel, toy, how, m=64, n=64, k=64):
    a, b, c = toy.operands(m, n, k)
    if how == "positional":
        kernel[toy.grid](a, b, c, m, n, k)
    else:
        kernel[toy.grid](a_ptr=a, b_ptr=b, c_ptr=c, M=m, N=n, K=k)


@pytest.mark.parametrize("how", ["positional", "keyword"])
def test_only_the_shortlist_is_benchmarked(toy, how):
    family, tried = toy.ToyFamily(), []

    def meter(kernel_call, quantiles):
        kernel_call()
        tried.append(1)
        return [float(len(tried))] * 3  # the first tried, so the first of the shortlist, is the fastest

    kernel = toy.tuned(Pruner(family, 2, device=toy.H200, bundle=toy.ToyBundle()), do_bench=meter)
    with use_stub_driver(toy.H200) as driver:
        _launch(kernel, toy, how)
        _launch(kernel, toy, how)
    assert len(tried) == 2
    assert set(kernel.configs_timings) == {kernel.configs[4], kernel.configs[5]}
    assert kernel.best_config is kernel.configs[5]
    assert len(driver.launches) == 4  # two benchmarked, two for the user
    assert len(family.calls) == 1  # once a key, not once a launch
    assert family.calls[0]["M"] == 64
    assert family.calls[0]["a_ptr"].shape == (64, 64)


def test_a_config_that_does_not_fit_is_survived(toy, small_device):
    kernel = toy.tuned(Pruner(toy.ToyFamily(), 2, device=small_device, bundle=toy.ToyBundle([9, 9, 9, 2, 1, 9])))
    with use_stub_driver(small_device) as driver:
        _launch(kernel, toy, "positional")
    assert kernel.configs_timings[kernel.configs[4]][0] == float("inf")
    assert kernel.best_config is kernel.configs[3]
    assert {launch.metadata.shared <= 48 * 1024 for launch in driver.launches} == {True}


def test_a_shortlist_of_one_runs_that_one(toy):
    kernel = toy.tuned(Pruner(toy.ToyFamily(), 1, device=toy.H200, bundle=toy.ToyBundle()))
    with use_stub_driver(toy.H200) as driver:
        _launch(kernel, toy, "keyword")
    assert kernel.best_config is kernel.configs[5]
    assert driver.launches[-1].grid == (1, 2, 1)


def test_trouble_tunes_the_whole_space(toy):
    kernel = toy.tuned(Pruner(toy.ToyFamily(), 1, device=toy.H200, bundle=toy.ToyBundle([1.0])))
    with use_stub_driver(toy.H200):
        with pytest.warns(ForetuneWarning, match="must return 6 slowdowns") as caught:
            _launch(kernel, toy, "positional")
        _launch(kernel, toy, "positional", n=32)
    (said,) = [one for one in caught if one.category is ForetuneWarning]  # others are other tests' garbage
    assert said.filename == __file__  # where the launch is written: no line of ours, nor of Triton's
    assert len(kernel.configs_timings) == 6


def test_the_stub_leaves_nothing_behind(toy):
    import triton

    before = triton.runtime.driver._active
    with pytest.raises(ZeroDivisionError), use_stub_driver(toy.H200):
        raise ZeroDivisionError
    assert triton.runtime.driver._active is before
    jit = triton.jit(toy.matmul_kernel)
    indices = set()
    for _ in range(2):
        with use_stub_driver(toy.H200) as driver:
            jit[(1,)](*toy.operands(16, 16, 16), 16, 16, 16, BLOCK_M=16, BLOCK_N=16, BLOCK_K=16)
            indices.add(driver.get_current_device())
    # In memory, Triton keeps kernels by device: a real one must never be given a kernel that only the stub loaded.
    assert set(jit.device_caches) == indices
    assert len(indices) == 2
    assert 0 not in indices


def test_the_target_comes_from_the_spec():
    h200 = DeviceSpec.named("h200")
    assert gpu_target(h200) == gpu_target(replace(h200, name="NVIDIA H100"))
    assert gpu_target(replace(h200, arch="sm_100")).arch == 100
    mi300 = gpu_target(replace(h200, backend="hip", arch="gfx942", warp_size=64))
    assert (mi300.backend, mi300.arch, mi300.warp_size) == ("hip", "gfx942", 64)
    with pytest.raises(ForetuneError, match="arch must be like sm_90"):
        gpu_target(replace(h200, arch="avx512", backend="cpu"))


@pytest.mark.parametrize(
    ("backend", "arch", "warp_size"), [("cuda", "sm_80", 32), ("cuda", "sm_100", 32), ("hip", "gfx942", 64)]
)
def test_compiles_for_devices_that_are_not_here(toy, backend, arch, warp_size):
    with use_stub_driver(replace(toy.H200, backend=backend, arch=arch, warp_size=warp_size)):
        kernel = toy.warm_up()
    assert kernel.metadata.target.arch == (arch if backend == "hip" else int(arch[3:]))
    assert len(kernel.kernel) > 1000


WORKER = """
import sys
sys.path.insert(0, sys.argv[1])
import toy
from foretune.runtime import use_stub_driver
with use_stub_driver(toy.H200):
    toy.warm_up()
"""


def test_a_workers_binary_is_a_cache_hit_for_the_real_driver(toy):
    """The real driver's own code, on an H200 that is only said to be there."""
    import triton
    from triton.backends.nvidia.driver import CudaDriver

    here = str(Path(__file__).parent)
    subprocess.run([sys.executable, "-c", WORKER, here], check=True)
    real = object.__new__(CudaDriver)  # without its __init__, which loads libcuda
    real.get_current_device = real.get_current_stream = lambda *_: 0
    real.get_device_capability = lambda device: (9, 0)
    hits, before = [], triton.runtime.driver._active
    triton.runtime.driver.set_active(real)
    triton.knobs.compilation.listener = lambda **seen: hits.append(seen["cache_hit"])
    try:
        toy.warm_up()
    finally:
        triton.knobs.compilation.listener = None
        triton.runtime.driver.set_active(before)
    assert hits == [True]


LAUNCH = """
import json, sys
sys.path.insert(0, sys.argv[1])
import toy, triton
hits = []
triton.knobs.compilation.listener = lambda **seen: hits.append(seen["cache_hit"])
a, b, c = (operand.cuda() for operand in toy.operands())
triton.jit(toy.matmul_kernel)[(2, 2)](a, b, c, 64, 64, 64, **toy.WARM)
print(json.dumps([hits, float((c - (a.float() @ b.float())).abs().max())]))
"""


@pytest.mark.gpu
def test_a_workers_binary_is_a_cache_hit_beside_the_gpu(toy):
    live = DeviceSpec.live()
    here = str(Path(__file__).parent)
    worker = WORKER.replace("toy.H200", f"toy.DeviceSpec.from_json({live.to_json()!r})")
    subprocess.run([sys.executable, "-c", worker, here], env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, check=True)
    run = subprocess.run([sys.executable, "-c", LAUNCH, here], capture_output=True, text=True, check=True)
    hits, error = json.loads(run.stdout)
    assert hits == [True]
    assert error < 1e-2
