"""`Launcher`: what goes through Triton's JIT, what past it, and that both launch the same."""

from __future__ import annotations

import subprocess
import sys
import weakref
from dataclasses import replace

import pytest
import torch
from foretune import KernelConfig
from foretune.datasets import DeviceSpec, ForetuneError
from foretune.kernels.boxes import stack
from foretune.kernels.grouped_gemm.triton_kernels import gemm, rowwise, tiles
from foretune.kernels.grouped_gemm.triton_kernels import launches as grouped_launches
from foretune.runtime import use_stub_driver
from foretune.runtime.launching.launcher import Launcher
from grouped import launch_gemm

pytestmark = [pytest.mark.compile, pytest.mark.usefixtures("own_cache")]

H200 = DeviceSpec.named("h200")
MI300X = replace(H200, backend="hip", arch="gfx942", warp_size=64, sm_count=304, smem_per_block_bytes=65536)
PLAIN = {"TMA_X": 0, "TMA_W": 0, "TMA_Y": 0, "CONSUMERS": 0, "PINGPONG": 0}
CONFIG = KernelConfig.of(BLOCK_M=16, BLOCK_N=32, BLOCK_K=32, GROUP_M=1, PROGRAMS_PER_SM=1, **PLAIN)


class Calls:
    """Launches of the forward kernel on a stub, and those of them that went through the JIT."""

    def __init__(self, monkeypatch):
        self.through_jit = 0
        self.launcher = Launcher(gemm.grouped_gemm_kernel)
        monkeypatch.setitem(grouped_launches.OVER_ROWS.made, ".gemm:grouped_gemm_kernel", self.launcher)
        monkeypatch.setattr(gemm.grouped_gemm_kernel, "pre_run_hooks", [self._count])

    def _count(self, *arguments, **options):
        self.through_jit += 1

    def __call__(self, *, dtype=torch.bfloat16, config=CONFIG, rows=32, groups=2, offset=0, **options):
        memory = torch.zeros(offset + rows * 16, dtype=dtype)
        x, w = memory[offset:].view(rows, 16), torch.zeros(groups, 8, 16, dtype=dtype)
        tile_map = tiles.TileMap.build(torch.zeros(groups, dtype=torch.int32), rows)
        launch_gemm(x, w, torch.zeros(rows, 8, dtype=dtype), tile_map, config, 132, **options)
        return self.through_jit


@pytest.fixture
def call(monkeypatch):
    return Calls(monkeypatch)


def launches(driver):
    return sum(launch.kernel == "grouped_gemm_kernel" for launch in driver.launches)


def test_only_the_first_of_a_kind_goes_through_the_jit(call):
    with use_stub_driver(H200) as driver:
        for rows, groups in ((32, 2), (32, 2), (33, 2), (1, 1), (16, 16), (1000, 3)):
            assert call(rows=rows, groups=groups) == 1
        assert launches(driver) == 6


def test_whatever_makes_another_binary_goes_through_it_again(call):
    indices, scale = torch.arange(32), torch.ones(32)
    others = [
        {},
        {"dtype": torch.float16},
        {"config": KernelConfig.from_json(CONFIG.to_json() | {"BLOCK_M": 32})},
        {"config": KernelConfig.from_json(CONFIG.to_json() | {"num_stages": 4})},
        {"gather": indices},
        {"gather": indices.int()},
        {"scatter": indices},
        {"scale": scale},
        {"scale": scale.bfloat16()},
        {"bias": torch.zeros(2, 8)},
    ]
    with use_stub_driver(H200) as driver:
        for _ in range(2):
            for options in others:
                call(**options)
        assert call.through_jit == len(others)
        assert launches(driver) == 2 * len(others)
    with use_stub_driver(H200):  # another device: binaries are loaded into one
        assert call() == len(others) + 1


def test_a_tensor_at_an_odd_address_goes_through_it_every_time(call):
    with use_stub_driver(H200) as driver:
        for times in (1, 2):
            assert call(offset=1) == times
        assert call() == 3  # and has left no binary that assumes less than is known here
        assert call() == 3
        assert launches(driver) == 4


def test_where_binaries_depend_on_more_everything_goes_through_it(call):
    with use_stub_driver(MI300X):
        assert [call(), call()] == [1, 2]


def test_forgetting_goes_through_it_again(call):
    with use_stub_driver(H200):
        call()
        call.launcher.forget()
        assert call() == 2


def test_a_prepared_launch_goes_through_it_once_whatever_tensors_it_is_given(call):
    with use_stub_driver(H200) as driver:
        launch = grouped_launches.prepare_gemm(32, 2, 8, 16, CONFIG, 132, x_rows=32)
        for dtype, offset, through_jit in (
            (torch.bfloat16, 0, 1),
            (torch.bfloat16, 16, 1),
            (torch.float16, 0, 2),
            (torch.bfloat16, 0, 2),
            (torch.bfloat16, 1, 3),  # an odd address
        ):
            memory = torch.zeros(offset + 32 * 16, dtype=dtype)
            w, y = torch.zeros(2, 8, 16, dtype=dtype), torch.zeros(32, 8, dtype=dtype)
            entries = tiles.TileMap.build(torch.zeros(2, dtype=torch.int32), 32).entries
            launch((memory[offset:].view(32, 16), w, y, entries, None, None, None))
            assert call.through_jit == through_jit
        assert launches(driver) == 5
        assert call() == 3  # what is launched without being prepared is the same
        call.launcher.forget()
        launch((w.view(-1, 16)[:16].repeat(2, 1), w, y, entries, None, None, None))
        assert call.through_jit == 4


@pytest.fixture
def recorded(monkeypatch):
    """What reaches the binary of the forward kernel: (arguments, launch metadata) of each launch."""
    launches = []

    def record(driver):
        make = driver.launcher_cls

        def launcher_cls(source, metadata):
            launch = make(source, metadata)

            def call(x, y, z, stream, function, packed, launched, enter, leave, *arguments):
                if metadata.name == "grouped_gemm_kernel":
                    addresses = [getattr(value, "data_ptr", lambda value=value: value)() for value in arguments]
                    launches.append((addresses, launched))
                launch(x, y, z)

            return call

        monkeypatch.setattr(driver, "launcher_cls", launcher_cls)
        return launches

    return record


def test_both_ways_pass_the_same_arguments(monkeypatch, recorded):
    """Also knobs that are runtime arguments, which come after the integers."""
    with use_stub_driver(H200) as driver:
        launches = recorded(driver)
        monkeypatch.setitem(grouped_launches.OVER_ROWS.made, False, Launcher(gemm.grouped_gemm_kernel))
        x, w, y = torch.zeros(32, 16), torch.zeros(2, 8, 16), torch.zeros(32, 8)
        tile_map = tiles.TileMap.build(torch.zeros(2, dtype=torch.int32), 32)
        scale, odd = torch.ones(32), KernelConfig.from_json(CONFIG.to_json() | {"GROUP_M": 7, "PROGRAMS_PER_SM": 5})
        for config in (CONFIG, odd, CONFIG, odd):
            launch_gemm(x, w, y, tile_map, config, 132, scale=scale)
    passed = [arguments for arguments, _ in launches]
    assert passed[:2] == passed[2:]
    assert passed[0] != passed[1]
    arguments = dict(zip(gemm.grouped_gemm_kernel.arg_names, passed[3], strict=True))
    assert (arguments["x_ptr"], arguments["scale_ptr"]) == (x.data_ptr(), scale.data_ptr())
    assert (arguments["rows"], arguments["GROUP_M"], arguments["PROGRAMS_PER_SM"]) == (32, 7, 5)


def test_descriptors_of_each_launch_are_of_its_own_tensors(monkeypatch, recorded):
    """Also after the first launch, which Triton's JIT makes; and no launch keeps its tensors alive."""
    tma = KernelConfig.from_json(CONFIG.to_json() | {"TMA_X": 1, "TMA_Y": 1})
    launcher = Launcher(gemm.grouped_gemm_kernel)
    monkeypatch.setitem(grouped_launches.OVER_ROWS.made, ".gemm:grouped_gemm_kernel", launcher)
    names, dead = gemm.grouped_gemm_kernel.arg_names, []
    with use_stub_driver(H200) as driver:
        launches = recorded(driver)
        launch = grouped_launches.prepare_gemm(32, 2, 8, 16, tma, 132, x_rows=32)
        for _ in range(3):
            x, w, y = torch.zeros(32, 16), torch.zeros(2, 8, 16), torch.zeros(32, 8)
            launch((x, w, y, tiles.TileMap.build(torch.zeros(2, dtype=torch.int32), 32).entries, None, None, None))
            given = dict(zip(names, launches.pop()[0], strict=True))
            described = [given[name] for name in ("x_desc", "w_desc", "y_desc")]
            assert [one and one.base for one in described] == [x, None, y]
            assert (described[0].shape, described[0].strides, described[0].block_shape) == ((32, 16), (16, 1), [16, 32])
            del given, described
            dead.append(weakref.ref(x))
        del x, w, y
        assert launcher.is_known
        assert all(one() is None for one in dead)


@pytest.mark.parametrize("bits", [0, 16])
def test_a_descriptor_is_one_that_triton_accepts(bits):
    """Triton's own constructor, which the launcher bypasses, makes the same one of the same facts."""
    y = torch.zeros(3, 64, 128, dtype=torch.bfloat16)
    made = stack(1, 3, 64, 128, (32, 64), bits=bits).of((None, y))
    fields = dict(vars(made))
    assert fields["base"] is y
    assert vars(type(made)(**fields)) == fields
    assert bits == 0 or (made.layout.swizzle_byte_width, made.layout.rank) == (128, 3)


def test_a_profiler_that_listens_is_told_of_every_launch(call, recorded):
    import triton

    def listen(metadata):
        pass

    with use_stub_driver(H200) as driver:
        launches = recorded(driver)
        triton.knobs.runtime.launch_enter_hook.add(listen)
        try:
            call()
            call()
        finally:
            triton.knobs.runtime.launch_enter_hook.remove(listen)
        call()
    told = [launched is not None and launched.get()["name"] for _, launched in launches]
    assert told == ["grouped_gemm_kernel", "grouped_gemm_kernel", False]
    assert call.through_jit == 1


def test_a_kernel_whose_integers_are_specialised_is_refused():
    import triton

    with pytest.raises(ForetuneError, match=r"must list its integers in do_not_specialize but lacks \['width8'\]"):
        Launcher(triton.jit(do_not_specialize=["rows", "topk"])(rowwise.sum_rows_kernel.fn))


WAITING = """
import sys, torch
from foretune.datasets import DeviceSpec
from foretune.kernels.grouped_gemm.triton_kernels import tiles
from foretune.runtime import use_stub_driver
from foretune.runtime.launching import launcher
from triton.backends.nvidia.compiler import get_ptxas_version

def wait():
    print("triton.experimental.gluon" in sys.modules, get_ptxas_version.cache_info().currsize)

launcher.wait_for_the_hash = wait
print("triton.experimental.gluon" in sys.modules, get_ptxas_version.cache_info().currsize)
with use_stub_driver(DeviceSpec.named("h200")):
    tiles.TileMap.build(torch.zeros(2, dtype=torch.int32), 8)
"""


def test_what_a_first_compile_begins_with_is_done_before_tritons_hash_is_waited_for():
    done = subprocess.run([sys.executable, "-c", WAITING], capture_output=True, text=True, check=True).stdout
    assert done.splitlines() == ["False 0", "True 1"]


KEYS = """
import sys
from foretune.kernels.grouped_gemm.triton_kernels import dw, gemm, tiles
from foretune.runtime.launching.launcher import Launcher
kernels = [gemm.grouped_gemm_kernel, dw.grouped_gemm_dw_kernel, dw.sum_partials_kernel, tiles.tile_map_kernel]
order = kernels if sys.argv[1] == "first" else kernels[::-1]
keys = {}
for kernel in order:
    Launcher(kernel)
    keys[kernel.__name__] = kernel.cache_key
print(sorted(keys.items()))
"""


def test_a_binary_is_found_on_the_disk_whichever_kernel_came_first():
    """Triton 3.6 would else make another key for a kernel after another one that calls the same functions."""
    keys = [
        subprocess.run([sys.executable, "-c", KEYS, order], capture_output=True, text=True, check=True).stdout
        for order in ("first", "last")
    ]
    assert keys[0] == keys[1] != ""
