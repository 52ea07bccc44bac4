"""What a measuring process opens."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from fakes import DEVICE
from foretune.collect import worker
from foretune.collect.worker import CudaGpu
from foretune.datasets import DeviceSpec
from foretune.runtime import sm_partition


class Card:
    """A card whose driver gives SMs by eights; notes what is done on it, in order."""

    def __init__(self):
        self.log = []

    @contextmanager
    def carve(self, sms):
        self.log.append(f"{sms} SMs")
        yield sms + -sms % 8
        self.log.append("back")

    def runner(self, device):
        self.log.append(device)
        return "runner"


@pytest.fixture
def card(monkeypatch):
    card = Card()
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: card.log.append(f"card {index}"))
    monkeypatch.setattr(DeviceSpec, "live", lambda index: DEVICE)
    monkeypatch.setattr(
        "foretune.runtime.sm_partition", lambda sms, device: sm_partition(sms, device, carve=card.carve)
    )
    monkeypatch.setattr(worker, "GpuRunner", card.runner)
    return card


def test_a_whole_card_is_its_own_device(card):
    assert CudaGpu(1).open() == (DEVICE, "runner")
    assert card.log == ["card 1", DEVICE]


def test_a_part_of_a_card_is_a_device_that_the_process_stays_on(card):
    part = DEVICE.with_sms(64)
    assert CudaGpu(1, 60).open() == (part, "runner")
    assert card.log == ["card 1", "60 SMs", part]  # the runner is made inside, and the SMs are never given back
    worker._entered.close()
    assert card.log[-1] == "back"
