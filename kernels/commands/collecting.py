"""Commands that measure configs on GPUs, or evaluate a measuring plan on existing data."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...datasets import Family
from ...datasets.console import whole_number, whole_numbers
from ...datasets.errors import MOST
from .. import find_measurable
from ..learning import datasets_merged, families_in
from .app import INTERRUPTED, ByFamily, command, emit
from .inputs import check_dtype, for_each_family, show_config
from .options import (
    FAMILY,
    FAMILY_FORMS,
    MOST_SMS,
    SHIPPED,
    AsJson,
    Budget,
    Data,
    OnlyFamilies,
    amount,
    argument,
    choice,
    count,
    data_option,
    dtype_names,
    family_names,
    given_as,
    option,
    words,
)

if TYPE_CHECKING:
    from ...collect.replay import Replay

#: Upper bound for a number of GPUs; no machine has more.
_MOST_GPUS = 1024
#: Seconds per measurement that a replay takes on two cores of 2026, for the estimate printed at the start.
_REPLAYING_S = 8e-4


def plan_names() -> Iterable[str]:
    """Return the names of the measuring plans."""
    from ...collect.plan import PLANS

    return PLANS


@command("collect", f"foretune collect {FAMILY} --models models.csv --out measured --budget 20m")
def collect(
    family: Annotated[
        list[str],
        argument("FAMILY...", f"Kernel families, each {FAMILY_FORMS}.", family_names, False),
    ],
    out: Annotated[Path, option("Dataset folder; an interrupted run in it is continued.", metavar="FOLDER")],
    gpus: Annotated[
        str,
        option("Number of visible GPUs to measure on.", names=words("all"), metavar="all|N"),
    ] = "all",
    sms: Annotated[
        list[str] | None,
        option(
            "Measure on this number of SMs of each GPU, as a separate device; 32,64,96 measures one after the other.",
            "all",
            metavar="N[,N...]",
        ),
    ] = None,
    scheduler: Annotated[
        str | None,
        option(
            "Address of a dask scheduler, tcp://HOST:8786, whose workers measure instead of this machine's GPUs.",
            "none",
            metavar="ADDRESS",
        ),
    ] = None,
    models: Annotated[
        Path | None,
        option(
            "File of models whose layers to measure, in the family's format (MoE: a CSV file with columns model, "
            "num_experts, ..., or a model's config.json or its folder).",
            "the family's own models",
            metavar="FILE",
        ),
    ] = None,
    budget: Budget = None,
    tokens: Annotated[
        str | None, option("Token counts, for example 16,256,4096.", "16 to 65536", metavar="N[,N...]")
    ] = None,
    per_layer: Annotated[int, count("Number of problems for each distinct layer shape.", 0, 100)] = 2,
    random: Annotated[int, count("Number of random shapes, in addition to the models' layers.", 0, 10_000)] = 40,
    invented: Annotated[
        int | None, count("Number of synthetic layers, if the family supports them.", 0, 10_000, "none")
    ] = None,
    seed: Annotated[int, count("Random seed for sampling problems.", 0, MOST)] = 0,
    plan: Annotated[
        str,
        choice(
            "Which configs of each problem to measure. exhaustive: all; adaptive: a tenth, chosen by a model that "
            "learns during the run; thin: an eighth, chosen by a bundle; missing: those that the --like dataset lacks, "
            "plus its fastest; outdated: those whose kernel has changed since, plus its fastest others.",
            plan_names,
            "PLAN",
        ),
    ] = "exhaustive",
    share: Annotated[
        float | None,
        amount(
            "Share of each problem's configs that the adaptive or thin plan measures.", 0.001, 1.0, "the plan's own"
        ),
    ] = None,
    dtype: Annotated[
        list[str] | None,
        option("Only problems of this element type. May be repeated.", "all", dtype_names, metavar="DTYPE"),
    ] = None,
    max_tflop: Annotated[
        float | None,
        amount(
            "Only problems of at most this many TFLOP; lower it for a small GPU.", 0.0, 1e6, "the family's", "TFLOP"
        ),
    ] = None,
    suite: Annotated[bool, option("Begin with the problems of `foretune bench kernels`.")] = False,
    like: Annotated[
        str | None,
        data_option("Begin with the problems of this dataset: a folder, or the name of a shipped one.", "none"),
    ] = None,
    replay: Annotated[
        str | None,
        data_option("Replay the times of this dataset without a GPU: a folder, or the name of a shipped one.", "none"),
    ] = None,
    limit: Annotated[int | None, count("Largest number of problems of each family.", 1, MOST, "all")] = None,
    resume: Annotated[bool, option("Continue an interrupted run in the folder, or refuse such a folder.")] = True,
    as_json: AsJson = False,
) -> None:
    """Measure the configs of kernels on the GPUs of this machine or a cluster, and write a dataset.

    After an interruption, run the same command again to continue.
    """
    if replay is not None:
        others: dict[str, object] = {
            "--gpus": gpus != "all",
            "--sms": sms,
            "--scheduler": scheduler,
            "--models": models,
        }
        others |= {"--tokens": tokens, "--invented": invented, "--suite": suite, "--like": like}
        for other in (name for name, value in others.items() if value):
            raise typer.BadParameter("a replay uses no GPU, and has the problems of its data", param_hint=other)
    gpu_count = None if gpus == "all" else given_as("--gpus (a number, or all)", whole_number, gpus, 1, _MOST_GPUS)
    token_counts = None if tokens is None else given_as("--tokens", whole_numbers, tokens)
    parts = given_as("--sms", whole_numbers, ",".join(sms), 1, MOST_SMS) if sms else ()
    if scheduler is not None and gpu_count is not None:
        raise typer.BadParameter(
            "a cluster has one worker for each GPU: start as many workers as you need", param_hint="--gpus"
        )
    if scheduler is not None and parts:
        raise typer.BadParameter(
            "only the GPUs of this machine can be partitioned, not those of a cluster", param_hint="--sms"
        )

    from ...collect import campaign
    from ...collect import cluster as on_cluster
    from ...collect.cases import cases_like, draw_cases, first_cases
    from ...collect.plan import ADDING
    from ...datasets import load
    from ...datasets.progress import showing_steps
    from ..registry import comparison_of

    kernels = [find_measurable(name) for name in dict.fromkeys(family)]
    for one in dtype or ():
        check_dtype(one, list(dict.fromkeys(name for kernel in kernels for name in kernel.dtypes)))
    known = load(like) if like else None
    adds = plan in ADDING  # only the problems of `known` are measured
    drawing: dict[str, Any] = {"models": models, "tokens": token_counts, "per_layer": per_layer, "random": random}
    drawing |= {"invented": invented, "max_tflop": max_tflop, "seed": seed}
    recorded = load(replay) if replay else None
    source = known if recorded is None else recorded
    cases: list[Any] = []
    show_config(models)
    for kernel in kernels:
        drawn = () if adds or recorded is not None else draw_cases(kernel, **drawing)
        compared = comparison_of(kernel).suite(kernel).values() if suite else ()
        shared = () if source is None else cases_like(source, kernel.name, seed=seed)
        cases += first_cases(kernel, (*compared, *shared, *drawn), limit, max_tflop=max_tflop, dtypes=dtype or ())
    collected: Any = partial(campaign.collect_on_gpus, gpus=gpu_count, sms=tuple(dict.fromkeys(parts)))
    if scheduler is not None:
        collected = partial(on_cluster.collect_on_cluster, scheduler=scheduler)
    if recorded is not None:
        collected = partial(campaign.collect_replayed, recorded=recorded)
    running: dict[str, Any] = {"plan": plan, "known": known if adds else None, "share": share, "budget_s": budget}
    with showing_steps() as on_progress:
        summary = collected(kernels, cases, out, resume=resume, on_progress=on_progress, **running)
    emit(summary, as_json, out=out)
    if summary.interrupted:
        raise typer.Exit(INTERRUPTED)


@command("replay", "foretune replay --data h200 --share 0.1")
def replay(
    data: Data = None,
    share: Annotated[float, amount("Share of each problem's configs that the plan measures.", 0.001, 1.0)] = 0.09,
    family: OnlyFamilies = None,
    as_json: AsJson = False,
) -> None:
    """Estimate the accuracy lost by measuring with `collect --plan adaptive`, on exhaustive data. Needs no GPU.

    Compares, by cross-validation, a ranker trained on the configs that the plan would have measured with a ranker
    trained on all measured configs of the family's space.
    """
    from ...collect.plan import Adaptive
    from ...collect.replay import replay_plan

    dataset, adaptive = datasets_merged(data or [SHIPPED]), partial(Adaptive, share=share)

    def replayed(kernel: Family) -> Replay:
        return replay_plan(dataset, kernel, adaptive)

    what = "measuring by the plan, training and judging"
    found = for_each_family(replayed, dataset, families_in(dataset, family), what, _REPLAYING_S)
    emit(ByFamily(found), as_json)
