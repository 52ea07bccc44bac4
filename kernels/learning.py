"""The public functions of `foretune` that collect data, train bundles on them and evaluate bundles.

They also accept a family by name, and data as a folder or by the name of a shipped dataset. Each function imports what
it needs when it is called, so importing this module imports neither torch, pandas nor NumPy. `collect_dataset` uses
collect/, the floor above, so in kernels/ only `api.py` and the commands may import this module.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from ..datasets import Family, ForetuneError
from ..runtime.shortlist import bundle_in_force, bundle_of
from .registry import families, find_family, find_measurable

if TYPE_CHECKING:
    from pathlib import Path

    from ..collect.summary import Summary
    from ..datasets import Case
    from ..datasets.dataset import Dataset
    from ..model import Bundle, Evaluation, LightGBMRanker
    from ..model.baselines import Rivals
    from ..model.report import Report

#: A family, its class, its name, or "package.module:attribute".
FamilyLike: TypeAlias = Family | type[Family] | str
#: How errors name the option and the argument that pass a family.
_PASSED = "--family package.module:Class or path/to/file.py:Class (family= in Python)"
#: A dataset, its folder, or the name of a shipped one.
DataLike: TypeAlias = "Dataset | Path | str"


def collect_dataset(
    family: FamilyLike | Sequence[FamilyLike],
    *,
    out: Path | str,
    cases: Sequence[Case] | None = None,
    plan: str = "exhaustive",
    known: Dataset | None = None,
    share: float | None = None,
    budget_s: float | None = None,
    gpus: int | None = None,
    resume: bool = True,
    progress: bool = True,
    replay: Dataset | Path | str | None = None,
) -> Summary:
    """Measure the config spaces of one family or several on this machine's GPUs, as `foretune collect` does.

    If the process is killed or interrupted, the next call continues.

    Args:
        family: The families, which must be `Measurable`.
        out: The dataset's folder.
        cases: The problems to measure; if None, those of `known`, or those that each family draws.
        plan: Which configs of each problem are measured: "exhaustive" all; "thin" a `share`, in part those that a
            bundle or an estimate ranks first and in part random ones; "adaptive" the same, ranked by a model that
            learns during the run; "missing" those that `known` does not have; "outdated" those whose kernel has
            changed since `known` was measured.
        known: The dataset that the plan "missing" or "outdated" adds to.
        share: The part of each problem's configs that "adaptive" or "thin" tries, such as 0.03.
        budget_s: Seconds after which it stops.
        gpus: How many GPUs to use; all that are visible if None.
        resume: Whether to continue an earlier run in `out`; if not, `out` must not have one.
        progress: Whether to show progress on stderr.
        replay: A dataset whose times are replayed instead of measured, which needs no GPU: see
            `foretune.collect.collect_replayed`. The cases are then by default those of this dataset.

    Raises:
        ForetuneError: A family can only predict, or as for `foretune collect`.

    >>> import tempfile
    >>> from foretune.datasets import load
    >>> recorded, out = load("h200_rms_norm_rope"), tempfile.TemporaryDirectory()
    >>> case = next(case for case in recorded.cases if case.problem.family == "rms_norm_rope_bwd")
    >>> summary = collect_dataset("rms_norm_rope_bwd", out=out.name, cases=[case], replay=recorded, progress=False)
    >>> summary.cases, summary.complete, len(load(out.name).measurements) == summary.measurements
    (1, True, True)
    """
    from ..collect.campaign import collect_on_gpus, collect_replayed
    from ..collect.cases import cases_like, draw_cases
    from ..collect.plan import checked_dataset
    from ..datasets.errors import check_flag
    from ..datasets.progress import showing_steps

    for name, value in (("resume", resume), ("progress", progress)):
        check_flag(name, value)
    measurable = [find_measurable(one) for one in _several(family)]
    options: dict[str, Any] = {"plan": plan, "known": known, "share": share, "budget_s": budget_s, "resume": resume}
    if replay is not None:
        if gpus is not None:
            raise ForetuneError(f"a replay uses no GPU: leave gpus out (it is {gpus})")
        with showing_steps(progress) as on_progress:
            return collect_replayed(measurable, cases, out, dataset_of(replay), on_progress=on_progress, **options)
    if cases is None and known is not None:
        cases = [case for one in measurable for case in cases_like(checked_dataset(known), one.name)]
    drawn = [case for one in measurable for case in draw_cases(one)] if cases is None else cases
    with showing_steps(progress) as on_progress:
        return collect_on_gpus(measurable, drawn, out, gpus=gpus, on_progress=on_progress, **options)


def train(
    data: DataLike | Sequence[DataLike],
    *,
    family: FamilyLike | Sequence[FamilyLike] | None = None,
    keep: Bundle | Path | str | None = None,
    winners: Sequence[str] = (),
) -> Bundle:
    """Train a bundle on measurements, as `foretune train` does.

    The same data, families and versions give the same bundle, byte for byte.

    Args:
        data: The measurements: a dataset, its folder, or the name of a shipped one; or several of these.
        family: One family of the data or several; all registered families in the data if None.
        keep: A bundle, or its folder: its other families become part of the new bundle.
        winners: Installed serving engines, "vllm" or "sglang", whose tuned files `fused_moe` and `fused_moe_down` also
            learn from: the configs that won on cards that were not measured.

    Returns:
        The trained bundle. `save(folder)` writes it.

    Raises:
        ForetuneError: The data have none of the families, a family is not registered, data cannot be read, or an engine
            of `winners` is not installed.

    >>> from dataclasses import replace
    >>> from foretune.datasets import load
    >>> data = load("h200_rms_norm_rope")
    >>> few = replace(data, measurements=data.measurements[data.measurements["problem"] < 2])
    >>> bundle = train(few, family="rms_norm_rope_fwd")
    >>> bundle.families, bundle.trained["rms_norm_rope_fwd"].origin["problems"]
    (('rms_norm_rope_fwd',), 2)
    """
    from ..model.train import train_bundle

    kept = bundle_of(keep)
    dataset = datasets_merged(data)
    families = families_in(dataset, family)
    trained = train_bundle(dataset, families, ranker_for(families, winners))
    return trained if kept is None else trained.merged_with(kept)


def adapt(
    data: Dataset | Path | str,
    *,
    bundle: Bundle | Path | str | None = None,
    family: FamilyLike | Sequence[FamilyLike] | None = None,
) -> Bundle:
    """Return a bundle adapted to another card: `bundle` with additional trees, trained on a few measurements.

    Five minutes of `foretune collect --plan adaptive` on the card are enough; the bundle's own data are not needed.
    Where few problems of a kind, or few of their configs, were measured, single first choices can become worse:
    evaluate both bundles on other measurements of the card, and keep the better one.

    Args:
        data: The measurements of the new card: a dataset, its folder, or the name of a shipped one.
        bundle: The bundle to adapt, or its folder; the shipped one if None.
        family: One family of `data` or several; all families that the bundle also has if None.

    Returns:
        A new bundle with all families of `bundle`. `save(folder)` writes it.

    Raises:
        ForetuneError: `data` and the bundle have no family in common, or an argument is invalid.

    >>> from dataclasses import replace
    >>> from foretune.datasets import load
    >>> data = load("h200_rms_norm_rope")
    >>> few = replace(data, measurements=data.measurements[data.measurements["problem"] < 2])
    >>> adapted = adapt(few, family="rms_norm_rope_fwd")  # warns that two problems are too few to calibrate
    >>> len(adapted.families), adapted.trained["rms_norm_rope_fwd"].origin["adapted"][0]["problems"]
    (20, 2)
    """
    from ..model.train import adapt_bundle

    dataset, given = dataset_of(data), bundle_in_force(bundle_of(bundle))
    return adapt_bundle(given, dataset, families_in(dataset, family, given))


def ranker_for(names: Collection[str], winners: Sequence[str]) -> Callable[[], LightGBMRanker]:
    """Return a function that makes an untrained ranker: a plain one, or one that also learns serving engines' winners.

    Args:
        names: The families to train.
        winners: Names of engines, none for plain rankers.

    Raises:
        ForetuneError: An engine is unknown or not installed, or none of the families has winners.
    """
    from ..model import LightGBMRanker

    if not winners:
        return LightGBMRanker
    from ..model.train import WinnerRanker
    from .fused_moe.shipped_winners import winners_of

    found = winners_of(_several(winners))
    if not set(found) & set(names):
        raise ForetuneError(
            f"winners are of {' and '.join(found)}, but the families to train are {_few(sorted(names)) or 'none'}"
        )
    return partial(WinnerRanker, found)


def evaluate(
    data: DataLike | Sequence[DataLike],
    *,
    bundle: Bundle | Path | str | None = None,
    family: FamilyLike | Sequence[FamilyLike] | None = None,
    split: Literal["model", "device", "size"] = "model",
    baselines: Sequence[str] = ("fast",),
    jobs: int = 2,
) -> dict[str, Evaluation]:
    """Return the regret of shortlists for each family in the data, as `foretune evaluate` prints it.

    The regret at k is how much slower the best of the first k configs is than the best config.

    Args:
        data: The measurements to evaluate on: a dataset, its folder, or the name of a shipped one; or several of these.
        bundle: A bundle to evaluate, or its folder. If None, rankers are trained and cross-validated.
        family: One family of the data or several; all registered families in the data if None.
        split: What cross-validation holds out: model families, each device, or the largest sizes.
        baselines: What to compare with: "fast", "all", or names such as "random", "static" and "nearest".
        jobs: The number of folds that are trained and evaluated in parallel.

    Returns:
        An evaluation for each family, by name.

    Raises:
        ForetuneError: The data have none of the families, or cannot be split this way.

    >>> from dataclasses import replace
    >>> from foretune.datasets import load
    >>> data = load("h200_rms_norm_rope")
    >>> few = replace(data, measurements=data.measurements[data.measurements["problem"] < 2])
    >>> import foretune
    >>> bundle = foretune.load_bundle()
    >>> judged = evaluate(few, bundle=bundle, family="rms_norm_rope_fwd", baselines=["random"])["rms_norm_rope_fwd"]
    >>> regret = judged.to_json()["regret"]
    >>> list(regret), all(one["geomean"] < 1.1 for one in regret.values())
    (['1', '2', '4', '8', '16'], True)
    """
    from ..model.baselines import choose_rivals
    from .registry import baselines_of

    given = bundle_of(bundle)
    dataset = datasets_merged(data)
    judged: dict[str, Evaluation] = {}
    for name, one in judged_families(dataset, family, given).items():
        judged[name] = evaluation_of(dataset, one, given, choose_rivals(baselines, baselines_of(one)), split, jobs)
    return judged


def report(
    data: DataLike | Sequence[DataLike],
    *,
    bundle: Bundle | Path | str | None = None,
    family: FamilyLike | Sequence[FamilyLike] | None = None,
    quick: bool = False,
) -> Report:
    """Return an HTML report on how good the shortlists are, as `foretune report` writes it.

    Args:
        data: The measurements to evaluate on: a dataset, its folder, or the name of a shipped one; or several of these.
        bundle: A bundle to evaluate, or its folder. If None, rankers are trained and cross-validated.
        family: One family of the data or several; all registered families in the data if None.
        quick: Leave out the learning curve, which needs more training.

    Returns:
        The report: `save(file)` writes the page, `save_plots(folder)` its figures as SVG files.

    Raises:
        ForetuneError: `foretune[report]` is not installed, or as for `evaluate`.

    >>> from dataclasses import replace
    >>> from foretune.datasets import load
    >>> data = load("h200_rms_norm_rope")
    >>> few = replace(data, measurements=data.measurements[data.measurements["problem"] < 2])
    >>> import foretune
    >>> made = report(few, bundle=foretune.load_bundle(), family="rms_norm_rope_fwd", quick=True)
    >>> list(made.families)  # made.save("report.html") writes the page
    ['rms_norm_rope_fwd']
    """
    from ..model.report import make_report

    given = bundle_of(bundle)
    dataset = datasets_merged(data)
    return make_report(dataset, judged_families(dataset, family, given), given, quick=quick)


def evaluation_of(
    dataset: Dataset, family: Family, bundle: Bundle | None, rivals: Rivals, split: str, jobs: int
) -> Evaluation:
    """Evaluate a bundle, or cross-validated rankers if None, and the baselines `rivals` on a family's measurements.

    `split` and `jobs` are as for `evaluate`.
    """
    from ..model.cross_validation import cross_validate, evaluate_bundle

    if bundle is None:
        return cross_validate(dataset, family, split=split, rivals=rivals, jobs=jobs)
    return evaluate_bundle(dataset, bundle, family, rivals=rivals, jobs=jobs)


def datasets_merged(data: DataLike | Sequence[DataLike]) -> Dataset:
    """Return the given dataset, or several merged into one; `Dataset.of_family` makes their times comparable."""
    from ..datasets.merge import merge_datasets

    loaded = [dataset_of(one) for one in _several(data)]
    if len(loaded) == 1:
        return loaded[0]
    merged = merge_datasets(loaded, name="+".join(one.name for one in loaded), families=families().values())
    return replace(merged, given="+".join(one.label for one in loaded))


def families_in(
    dataset: Dataset, only: FamilyLike | Sequence[FamilyLike] | None = None, bundle: Bundle | None = None
) -> dict[str, Family]:
    """Return families by name: those in `only` if given, otherwise those in the dataset (and the bundle, if given).

    Kernels that were only logged while they were tuned, and that no family declares, are left out with a warning if
    the dataset has other families.

    Raises:
        ForetuneError: A name is not registered, or no kernel in the dataset has a family.
    """
    from ..datasets.errors import warn
    from ..datasets.log_part import LOGGED

    if only is not None:
        return {family.name: family for family in map(find_family, _several(only))}
    names = [name for name in dataset.families if bundle is None or name in bundle.families]
    undeclared = [name for name in names if name not in families() and dataset.plans(name) == {LOGGED}]
    if undeclared and len(undeclared) == len(names):
        raise ForetuneError(
            f"{dataset.label} has logged times of {_few(undeclared)}, for which no family is registered: pass "
            f"{_PASSED}. What an attached kernel without a family learned is in the choice cache"
        )
    if undeclared:
        warn(
            f"{dataset.label}: the logged times of {_few(undeclared)} are left out, because no family is registered "
            "for them"
        )
    declared = [name for name in names if name not in undeclared]
    if unknown := [name for name in declared if name not in families()]:
        raise ForetuneError(
            f"{dataset.label} has measurements of {_few(unknown)}, for which no family is registered: pass {_PASSED} "
            "for each family to use, or register the family with foretune.register or an entry point"
        )
    return {name: find_family(name) for name in declared}


def judged_families(
    dataset: Dataset, only: FamilyLike | Sequence[FamilyLike] | None, bundle: Bundle | None
) -> dict[str, Family]:
    """Return the families in a dataset that can be evaluated, by name: with a bundle, those that the bundle has.

    Raises:
        ForetuneError: The bundle has none of them, or as `families_in`.
    """
    found = families_in(dataset, only, bundle)
    judged = {name: family for name, family in found.items() if bundle is None or name in bundle.families}
    if not judged:
        why = "it has no families" if bundle is None else bundle.without(", ".join(found or dataset.families))
        raise ForetuneError(f"cannot evaluate on {dataset.label}: {why}")
    return judged


def dataset_of(data: DataLike) -> Dataset:
    """Return a given dataset unchanged, or read the one in a folder or with a shipped name."""
    from ..datasets import load
    from ..datasets.dataset import Dataset

    return data if isinstance(data, Dataset) else load(data)


def _few(names: Sequence[str]) -> str:
    """Return up to four names as text, and how many more there are."""
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more


def _several(given: Any) -> Sequence[Any]:
    """Return a single value as a list of one, and a sequence of values unchanged."""
    return given if isinstance(given, Sequence) and not isinstance(given, str) else [given]
