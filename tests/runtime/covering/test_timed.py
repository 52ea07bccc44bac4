"""Covers that time what is predicted: what is timed is looked up in h200_cover (see cover_replay.py)."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
import torch
from cover_replay import H200, Replay
from fakes import DEVICE, FakeFamily
from foretune.datasets import DeviceSpec, ForetuneError, Problem
from foretune.kernels import api, find_measurable
from foretune.runtime.covering import cover, make_cover, measured_cover
from foretune.runtime.covering.losses import CANDIDATES


@cache
def undisturbed():
    """A replay whose launches all work, and the cover that it found."""
    replay = Replay("matmul")
    return replay, replay.cover(within=0.02)


def test_few_configs_are_timed_and_those_chosen_lose_two_per_cent_hardly_anywhere():
    """At two of 64 sizes: they are chosen by some passes, and judged by others."""
    replay, found = undisturbed()
    losses = replay.losses(found)
    assert (losses > 0.02).sum() <= 2
    assert losses.max() <= 0.05
    of_all = measured_cover(replay.family, replay.problem, "m", (64, 4096), None, H200, replay.data, within=0.02)
    assert 1 < len(found.configs) <= len(of_all.configs) + 1
    timed = {config for _, config in replay.timed}
    assert len(timed) <= CANDIDATES * len(found.sizes) / 4  # neighbours share their best ones
    assert set(found.configs) <= timed
    assert set(Counter(replay.timed).values()) == {4}  # once in each pass
    half = len(replay.timed) // 2
    assert replay.timed[:half] == replay.timed[half:]  # the third begins when the second is through
    assert Counter(replay.compiled).most_common(1)[0][1] == 1  # each binary, which serves every size
    assert f"timed here: the {len(timed)} configs" in found.reason


def test_with_room_for_noise_they_lose_two_per_cent_nowhere():
    replay = Replay("matmul")
    assert (replay.losses(replay.cover(within=0.015)) <= 0.02).all()


def test_what_cannot_be_launched_is_not_chosen():
    chosen = undisturbed()[1].configs
    replay = Replay("matmul")
    replay.broken = set(chosen[:2])
    found = replay.cover(within=0.02)
    assert not replay.broken & set(found.configs)
    assert not replay.broken & {config for _, config in replay.timed}


def test_a_disturbed_time_does_not_count():
    replay, expected = Replay("matmul"), undisturbed()[1]
    replay.disturbed = set(expected.configs)
    found = replay.cover(within=0.02)
    assert found.configs == expected.configs
    assert found.worst_loss == expected.worst_loss


def test_where_nothing_runs_its_reason_is_said():
    replay = Replay("matmul")
    replay.broken = set(replay.known.configs)
    with pytest.raises(ForetuneError, match=r"none of \d+ configs of matmul ran .*m=64.*: .*out of resource"):
        replay.cover()


def test_only_what_can_run_here_is_timed(monkeypatch):
    problem = Problem.of("matmul", batch=1, m=1, n=64, k=64)

    def none():
        raise ForetuneError("no GPU is visible here")

    monkeypatch.setattr(cover, "device_here", none)
    with pytest.raises(ForetuneError, match="measure=True needs a GPU in this machine: no GPU is visible here"):
        make_cover(find_measurable("matmul"), problem, "m", (1, 64), None, "h200", measure=True)
    monkeypatch.setattr(cover, "device_here", lambda: DeviceSpec.named("h100"))
    with pytest.raises(ForetuneError, match=r"on the current device, NVIDIA H100 80GB HBM3, but device is NVIDIA H200"):
        make_cover(find_measurable("matmul"), problem, "m", (1, 64), None, "h200", measure=True)
    monkeypatch.setattr(cover, "Measurable", str)
    with pytest.raises(ForetuneError, match="fake cannot be timed: measure=True needs a Measurable family"):
        make_cover(
            FakeFamily(), Problem.of("fake", groups=1, n=8, k=8, rows=8), "rows", (1, 8), None, DEVICE, measure=True
        )
    with pytest.raises(ForetuneError, match="measure is for predictions"):
        api.cover("matmul", problem, "m", (64, 4096), device="h200", data="h200_cover", measure=True)


@pytest.mark.gpu
def test_on_a_gpu_a_cover_loses_little_of_what_it_timed():
    problem = Problem.of("matmul", batch=1, m=1, n=4096, k=4096)
    found = api.cover("matmul", problem, "m", (64, 1024), within=0.05, sizes=range(64, 1025, 64), measure=True)
    assert found.device in torch.cuda.get_device_name()
    assert found.worst_loss <= 0.1  # chosen by some passes, and judged by others
    assert "timed here" in found.reason
