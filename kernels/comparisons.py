"""Find what a family is compared with: the module `contenders` in the family's package, if there is one."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ..datasets import Family, ForetuneError, Measurable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import ModuleType

    from ..model.baselines import Baseline
    from ..runtime.timing.compare import Comparison, Goal, Row


def comparison_of(family: Family) -> Comparison:
    """Return the object `COMPARISON` of the module `contenders` in the family's package.

    An exception raised while that module is imported propagates unchanged.

    Raises:
        ForetuneError: There is no such module or object.
    """
    module = _contenders(family)
    comparison: Comparison | None = getattr(module, "COMPARISON", None)
    if comparison is None:
        place = f"{_package(family)}.contenders"
        raise ForetuneError(f"{family.name} has nothing to be compared with: no COMPARISON in {place}")
    return comparison


def baselines_of(family: Family) -> Mapping[str, Baseline]:
    """Return the rankers that only this family is compared with, by name.

    They are the mapping `BASELINES` of the module `contenders` in the family's package; empty if there is none, or if
    the family only predicts: they rank by the default and usual configs of a `Measurable`.

    >>> from foretune.kernels import find_family
    >>> [list(baselines_of(find_family(name))) for name in ("grouped_gemm_fwd", "inductor_mm", "inductor_reduction")]
    [[], ['inductor'], []]
    """
    found: Mapping[str, Baseline] = getattr(_contenders(family), "BASELINES", {})
    return found if isinstance(family, Measurable) else {}


def judge_predicted(
    rows: Sequence[Row], over: Mapping[str, Sequence[float]], what: str = "predicted config, over {}"
) -> list[Goal]:
    """Return the goals for the speed of the predicted config relative to each contender.

    Args:
        rows: The rows of a comparison. A row without a contender's time does not count for that contender.
        over: The minimum speedups over each contender, in the order of `judge_least`'s parameters.
        what: The text of a goal, with `{}` for the contender's name.
    """
    from ..runtime.timing.compare import judge_least

    goals: list[Goal] = []
    for name, least in over.items():
        chosen = [row for row in rows if name in row.others_us]
        ratios = [row.others_us[name] / row.predicted_us for row in chosen]
        goals += judge_least(what.format(name), chosen, ratios, *least)
    return goals


def _contenders(family: Family) -> ModuleType | None:
    """Return the family's module `contenders`, or None if there is none; exceptions of its import propagate."""
    package = _package(family)
    place = f"{package}.contenders"
    return import_module(place) if package and find_spec(place) else None


def _package(family: Family) -> str:
    return type(family).__module__.rpartition(".")[0]
