"""Commands that train bundles on measurements and evaluate them."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...datasets import DeviceSpec, Family, ForetuneError
from ...datasets.errors import printable
from ...datasets.progress import showing
from .. import find_measurable
from ..learning import datasets_merged, evaluation_of, families_in, judged_families, ranker_for
from .app import GIVEN, ByFamily, Printed, command, emit, left_out_of
from .inputs import bundle_at, for_each_family, live_gpu, rows_of
from .options import (
    EXAMPLE,
    FAMILY,
    SHIPPED,
    SHIPPED_BUNDLE,
    AsJson,
    Data,
    OnlyFamilies,
    ToJudge,
    amount,
    choice,
    completes,
    count,
    data_option,
    engine_names,
    option,
    switch,
    words,
)

if TYPE_CHECKING:
    from ...model.evaluation import Evaluation

#: Seconds per measurement that a command takes on two cores of 2026, for the estimate printed at the start.
_QUICKSTART_S, _TRAINING_S, _EVALUATING_S, _JUDGING_S, _CURVE_S = 1e-4, 5e-5, 2.5e-4, 5e-5, 6e-5


def split_names() -> Iterable[str]:
    """Return the names of the cross-validation splits."""
    from ...model.cross_validation import SPLITS

    return SPLITS


@completes
def baseline_names() -> Iterable[str]:
    """Return the names of the baselines and of groups of them, for shell completion."""
    from ...model.baselines import ALL, BASELINES, FAST

    return (FAST, ALL, *BASELINES)


@command("quickstart", "foretune quickstart")
def quickstart(
    out: Annotated[
        Path | None, option("Folder for the bundle.", "~/.cache/foretune/quickstart", metavar="FOLDER")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train on shipped H200 measurements and show how good the predicted configs are. Needs no GPU.

    Prints how much slower than the best config the predictions are, on models that were held out, next to simple
    baselines, and the shortlist for an example layer. With a GPU and torch, it also tunes that layer with and without
    the shortlist.
    """
    from ...datasets import load
    from ...model.bundle_file import check_bundle_folder
    from ...runtime.quickstart import run_quickstart
    from ..grouped_gemm.contenders import autotuned

    out = out or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "foretune" / "quickstart"
    check_bundle_folder(out)
    family = find_measurable(FAMILY)
    device, dataset = DeviceSpec.named(SHIPPED), load(SHIPPED)
    rows = len(dataset.rows(family.name))
    with showing("training", _QUICKSTART_S * rows) as say:
        result = run_quickstart(family, EXAMPLE, dataset, device, out, gpu=live_gpu(), autotuned=autotuned, say=say)
    emit(result, as_json)


@command("train", "foretune train --data measured --data h200 --out my-bundle")
def train(
    data: Annotated[
        list[str],
        data_option("Dataset: a folder, or the name of a shipped one. May be repeated."),
    ],
    out: Annotated[Path, option("Folder for the bundle.", metavar="FOLDER")],
    family: OnlyFamilies = None,
    keep: Annotated[
        str | None,
        option(
            f"Bundle folder, or {SHIPPED_BUNDLE!r}, from which to copy the families that are not trained now.",
            "none",
            words(SHIPPED_BUNDLE),
            metavar=f"{SHIPPED_BUNDLE}|FOLDER",
        ),
    ] = None,
    winners: Annotated[
        list[str] | None,
        option(
            "Installed serving engine from whose tuned files fused_moe also learns, for cards that were not measured. "
            "May be repeated.",
            "none",
            engine_names,
            metavar="vllm|sglang",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train a bundle, which predicts configs, on measurements."""
    from ...model import load_bundle
    from ...model.bundle_file import check_bundle_folder
    from ...model.train import train_bundle

    check_bundle_folder(out)
    kept = None if keep is None else load_bundle(None if keep == SHIPPED_BUNDLE else keep)
    dataset = datasets_merged(data)
    families = families_in(dataset, family)
    _check_keeps(out, {*families, *(kept.families if kept else ())}, f"keep them with --keep {out}")
    ranker = ranker_for(families, winners or ())
    with showing(f"training on {' and '.join(data)}", _TRAINING_S * rows_of(dataset, families)):
        trained = train_bundle(dataset, families, ranker)
    merged = trained if kept is None else trained.merged_with(kept)
    merged.save(out)
    others = [name for name in merged.families if name not in trained.families]
    text = f"Trained {', '.join(trained.families)}." + f" Kept {', '.join(others)}." * bool(others)
    value = {"families": list(merged.families), "kept": others} | left_out_of(dataset)
    emit(Printed(value, text), as_json, bundle=out)


@command("adapt", "foretune adapt --data small --out my-bundle")
def adapt(
    data: Annotated[
        list[str],
        data_option("Dataset measured on the new GPU. May be repeated."),
    ],
    out: Annotated[Path, option("Folder for the new bundle.", metavar="FOLDER")],
    bundle: Annotated[
        Path | None, option("Folder of the bundle to adapt.", "the shipped bundle", metavar="FOLDER")
    ] = None,
    family: OnlyFamilies = None,
    as_json: AsJson = False,
) -> None:
    """Adapt a bundle to a new GPU with a few measurements there. Its own training data are not needed.

    Five minutes of measuring are enough: `foretune collect FAMILY... --plan adaptive --budget 5m --out small`.
    """
    from ...model import load_bundle
    from ...model.bundle_file import check_bundle_folder
    from ..learning import adapt as adapted_by_name

    check_bundle_folder(out)
    given, dataset = load_bundle(bundle), datasets_merged(data)
    if bundle is None and not {*dataset.families} & {*given.families}:
        raise ForetuneError(
            f"the shipped bundle does not know {', '.join(dataset.families) or 'any family of these data'}: name the "
            "bundle to adapt with --bundle"
        )
    families = families_in(dataset, family, given)
    _check_keeps(out, given.families, f"adapt that one with --bundle {out}")
    with showing(f"adapting to {' and '.join(data)}", _TRAINING_S * rows_of(dataset, families)):
        adapted = adapted_by_name(dataset, bundle=given, family=list(families.values()))
    adapted.save(out)
    known = sorted({spec.name for name in families if name in adapted.families for spec in adapted.trained_on(name)})
    value = {"families": sorted(set(families)), "devices": known}
    source = "the shipped bundle" if bundle is None else printable(str(bundle))
    text = f"Adapted {', '.join(value['families'])} of {source}. Trained on: {', '.join(known)}."
    compared = f"foretune evaluate --data OTHER --bundle {SHIPPED_BUNDLE if bundle is None else source}"
    text += f" Single first choices may have become worse: to compare, run {compared}, and again with --bundle "
    text += f"{printable(str(out))}, on measurements OTHER that neither was trained on."
    emit(Printed(value, text), as_json, bundle=out)


def _check_keeps(out: Path, families: Collection[str], remedy: str) -> None:
    """Check that the bundle in a folder, if there is one, has no families that the new bundle will not have.

    Args:
        out: The folder.
        families: The families of the new bundle.
        remedy: What the user can do instead of naming another folder.

    Raises:
        ForetuneError: The bundle in the folder has such families; the message names them.
    """
    from ...model import load_bundle

    try:
        lost = [name for name in load_bundle(out).families if name not in families]
    except ForetuneError:  # there is none, or it cannot be read
        return
    if lost:
        raise ForetuneError(
            f"{printable(str(out))} has a bundle with {', '.join(lost)}, which the new one would replace without "
            f"them: {printable(remedy)}, or name another --out"
        )


@command("evaluate", "foretune evaluate --data measured --bundle my-bundle --json")
def evaluate(
    data: Data = None,
    bundle: ToJudge = None,
    split: Annotated[
        str,
        choice(
            "What cross-validation holds out. model: each model family; device: each device; size: the largest sizes.",
            split_names,
            "model|device|size",
        ),
    ] = "model",
    baselines: Annotated[
        list[str] | None,
        option(
            "Baselines to compare with: fast, all, or a name: random, static (one list for all problems), regimes (a "
            "list for each of three arithmetic intensities), nearest (the configs of the nearest problem), estimate "
            "(the analytic model), or one that a family declares. May be repeated.",
            "fast",
            baseline_names,
            metavar="fast|all|NAME",
        ),
    ] = None,
    jobs: Annotated[int, count("Number of folds to train and evaluate in parallel.", 1, 256)] = 2,
    family: OnlyFamilies = None,
    max_regret1: Annotated[
        float | None,
        amount(
            "Exit with 1 if the first choice of a family is slower than this, in geometric mean with ragged sizes "
            "known; 0.02 is 2 %.",
            0.0,
            1000.0,
            "none",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print regret@k: how much slower the best of the first k predicted configs is than the best measured config.

    With --bundle, that bundle is evaluated; the output says if it was trained on the data. Without it, rankers are
    trained and evaluated by cross-validation, each on model families that it was not trained on; with --split device,
    on a device, or with --split size, on larger sizes that it was not trained on.

    Below the table stand the coverage and the mean length of shortlists with k="auto".
    """
    if bundle is not None and split != "model":
        raise typer.BadParameter(
            "does not apply with --bundle: nothing is trained, so nothing is held out", param_hint="--split"
        )

    from ...model.baselines import choose_rivals
    from ..registry import baselines_of

    given = bundle_at(bundle)
    names = ",".join(baselines or ["fast"]).split(",")
    with showing(f"loading {' and '.join(data or [SHIPPED])}"):
        dataset = datasets_merged(data or [SHIPPED])
        kernels = judged_families(dataset, family, given)
        try:
            rivals = {name: choose_rivals(names, baselines_of(kernel)) for name, kernel in kernels.items()}
        except ForetuneError as unknown:
            raise typer.BadParameter(str(unknown), param_hint="--baselines") from None
    what, row_s = ("evaluating the bundle", _JUDGING_S) if given else (f"cross-validating by {split}", _EVALUATING_S)
    row_s += _EVALUATING_S * max(chosen.cost for chosen in rivals.values())

    def judge(kernel: Family) -> Evaluation:
        return evaluation_of(dataset, kernel, given, rivals[kernel.name], split, jobs)

    judged = for_each_family(judge, dataset, kernels, what, row_s)
    if max_regret1 is None:
        emit(ByFamily(judged), as_json)
        return
    regrets1 = {name: one.to_json()["regret"]["1"]["geomean"] - 1 for name, one in judged.items()}
    over = [f"{name} {100 * regret1:.2f} %" for name, regret1 in regrets1.items() if regret1 > max_regret1]
    error = f"regret@1 must be at most {100 * max_regret1:g} % but is: {', '.join(over)}"
    more = {"max_regret1": max_regret1} | ({"error": error} if over else {})
    emit(ByFamily(judged, more), as_json)
    if over:
        typer.echo(f"Error: {printable(error)}", err=True)
        raise typer.Exit(1)


@command("report", "foretune report --data measured --bundle my-bundle --out report.html")
def report(
    context: typer.Context,
    out: Annotated[Path, option("HTML file to write.", metavar="FILE")],
    data: Data = None,
    bundle: ToJudge = None,
    plots: Annotated[
        Path | None, option("Folder to write each figure to, as an SVG file.", "none", metavar="FOLDER")
    ] = None,
    quick: Annotated[bool, switch("--quick", "Leave out the learning curve, which takes more training.")] = False,
    family: OnlyFamilies = None,
    as_json: AsJson = False,
) -> None:
    """Write an HTML report on how good the predicted configs are: the results of `foretune evaluate`, with figures.

    It shows regret next to the baselines and by shape and device, the learning curve, feature contributions,
    calibration, and the slowest first choices. The file loads nothing from the network.

    Needs matplotlib and jinja2 (the extra 'report').
    """
    from ...datasets.files import check_file
    from ...model.bundle_file import check_plots_folder
    from ...model.report import check_installed, make_report

    check_installed()
    check_file(out)
    if plots is not None:
        check_plots_folder(plots)
    given = bundle_at(bundle)
    dataset = datasets_merged(data or [SHIPPED])
    kernels = judged_families(dataset, family, given)
    row_s = (_JUDGING_S if given else _EVALUATING_S) + (0.0 if quick else _CURVE_S)
    with showing("cross-validating" if given is None else "evaluating the bundle", row_s * rows_of(dataset, kernels)):
        words_given = shlex.join(("foretune", *context.meta[GIVEN]))
        made = make_report(dataset, kernels, given, quick=quick, command=words_given)
    made.save(out)
    places = {"out": out}
    if plots is not None:
        made.save_plots(plots)
        places["plots"] = plots
    emit(made, as_json, **places)
