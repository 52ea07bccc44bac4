"""Plans: which configs to measure on which problems. They only decide; a run measures."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np

from ..datasets import Case, DeviceSpec, Family, FamilyError, ForetuneError, KernelConfig, Measurable, Problem
from ..datasets.errors import check_between, check_integer, shown
from ..datasets.family_checks import with_defaults
from ..datasets.grid import Grid
from ..model import EstimateRanker, LightGBMRanker, Ranker, load_bundle
from ..model.ranker import FixedRanker
from ..runtime.arguments import warn_once

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..datasets.dataset import Dataset
    from ..model import Bundle


class Prior(FixedRanker):
    """Ranks configs before a run has measured any: by a bundle if possible, else by the family's estimate.

    The bundle must have been trained on the family and on a device of the same arch.

    Args:
        bundle: The bundle; the shipped one if None.
    """

    def __init__(self, bundle: Bundle | None = None) -> None:
        self.bundle = bundle

    def predict(
        self, family: Family, problem: Problem, device: DeviceSpec, configs: Sequence[KernelConfig]
    ) -> NDArray[np.float64]:
        """Return a score for each config, (n_configs,); the smallest is predicted to be the fastest."""
        try:
            bundle = self.bundle or _shipped()
            if device.arch in {spec.arch for spec in bundle.trained_on(family.name)}:
                return bundle.ranker(family.name).predict(family, problem, device, configs)
        except ForetuneError:  # it does not have the family, or the family has other features now
            pass
        return EstimateRanker().predict(family, problem, device, configs)


@lru_cache(maxsize=1)
def _shipped() -> Bundle:
    return load_bundle()


#: The smallest and the largest share of a space that a plan may try.
SHARES = (0.001, 1.0)
#: A config is drawn with a probability proportional to its predicted time to minus this power: one that is predicted to
#: take twice as long is drawn 16 times less often.
_CAUTION = 4.0


class Step:
    """A case (a problem and its sources) to measure next, with the configs to try on it.

    Args:
        case: The case.
        choose: A function that returns the configs, best first.
    """

    def __init__(self, case: Case, choose: Callable[[], tuple[KernelConfig, ...]]) -> None:
        self.case, self._choose = case, choose

    @cached_property
    def configs(self) -> tuple[KernelConfig, ...]:
        """The configs, best first. They are chosen at the first access: for hundreds of problems that takes seconds."""
        return self._choose()


class Plan(Protocol):
    """Decides what to measure next. A run calls it until nothing is left.

        while steps := plan.next(todo, measured):
            ...  # measure the steps, in any order, and remove their cases from `todo`

    The result depends only on the arguments, so that a run which was killed can be continued.
    """

    @property
    def learns(self) -> bool:
        """Whether the plan uses the measurements so far."""

    def next(self, todo: Sequence[Case], measured: Grid | None) -> list[Step]:
        """Return the steps to measure before the next call.

        Args:
            todo: The cases that are left.
            measured: The measurements of other cases on this device, NaN where a config was not tried or failed; None
                if there are none.

        Returns:
            Steps for some of the cases in `todo`: at least one, unless `todo` is empty.
        """


class MakePlan(Protocol):
    """The type of a function that makes the plan of a family on a device; `PLANS` maps each plan's name to one."""

    def __call__(self, family: Family, device: DeviceSpec, /, *, prior: Ranker | None = None) -> Plan:
        """Return the plan. `prior` ranks the configs while nothing is measured; it is `Prior` by default."""


class _Independent:
    """Base class of plans that choose each problem's configs without the run's measurements, for all at once."""

    learns: ClassVar[bool] = False

    def __init__(self, family: Family, device: DeviceSpec, *, prior: Ranker | None = None) -> None:
        self._family, self._device, self._prior = family, device, prior or Prior()

    def next(self, todo: Sequence[Case], measured: Grid | None) -> list[Step]:
        """Return a step for every case in `todo`, as `Plan.next` describes."""
        return [Step(case, partial(self._chosen, case.problem)) for case in todo]

    def _chosen(self, problem: Problem) -> tuple[KernelConfig, ...]:
        """Return the configs to try on a problem, best first."""
        raise NotImplementedError


class Exhaustive(_Independent):
    """Tries the whole space on every problem.

    This includes configs that cannot run it: they are not launched, and their rows state the reason.
    """

    def _chosen(self, problem: Problem) -> tuple[KernelConfig, ...]:
        try:
            scores = self._prior.predict(self._family, problem, self._device, self._space)
        except FamilyError as error:
            warn_once(str(error), ": its configs are measured in the order of its space")
            return self._space
        return _by_score(self._space, scores)

    @cached_property
    def _space(self) -> tuple[KernelConfig, ...]:
        return self._family.space(self._device)  # always the same object: families keep what depends only on it


class Sparse(_Independent):
    """Tries a share of the space on every problem, at least one config, and the configs of `Measurable.usual`.

    Some configs are those that the prior ranks first. The others are drawn at random, to find configs that the prior
    wrongly ranks as slow; one that is predicted to take twice as long is drawn 16 times less often. The plan trains
    nothing, so it needs no LightGBM, and it keeps the order of the cases. A thousand problems take about as long as a
    hundred that are measured exhaustively.

    Args:
        family: The family.
        device: The device.
        share: The share of each problem's supported configs to try.
        explored: The share of these that are drawn at random.
        prior: Ranks the configs; `Prior` by default.
        seed: The random seed.

    >>> [len(step.configs) for step in Sparse(family, device, share=0.05).next(cases, None)]  # doctest: +SKIP
    [47, 47, 39, ...]
    """

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
        super().__init__(family, device, prior=prior)
        self._share, self._explored, self._seed = share, explored, seed

    def _chosen(self, problem: Problem, ranker: Ranker | None = None) -> tuple[KernelConfig, ...]:
        """Return the best configs by `ranker` (the prior if None), and others drawn at random."""
        family, device = self._family, self._device
        space = [config for config in family.space(device) if _may_run(family, config, problem, device)]
        if not space:
            return family.space(device)  # so that each has a row which says why it cannot run
        scores = (ranker or self._prior).predict(family, problem, device, space)
        tried = max(round(self._share * len(space)), 1)
        drawn = int(self._explored * tried)
        order = np.argsort(scores, kind="stable")
        # Seeded by the problem, so that a continued run draws the same configs.
        random = np.random.default_rng([self._seed, zlib.crc32(json.dumps(problem.to_json()).encode())])
        others = order[tried - drawn :]
        # The Gumbel top-k trick: the largest sums of log weights and Gumbel noise are a weighted draw without
        # replacement.
        keys = -_CAUTION * np.log(scores[others]) + random.gumbel(size=len(others))
        others = others[np.argsort(-keys, kind="stable")[:drawn]]
        usual = set(family.usual(problem, device)) if isinstance(family, Measurable) else ()
        chosen = np.concatenate([order[: tried - drawn], others])
        missed = set(np.flatnonzero([config in usual for config in space])) - set(chosen)
        chosen = np.concatenate([chosen, sorted(missed)]).astype(int)
        return _by_score([space[i] for i in chosen], scores[chosen])


class Adaptive(Sparse):
    """Tries a share of the space on every problem, like `Sparse`, ranked by a ranker that learns during the run.

    The problems come in batches. Each batch is as large as all earlier ones together, so that the ranker is trained
    only a few times. The configs of the first batch are ranked by the prior. The default values were chosen by
    measurements: see README.md in this folder.

    Args:
        family: The family.
        device: The device.
        share: The share of each problem's supported configs to try.
        explored: The share of these that are drawn at random.
        first: How many problems the first batch has.
        ranker: Makes the ranker that is trained.
        prior: Ranks the configs of the first batch; `Prior` by default.
        seed: The random seed.

    >>> [len(step.configs) for step in Adaptive(family, device, share=0.05).next(cases, None)]  # doctest: +SKIP
    [47, 47, 39, ...]
    """

    learns: ClassVar[bool] = True

    def __init__(
        self,
        family: Family,
        device: DeviceSpec,
        *,
        share: float = 0.09,
        explored: float = 0.5,
        first: int = 24,
        ranker: Callable[[], Ranker] = partial(LightGBMRanker, epochs=0),  # noqa: B008 - only trees, because GPUs wait for it
        prior: Ranker | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(family, device, share=share, explored=explored, prior=prior, seed=seed)
        check_integer("first", first, 1, 1_000_000)
        self._first, self._ranker = first, ranker

    def next(self, todo: Sequence[Case], measured: Grid | None) -> list[Step]:
        """Return steps for the next batch: the cases in `todo` that are least similar to the measured ones.

        `Plan.next` describes the arguments.
        """
        if not todo:
            return []
        known = () if measured is None else measured.cases
        ranker = self._prior
        if measured is not None and len(known) >= self._first:
            try:
                ranker = self._ranker().fit(measured.tidy(), self._family)
            except FamilyError as error:
                warn_once(str(error), ": the plan continues with the ranker that it had before")
        batch = _dissimilar(todo, known, max(self._first, len(known)))
        return [Step(case, partial(self._chosen, case.problem, ranker)) for case in batch]


class Missing(_Independent):
    """Tries the configs that a dataset has no row of, for example because the kernel got a new knob.

    With them it tries the fastest configs that the dataset has, so that old and new times can be compared. It tries
    all configs on a problem that the dataset does not have, and none on a problem for which no config is missing.

    Args:
        known: The dataset.
        family: The family.
        device: The device.
        fastest: How many of the fastest known configs to measure again on each problem.
        prior: Ranks the missing configs; `Prior` by default.

    Raises:
        ForetuneError: The dataset has nothing of the family on the device.

    >>> [len(step.configs) for step in Missing(load("mine"), family, device).next(cases, None)]  # doctest: +SKIP
    [12, 12, 0, ...]
    """

    def __init__(
        self, known: Dataset, family: Family, device: DeviceSpec, *, fastest: int = 4, prior: Ranker | None = None
    ) -> None:
        check_integer("fastest", fastest, 0, 1000)
        super().__init__(family, device, prior=prior)
        self._fastest = fastest
        grid = known.grid(family)
        if device.name not in (there := sorted({spec.name for spec in grid.devices})):
            raise ForetuneError(
                f"the plan adds to what was measured on {device.name}, but {known.name} has {family.name} on "
                f"{', '.join(there)}"
            )
        self._row = {case.problem: row for row, case in enumerate(grid.cases) if grid.devices[row].name == device.name}
        self._configs, self._times_us, self._measured = grid.configs, grid.times_us, grid.measured

    def _chosen(self, problem: Problem) -> tuple[KernelConfig, ...]:
        """Return the fastest known configs, then the missing ones as the prior ranks them."""
        family, device, row = self._family, self._device, self._row.get(problem)
        fastest: list[KernelConfig] = []
        if row is not None:
            times = self._times_us[row]
            known = [self._configs[place] for place in np.argsort(times) if np.isfinite(times[place])]
            fastest = [config for config in known if _may_run(family, config, problem, device)][: self._fastest]
        missing = [one for one in self._missing(problem) if _may_run(family, one, problem, device)]
        if not missing:
            return ()
        return *fastest, *_by_score(missing, self._prior.predict(family, problem, device, missing))

    def _missing(self, problem: Problem) -> list[KernelConfig]:
        """Return the configs of the space that have no row, in the order of the space."""
        row, tried = self._row.get(problem), set()
        if row is not None:
            tried = {config for config, was in zip(self._configs, self._measured[row], strict=True) if was}
        return [config for config in self._family.space(self._device) if config not in tried]


class Outdated(Missing):
    """Tries the configs whose times are outdated, because their kernel has changed since (`Family.kernel_changes`).

    With them it tries the fastest of the other configs, so that old and new times can be compared. The arguments are
    those of `Missing`, but the default of `fastest` is twice as large: in a merged dataset, all of only four configs
    could be from a single run. It tries nothing on problems without outdated times, nor configs that were also measured
    since the change.
    """

    def __init__(
        self, known: Dataset, family: Family, device: DeviceSpec, *, fastest: int = 8, prior: Ranker | None = None
    ) -> None:
        outdated = known.outdated(family, kept=True)
        today = known.measurements.drop(outdated.index).reset_index(drop=True)
        super().__init__(replace(known, measurements=today), family, device, fastest=fastest, prior=prior)
        rows = known.rows(family.name)
        rows = rows[rows["device"] == device.name]
        complete = {number: with_defaults(family, known.configs[number]) for number in rows["config"].unique()}
        rows = rows.assign(config=rows["config"].map(complete), is_old=rows.index.isin(outdated.index))
        is_old = rows.groupby(["problem", "config"], sort=False)["is_old"].all()
        self._outdated: dict[Problem, set[KernelConfig]] = {}
        for problem, config in is_old.index[is_old]:
            self._outdated.setdefault(known.cases[problem].problem, set()).add(config)

    def _missing(self, problem: Problem) -> list[KernelConfig]:
        """Return the outdated configs that are in the space, in the order of the space."""
        outdated = self._outdated.get(problem, set())
        return [config for config in self._family.space(self._device) if config in outdated]


#: The class of each plan, by the name in `foretune collect --plan`.
PLANS: dict[str, Callable[..., Plan]] = {
    "exhaustive": Exhaustive,
    "adaptive": Adaptive,
    "thin": Sparse,
    "missing": Missing,
    "outdated": Outdated,
}
#: The plans that add to a dataset.
ADDING = ("missing", "outdated")


def named(name: str, known: Dataset | None = None, share: float | None = None) -> MakePlan:
    """Return a function that makes the plan of that name.

    Args:
        name: A key of `PLANS`: "exhaustive", "adaptive", "thin" (the plan `Sparse`), "missing" or "outdated".
        known: The dataset that the plan "missing" or "outdated" adds to.
        share: The share of each problem's configs that "adaptive" or "thin" tries; None selects the default of the
            plan's class.

    Raises:
        ForetuneError: There is no such plan, the plan does not take an argument that is given, a plan has no dataset to
            add to, or LightGBM, which the adaptive plan needs, is not installed.
    """
    if not isinstance(name, str) or name not in PLANS:
        raise ForetuneError(f"plan must be one of {', '.join(PLANS)} but is {shown(name)}")
    if share is not None:
        if name not in ("adaptive", "thin"):
            raise ForetuneError(f"share is only for the plans adaptive and thin, but plan is {name}")
        check_between("share", share, *SHARES)
    if name in ADDING:
        if known is None:
            raise ForetuneError(f"the {name} plan needs the dataset that it adds to: --like DATA, or known=load(DATA)")
        return partial(PLANS[name], checked_dataset(known))
    if known is not None:
        raise ForetuneError(f"known is only for the plans {' and '.join(ADDING)}, but plan is {name}")
    if name == "adaptive":
        try:
            import lightgbm  # noqa: F401
        except (ImportError, OSError) as error:  # OSError: a shared library that it needs is missing
            raise ForetuneError(f"the adaptive plan trains a ranker, which needs lightgbm: {error}") from None
    return PLANS[name] if share is None else partial(PLANS[name], share=share)


def checked_dataset(known: Dataset) -> Dataset:
    """Return `known` unchanged; raise `ForetuneError` if it is not a `Dataset`, but for example a dataset's name."""
    from ..datasets.dataset import Dataset

    if not isinstance(known, Dataset):
        raise ForetuneError(f"known must be a Dataset, as foretune.datasets.load returns, but is {shown(known)}")
    return known


def _may_run(family: Family, config: KernelConfig, problem: Problem, device: DeviceSpec) -> bool:
    """Return whether to try a config: the family supports it, or its `supports` raises an error.

    In the second case the config is tried too, so that its row states the error.
    """
    try:
        return family.supports(config, problem, device) is None
    except FamilyError:
        return True


def _by_score(configs: Sequence[KernelConfig], scores: NDArray[np.float64]) -> tuple[KernelConfig, ...]:
    return tuple(configs[i] for i in np.argsort(scores, kind="stable"))


def _dissimilar(todo: Sequence[Case], known: Sequence[Case], count: int) -> list[Case]:
    """Choose `count` cases of `todo`, each as far as possible from those known or chosen (farthest-point sampling).

    The distance is that of the logarithms of the dimensions. Of equal cases the first is chosen. If nothing is known,
    the case nearest to the median is chosen first.
    """
    sizes = np.log2([[1 + size for _, size in case.problem.dims] for case in (*todo, *known)])
    points, others = sizes[: len(todo)], sizes[len(todo) :]
    # (n_todo,) squared distance to the nearest case that is known or chosen
    nearest = -_squared_distances(points, np.median(points, axis=0)) if not known else np.full(len(todo), np.inf)
    for other in others:
        nearest = np.minimum(nearest, _squared_distances(points, other))
    chosen: list[int] = []
    while len(chosen) < min(count, len(todo)):
        farthest = int(nearest.argmax())
        if not known and not chosen:
            nearest = np.full(len(todo), np.inf)
        chosen.append(farthest)
        nearest = np.minimum(nearest, _squared_distances(points, points[farthest]))
        nearest[chosen] = -1.0
    return [todo[i] for i in chosen]


def _squared_distances(points: NDArray[np.float64], point: NDArray[np.float64]) -> NDArray[np.float64]:
    squared: NDArray[np.float64] = np.square(points - point).sum(axis=1)
    return squared
