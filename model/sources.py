"""Whether measurements are of the kernel as it is now: asked where a family meets a dataset."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from ..datasets import Family, ForetuneWarning

if TYPE_CHECKING:
    from ..datasets.dataset import Dataset


def check_sources(dataset: Dataset, family: Family) -> None:
    """Warns (`ForetuneWarning`) where a dataset was measured with other sources of the family's kernel.

    What is learned from it may still be good: a new feature that is off by default changes the sources too. Where
    runs recorded no sources there is nothing to compare, nor where Triton is not installed (a laptop ranks without it).
    """
    recorded = dataset.kernel_sources(family.name)
    try:
        now = family.source_hash()
    except ImportError:
        return
    if others := recorded - {now}:
        warnings.warn(
            f"{dataset.name} was measured with other sources of {family.name} ({', '.join(sorted(others))}) than there "
            f"are now ({now}): its times are another kernel's. Collect again where that matters",
            ForetuneWarning,
            stacklevel=3,
        )
