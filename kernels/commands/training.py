"""Commands that train on measurements and evaluate what was learned."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...datasets import DeviceSpec, Family
from ...datasets.errors import printable
from ...datasets.progress import showing
from .. import find_measurable
from ..learning import datasets_merged, families_in, judged_families
from .app import command
from .inputs import bundle_at, for_each_family, live_gpu, rows_of
from .options import EXAMPLE, FAMILY, SHIPPED, AsJson, Data, OnlyFamilies, ToJudge, amount, count, dataset_names, option
from .printing import ByFamily, Printed, emit, left_out_of

if TYPE_CHECKING:
    from ...model.evaluation import Evaluation

#: What `train --keep` calls the shipped bundle.
SHIPPED_BUNDLE = "shipped"
#: Seconds that a command takes for each measurement, on two cores of 2026: what is printed beforehand.
_QUICKSTART_S, _TRAINING_S, _EVALUATING_S, _JUDGING_S, _CURVE_S = 1e-4, 5e-5, 2.5e-4, 5e-5, 6e-5


@command("quickstart", "foretune quickstart")
def quickstart(
    out: Annotated[Path | None, option("Folder for the bundle.", "~/.cache/foretune/quickstart")] = None,
    as_json: AsJson = False,
) -> None:
    """Train on the shipped H200 measurements and see what the ranker is worth, without a GPU.

    Prints how far off its choices are on models it never saw, next to simpler choices, and the shortlist of
    an example layer. With a GPU and torch it also tunes that layer there, with and without the shortlist.
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
        list[str], option("Dataset folder, or the name of a shipped one; may be repeated.", names=dataset_names)
    ],
    out: Annotated[Path, option("Folder for the bundle.")],
    family: OnlyFamilies = None,
    keep: Annotated[
        str | None,
        option(f"A bundle, or {SHIPPED_BUNDLE!r}: the families that are not trained now are taken from it."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train a bundle on measurements."""
    from ...model import load_bundle
    from ...model.bundle_file import check_bundle_folder
    from ...model.train import train_bundle

    check_bundle_folder(out)
    kept = None if keep is None else load_bundle(None if keep == SHIPPED_BUNDLE else keep)
    dataset = datasets_merged(data)
    families = families_in(dataset, family)
    with showing(f"training on {' and '.join(data)}", _TRAINING_S * rows_of(dataset, families)):
        trained = train_bundle(dataset, families)
    merged = trained if kept is None else trained.beside(kept)
    merged.save(out)
    others = [name for name in merged.families if name not in trained.families]
    text = f"Trained {', '.join(trained.families)}." + f" Kept {', '.join(others)}." * bool(others)
    value = {"families": list(merged.families), "kept": others} | left_out_of(dataset)
    emit(Printed(value, text), as_json, bundle=out)


@command("adapt", "foretune adapt --data small --out my-bundle")
def adapt(
    data: Annotated[
        list[str],
        option("What was measured on the new card: a dataset folder; may be repeated.", names=dataset_names),
    ],
    out: Annotated[Path, option("Folder for the new bundle.")],
    bundle: Annotated[Path | None, option("The bundle to begin with.", "the shipped bundle")] = None,
    family: OnlyFamilies = None,
    as_json: AsJson = False,
) -> None:
    """Teach a bundle a card that it never saw, from a few measurements there and without its old ones.

    Five minutes are enough: `foretune collect FAMILY... --plan adaptive --budget 5m --out small`.
    """
    from ...model import load_bundle
    from ...model.bundle_file import check_bundle_folder
    from ..learning import adapt as adapted_by_name

    check_bundle_folder(out)
    given, dataset = load_bundle(bundle), datasets_merged(data)
    families = families_in(dataset, family or [name for name in dataset.families if name in given.families])
    with showing(f"adapting to {' and '.join(data)}", _TRAINING_S * rows_of(dataset, families)):
        adapted = adapted_by_name(dataset, bundle=given, family=list(families.values()))
    adapted.save(out)
    known = sorted({spec.name for name in adapted.families for spec in adapted.trained_on(name)})
    value = {"families": sorted(set(families)), "devices": known}
    emit(Printed(value, f"Adapted {', '.join(value['families'])}: knows {', '.join(known)}."), as_json, bundle=out)


@command("evaluate", "foretune evaluate --data measured --bundle my-bundle --json")
def evaluate(
    data: Data = None,
    bundle: ToJudge = None,
    split: Annotated[
        str, option("What cross-validation holds out: model families, each device, or the largest sizes.")
    ] = "model",
    baselines: Annotated[
        list[str] | None,
        option(
            "What to compare with: fast, all, or a name: random, static, regimes (a static list for each), "
            "nearest, estimate, or what a family has of its own. May be repeated.",
            "fast",
            metavar="fast|all|NAME",
        ),
    ] = None,
    jobs: Annotated[int, count("Folds that are trained and judged side by side.", 1, 256)] = 2,
    family: OnlyFamilies = None,
    max_regret1: Annotated[
        float | None,
        amount(
            "End with exit code 1 where a family's first choices are slower, as 0.02 for 2 %: geometric mean, "
            "ragged sizes known.",
            0.0,
            1000.0,
            "none",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print regret@k: how much slower the best of the first k choices runs than the best config there is.

    With a bundle, that bundle is judged as it is, and a warning says where it was trained on the data. Without one, new
    ones are trained and judged, each on the layers of models it never saw; with --split device, on a device it never
    saw; with --split size, on sizes above those it saw. Below the table: how often a shortlist of k="auto" holds a good
    config, and how long it is.
    """
    if bundle is not None and split != "model":
        raise typer.BadParameter("a bundle is judged as it is: nothing is split", param_hint="--split")

    from ...model.baselines import choose_rivals
    from ...model.cross_validation import cross_validate, evaluate_bundle
    from ..comparisons import baselines_of

    given = bundle_at(bundle)
    names = ",".join(baselines or ["fast"]).split(",")
    with showing(f"loading {' and '.join(data or [SHIPPED])}"):
        dataset = datasets_merged(data or [SHIPPED])
        kernels = judged_families(dataset, family, given)
        rivals = {name: choose_rivals(names, baselines_of(kernel)) for name, kernel in kernels.items()}
    what, row_s = ("judging the bundle", _JUDGING_S) if given else (f"training and judging, by {split}", _EVALUATING_S)
    row_s += _EVALUATING_S * max(chosen.cost for chosen in rivals.values())

    def judge(kernel: Family) -> Evaluation:
        chosen = rivals[kernel.name]
        if given:
            return evaluate_bundle(dataset, given, kernel, rivals=chosen, jobs=jobs)
        return cross_validate(dataset, kernel, split=split, rivals=chosen, jobs=jobs)

    judged = for_each_family(judge, dataset, kernels, what, row_s)
    if max_regret1 is None:
        emit(ByFamily(judged), as_json)
        return
    regrets1 = {name: one.to_json()["regret"]["1"]["geomean"] - 1 for name, one in judged.items()}
    over = [f"{name} {100 * regret1:.2f} %" for name, regret1 in regrets1.items() if regret1 > max_regret1]
    error = f"regret@1 must be at most {100 * max_regret1:g} % but is: {', '.join(over)}"
    emit(ByFamily(judged, {"max_regret1": max_regret1} | ({"error": error} if over else {})), as_json)
    if over:
        typer.echo(f"Error: {printable(error)}", err=True)
        raise typer.Exit(1)


@command("report", "foretune report --data measured --bundle my-bundle --out report.html")
def report(
    out: Annotated[Path, option("The HTML file to write.")],
    data: Data = None,
    bundle: ToJudge = None,
    plots: Annotated[Path | None, option("Folder for each figure as an SVG file.", "none")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Without the learning curve, for which more is trained.")
    ] = False,
    family: OnlyFamilies = None,
    as_json: AsJson = False,
) -> None:
    """Write one HTML file on how good the shortlists are, for people to look at: what `evaluate` prints, drawn.

    Regret beside the baselines and by shape and device, the learning curve, what the trees look at, calibration, the
    slowest first choices. The file needs no network. Takes `foretune[report]`.
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
    with showing("training and judging" if given is None else "judging the bundle", row_s * rows_of(dataset, kernels)):
        made = make_report(dataset, kernels, given, quick=quick)
    made.save(out)
    places = {"out": out}
    if plots is not None:
        made.save_plots(plots)
        places["plots"] = plots
    emit(made, as_json, **places)
