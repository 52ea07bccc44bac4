"""The order of a scan: the bundle's where it knows better, else the family's estimate."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace as Toy

import numpy as np
import pytest
from fakes import DEVICE, FakeFamily, fake_cases
from foretune.collect import plan as prior
from foretune.collect.plan import Exhaustive, Prior
from foretune.datasets import BundleError

FAMILY = FakeFamily()
SPACE = FAMILY.space()
CASE = fake_cases()[0]
PROBLEM = CASE.problem


def bundle(trained_on=(DEVICE,), predict=lambda *_: np.arange(len(SPACE), 0, -1.0)):
    """One that knows the fake family: it ranks the last config first."""

    def of(what):
        def ask(family):
            if family != FAMILY.name:
                raise BundleError(f"no family {family!r}")
            return what

        return ask

    return Toy(trained_on=of(trained_on), ranker=of(Toy(predict=predict)))


def estimate_us(configs):
    return FAMILY.estimate_us(PROBLEM, DEVICE, configs)


def ordered(bundle=None):
    """The space in the order in which it is scanned."""
    (step,) = Exhaustive(FAMILY, DEVICE, prior=Prior(bundle)).next([CASE], None)
    return list(step.configs)


def test_what_a_bundle_predicts_comes_first():
    assert ordered(bundle()) == list(SPACE[::-1])


def raises(*_):
    raise BundleError("other features")


@pytest.mark.parametrize(
    "ignorant",
    [bundle(trained_on=(replace(DEVICE, arch="sm_80"),)), bundle(trained_on=()), bundle(predict=raises)],
    ids=["another arch", "no device", "other features"],
)
def test_a_bundle_that_does_not_know_the_case_leaves_it_to_the_estimate(ignorant):
    configs = ordered(ignorant)
    assert sorted(map(str, configs)) == sorted(map(str, SPACE))
    assert (np.diff(estimate_us(configs)) >= 0).all()


def test_the_shipped_bundle_is_asked_where_none_is_given(monkeypatch):
    monkeypatch.setattr(prior, "_shipped", bundle)
    assert ordered() == list(SPACE[::-1])
    (step,) = Exhaustive(FAMILY, DEVICE).next([CASE], None)
    assert list(step.configs) == list(SPACE[::-1])


def test_a_family_that_is_not_shipped_is_left_to_the_estimate():
    assert (np.diff(estimate_us(ordered())) >= 0).all()
