"""Whether measurements are of the kernel as it is now: asked where a family meets a dataset."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..datasets import DatasetError, Family, ForetuneError, Measurable, check_problem_of, wrong_knobs
from ..datasets.contents import kernel_sources
from ..datasets.errors import warn

if TYPE_CHECKING:
    from ..datasets.dataset import Dataset


def check_measured(dataset: Dataset, family: Family) -> None:
    """Raises `DatasetError` for a problem or a config of the dataset that cannot be the family's, and warns as
    `check_sources` does."""
    for case in dataset.cases:
        if case.problem.family == family.name:
            try:
                check_problem_of(family, case.problem)
            except ForetuneError as error:
                raise DatasetError(f"{dataset.name}: {error}") from None
    for number in dataset.rows(family.name)["config"].unique():
        if why := wrong_knobs(family, dataset.configs[number]):
            raise DatasetError(f"{dataset.name}: {why}")
    check_sources(dataset.name, dataset.provenance, family)


def check_sources(name: str, provenance: Mapping[str, Any], family: Family) -> None:
    """Warns (`ForetuneWarning`) where a dataset, of this name and provenance, was measured with other sources of the
    family's kernel.

    What is learned from it may still be good: a new feature that is off by default changes the sources too. Where
    runs recorded no sources there is nothing to compare, nor where the family's are not known here.
    """
    now = source_of(family)
    if now is not None and (others := kernel_sources(provenance, family.name) - {now}):
        warn(
            f"{name} was measured with other sources of {family.name} ({', '.join(sorted(others))}) than there "
            f"are now ({now}): its times are another kernel's. Collect again where that matters"
        )


def source_of(family: Family) -> str | None:
    """The hash of the family's kernel as it is now; None where it is not known: a family that only predicts has no
    kernel, and a laptop ranks without Triton."""
    if not isinstance(family, Measurable):
        return None
    try:
        return family.source_hash()
    except ImportError:
        return None
