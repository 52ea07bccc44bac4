"""From a bundle and a few measurements of another card to a bundle that knows that card as well."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..datasets import BundleError, Family, KernelConfig
from ..datasets.grid import BinaryKind, Grid
from ..datasets.progress import share_of
from .bundle import Bundle
from .origin import origin_of
from .sources import measured_grid
from .trained_family import TrainedFamily

if TYPE_CHECKING:
    from ..datasets.dataset import Dataset


def adapt_bundle(bundle: Bundle, dataset: Dataset, families: Mapping[str, Family], *, trees: int = 100) -> Bundle:
    """The bundle with `trees` more for each of `families` (by name) that it and the dataset have, which put right how
    it orders the dataset's configs: see `LightGBMRanker.adapted`. Its other families stay as they are.

    The measurements that the bundle was trained on are not needed, and five minutes of an adaptive collection on the
    new card are enough. The same bundle, dataset, families and LightGBM give the same bytes; the origin in the manifest
    has the bundle it came from and what was added, in "adapted". Warns as `measured_grid` does. Raises `BundleError`
    where the two have no family in common, or the family's features are not those that the bundle learned from.

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
        grid = measured_grid(dataset, families[name])
        # Tidy: what comes of a collection depends on what was measured, and not on what came first.
        with share_of(1 / len(both)):
            ranker = bundle.ranker(name).adapted(grid.tidy(), families[name], trees=trees)
        trained[name] = TrainedFamily(
            ranker=ranker,
            devices=tuple(dict.fromkeys((*bundle.trained_on(name), *grid.devices))),
            origin=_origin(bundle, dataset, grid, families[name]),
            wrong_results=_together(bundle.trained[name].wrong_results, dataset.wrong_results(name)),
        )
    return Bundle(trained, bundle.lightgbm_version)


def _origin(bundle: Bundle, dataset: Dataset, grid: Grid, family: Family) -> dict[str, Any]:
    """The bundle's origin, and what was added to it; its runs are those of both, where the bundle recorded any."""
    old, new = dict(bundle.trained[family.name].origin), origin_of(dataset, grid, family)
    if isinstance(old.get("runs"), list):
        old["runs"] = sorted({*map(str, old["runs"]), *new["runs"]})
    added = new | {"from_bundle": bundle.digest, "devices": sorted({device.name for device in grid.devices})}
    earlier = old.get("adapted")
    return old | {"adapted": [*(earlier if isinstance(earlier, list) else []), added]}


def _together(
    one: Mapping[BinaryKind, frozenset[KernelConfig]], other: Mapping[BinaryKind, frozenset[KernelConfig]]
) -> dict[BinaryKind, frozenset[KernelConfig]]:
    return {kind: one.get(kind, frozenset()) | other.get(kind, frozenset()) for kind in (*one, *other)}
