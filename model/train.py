"""Train a bundle on measurements, or adapt one to another card; learn from winners as well as from times.

Winners are configs that a search found to be the best of a space. Others publish them for cards that cannot be measured
here. `WinnerRanker` is trained on measurements first, and then corrects its order with trees that also learn from
winners. Predictions are made by a plain `LightGBMRanker`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..datasets import BundleError, DeviceSpec, Family, ForetuneError, KernelConfig, Problem
from ..datasets.errors import warn
from ..datasets.grid import BinarySignature, Grid
from ..datasets.progress import share_of, side_by_side
from .bundle import Bundle, TrainedFamily
from .calibration.conformal import UNCALIBRATED, Calibration
from .calibration.cross_fit import ENOUGH, LEAST, cross_fitted
from .calibration.training_domain import TrainingDomain
from .evaluation import in_percent
from .gbdt import RANKS_PER_LOG, AdaptedRanker, LightGBMRanker
from .rows import TrainingRows, features_of, training_rows
from .training_set import TrainingSet

if TYPE_CHECKING:
    from typing_extensions import Self

    from ..datasets.dataset import Dataset

#: Shortlists with k="auto" are long if they have more than this share of the configs; it is tested on so many problems.
_LONG, _LISTS = 0.25, 16
#: Configs of a space that a winner is compared with, drawn at random. Configs that are predicted to be fast are not
#: preferred: they may be as fast as the winner, and with them rankers learned the noise of searches (kernels/NOTES.md).
_OTHERS = 32
#: The log slowdown that these configs are taken to have; only that it is not among the best grades matters.
_SLOWER = float(np.log(1.15))
#: The weight of a winner's rows relative to measured ones. Winners are many and noisy: with a weight of 1, the first
#: choices for a measured card became slower.
_WEIGHT = 0.2
_TREES = 50


def train_bundle(
    dataset: Dataset, families: Mapping[str, Family], ranker: Callable[[], LightGBMRanker] = LightGBMRanker
) -> Bundle:
    """Train a bundle with one ranker for each family.

    Each ranker is fitted on all of the dataset's problems of its family, and calibrated by cross-validation if there
    are enough. The same dataset, families, parameters and LightGBM version give the same bytes. Warns as
    `TrainingSet.of` does, and if shortlists with k="auto" will be long because few problems calibrate them.

    Args:
        dataset: The measurements.
        families: Families by name; those without measurements are skipped.
        ranker: Returns an unfitted ranker.

    Raises:
        ForetuneError: The dataset has measurements of none of the families.

    >>> train_bundle(load("h200"), families).save("my-bundle")  # doctest: +SKIP
    """
    import lightgbm

    learnable = [name for name in dataset.families if name in families]
    if not learnable:
        wanted, measured = (", ".join(sorted(names)) or "none" for names in (families, dataset.families))
        raise ForetuneError(f"{dataset.label}: families must be among {wanted} but are {measured}")

    rows = {name: len(dataset.rows(name)) for name in learnable}

    def train(name: str) -> TrainedFamily:
        with share_of(rows[name] / sum(rows.values())):
            data = TrainingSet.of(dataset, families[name])
            with share_of(0.4):
                fitted = ranker().fit(data.grid, data.family)
            with share_of(0.6):
                calibration = cross_fitted(data, ranker)
        _warn_of_long_lists(data, fitted, calibration)
        won = {"winners": len(fitted.winners_.get(name, ()))} if isinstance(fitted, WinnerRanker) else {}
        return TrainedFamily(
            ranker=fitted,
            devices=data.devices,
            origin=data.origin | won,
            wrong_results=data.wrong_results,
            calibration=calibration,
            domain=TrainingDomain.of(data.problems),
            measured=data.knob_values,
        )

    # Two families at a time keep both cores busy, because the parts of a fit take unequal times (see
    # `LightGBMRanker.fit`). The largest family is first, so that it is not left alone at the end.
    learnable.sort(key=lambda name: -rows[name])
    trained = side_by_side([partial(train, name) for name in learnable], jobs=2)
    return Bundle(dict(zip(learnable, trained, strict=True)), lightgbm.__version__)


def adapt_bundle(bundle: Bundle, dataset: Dataset, families: Mapping[str, Family], *, trees: int = 100) -> Bundle:
    """Adapt a bundle to new measurements, usually from another card.

    Each ranker gets further trees that correct its order of configs (see `LightGBMRanker.adapted`). The measurements
    that the bundle was trained on are not needed, and five minutes of an adaptive collection on the new card suffice.

    The new measurements also replace the calibration, by the same cross-validation as in training. If they are too few,
    the family has no calibration, because the old one applied to another ranker and card; a `ForetuneWarning` reports
    this. Other warnings are those of `train_bundle`.

    The same bundle, dataset, families and LightGBM version give the same bytes. The manifest's origin records the
    original bundle and the new data under "adapted".

    Args:
        bundle: The bundle to adapt. It is not modified.
        dataset: The new measurements.
        families: Families by name; those that the bundle or the dataset lacks are skipped.
        trees: The number of further trees of each family.

    Returns:
        A bundle with the adapted families; the bundle's other families are unchanged.

    Raises:
        BundleError: No family is in the bundle, the dataset and `families`, or a family's features are not those that
            the bundle was trained on.

    >>> adapt_bundle(load_bundle(), load("small"), families).save("my-bundle")  # doctest: +SKIP
    """
    both = [name for name in dataset.families if name in families and name in bundle.families]
    if not both:
        raise BundleError(
            f"{dataset.label} has measurements of {', '.join(dataset.families) or 'nothing'}, but the bundle knows "
            f"{', '.join(bundle.families) or 'nothing'}: none of the requested families is in both. Adapt "
            "a bundle that knows one of them, or train one"
        )
    trained = dict(bundle.trained)
    for name in both:
        family, old = families[name], bundle.trained[name]
        data = TrainingSet.of(dataset, family)
        if seen := data.share_in(old.origin):
            warn(
                f"the bundle was trained on {in_percent(seen)} of the measurements of {name} in {data.label}, so they "
                'teach it nothing new, and calibrate k="auto" on problems that it knows: adapt it to other measurements'
            )
        tidy = data.tidy()  # the result must not depend on the order of the measurements
        with share_of(0.4 / len(both)):
            ranker = old.ranker.adapted(tidy.grid, family, trees=trees)
        with share_of(0.6 / len(both)):
            calibration = cross_fitted(tidy, partial(AdaptedRanker, old.ranker, trees))
        if calibration is None:
            warn(
                f"{dataset.label}: {len(tidy)} problems of {name} are too few, or of too few models, to calibrate it, "
                f'so k="auto" is {UNCALIBRATED}. Measure at least {LEAST} problems of at least two models'
            )
        _warn_of_long_lists(tidy, ranker, calibration)
        trained[name] = TrainedFamily(
            ranker=ranker,
            devices=tuple(dict.fromkeys((*bundle.trained_on(name), *data.devices))),
            origin=_origin(bundle, data),
            wrong_results=_merged(old.wrong_results, data.wrong_results),
            calibration=calibration,
            domain=old.domain | TrainingDomain.of(data.problems),
            measured=old.measured
            and {
                knob: tuple(sorted({*old.measured.get(knob, ()), *values})) for knob, values in data.knob_values.items()
            },
        )
    return Bundle(trained, bundle.lightgbm_version)


def _warn_of_long_lists(data: TrainingSet, ranker: LightGBMRanker, calibration: Calibration | None) -> None:
    """Warn if few problems calibrated a ranker and its shortlists with k="auto" are long.

    The length is set by the 95 % quantile of the problems' scores, which is nearly the worst score if there are few.
    """
    if calibration is None or calibration.problems >= ENOUGH:
        return
    known = np.flatnonzero(data.candidate.any(axis=1))
    rows = known[np.unique(np.linspace(0, len(known) - 1, min(len(known), _LISTS)).astype(np.intp))]
    logs = [np.sort(np.log(data.predict(ranker, row, data.family.at_call_time))) for row in rows.tolist()]
    lengths = [(calibration.length(one - one[0]), len(one)) for one in logs]
    length, configs = sorted(lengths)[len(lengths) // 2]
    if length > UNCALIBRATED and length > _LONG * configs:
        warn(
            f'{data.label}: shortlists of {data.family.name} with k="auto" will be long (typically {length} of '
            f"{configs} configs), because only {calibration.problems} problems calibrate them, so that the hardest few "
            f"decide. Measure at least {ENOUGH} problems, or give k as a number"
        )


def _origin(bundle: Bundle, data: TrainingSet) -> dict[str, Any]:
    """Return a bundle's description of its training data, extended by that of `data`, which it was adapted with."""
    old, new = dict(bundle.trained[data.family.name].origin), data.origin
    if isinstance(old.get("runs"), list):
        old["runs"] = sorted({*map(str, old["runs"]), *new["runs"]})
    added = new | {"from_bundle": bundle.digest, "devices": sorted({device.name for device in data.devices})}
    earlier = old.get("adapted")
    return old | {"adapted": [*(earlier if isinstance(earlier, list) else []), added]}


def _merged(
    one: Mapping[BinarySignature, frozenset[KernelConfig]], other: Mapping[BinarySignature, frozenset[KernelConfig]]
) -> dict[BinarySignature, frozenset[KernelConfig]]:
    """Return the union of two records of configs with wrong results, by signature."""
    return {key: one.get(key, frozenset()) | other.get(key, frozenset()) for key in (*one, *other)}


@dataclass(frozen=True)
class Winner:
    """The config that a search found to be the fastest of its space, on a problem and a device.

    >>> space = tuple(KernelConfig.of(BLOCK=size) for size in (16, 32, 64))
    >>> Winner(Problem.of("toy"), DeviceSpec.named("h200"), space[1], space).config["BLOCK"]
    32
    """

    problem: Problem
    device: DeviceSpec
    config: KernelConfig
    space: tuple[KernelConfig, ...]  # with `config`; all can run on the device


class WinnerRanker(LightGBMRanker):
    """A `LightGBMRanker` that also learns from winners.

    Args:
        winners: The winners of each family, by its name. Families without any are trained as usual.
        **params: The parameters of `LightGBMRanker`.

    >>> WinnerRanker({}, trees=100).trees
    100
    """

    def __init__(self, winners: Mapping[str, Sequence[Winner]], **params: Any) -> None:
        super().__init__(**params)
        self.winners_ = winners  # the underscore keeps them out of `get_params` and so out of bundles

    def fit(self, grid: Grid, family: Family) -> Self:
        """Train on a grid of measurements and then on the family's winners, and return this ranker."""
        with share_of(0.8):
            super().fit(grid, family)
        with share_of(0.2):
            return self.learn_winners(grid, family)

    def learn_winners(self, grid: Grid, family: Family) -> Self:
        """Train further trees on the family's winners, after the measurements, and return this ranker.

        The measurements are trained on again together with the winners, so that the order of measured configs is kept.
        """
        if not (winners := self.winners_.get(family.name, ())):
            return self
        with share_of(0.5):
            measured = training_rows(grid, family, slow=self.slow, keep_slow=self.keep_slow, seed=self.seed)
        rows = _joined(measured, winner_rows(winners, family, seed=self.seed))
        known = -RANKS_PER_LOG * self._logs(rows.features)
        new, *_ = self._training(rows).lambdarank(_TREES, share=0.5, known=known)
        self.forest_ = (self.forest_ + new.affine(-1 / RANKS_PER_LOG)).compact()
        self._check_reach()
        return self


def winner_rows(winners: Sequence[Winner], family: Family, *, seed: int) -> TrainingRows:
    """Return the training rows of winners: each with a few other configs of its space, which are taken to be slower.

    Args:
        winners: The winners.
        family: Their family.
        seed: Random seed for drawing the other configs.
    """
    random = np.random.default_rng(seed)
    features, sizes = [], []
    for winner in winners:
        drawn = random.choice(len(winner.space), min(_OTHERS + 1, len(winner.space)), replace=False).tolist()
        others = [winner.space[place] for place in drawn if winner.space[place] != winner.config][:_OTHERS]
        features.append(features_of(family, winner.problem, winner.device, (winner.config, *others), None))
        sizes.append(1 + len(others))
    log_slowdown = np.concatenate([np.repeat([0.0, _SLOWER], [1, size - 1]) for size in sizes])
    return TrainingRows(np.concatenate(features), log_slowdown, np.array(sizes), np.arange(len(sizes)))


def _joined(measured: TrainingRows, won: TrainingRows) -> TrainingRows:
    """Return both tables of rows as one; rows of winners get the weight `_WEIGHT`."""
    weights = np.ones(len(measured.features)) if measured.weights is None else measured.weights
    return TrainingRows(
        np.concatenate([measured.features, won.features]),
        np.concatenate([measured.log_slowdown, won.log_slowdown]),
        np.concatenate([measured.query_sizes, won.query_sizes]),
        np.concatenate([measured.query_rows, won.query_rows + measured.query_rows.max() + 1]),
        np.concatenate([weights, np.full(len(won.features), _WEIGHT)]),
    )
