"""A campaign: several GPUs, kinds of cards, parts of cards and families share the cases."""

from __future__ import annotations

import itertools
import threading
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from fakes import DEVICE, FakeFamily
from faulty import CompiledFamily, FaultyGpu
from foretune.collect import campaign
from foretune.collect import row_writer as provenance
from foretune.collect.campaign import collect_on_gpus
from foretune.datasets import DeviceSpec, ForetuneError, load
from replay import (
    CASE,
    CASES,
    FAMILIES,
    FAMILY,
    SPACE,
    ReplayGpu,
    check_complete,
    meeting,
    outcomes_of,
    run,
)
from replay_runner import ReplayRunner

pytestmark = pytest.mark.usefixtures("triton")


def test_the_rows_are_the_same_whatever_the_number_of_gpus(out):
    barrier = threading.Barrier(3)
    runners = [ReplayRunner(prepare=meeting(barrier)) for _ in range(3)]
    assert run(CASES, out, *runners).complete
    assert run(CASES, out.with_name("one")).complete
    assert outcomes_of(out) == outcomes_of(out.with_name("one"))
    prepared = [runner.asked("prepare") for runner in runners]
    assert all(prepared)  # each has done something
    assert sorted(map(str, itertools.chain(*prepared))) == sorted(str(case.problem) for case in CASES)


def test_each_kind_of_card_measures_every_case(out):
    small = replace(DEVICE, name="small", sm_count=64)
    gpus = [ReplayGpu(ReplayRunner(), DEVICE), ReplayGpu(ReplayRunner(), small), ReplayGpu(ReplayRunner(), small)]
    summary = run(CASES, out, phases=[gpus])
    assert (summary.cases, summary.complete) == (2 * len(CASES), True)
    dataset = load(out)
    assert {spec.name for spec in dataset.devices} == {DEVICE.name, "small"}
    per_device = dataset.measurements.groupby(["device", "problem"]).size()
    assert len(per_device) == 2 * len(CASES)
    assert run(CASES, out, phases=[gpus]).measurements == 0


class PartRunner(ReplayRunner):
    """One of a part of a card: notes whether another part is at work."""

    at_work: ClassVar = []

    def __init__(self, sms):
        super().__init__(seconds=1e-4)
        self.sms = sms

    def scan(self, config, best_us):
        self.at_work.append(self.sms)
        return super().scan(config, best_us)


def parts_of_cards(*sizes, cards=1):
    return [[ReplayGpu(PartRunner(sms), DEVICE.with_sms(sms)) for _ in range(cards)] for sms in sizes]


def test_parts_of_cards_are_measured_one_after_the_other_each_as_a_device(out):
    PartRunner.at_work.clear()
    summary = run(CASES, out, phases=parts_of_cards(32, 64, cards=2))
    assert (summary.cases, summary.complete, summary.gpus) == (2 * len(CASES), True, 2)
    assert 0 < summary.gpu_busy_share <= 1
    assert PartRunner.at_work == sorted(PartRunner.at_work)  # never both at once
    dataset = load(out)
    assert set(dataset.devices) == {DEVICE.with_sms(32), DEVICE.with_sms(64)}
    rows = dataset.measurements
    assert rows[rows["timing_pass"] == 1].groupby("device").size().to_dict() == dict.fromkeys(
        ["NVIDIA H200 (32 SMs)", "NVIDIA H200 (64 SMs)"], len(CASES) * len(SPACE)
    )
    again = run(CASES, out, phases=parts_of_cards(64, 96))
    assert (again.cases, again.complete, again.measurements) == (2 * len(CASES), True, summary.measurements / 2)


def test_a_size_that_the_driver_rounds_to_another_is_that_one(out):
    twice = [*parts_of_cards(64), *parts_of_cards(64)]
    summary = run(CASES, out, phases=twice)
    assert (summary.cases, summary.complete) == (len(CASES), True)
    assert twice[1][0].runner.calls == []


def test_parts_that_the_budget_does_not_get_to_are_left_to_the_next_run(out):
    now, events = [0.0], []
    first = ReplayRunner(prepare=lambda problem: now.__setitem__(0, now[0] + 1))
    phases = [[ReplayGpu(first, DEVICE.with_sms(32))], *parts_of_cards(64)]
    summary = run(CASES, out, phases=phases, budget_s=2.5, clock=lambda: now[0], on_progress=events.append)
    assert (summary.cases, summary.complete) == (2, False)
    assert {event.total for event in events} == {2 * len(CASES)}
    assert phases[1][0].runner.calls == []
    assert run(CASES, out, phases=parts_of_cards(32, 64)).complete


def test_several_families_share_a_run_and_each_has_its_sources_noted(out):
    other = OtherFamily()
    cases = [*CASES[:2], *(replace(case, problem=replace(case.problem, family="other")) for case in CASES[:2])]
    assert run(cases, out, families={**FAMILIES, "other": other}).complete
    dataset = load(out)
    assert dataset.families == ("fake", "other")
    assert [(dataset.rows(name)["timing_pass"] == 1).sum() for name in dataset.families] == [2 * len(SPACE)] * 2
    noted = {run_id: (run["family"], run["kernel_source"]) for run_id, run in dataset.provenance["runs"].items()}
    assert sorted(noted.values()) == [("fake", "fake-source"), ("other", "other-source")]
    of_row = dataset.measurements["run_id"].map(lambda run_id: noted[run_id][0])
    of_problem = dataset.measurements["problem"].map(lambda problem: dataset.cases[problem].problem.family)
    assert (of_row == of_problem).all()


class OtherFamily(FakeFamily):
    name = "other"

    def source_hash(self):
        return "other-source"


def test_where_measurements_come_from_is_found_out_before_a_gpu_has_work(out, monkeypatch):
    events = []
    monkeypatch.setattr(provenance, "_first_gpu", lambda: events.append("nvidia-smi") or {})

    class Noted(FakeFamily):
        def source_hash(self):
            events.append("source hash")
            return super().source_hash()

    run(CASES[:1], out, ReplayRunner(prepare=events.append), families={FAMILY.name: Noted()})
    assert set(events[: events.index(CASES[0].problem)]) == {"source hash", "nvidia-smi"}


def test_an_existing_dataset_is_refused_without_resume(out):
    run([CASE], out)
    before = len(load(out).measurements)
    with pytest.raises(ForetuneError, match=r"measured already holds a dataset: continue it \(resume\), or choose"):
        collect_on_gpus([FAMILY], [CASE], out, resume=False)
    assert len(load(out).measurements) == before


def test_collecting_takes_all_visible_gpus_or_as_many_as_wanted(out, monkeypatch):
    """With processes of its own: those that measure, and those that compile."""
    opened = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(campaign, "CudaGpu", lambda index, sms: opened.append((index, sms)) or FaultyGpu(seconds=0.002))
    summary = collect_on_gpus([CompiledFamily()], CASES[:3], out, compilers=1)
    assert (summary.gpus, summary.complete, opened) == (3, True, [(0, None), (1, None), (2, None)])
    assert summary.compile_s > 0
    check_complete(out, CASES[:3])
    assert collect_on_gpus([CompiledFamily()], CASES, out, gpus=1, compilers=1).gpus == 1
    for wanted, said in ((0, "an integer >= 1 but got 0"), (4, "between 1 and 3, .* but got 4")):
        with pytest.raises(ForetuneError, match=f"gpus must be {said}"):
            collect_on_gpus([FAMILY], CASES, out, gpus=wanted)
    opened.clear()
    monkeypatch.setattr(DeviceSpec, "live", lambda index: DEVICE)
    assert collect_on_gpus([CompiledFamily()], CASES[:3], out, gpus=2, sms=[32, 64], compilers=1).complete
    assert opened == [(0, 32), (1, 32), (0, 64), (1, 64)]
