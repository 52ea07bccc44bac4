"""Whether measurements are of the kernel as it is now: asked where a family meets a dataset."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..datasets import Family, Measurable
from ..datasets.errors import warn

if TYPE_CHECKING:
    from ..datasets.dataset import Dataset


def check_sources(dataset: Dataset, family: Family) -> None:
    """Warns (`ForetuneWarning`) where a dataset was measured with other sources of the family's kernel.

    What is learned from it may still be good: a new feature that is off by default changes the sources too. Where
    runs recorded no sources there is nothing to compare, nor where the family's are not known here.
    """
    now = source_of(family)
    if now is not None and (others := dataset.kernel_sources(family.name) - {now}):
        warn(
            f"{dataset.name} was measured with other sources of {family.name} ({', '.join(sorted(others))}) than there "
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
