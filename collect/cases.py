"""Which cases a run measures: those of a dataset, or those that a family draws; and checks of a run's arguments."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from ..datasets import Case, ForetuneError, Measurable, check_attributes, check_problem_of
from ..datasets.errors import abridged, check_between, shown

if TYPE_CHECKING:
    from ..datasets.dataset import Dataset

#: The longest budget, in seconds: thirty years.
_LONGEST_BUDGET = 1e9


def cases_like(dataset: Dataset, family: str, *, seed: int = 0) -> tuple[Case, ...]:
    """The problems that a dataset has of one family, to compare cards; shuffled by `seed`.

    >>> from foretune.datasets import load
    >>> dataset = load("h200")
    >>> {case.problem.family for case in cases_like(dataset, dataset.families[0])} == {dataset.families[0]}
    True
    """
    found = [case for case in dataset.cases if case.problem.family == family]
    return tuple(found[i] for i in np.random.default_rng(seed).permutation(len(found)))


def draw_cases(family: Measurable, **options: Any) -> tuple[Case, ...]:
    """What the family draws with these options, see `Measurable.cases`; what is left out is up to the family.

    Raises `ForetuneError` naming the family where its `cases` fails, or draws what is not its own.
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
    """The first `limit` of these cases, all if None: each problem once, of one of `dtypes` if there are any, and none
    of more than `max_tflop` x 1e12 floating-point operations. Raises `ForetuneError` where the family says no such
    number, and where it has none of the dtypes."""
    if dtypes and not set(dtypes) & set(family.dtypes):
        raise ForetuneError(
            f"{family.name} has no dtype {abridged(', '.join(dtypes), 60)}: one of {', '.join(family.dtypes)}"
        )
    once = {case.problem: case for case in cases if not dtypes or case.problem.dtype in dtypes}

    def small() -> Iterator[Case]:
        for case in once.values():
            flops = family.flops(case.problem)
            if max_tflop is None or flops <= 1e12 * max_tflop:
                yield case

    return tuple(islice(small(), limit))


def check_request(families: Mapping[str, Measurable], cases: Collection[Case], budget_s: float | None = None) -> None:
    """Check the arguments of a run.

    Raises:
        ForetuneError: There is no family or it declares something wrong, a case is none of the families, or the budget
            is no duration in seconds.
    """
    if not families:
        raise ForetuneError("there must be a kernel family to collect but there is none")
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
            raise ForetuneError(f"a case is of {case.problem.family}, but collected is {', '.join(families)}: {case}")
        check_problem_of(families[case.problem.family], case.problem)
