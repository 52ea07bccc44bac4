"""What a family is compared with: `contenders.py` in the folder of a family that has some."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ..datasets import Family, ForetuneError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import ModuleType

    from ..model.baselines import Baseline
    from ..runtime.timing.compare import Comparison, Goal, Row


def comparison_of(family: Family) -> Comparison:
    """The object `COMPARISON` of the module `contenders` beside the family's. Raises `ForetuneError` where there is
    none; what goes wrong while it is imported is its own error."""
    module = _contenders(family)
    comparison: Comparison | None = getattr(module, "COMPARISON", None)
    if comparison is None:
        place = f"{_package(family)}.contenders"
        raise ForetuneError(f"{family.name} has nothing to be compared with: no COMPARISON in {place}")
    return comparison


def baselines_of(family: Family) -> Mapping[str, Baseline]:
    """Rankers that only this family can be compared with, by name: `BASELINES` of the module `contenders` beside the
    family's, none where it has none.

    >>> from foretune.kernels import find_family
    >>> dict(baselines_of(find_family("grouped_gemm_fwd")))
    {}
    """
    found: Mapping[str, Baseline] = getattr(_contenders(family), "BASELINES", {})
    return found


def judge_predicted(
    rows: Sequence[Row], over: Mapping[str, Sequence[float]], what: str = "predicted config, over {}"
) -> list[Goal]:
    """Return the goals for the predicted config next to contenders.

    Args:
        rows: The rows of a comparison; those without a contender do not count for it.
        over: The least speedups over each contender, in the order of `judge_least`.
        what: The text of a goal, with the place of the contender's name.
    """
    from ..runtime.timing.compare import judge_least

    goals: list[Goal] = []
    for name, least in over.items():
        chosen = [row for row in rows if name in row.others_us]
        ratios = [row.others_us[name] / row.predicted_us for row in chosen]
        goals += judge_least(what.format(name), chosen, ratios, *least)
    return goals


def _contenders(family: Family) -> ModuleType | None:
    """The module, or None where there is none; what goes wrong while it is imported is its own error."""
    package = _package(family)
    place = f"{package}.contenders"
    return import_module(place) if package and find_spec(place) else None


def _package(family: Family) -> str:
    return type(family).__module__.rpartition(".")[0]
