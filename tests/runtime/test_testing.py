"""`foretune.testing`: a stand-in for a GPU, in a block, until it is closed, and one inside another."""

from __future__ import annotations

import gc

import foretune
import pytest
import torch
import triton
from foretune.datasets import DeviceSpec, ForetuneError
from foretune.runtime import stubbed, testing
from foretune.runtime.launching.stub_driver import device_here
from foretune.runtime.testing import use_stub_device

H200, H100 = DeviceSpec.named("h200"), DeviceSpec.named("h100")


def test_it_is_an_attribute_of_the_package():
    assert foretune.testing.use_stub_device is use_stub_device
    assert "testing" in dir(foretune)


def test_in_a_block_launches_are_recorded_and_nothing_runs():
    before = triton.runtime.driver._active
    with foretune.testing.use_stub_device("h200") as driver:
        assert stubbed() is driver
        assert device_here() == H200
        assert driver.get_active_torch_device() == torch.device("cpu")
    assert triton.runtime.driver._active is before


def test_as_a_function_it_lasts_until_it_is_closed():
    before = triton.runtime.driver._active
    stub = use_stub_device(H100)
    try:
        assert (device_here(), stub.device) == (H100, H100)
        with use_stub_device("h200"):
            assert device_here() == H200
        assert stubbed() is stub.driver
    finally:
        stub.close()
    stub.close()  # which changes nothing
    assert triton.runtime.driver._active is before


def test_it_stays_active_without_a_reference_to_it():
    before = triton.runtime.driver._active
    use_stub_device(H100)
    gc.collect()
    assert device_here() == H100
    (stub,) = testing._active
    stub.close()
    assert (triton.runtime.driver._active, testing._active) == (before, set())


def test_a_device_may_be_a_file(tmp_path):
    path = tmp_path / "mine.json"
    H200.with_sms(64).save(path)
    with use_stub_device(path) as driver:
        assert driver.device.sm_count == 64


@pytest.mark.parametrize("device", ["h999", 3])
def test_an_unknown_device_is_named(device):
    with pytest.raises(ForetuneError, match=str(device)):
        use_stub_device(device)
    assert stubbed() is None
