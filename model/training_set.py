"""`TrainingSet`: one family's measurements, for training and evaluating rankers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ..datasets import (
    DatasetError,
    DeviceSpec,
    Family,
    ForetuneError,
    KernelConfig,
    Measurable,
    Problem,
    check_problem_of,
    not_empty,
    wrong_knobs,
)
from ..datasets.contents import kernel_sources, other_sources, since
from ..datasets.errors import warn
from .rows import supported
from .splits import split_groups

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..datasets.dataset import Dataset
    from ..datasets.grid import BinarySignature, Grid
    from .ranker import Ranker

#: A problem counts as measured exhaustively if at least this share of its supported configs was measured.
EXHAUSTIVE = 0.5


@dataclass(frozen=True)
class TrainingSet:
    """One family's measurements: times, problems, configs and masks, each computed once.

    Masks are (n_problems, n_configs), in the order of `grid.cases` and `grid.configs`. `exhaustive` and `groups` are
    (n_problems,).

    >>> data = TrainingSet.of(load("h200"), family)  # doctest: +SKIP
    >>> data.grid.times_us.shape, data.judged.mean(), data.origin["problems"]  # doctest: +SKIP
    ((454, 768), 0.82, 454)
    """

    name: str  # of the dataset
    label: str  # what messages call the dataset: see `Dataset.label`
    family: Family
    grid: Grid  # with `supported` and `measured`; without empty problems and times of unsupported configs
    candidate: NDArray[np.bool_]  # a shortlist may have it: supported, no wrong result with this signature
    wrong_results: Mapping[BinarySignature, frozenset[KernelConfig]]  # see `Dataset.wrong_results`
    runs: Mapping[str, int]  # the number of the family's measurements, by run id

    @classmethod
    def of(
        cls, dataset: Dataset | TrainingSet, family: Family, where: Callable[[Problem, DeviceSpec], bool] | None = None
    ) -> TrainingSet:
        """Return the training set with a dataset's measurements that a ranker of the family may learn from.

        Times of configs that the family does not support on their problem are dropped with a `ForetuneWarning`: no
        shortlist contains them, and their features are undefined. Configs that the family supports on no problem and
        problems without work are dropped too. Warns as `check_sources` does.

        Args:
            dataset: The measurements. A training set is returned unchanged.
            family: The family whose measurements are used.
            where: A predicate; if given, only problems on devices for which it returns True are used.

        Raises:
            DatasetError: A problem or a config of the dataset is invalid for the family, or no measurement is left.
            FamilyError: The family's declarations are inconsistent.
        """
        if isinstance(dataset, TrainingSet):
            return dataset
        dataset = dataset.of_family(family)
        check_measured(dataset, family)
        grid = dataset.grid(family.name)
        if where is not None:
            cells = zip(grid.cases, grid.devices, strict=True)
            grid = grid.select([row for row, (case, device) in enumerate(cells) if where(case.problem, device)])
        grid = _valid(dataset.label, grid, family)
        wrong_results = dataset.wrong_results(family.name)
        candidate = supported(grid, family).copy()
        for row, case in zip(candidate, grid.cases, strict=True):
            if wrong := wrong_results.get((case.problem.dtype, case.problem.flags)):
                row &= np.array([config not in wrong for config in grid.configs])
        runs = dataset.rows(family.name)["run_id"].value_counts()
        counts = {str(run): n for run, n in runs.items() if n}
        return cls(dataset.name, dataset.label, family, grid, candidate, wrong_results, counts)

    def __len__(self) -> int:
        """Return the number of problems."""
        return len(self.grid)

    @property
    def supported(self) -> NDArray[np.bool_]:
        """Mask of the configs that the family supports."""
        return supported(self.grid, self.family)

    @property
    def measured(self) -> NDArray[np.bool_]:
        """Mask of the configs that were measured, including failed launches."""
        return self.grid.measured

    @cached_property
    def knob_values(self) -> dict[str, tuple[str, ...]]:
        """The measured values of each knob, as texts."""
        found = [config.to_json() for config, n in zip(self.grid.configs, self.measured.sum(axis=0), strict=True) if n]
        return {knob: tuple(sorted({str(one.get(knob)) for one in found})) for knob in self.family.knobs}

    @cached_property
    def judged(self) -> NDArray[np.bool_]:
        """Mask of the configs that a ranker is evaluated on: candidates that were measured.

        Candidates are the configs that a shortlist may have: supported, and not known to compute wrong results. Some
        were not measured if a run ended early or measured only some of the configs.
        """
        return self.candidate & self.measured

    @cached_property
    def exhaustive(self) -> NDArray[np.bool_]:
        """Mask of the problems, (n_problems,), with at least a share `EXHAUSTIVE` of their supported configs judged."""
        return is_exhaustive(self.judged, self.supported)

    @cached_property
    def groups(self) -> NDArray[np.intp]:
        """Labels of related problems, (n_problems,): see `split_groups`."""
        return split_groups(self.grid.cases)

    @cached_property
    def devices(self) -> tuple[DeviceSpec, ...]:
        """The distinct devices of the measurements."""
        return tuple(dict.fromkeys(self.grid.devices))

    @property
    def problems(self) -> list[Problem]:
        """The problem of each row, (n_problems,)."""
        return [case.problem for case in self.grid.cases]

    def select(self, rows: Sequence[int] | NDArray[np.intp]) -> TrainingSet:
        """Return a training set with only the problems of these rows."""
        index = np.asarray(rows, np.intp)
        return replace(self, grid=self.grid.select(index), candidate=self.candidate[index])

    def tidy(self) -> TrainingSet:
        """Return the set in a canonical order, without configs that never ran.

        Training on it gives the same result whatever the order of the measurements was.
        """
        return self._taken(self.grid.row_order(), self.grid.column_order())

    def ordered(self) -> TrainingSet:
        """Return the set in a canonical order: configs as in the family's space. Shortlists break ties by that order.

        Evaluating on it gives the same result whatever the order of the measurements was.
        """
        place, configs = {config: number for number, config in enumerate(self.family.space())}, self.grid.configs
        columns = sorted(
            range(len(configs)),
            key=lambda column: (place.get(configs[column], len(place)), json.dumps(configs[column].to_json())),
        )
        return self._taken(self.grid.row_order(), columns)

    def _taken(self, rows: list[int], columns: list[int]) -> TrainingSet:
        """Return the set with only these rows and columns, in this order."""
        grid = self.grid.select(rows).select_configs(columns)
        return replace(self, grid=grid, candidate=self.candidate[np.ix_(rows, columns)])

    def predict(self, ranker: Ranker, row: int, view: Callable[[Problem], Problem]) -> NDArray[np.float64]:
        """Return the predicted slowdowns of one problem's candidates, (n_candidates,).

        Args:
            ranker: A fitted ranker.
            row: The problem's row.
            view: Converts the problem to what the ranker is given, for example `Family.at_call_time`.
        """
        configs, problem = self.configs(self.candidate[row]), view(self.grid.cases[row].problem)
        return ranker.predict(self.family, problem, self.grid.devices[row], configs)

    def configs(self, mask: NDArray[np.bool_]) -> tuple[KernelConfig, ...]:
        """Return the configs selected by a mask, (n_configs,).

        Equal masks give the identical tuple, because families cache what depends only on the tuple of configs.
        """
        key = mask.tobytes()
        if key not in self._subsets:
            self._subsets[key] = tuple(self.grid.configs[column] for column in np.flatnonzero(mask))
        return self._subsets[key]

    @cached_property
    def _subsets(self) -> dict[bytes, tuple[KernelConfig, ...]]:
        return {}

    @property
    def origin(self) -> dict[str, Any]:
        """A description of the training data, as JSON values, for a bundle: see `TrainedFamily.origin`."""
        return {
            "dataset": self.name,
            "measurements_sha256": self._fingerprint(),
            "runs": sorted(self.runs),
            "source_hash": source_of(self.family),
            "problems": len(self.grid),
            "configs": len(self.grid.configs),
        }

    def share_in(self, origin: Mapping[str, Any]) -> float | None:
        """Return the share of these measurements that a bundle was trained on, judged by their run ids.

        Args:
            origin: The bundle's `TrainedFamily.origin`.

        Returns:
            A share from 0 to 1, or None for a bundle that recorded no runs.
        """
        if origin.get("measurements_sha256") == self._fingerprint():
            return 1.0
        runs = origin.get("runs")
        if not isinstance(runs, list):  # older bundles have none
            return None
        return sum(self.runs.get(run, 0) for run in {run for run in runs if isinstance(run, str)}) / sum(
            self.runs.values()
        )

    def _fingerprint(self) -> str:
        """Return the SHA-256 of the problems, devices, configs and times of both passes."""
        digest = hashlib.sha256()
        for part in (self.problems, self.grid.devices, self.grid.configs):
            digest.update(json.dumps([one.to_json() for one in part], sort_keys=True).encode())
        for times in (self.grid.first_us, self.grid.second_us):
            digest.update(times.astype("<f8").tobytes())
        return digest.hexdigest()


def is_exhaustive(judged: NDArray[np.bool_], supported: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return whether at least a share `EXHAUSTIVE` of each problem's supported configs is judged, (n_problems,)."""
    result: NDArray[np.bool_] = judged.sum(axis=1) >= EXHAUSTIVE * np.maximum(supported.sum(axis=1), 1)
    return result


def _valid(name: str, grid: Grid, family: Family) -> Grid:
    """Return a grid without empty problems and times of unsupported configs; `name` is the dataset's in warnings."""
    idle = np.array([not_empty(family, case.problem) != case.problem for case in grid.cases])
    if idle.any():
        example = grid.cases[int(idle.argmax())].problem
        warn(f"{name}: {idle.sum()} problems without work are left out, such as {example}")
        if idle.all():
            raise DatasetError(f"{name}: no problem of {family.name} has work")
        grid = grid.select(np.flatnonzero(~idle))
    may_run = supported(grid, family)
    grid = replace(grid, supported=may_run)
    ran = np.isfinite(grid.times_us)
    if len(wrong := np.argwhere(ran & ~may_run)):
        row, column = (int(place) for place in wrong[0])
        problem, config = grid.cases[row].problem, grid.configs[column]
        warn(
            f"{name}: {len(wrong)} times are left out, of configs that {family.name} does not support on their "
            f"problem, such as {config} on {problem}: {family.supports(config, problem, grid.devices[row])}"
        )
        left = np.flatnonzero((ran & may_run).any(axis=1))
        if not len(left):
            raise DatasetError(f"{name}: {family.name} supports none of the configs on their problems")
        first, second = (np.where(may_run, passed, np.nan) for passed in (grid.first_us, grid.second_us))
        grid = replace(grid, first_us=first, second_us=second).select(left)
    return grid.select_configs(np.flatnonzero(supported(grid, family).any(axis=0)))


def check_measured(dataset: Dataset, family: Family) -> None:
    """Check that the problems and configs of a dataset are valid for a family, and warn as `check_sources` does.

    Raises:
        DatasetError: A problem or a config is invalid.
    """
    for case in dataset.cases:
        if case.problem.family == family.name:
            try:
                check_problem_of(family, not_empty(family, case.problem))
            except ForetuneError as error:
                raise DatasetError(f"{dataset.label}: {error}") from None
    for number in dataset.rows(family.name)["config"].unique():
        if why := wrong_knobs(family, dataset.configs[number]):
            raise DatasetError(f"{dataset.place_of(family.name, dataset.configs[number])}: {why}")
    check_sources(dataset.label, dataset.provenance, family)


def check_sources(name: str, provenance: Mapping[str, Any], family: Family) -> None:
    """Warn if a dataset was measured with other sources of the family's kernel than the installed ones.

    It is only a warning, because the times may still apply: adding an option that is off by default changes the sources
    too. Changes that the family declares (`Family.kernel_changes`) are no reason to warn. Nothing is compared if the
    runs recorded no source hash or the family's is not known here.

    Args:
        name: The dataset's name, for the `ForetuneWarning`.
        provenance: The dataset's provenance.
        family: The family to compare with.
    """
    now = source_of(family)
    recorded = {since(family.kernel_changes, source)[0] for source in kernel_sources(provenance, family.name)}
    if now is not None and (others := other_sources(recorded, now)):
        warn(
            f"{name} was measured with other sources of {family.name} ({', '.join(sorted(others))}) than the installed "
            f"ones ({now}), so its times may not apply. Collect again if the change affects performance"
        )


def check_trained_source(origin: Mapping[str, Any], family: Family) -> None:
    """Warn if a bundle was trained or adapted when other sources of the family's kernel were installed.

    A declared change (`Family.kernel_changes`) that left all times valid is no reason to warn. Nothing is compared if
    the bundle recorded no source hash or the family's is not known here.

    Args:
        origin: The bundle's `TrainedFamily.origin`.
        family: The family to compare with.
    """
    adapted = origin.get("adapted")
    trainings = [origin, *(adapted if isinstance(adapted, list) else [])]
    recorded = {one.get("source_hash") for one in trainings if isinstance(one, Mapping)}
    now, as_of_today = source_of(family), set[str]()
    for one in recorded:
        if isinstance(one, str):
            latest, changed = since(family.kernel_changes, one)
            as_of_today.add(one if changed else latest)
    if now is not None and (others := other_sources(as_of_today, now)):
        warn(
            f"the bundle was trained for other sources of {family.name} ({', '.join(sorted(others))}) than the "
            f"installed ones ({now}), so its predictions may not apply. Train again if the change affects performance"
        )


def source_of(family: Family) -> str | None:
    """Return the source hash of the family's installed kernel.

    None if it is unknown: a family that only predicts has no kernel, and hashing needs Triton, or the package that the
    kernel is from.
    """
    if not isinstance(family, Measurable):
        return None
    try:
        return family.source_hash()
    except ForetuneError as error:
        if isinstance(error, ImportError) or isinstance(error.__cause__, ImportError):
            return None
        raise
