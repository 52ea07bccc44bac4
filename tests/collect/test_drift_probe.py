"""Which launch is repeated through a run."""

from __future__ import annotations

import numpy as np
from fakes import DEVICE, FakeFamily, fake_cases
from foretune.collect.drift_probe import PROBE_US, choose_probe
from foretune.datasets import roofline_us

FAMILIES = {"fake": FakeFamily()}
CASES = fake_cases()


def test_it_is_a_launch_of_middling_length_of_a_config_that_runs():
    chosen = choose_probe(FAMILIES, CASES, DEVICE)
    family = FAMILIES["fake"]
    assert chosen.config == family.default(chosen.problem, DEVICE)
    assert family.supports(chosen.config, chosen.problem, DEVICE) is None
    times = {case.problem: roofline_us(family, case.problem, DEVICE) for case in CASES}
    assert abs(times[chosen.problem] - PROBE_US) == np.abs(np.array([*times.values()]) - PROBE_US).min()


def test_it_does_not_depend_on_the_order_of_the_cases():
    assert choose_probe(FAMILIES, CASES[::-1], DEVICE) == choose_probe(FAMILIES, CASES, DEVICE)


def test_there_is_none_where_no_default_runs_and_where_there_is_no_case():
    class Unsupporting(FakeFamily):
        def supports(self, config, problem, device):
            return "no"

    assert choose_probe({"fake": Unsupporting()}, CASES, DEVICE) is None
    assert choose_probe(FAMILIES, (), DEVICE) is None
