"""Plans: which configs to measure on which problems. Pure logic: a campaign measures what a plan asks for."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np

from ..datasets import Case, DeviceSpec, Family, FamilyError, ForetuneError, KernelConfig, Problem
from ..datasets.errors import check_between, check_integer, shown
from ..datasets.grid import Grid
from ..model import EstimateRanker, LightGBMRanker, Ranker, load_bundle
from ..runtime.arguments import warn_once

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Self

    from ..datasets.dataset import Dataset
    from ..model import Bundle


class Prior(Ranker):
    """The bundle (the shipped one if left out) where it has learned the family on the device's arch, else the family's
    own estimate."""

    learns = False

    def __init__(self, bundle: Bundle | None = None) -> None:
        self.bundle = bundle

    def fit(self, grid: Grid, family: Family) -> Self:
        """Nothing to learn."""
        return self

    def predict(
        self, family: Family, problem: Problem, device: DeviceSpec, configs: Sequence[KernelConfig]
    ) -> NDArray[np.float64]:
        try:
            bundle = self.bundle or _shipped()
            if device.arch in {spec.arch for spec in bundle.trained_on(family.name)}:
                return bundle.ranker(family.name).predict(family, problem, device, configs)
        except ForetuneError:  # no such family in it, or the family has other features by now
            pass
        return EstimateRanker().predict(family, problem, device, configs)


@lru_cache(maxsize=1)
def _shipped() -> Bundle:
    return load_bundle()


#: The least and the most of a space that a plan may try.
SHARES = (0.001, 1.0)
#: How much less often what is predicted to be slower is drawn: by this power of the slowdown.
_CAUTION = 4.0


class Step:
    """A problem to measure next, and the configs to try on it, as `choose` says."""

    def __init__(self, case: Case, choose: Callable[[], tuple[KernelConfig, ...]]) -> None:
        self.case, self._choose = case, choose

    @cached_property
    def configs(self) -> tuple[KernelConfig, ...]:
        """The configs, best first. Chosen at the first access: for hundreds of problems that takes seconds."""
        return self._choose()


class Plan(Protocol):
    """What to measure next. A campaign asks until there is nothing left:

        while steps := plan.next(todo, measured):
            ...  # measure the steps, in any order, and take their cases out of `todo`

    An answer depends on the arguments alone, so a campaign that was killed goes on where it was.
    """

    #: Whether it looks at what is measured at all.
    learns: ClassVar[bool]

    def next(self, todo: Sequence[Case], measured: Grid | None) -> list[Step]:
        """Some of the cases in `todo`, at least one if there are any, to measure before the next call.

        `measured` is what is known of other cases on this device, NaN where a config was not tried or failed; None
        where nothing is.
        """


class MakePlan(Protocol):
    """Makes the plan of a family on a device: see `PLANS`. The `prior` ranks while nothing is measured, `Prior` if
    left out."""

    def __call__(self, family: Family, device: DeviceSpec, /, *, prior: Ranker | None = None) -> Plan: ...


class Exhaustive:
    """The whole space on every problem, even what cannot run it: that costs nothing, and its row says why."""

    learns: ClassVar = False

    def __init__(self, family: Family, device: DeviceSpec, *, prior: Ranker | None = None) -> None:
        self._family, self._device, self._prior = family, device, prior or Prior()

    def next(self, todo: Sequence[Case], measured: Grid | None) -> list[Step]:
        """Every case, at once; see `Plan.next`."""
        return [Step(case, partial(self._ordered, case.problem)) for case in todo]

    def _ordered(self, problem: Problem) -> tuple[KernelConfig, ...]:
        try:
            scores = self._prior.predict(self._family, problem, self._device, self._space)
        except FamilyError as error:
            warn_once(str(error), ": its configs are measured in the order of its space")
            return self._space
        return _by_score(self._space, scores)

    @cached_property
    def _space(self) -> tuple[KernelConfig, ...]:
        return self._family.space(self._device)  # one and the same: families remember what depends on it alone


class Sparse:
    """A `share` of the space on every problem, at least one config.

    Most are what the `prior` ranks first. To find configs that it wrongly ranks as slow, a share `explored` of
    them is drawn at random; one predicted to take twice as long is drawn 16 times less often. The plan trains nothing
    (so it needs no LightGBM) and keeps the order of the cases: a thousand problems take as long as a hundred measured
    exhaustively.

    >>> [len(step.configs) for step in Sparse(family, device, share=0.05).next(cases, None)]  # doctest: +SKIP
    [47, 47, 39, ...]
    """

    learns: ClassVar[bool] = False

    def __init__(
        self,
        family: Family,
        device: DeviceSpec,
        *,
        share: float = 0.125,
        explored: float = 0.5,
        prior: Ranker | None = None,
        seed: int = 0,
    ) -> None:
        check_between("share", share, *SHARES)
        check_between("explored", explored, 0.0, 1.0)
        check_integer("seed", seed, 0, 2**31 - 1)
        self._family, self._device, self._prior = family, device, prior or Prior()
        self._share, self._explored, self._seed = share, explored, seed

    def next(self, todo: Sequence[Case], measured: Grid | None) -> list[Step]:
        """Every case, at once; see `Plan.next`."""
        return [Step(case, partial(self._chosen, case.problem, self._prior)) for case in todo]

    def _chosen(self, problem: Problem, ranker: Ranker) -> tuple[KernelConfig, ...]:
        """The share of the supported configs, best first."""
        family, device = self._family, self._device
        space = [config for config in family.space(device) if _may_run(family, config, problem, device)]
        if not space:
            return family.space(device)  # their rows say why
        scores = ranker.predict(family, problem, device, space)
        tried = max(round(self._share * len(space)), 1)
        drawn = int(self._explored * tried)
        order = np.argsort(scores, kind="stable")
        # Of the problem, not of a generator's state: a resumed campaign draws the same.
        random = np.random.default_rng([self._seed, zlib.crc32(json.dumps(problem.to_json()).encode())])
        others = order[tried - drawn :]
        # Gumbel's trick: the largest of logarithms and such noise are a draw without replacement by those weights.
        keys = -_CAUTION * np.log(scores[others]) + random.gumbel(size=len(others))
        others = others[np.argsort(-keys, kind="stable")[:drawn]]
        chosen = np.concatenate([order[: tried - drawn], others])
        return _by_score([space[i] for i in chosen], scores[chosen])


class Adaptive(Sparse):
    """A share of the space on every problem as `Sparse` chooses it, ranked by a ranker of all that is measured so far.

    The problems come in batches, each as large as all before it (the first has `first`, ranked by the `prior`), so that
    the ranker is trained a few times and not once a problem.

    The README beside this file has the figures that decided on these numbers.

    >>> [len(step.configs) for step in Adaptive(family, device, share=0.05).next(cases, None)]  # doctest: +SKIP
    [47, 47, 39, ...]
    """

    learns: ClassVar = True

    def __init__(
        self,
        family: Family,
        device: DeviceSpec,
        *,
        share: float = 0.09,
        explored: float = 0.5,
        first: int = 24,
        ranker: Callable[[], Ranker] = partial(LightGBMRanker, epochs=0),  # noqa: B008 - GPUs wait: trees alone
        prior: Ranker | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(family, device, share=share, explored=explored, prior=prior, seed=seed)
        check_integer("first", first, 1, 1_000_000)
        self._first, self._ranker = first, ranker

    def next(self, todo: Sequence[Case], measured: Grid | None) -> list[Step]:
        """A batch of the cases that are least like the measured ones; see `Plan.next`."""
        if not todo:
            return []
        known = () if measured is None else measured.cases
        ranker = self._prior
        if measured is not None and len(known) >= self._first:
            try:
                ranker = self._ranker().fit(measured.tidy(), self._family)
            except FamilyError as error:
                warn_once(str(error), ": the plan goes on with what it knew before")
        batch = _unlike(todo, known, max(self._first, len(known)))
        return [Step(case, partial(self._chosen, case.problem, ranker)) for case in batch]


class Missing:
    """What a dataset, `known`, lacks: of each of its problems the supported configs that it has no row of, as where a
    kernel got a knob since then, and so that the two can be compared, the `beside` fastest that it has. All configs of
    a problem that it has not, and none of one of which it lacks none.

    Raises `ForetuneError` where it has nothing of the family on the device.

    >>> [len(step.configs) for step in Missing(load("mine"), family, device).next(cases, None)]  # doctest: +SKIP
    [12, 12, 0, ...]
    """

    learns: ClassVar[bool] = False

    def __init__(
        self, known: Dataset, family: Family, device: DeviceSpec, *, beside: int = 4, prior: Ranker | None = None
    ) -> None:
        check_integer("beside", beside, 0, 1000)
        self._family, self._device, self._beside, self._prior = family, device, beside, prior or Prior()
        grid = known.grid(family)
        if device.name not in (there := sorted({spec.name for spec in grid.devices})):
            raise ForetuneError(
                f"the missing plan adds to what was measured on {device.name}, but {known.name} has {family.name} on "
                f"{', '.join(there)}"
            )
        self._row = {case.problem: row for row, case in enumerate(grid.cases) if grid.devices[row].name == device.name}
        self._configs, self._times_us, self._tried = grid.configs, grid.times_us, grid.measured

    def next(self, todo: Sequence[Case], measured: Grid | None) -> list[Step]:
        """Every case, at once; see `Plan.next`."""
        return [Step(case, partial(self._chosen, case.problem)) for case in todo]

    def _chosen(self, problem: Problem) -> tuple[KernelConfig, ...]:
        """The fastest of old, and the others as the prior ranks them."""
        family, device, row = self._family, self._device, self._row.get(problem)
        tried: set[KernelConfig] = set()
        fastest: list[KernelConfig] = []
        if row is not None:
            tried = {config for config, was in zip(self._configs, self._tried[row], strict=True) if was}
            times = self._times_us[row]
            known = [self._configs[place] for place in np.argsort(times) if np.isfinite(times[place])]
            fastest = [config for config in known if _may_run(family, config, problem, device)][: self._beside]
        space = [config for config in family.space(device) if config not in tried]
        lacking = [config for config in space if _may_run(family, config, problem, device)]
        if not lacking:
            return ()
        return *fastest, *_by_score(lacking, self._prior.predict(family, problem, device, lacking))


PLANS: dict[str, Callable[..., Plan]] = {
    "exhaustive": Exhaustive,
    "adaptive": Adaptive,
    "thin": Sparse,
    "missing": Missing,
}


def named(name: str, known: Dataset | None = None, share: float | None = None) -> MakePlan:
    """Return a function that makes a plan.

    Args:
        name: One of `PLANS`.
        known: The dataset that the missing plan adds to.
        share: The part of a problem's configs that the adaptive or the thin plan tries; their own default if left out.

    Raises:
        ForetuneError: There is no such plan, it does not take an argument that is given, the missing plan has no
            dataset, or LightGBM is not installed, which the adaptive plan trains.
    """
    if not isinstance(name, str) or name not in PLANS:
        raise ForetuneError(f"plan must be one of {', '.join(PLANS)} but is {shown(name)}")
    if share is not None:
        if name not in ("adaptive", "thin"):
            raise ForetuneError(f"share is for the adaptive and the thin plan, but plan is {name}")
        check_between("share", share, *SHARES)
    if name == "missing":
        if known is None:
            raise ForetuneError("the missing plan needs the dataset that it adds to: --like DATA, or known=load(DATA)")
        return partial(Missing, checked_dataset(known))
    if known is not None:
        raise ForetuneError(f"known is for the missing plan, but plan is {name}")
    if name == "adaptive":
        try:
            import lightgbm  # noqa: F401
        except (ImportError, OSError) as error:  # OSError: without its own shared libraries
            raise ForetuneError(f"the adaptive plan trains as it measures, and needs lightgbm: {error}") from None
    return PLANS[name] if share is None else partial(PLANS[name], share=share)


def checked_dataset(known: Dataset) -> Dataset:
    """A dataset. Raises `ForetuneError` for what is none, as its name."""
    from ..datasets.dataset import Dataset

    if not isinstance(known, Dataset):
        raise ForetuneError(f"known must be a dataset, as foretune.datasets.load gives it, but is {shown(known)}")
    return known


def _may_run(family: Family, config: KernelConfig, problem: Problem, device: DeviceSpec) -> bool:
    """Whether to try a config: the family supports it, or fails at it, which then is what its row says."""
    try:
        return family.supports(config, problem, device) is None
    except FamilyError:
        return True


def _by_score(configs: Sequence[KernelConfig], scores: NDArray[np.float64]) -> tuple[KernelConfig, ...]:
    return tuple(configs[i] for i in np.argsort(scores, kind="stable"))


def _unlike(todo: Sequence[Case], known: Sequence[Case], count: int) -> list[Case]:
    """So many of `todo`, each the one whose dimensions are furthest, as ratios, from those known and chosen so far; of
    equals the first. Where nothing is known, the one in the middle of all leads."""
    sizes = np.log2([[1 + size for _, size in case.problem.dims] for case in (*todo, *known)])
    points, others = sizes[: len(todo)], sizes[len(todo) :]
    # Squared distances to the nearest one that is known or chosen.
    nearest = -_apart(points, np.median(points, axis=0)) if not known else np.full(len(todo), np.inf)
    for other in others:
        nearest = np.minimum(nearest, _apart(points, other))
    chosen: list[int] = []
    while len(chosen) < min(count, len(todo)):
        furthest = int(nearest.argmax())
        if not known and not chosen:
            nearest = np.full(len(todo), np.inf)
        chosen.append(furthest)
        nearest = np.minimum(nearest, _apart(points, points[furthest]))
        nearest[chosen] = -1.0
    return [todo[i] for i in chosen]


def _apart(points: NDArray[np.float64], point: NDArray[np.float64]) -> NDArray[np.float64]:
    squared: NDArray[np.float64] = np.square(points - point).sum(axis=1)
    return squared
