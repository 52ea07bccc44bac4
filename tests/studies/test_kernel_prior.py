"""The study of the prior without packages: wide lists, and which models predict what."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from foretune.datasets import KernelConfig, Problem
from foretune.runtime.tuning.own_timings import OwnTimings
from studies import kernel_prior


def key(package: str, wide: bool = False, size: int = 0, n_configs: int = 6):
    """A key of a package's only kernel."""
    problem = Problem.of("kernel", size=size)
    configs = tuple(KernelConfig.of(BLOCK=16 + one) for one in range(n_configs))
    times, features = np.arange(float(n_configs)), np.zeros((n_configs, 2))
    return kernel_prior.Key(package, f"{package}.kernel", problem, configs, times, features, wide)


@pytest.mark.parametrize("wide", [False, True])
def test_a_package_is_predicted_by_the_others_with_or_without_wide_lists(wide):
    keys = [key("a"), key("a", wide=True), key("b"), key("b", wide=True)]

    def fit(others, columns):
        seen = {(one.package, one.wide) for one in others}
        return lambda _: seen

    found = kernel_prior.held_out(keys, fit, [], wide=wide)
    kinds = (False, True) if wide else (False,)
    assert found == [{("b", kind) for kind in kinds}] * 2 + [{("a", kind) for kind in kinds}] * 2


def test_configs_that_compute_something_else_are_left_out_if_the_authors_agree():
    own, other, wrong = {"own": True}, {"us": 1.0}, {"differs": True}
    assert kernel_prior.comparable([own, other, wrong]) == [own, other]
    not_reproducible = [own, {"own": True, "differs": True}, wrong]
    assert kernel_prior.comparable(not_reproducible) == not_reproducible


def test_wide_lists_have_a_column_and_rows_of_their_own(capsys):
    keys = [key("a"), key("c", n_configs=16), key("own d", n_configs=16)]
    kernel_prior.Table(keys).row("one", lambda *_: (0.5, 0.0))
    keys += [key("b", wide=True, size=1), key("b", wide=True, size=2)]
    kernel_prior.Table(keys).row("two", lambda *_: (0.5, 0.0))
    heads = [line for line in capsys.readouterr().out.splitlines() if "own families" in line]
    assert ["wide lists" in line for line in heads] == [False, True]
    kernel_prior.replay(keys, {"none": None, "yes": [one.times for one in keys]})
    rows = [line.split()[:-3] for line in capsys.readouterr().out.splitlines()[1:]]
    assert ["first", "wide", "yes"] in rows
    assert ["2", "to", "8", "wide", "none"] in rows
    assert ["first", "6-15", "none"] in rows


def test_a_round_takes_as_long_as_its_slowest_compile(monkeypatch):
    monkeypatch.syspath_prepend(Path(kernel_prior.__file__).parent)  # as for the command
    one = key("a")
    one.seconds = np.array([[1.0, 0.1]] * 5 + [[2.0, 0.1]])
    timed, rounds, compiling, timing = kernel_prior._timed(one, None, OwnTimings(SimpleNamespace(name="kernel")))
    assert 5 in timed
    assert compiling == pytest.approx(1.3 * (rounds + 1))  # eight compile side by side, each 1.3 times as long as alone
    assert timing == pytest.approx(0.03 * len(timed))
