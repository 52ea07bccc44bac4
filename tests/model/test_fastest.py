"""The quick ranking of the first configs is that of predicting them all; `two_stages.py` says so for all problems."""

from __future__ import annotations

import numpy as np
import pytest
from foretune.datasets import DeviceSpec, ForetuneError, Problem
from foretune.kernels import find_family
from foretune.model import Ranker, load_bundle

H200 = DeviceSpec.named("h200")
DIMS = ((8, 512, 28672, 4096), (64, 8192, 2048, 1024), (128, 65536, 1536, 2048))


@pytest.mark.parametrize("name", ["grouped_gemm_fwd", "grouped_gemm_dx", "grouped_gemm_dw"])
def test_the_first_are_those_of_all_predictions(name):
    family, ranker = find_family(name), load_bundle().ranker(name)
    space = family.space(H200)
    for groups, rows, n, k in DIMS:
        problem = Problem.of(name, groups=groups, rows=rows, n=n, k=k)
        slowdowns = ranker.predict(family, problem, H200, space)
        order = np.argsort(slowdowns, kind="stable")
        for count in (1, 8, 65, len(space), len(space) + 1):
            places, predicted = ranker.fastest(family, problem, H200, space, count)
            assert len(places) >= min(count, len(space))
            assert places[:count].tolist() == order[:count].tolist()
            np.testing.assert_allclose(predicted, slowdowns[places], rtol=1e-6)


def test_a_config_has_the_same_figure_in_any_list_and_among_any_problems():
    family, ranker = find_family("grouped_gemm_fwd"), load_bundle().ranker("grouped_gemm_fwd")
    space, problem = family.space(H200), Problem.of("grouped_gemm_fwd", groups=64, rows=8192, n=2048, k=1024)
    slowdowns = ranker.predict(family, problem, H200, space)
    some = [5, 500, 17, 300]
    alone = ranker.predict(family, problem, H200, tuple(space[place] for place in some))
    np.testing.assert_allclose(alone, slowdowns[some], rtol=1e-12)
    # Any number of threads gives the same bytes: no product is large enough to be shared among them.
    likely = [one for _, one in family.plausible(problem)]
    together = ranker.network_.predict_groups(family.feature_groups(likely, H200, space))
    for place, one in enumerate(likely):
        assert np.array_equal(together[place], ranker.network_.predict(family.features(one, H200, space)))


class Odd(Ranker):
    """Predicts what it was made with."""

    def __init__(self, slowdowns):
        self.slowdowns = slowdowns

    def fit(self, grid, family):
        return self

    def predict(self, family, problem, device, configs):
        return self.slowdowns


@pytest.mark.parametrize(
    ("slowdowns", "message"),
    [
        ([1.0], "must return 2 slowdowns"),
        ([1.0, np.nan], "not finite positive numbers"),
        ([1.0, 0.0], "not finite positive numbers"),
    ],
)
def test_what_are_no_slowdowns_is_refused(slowdowns, message):
    with pytest.raises(ForetuneError, match=message):
        Odd(slowdowns).fastest(None, Problem.of("odd"), H200, [None, None], 1)


def test_equals_come_as_they_were_given():
    places, slowdowns = Odd([2.0, 1.0, 2.0, 1.0]).fastest(None, Problem.of("odd"), H200, [None] * 4, 3)
    assert (places.tolist(), slowdowns.tolist()) == ([1, 3, 0], [1.0, 1.0, 2.0])
