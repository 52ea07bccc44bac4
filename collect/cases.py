"""The cases of a run, from a dataset or drawn by a family, and checks of a run's arguments."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from ..datasets import Case, ForetuneError, Measurable, check_attributes, check_problem_of
from ..datasets.errors import abridged, check_between, shown

if TYPE_CHECKING:
    from ..datasets.dataset import Dataset

#: The longest budget in seconds: thirty years.
_LONGEST_BUDGET = 1e9


def cases_like(dataset: Dataset, family: str, *, seed: int = 0) -> tuple[Case, ...]:
    """Return the cases of one family in a dataset, shuffled, for example to measure the same ones on another GPU.

    Args:
        dataset: The dataset.
        family: The family's name.
        seed: The random seed of the order.

    >>> from foretune.datasets import load
    >>> dataset = load("h200")
    >>> {case.problem.family for case in cases_like(dataset, dataset.families[0])} == {dataset.families[0]}
    True
    """
    found = [case for case in dataset.cases if case.problem.family == family]
    return tuple(found[i] for i in np.random.default_rng(seed).permutation(len(found)))


def draw_cases(family: Measurable, **options: Any) -> tuple[Case, ...]:
    """Return the cases (problems to measure) that `family.cases` returns for the options, checked.

    Args:
        family: The family.
        options: Arguments of `Measurable.cases`. None stands for the family's default.

    Raises:
        ForetuneError: The family's `cases` fails, or returns something else. The message names the family.
    """
    return tuple(family.cases(**{name: value for name, value in options.items() if value is not None}))


def first_cases(
    family: Measurable,
    cases: Iterable[Case],
    limit: int | None = None,
    *,
    max_tflop: float | None = None,
    dtypes: Collection[str] = (),
) -> tuple[Case, ...]:
    """Return the first cases that satisfy the given limits, each problem only once.

    Args:
        family: The family of the cases.
        cases: The cases.
        limit: How many to return at most; all if None.
        max_tflop: Leave out problems of more than this many TFLOP.
        dtypes: Leave out problems of other dtypes; none if empty.

    Raises:
        ForetuneError: The family has none of the dtypes, or its `flops` fails.
    """
    if dtypes and not set(dtypes) & set(family.dtypes):
        wrong = abridged(", ".join(dtypes), 60)
        raise ForetuneError(f"dtype must be one of {', '.join(family.dtypes)} for {family.name} but is {wrong}")
    once = {case.problem: case for case in cases if not dtypes or case.problem.dtype in dtypes}

    def small() -> Iterator[Case]:
        for case in once.values():
            flops = family.flops(case.problem)
            if max_tflop is None or flops <= 1e12 * max_tflop:
                yield case

    return tuple(islice(small(), limit))


def check_request(families: Mapping[str, Measurable], cases: Collection[Case], budget_s: float | None = None) -> None:
    """Check the arguments of a run.

    Args:
        families: The families by name.
        cases: The cases.
        budget_s: The budget in seconds; None without a budget.

    Raises:
        ForetuneError: There is no family, one declares something wrong, a case is of another family, or the budget is
            no duration.
    """
    if not families:
        raise ForetuneError("there must be at least one kernel family to collect")
    for family in families.values():
        check_attributes(family)
    if budget_s is not None:
        check_between("budget_s", budget_s, 0, _LONGEST_BUDGET)
    if not isinstance(cases, Collection) or isinstance(cases, (str, bytes)):
        raise ForetuneError(f"cases must be a list of Cases but is {shown(cases)}")
    for case in cases:
        if not isinstance(case, Case):
            raise ForetuneError(f"each of cases must be a Case but one is {shown(case)}")
        if case.problem.family not in families:
            raise ForetuneError(
                f"each case must be of one of the families {', '.join(families)} but one is of {case.problem.family}: "
                f"{case}"
            )
        check_problem_of(families[case.problem.family], case.problem)
