"""Which baselines there are, what each takes, and which of them are wanted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import TypeAlias

from ...datasets import ForetuneError
from ..ranker import Ranker
from .by_regime import RegimeRanker
from .ck_tile import CKTileRanker
from .flagtune import FlagTuneRanker
from .plain import EstimateRanker, NearestRanker, RandomRanker, StaticRanker

RankerFactory: TypeAlias = Callable[[], Ranker]

#: What stands for several names: those that take no time worth mentioning, and all.
FAST, ALL = "fast", "all"
#: A baseline that takes longer than this is not among the fast ones; see `Baseline.cost`.
_FAST_COST = 0.5


@dataclass(frozen=True)
class Baseline:
    """What a learned ranker is compared with: one ranker, or the mean over several."""

    rankers: tuple[RankerFactory, ...]
    #: Processor time over that of `LightGBMRanker`, to train and to judge, as far as one can tell beforehand.
    cost: float = 0.01
    #: The module that it needs, and the distribution that has it, where that is not one of Foretune's own.
    module: str | None = None
    distribution: str | None = None

    @property
    def is_fast(self) -> bool:
        return self.cost <= _FAST_COST

    @property
    def lacking(self) -> str | None:
        """Why it cannot be had here, or None."""
        if self.module is None or find_spec(self.module):
            return None
        return f"it needs {self.distribution or self.module}: pip install {self.distribution or self.module}"


#: Processor time of one fold of h200's largest family, extrapolated from 30 trees for the two recipes (2026-11): 35 s
#: for `LightGBMRanker`, 670 s for `FlagTuneRanker`, 450 s for `CKTileRanker`.
BASELINES: Mapping[str, Baseline] = {
    "random": Baseline(tuple(partial(RandomRanker, seed) for seed in range(10)), cost=0.05),
    "static": Baseline((StaticRanker,)),
    "regimes": Baseline((RegimeRanker,)),
    "nearest": Baseline((NearestRanker,), cost=0.05),
    "estimate": Baseline((EstimateRanker,)),
    "flagtune": Baseline((FlagTuneRanker,), cost=19.0, module="xgboost"),
    "ck_tile": Baseline((CKTileRanker,), cost=13.0),
}


@dataclass(frozen=True)
class Rivals:
    """The baselines of one evaluation, and why others that were asked for are left out."""

    baselines: Mapping[str, Baseline]
    left_out: Mapping[str, str]

    @property
    def cost(self) -> float:
        """See `Baseline.cost`; of all of them."""
        return sum(one.cost for one in self.baselines.values())


def choose_rivals(names: Sequence[str] = (FAST,), own: Mapping[str, Baseline] | None = None) -> Rivals:
    """The baselines of these names, among Foretune's and a family's `own`; "fast" and "all" stand for several.

    Those that need a package that is not installed are left out, with the reason. Raises `ForetuneError` for an unknown
    name, and for none.

    >>> list(choose_rivals().baselines)
    ['random', 'static', 'regimes', 'nearest', 'estimate']
    >>> list(choose_rivals(["static", "ck_tile"]).baselines)
    ['static', 'ck_tile']
    """
    known = {**BASELINES, **(own or {})}
    if unknown := [name for name in names if name not in (FAST, ALL, *known)]:
        raise ForetuneError(f"baselines must be {FAST}, {ALL} or among {', '.join(known)} but one is {unknown[0]!r}")
    if not names:
        raise ForetuneError(f"baselines must be {FAST}, {ALL} or among {', '.join(known)} but none is given")
    wanted = {
        name: one for name, one in known.items() if name in names or ALL in names or (FAST in names and one.is_fast)
    }
    left_out = {name: reason for name, one in wanted.items() if (reason := one.lacking) is not None}
    return Rivals({name: one for name, one in wanted.items() if name not in left_out}, left_out)
