"""From measurements to a bundle: trained, or adapted to another card."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from ..datasets import BundleError, Family, ForetuneError, KernelConfig
from ..datasets.errors import warn
from ..datasets.grid import BinarySignature
from ..datasets.progress import share_of, side_by_side
from .bundle import Bundle, TrainedFamily
from .calibration.conformal import UNCALIBRATED
from .calibration.cross_fit import cross_fitted
from .calibration.training_domain import TrainingDomain
from .gbdt import AdaptedRanker, LightGBMRanker
from .training_set import TrainingSet

if TYPE_CHECKING:
    from ..datasets.dataset import Dataset


def train_bundle(
    dataset: Dataset, families: Mapping[str, Family], ranker: Callable[[], LightGBMRanker] = LightGBMRanker
) -> Bundle:
    """A bundle with one ranker for each of `families` (by name) that the dataset has, fitted on all its problems, and
    calibrated on models that were held out, where the dataset has enough.

    `ranker` makes the unfitted ranker. The same dataset, families, parameters and LightGBM give the same bytes. Warns
    as `TrainingSet.of` does. Raises `ForetuneError` where the dataset has none of the families.

    >>> train_bundle(load("h200"), families).save("my-bundle")  # doctest: +SKIP
    """
    import lightgbm

    learnable = [name for name in dataset.families if name in families]
    if not learnable:
        wanted, there = (", ".join(sorted(names)) or "none" for names in (families, dataset.families))
        raise ForetuneError(f"{dataset.name}: families must be among {wanted} but are {there}")

    rows = {name: len(dataset.rows(name)) for name in learnable}

    def train(name: str) -> TrainedFamily:
        with share_of(rows[name] / sum(rows.values())):
            data = TrainingSet.of(dataset, families[name])
            with share_of(0.4):
                fitted = ranker().fit(data.grid, data.family)
            with share_of(0.6):
                calibration = cross_fitted(data, ranker)
        return TrainedFamily(
            ranker=fitted,
            devices=data.devices,
            origin=data.origin,
            wrong_results=data.wrong_results,
            calibration=calibration,
            domain=TrainingDomain.of(data.problems),
        )

    # One family's two halves do not take equally long (see `LightGBMRanker.fit`), and beside another no core idles. The
    # longest first, so that none is left for the end.
    learnable.sort(key=lambda name: -rows[name])
    trained = side_by_side([partial(train, name) for name in learnable], jobs=2)
    return Bundle(dict(zip(learnable, trained, strict=True)), lightgbm.__version__)


def adapt_bundle(bundle: Bundle, dataset: Dataset, families: Mapping[str, Family], *, trees: int = 100) -> Bundle:
    """The bundle with `trees` more for each of `families` (by name) that it and the dataset have, which put right how
    it orders the dataset's configs: see `LightGBMRanker.adapted`. Its other families stay as they are.

    The measurements that the bundle was trained on are not needed, and five minutes of an adaptive collection on the
    new card are enough. They also calibrate it anew, by the same cross-validation as in training: what each part of
    them makes of the bundle is judged on the others' models. Where they are too few for that the bundle is not
    calibrated any more, since it would be for another ranker and card, and a `ForetuneWarning` says so.

    The same bundle, dataset, families and LightGBM give the same bytes; the origin in the manifest has the bundle it
    came from and what was added, in "adapted". Warns as `TrainingSet.of` does. Raises `BundleError` where the two have
    no family in common, or the family's features are not those that the bundle learned from.

    >>> adapt_bundle(load_bundle(), load("small"), families).save("my-bundle")  # doctest: +SKIP
    """
    both = [name for name in dataset.families if name in families and name in bundle.families]
    if not both:
        raise BundleError(
            f"{dataset.name} has measurements of {', '.join(dataset.families) or 'nothing'}, but the bundle knows "
            f"{', '.join(bundle.families) or 'nothing'}: none of these is in both and asked for"
        )
    trained = dict(bundle.trained)
    for name in both:
        family, old = families[name], bundle.trained[name]
        data = TrainingSet.of(dataset, family)
        tidy = data.tidy()  # what is learned depends on what was measured, and not on what came first
        with share_of(0.4 / len(both)):
            ranker = old.ranker.adapted(tidy.grid, family, trees=trees)
        with share_of(0.6 / len(both)):
            calibration = cross_fitted(tidy, partial(AdaptedRanker, old.ranker, trees))
        if calibration is None:
            warn(
                f"{dataset.name}: {len(tidy)} problems of {name} are too few, or too much alike, to calibrate it: "
                f'k="auto" is {UNCALIBRATED} then'
            )
        trained[name] = TrainedFamily(
            ranker=ranker,
            devices=tuple(dict.fromkeys((*bundle.trained_on(name), *data.devices))),
            origin=_origin(bundle, data),
            wrong_results=_together(old.wrong_results, data.wrong_results),
            calibration=calibration,
            domain=old.domain | TrainingDomain.of(data.problems),
        )
    return Bundle(trained, bundle.lightgbm_version)


def _origin(bundle: Bundle, data: TrainingSet) -> dict[str, Any]:
    """The bundle's origin, and what was added to it; its runs are those of both, where the bundle recorded any."""
    old, new = dict(bundle.trained[data.family.name].origin), data.origin
    if isinstance(old.get("runs"), list):
        old["runs"] = sorted({*map(str, old["runs"]), *new["runs"]})
    added = new | {"from_bundle": bundle.digest, "devices": sorted({device.name for device in data.devices})}
    earlier = old.get("adapted")
    return old | {"adapted": [*(earlier if isinstance(earlier, list) else []), added]}


def _together(
    one: Mapping[BinarySignature, frozenset[KernelConfig]], other: Mapping[BinarySignature, frozenset[KernelConfig]]
) -> dict[BinarySignature, frozenset[KernelConfig]]:
    return {key: one.get(key, frozenset()) | other.get(key, frozenset()) for key in (*one, *other)}
