"""Launches that are repeated with the arguments that Triton's launch function made before, on the current stream."""

from __future__ import annotations

import copy
from importlib import import_module

import pytest
import torch
import triton
import triton.language as tl
from foretune.datasets import DeviceSpec
from foretune.runtime import use_stub_driver
from foretune.runtime.launching import launcher
from foretune.runtime.launching.descriptors import Descriptor
from foretune.runtime.launching.launcher import Launcher
from foretune.runtime.launching.repeated import LaunchFunction

pytestmark = [pytest.mark.compile, pytest.mark.usefixtures("own_cache")]
H200 = DeviceSpec.named("h200")
BOXES = [Descriptor(0, (8, 64), (64, 1), (8, 64)), None, Descriptor(2, (8, 64), (64, 1), (8, 64))]


@triton.jit(do_not_specialize=["n"])
def copy_kernel(x_ptr, bias_ptr, y_ptr, x_desc, bias_desc, y_desc, n, BLOCK: tl.constexpr):
    y_desc.store([0, 0], x_desc.load([0, 0]))


@triton.jit(do_not_specialize=["n"])
def plain_kernel(x_ptr, bias_ptr, y_ptr, x_desc, n, BLOCK: tl.constexpr):
    tl.store(y_ptr + tl.arange(0, BLOCK), tl.load(x_ptr + tl.arange(0, BLOCK)))


class Card:
    """A stub driver with Triton's own launcher for NVIDIA cards, whose function in C is replaced."""

    def __init__(self, driver, monkeypatch):
        self.driver, self.launched, self.maps, self.stream = driver, [], [], 7
        triton_driver = import_module("triton.backends.nvidia.driver")

        def tensor_map(address, *facts):
            self.maps.append(address)
            return "map", address, *facts

        def launcher_cls(source, metadata):
            run = object.__new__(triton_driver.CudaLauncher)
            signature = dict(source.signature)
            run.launch = triton_driver.wrap_handle_tensordesc(
                lambda *arguments: self.launched.append(arguments), signature, metadata.tensordesc_meta
            )
            run.num_ctas, run.launch_cooperative_grid, run.launch_pdl, run.gsan_enabled = 1, False, False, False
            run.global_scratch_size = run.profile_scratch_size = 0
            run.global_scratch_align = run.profile_scratch_align = 1
            run.arg_annotations, run.kernel_signature = (), b""
            return run

        monkeypatch.setattr(driver, "launcher_cls", launcher_cls)
        monkeypatch.setattr(driver, "get_current_stream", lambda device: self.stream)
        for name in ("fill_tma_descriptor", "fill_tma_descriptor_tiled"):  # Triton 3.6, and later
            monkeypatch.setattr(driver.utils, name, tensor_map, raising=False)


@pytest.fixture
def card(monkeypatch):
    with use_stub_driver(H200) as driver:
        yield Card(driver, monkeypatch)


def tensors():
    return torch.zeros(8, 64), None, torch.zeros(8, 64)


def prepared():
    return Launcher(copy_kernel).prepare((2, 3, 1), [64], None, BOXES, BLOCK=64)


def plain(value):
    """The same arguments with addresses instead of tensors, and None instead of what is only for a profiler."""
    if isinstance(value, (tuple, list)):
        return type(value)(map(plain, value))
    if type(value).__name__ in ("LazyDict", "HookChain"):
        return None
    return value.data_ptr() if isinstance(value, torch.Tensor) else value


def with_stream(arguments, stream):
    return *arguments[:3], stream, *arguments[4:]


def test_a_repeated_launch_passes_what_triton_passed_without_new_tensor_maps(card):
    launch, given = prepared(), tensors()
    for _ in range(4):
        launch(given)
    (by_jit, first, *others), addresses = card.launched, [given[0].data_ptr(), given[2].data_ptr()]
    assert others == [first] * 2
    assert first == plain(by_jit)
    assert first[:4] == (2, 3, 1, 7)
    assert card.maps == addresses * 2  # of Triton's JIT, and of the first launch past it


def test_its_stream_is_the_current_one(card):
    launch, given = prepared(), tensors()
    launch(given)
    launch(given)
    card.stream = 8
    launch(given)
    assert card.launched[2] == with_stream(card.launched[1], 8)
    assert len(card.maps) == 4


def test_other_tensors_have_tensor_maps_of_their_own(card):
    launch, some = prepared(), [tensors() for _ in range(3)]
    for _ in range(3):
        for given in some:
            launch(given)
    firsts = card.launched[3:6]
    assert card.launched[6:] == firsts
    assert len({repr(one) for one in firsts}) == 3
    assert len(card.maps) == 2 * (1 + 3)


def test_so_many_are_kept_of_all_launches_of_a_kernel(card, monkeypatch):
    monkeypatch.setattr(launcher, "_MOST_KEPT", 4)
    kernel = Launcher(copy_kernel)
    wide, narrow = (kernel.prepare((grid, 1, 1), [64], None, BOXES, BLOCK=64) for grid in (2, 3))
    some = [tensors() for _ in range(3)]
    wide(some[0])  # through Triton's JIT, which nothing is kept of
    for given in some:
        wide(given)
        narrow(given)
        assert 0 < len(kernel._kept) <= 4
    assert [found[0] for found in card.launched[1:]] == [2, 3] * 3
    made = len(card.maps)
    narrow(some[2])
    assert len(card.maps) == made
    narrow(some[0])
    assert len(card.maps) == made + 2


def test_another_binary_has_its_own(card):
    """As after another thread has made or loaded one at the same time."""
    launch, given = prepared(), tensors()
    for _ in range(3):
        launch(given)
    ((key, known),) = launch._known.items()
    other = copy.copy(known.binary)
    other.function = "another"
    launch._known[key] = known._replace(binary=other)
    launch(given)
    assert "another" in card.launched[-1]
    launch(given)
    assert card.launched[-1] == card.launched[-2]


@pytest.mark.parametrize("change", ["another closure", "scratch memory", "no launch function"])
def test_where_arguments_cannot_be_kept_each_launch_makes_them(card, change, monkeypatch):
    kernel, given = Launcher(copy_kernel), tensors()
    launch = kernel.prepare((2, 3, 1), [64], None, BOXES, BLOCK=64)
    launch(given)
    ((binary, *_),) = launch._known.values()
    if change == "another closure":
        made = card.driver.launcher_cls

        def launcher_cls(*facts):
            run = made(*facts)
            wrapped = run.launch
            run.launch = lambda *arguments: wrapped(*arguments)
            return run

        monkeypatch.setattr(card.driver, "launcher_cls", launcher_cls)
    elif change == "scratch memory":
        monkeypatch.setattr(binary, "metadata", binary.metadata._replace(global_scratch_size=64))
    else:
        monkeypatch.setattr(type(binary), "run", lambda self, *arguments: card.launched.append(arguments))
    kernel.forget()
    for _ in range(3):
        launch(given)
    assert LaunchFunction.of(binary) is None
    assert len(card.launched) == 4
    assert kernel._kept == {}


def test_a_launch_without_descriptors_keeps_nothing(card):
    kernel, given = Launcher(plain_kernel), tensors()
    for _ in range(3):
        kernel((1, 1, 1), given, [64], None, [None], BLOCK=64)
    assert (len(card.launched), card.maps, kernel._kept) == (3, [], {})
