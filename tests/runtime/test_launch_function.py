"""The launch function of Triton 3.6, which a thread makes while the first binary is compiled."""

from __future__ import annotations

import foretune
import pytest
import torch
import triton
import triton.language as tl
from foretune.datasets import DeviceSpec
from foretune.runtime import use_stub_driver
from foretune.runtime.launching import ahead, stub_driver
from foretune.runtime.launching.ahead import make_launch_function_ahead
from foretune.runtime.launching.descriptors import Descriptor
from foretune.runtime.launching.launcher import Launcher

pytestmark = [pytest.mark.compile, pytest.mark.usefixtures("own_cache")]
H200 = DeviceSpec.named("h200")
CONFIGS = [triton.Config({"BLOCK": block}, num_warps=1) for block in (16, 32)]


@triton.jit(do_not_specialize=["n"])
def copy_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n), mask=at < n)


@triton.jit(do_not_specialize=["n"])
def box_kernel(x_ptr, y_ptr, x_desc, y_desc, n, BLOCK: tl.constexpr):
    at = tl.arange(0, 8)[:, None] * n + tl.arange(0, BLOCK)[None, :]
    tl.store(y_ptr + at, x_desc.load([0, 0]))


@pytest.fixture
def made(monkeypatch):
    """(whether of a binary, the types of the arguments) of each launch function, on a driver like Triton 3.6's."""
    monkeypatch.setattr(stub_driver, "make_launcher", object(), raising=False)
    make, found = stub_driver.StubDriver.launcher_cls, []

    def launcher_cls(self, source, metadata):
        found.append((hasattr(metadata, "name"), dict(source.signature)))
        return make(self, source, metadata) if hasattr(metadata, "name") else None

    monkeypatch.setattr(stub_driver.StubDriver, "launcher_cls", launcher_cls)
    return found


def wait_for_threads():
    for key in list(ahead._jobs.underway):
        ahead.wait_for(key)


def tensors(dtype=torch.float32):
    return torch.zeros(64, dtype=dtype), torch.zeros(64, dtype=dtype)


def test_a_launcher_has_it_made_once_for_each_signature_and_as_triton_would(made):
    launcher = Launcher(copy_kernel)
    with use_stub_driver(H200):
        for dtype in (torch.float32, torch.float16):
            launcher((1, 1, 1), tensors(dtype), [64], BLOCK=16)
            wait_for_threads()
        (first, fp32), (second, also_fp32), (third, fp16), (fourth, also_fp16) = sorted(
            made, key=lambda one: (one[1]["x_ptr"] != "*fp32", one[0])
        )
        assert [first, second, third, fourth] == [False, True] * 2
        assert fp32 == also_fp32 == {"x_ptr": "*fp32", "y_ptr": "*fp32", "n": "i32", "BLOCK": "constexpr"}
        assert fp16 == also_fp16


def test_one_with_tma_descriptors_is_made_as_triton_makes_it_for_a_binary_that_has_them(monkeypatch):
    """Triton 3.6's code depends on whether the binary's metadata has descriptors, as it has if the target has TMA."""
    monkeypatch.setattr(stub_driver, "make_launcher", object(), raising=False)
    make, counts = stub_driver.StubDriver.launcher_cls, []

    def launcher_cls(self, source, metadata):
        counts.append(len(metadata.tensordesc_meta))
        return make(self, source, metadata) if hasattr(metadata, "name") else None

    monkeypatch.setattr(stub_driver.StubDriver, "launcher_cls", launcher_cls)
    boxes = [Descriptor(0, (8, 64), (64, 1), (8, 64)), None]
    with use_stub_driver(H200):
        Launcher(box_kernel)((1, 1, 1), tensors(), [64], None, boxes, BLOCK=64)
        wait_for_threads()
    assert counts == [1, 1]


def test_an_autotuner_has_it_made_before_it_has_chosen(made):
    tuned = foretune.autotune(CONFIGS, key=["n"])(copy_kernel)
    with use_stub_driver(H200):
        tuned[1, 1, 1](*tensors(), 64)
        wait_for_threads()
    ahead_of_it = [signature for of_a_binary, signature in made if not of_a_binary]
    assert len(ahead_of_it) == 1
    assert all(signature == ahead_of_it[0] for _, signature in made)


def test_later_tritons_have_one_for_all(made, monkeypatch):
    monkeypatch.delattr(stub_driver, "make_launcher")
    with use_stub_driver(H200):
        Launcher(copy_kernel)((1, 1, 1), tensors(), [64], BLOCK=16)
        wait_for_threads()
    assert [of_a_binary for of_a_binary, _ in made] == [True]


def test_whatever_fails_is_left_to_triton(made):
    with use_stub_driver(H200):
        make_launch_function_ahead(object(), [], {})
        make_launch_function_ahead(copy_kernel, [], {"no_such_argument": 1})
        wait_for_threads()
    assert not made
