"""No model family is ever tested on itself."""

from __future__ import annotations

import numpy as np
import pytest
from fakes import fake_cases
from foretune.datasets import Case, ForetuneError, Problem
from foretune.kernels.workloads import load_models
from foretune.model import split_folds, split_groups


def real_cases():
    """Both GEMMs of every shipped model at three token counts, merged where shapes coincide, and random shapes."""
    sources: dict[Problem, list[str]] = {}
    for model in load_models():
        for projection, (n, k) in model.projections().items():
            for rows in (64, 1024, 16384):
                problem = Problem.of("f", groups=model.num_experts, rows=rows, n=n, k=k)
                sources.setdefault(problem, []).append(f"{model.model}/{projection}")
    cases = [Case(problem, tuple(names), "balanced") for problem, names in sources.items()]
    randoms = [Case(Problem.of("f", groups=8, rows=8, n=n, k=24), ("random",), "uniform") for n in range(40)]
    return (*cases, *randoms)


@pytest.mark.parametrize("cases", [real_cases(), fake_cases()])
def test_no_family_and_no_shape_on_both_sides(cases):
    folds = split_folds(split_groups(cases), 5)
    for fold in range(5):
        tested = [case for case, of in zip(cases, folds, strict=True) if of == fold]
        trained = [case for case, of in zip(cases, folds, strict=True) if of != fold]
        assert tested
        families = [{f for case in side for f in case.model_families} - {"random"} for side in (tested, trained)]
        assert not families[0] & families[1]
        assert not {case.problem.dims for case in tested} & {case.problem.dims for case in trained}


def test_random_shapes_are_spread_over_the_folds():
    cases = real_cases()
    folds = split_folds(split_groups(cases), 5)
    assert len({of for case, of in zip(cases, folds, strict=True) if case.sources == ("random",)}) > 1


def test_a_chain_of_shared_shapes_is_one_group():
    def case(n, *sources):
        return Case(Problem.of("f", n=n), sources, "balanced")

    chain = [case(1, "A/x"), case(2, "A/x", "B/x"), case(3, "B/x", "C/x"), case(4, "C/x"), case(5, "D/x")]
    assert split_groups(chain).tolist() == [0, 0, 0, 0, 1]
    assert split_groups(chain[::-1]).tolist() == [0, 1, 1, 1, 1]


def test_same_dimensions_belong_together_whatever_the_sizes():
    shapes = [Problem.of("f", rows=8, ragged={"rows": sizes}) for sizes in ((4, 4), (1, 7))]
    cases = [Case(shape, ("random",), scenario) for shape, scenario in zip(shapes, ("balanced", "hot"), strict=True)]
    assert split_groups(cases).tolist() == [0, 0]


def test_folds_are_even_and_whole():
    groups = np.repeat(np.arange(20), np.arange(20) + 1)
    folds = split_folds(groups, 4)
    assert all(len(set(folds[groups == group])) == 1 for group in range(20))
    sizes = np.bincount(folds)
    assert sizes.max() - sizes.min() <= 3


def test_labels_need_not_be_without_gaps():
    assert split_folds(np.array([7, 7, 3, 9]), 3).tolist() == [0, 0, 2, 1]


def test_too_few_groups_or_folds():
    assert sorted(split_folds(np.array([0, 1, 2]), 5)) == [0, 1, 2]
    with pytest.raises(ForetuneError, match="at least two unrelated models, but there is one group: --split size"):
        split_folds(np.array([0, 0]), 5)
    with pytest.raises(ForetuneError, match="folds must be >= 2 but got 1"):
        split_folds(np.array([0, 1]), 1)
