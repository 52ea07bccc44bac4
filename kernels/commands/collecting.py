"""Commands that measure, or show what measuring is worth."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...datasets import Family
from ...datasets.console import whole_number, whole_numbers
from ...datasets.errors import MOST
from .. import find_measurable
from ..learning import datasets_merged, families_in
from .app import INTERRUPTED, command
from .inputs import for_each_family
from .options import (
    FAMILY,
    MOST_SMS,
    AsJson,
    Budget,
    Data,
    OnlyFamilies,
    amount,
    argument,
    count,
    dataset_names,
    family_names,
    given_as,
    option,
)
from .printing import ByFamily, emit

if TYPE_CHECKING:
    from ...collect.replay import Replay

#: More than any machine has.
_MOST_GPUS = 1024
#: Seconds that a replay takes for each measurement, on two cores of 2026: what is printed beforehand.
_REPLAYING_S = 8e-4


@command("collect", f"foretune collect {FAMILY} --models models.csv --out measured --budget 20m")
def collect(
    family: Annotated[
        list[str],
        argument("FAMILY...", f"Kernel families, as {FAMILY}, or package.module:attribute.", family_names, False),
    ],
    out: Annotated[Path, option("Dataset folder; an earlier run's is continued.")],
    gpus: Annotated[str, option("How many of the visible GPUs to measure on.")] = "all",
    sms: Annotated[
        list[str] | None,
        option("Measure on so many SMs of each GPU, as a device of its own; 32,64,96 for one after the other.", "all"),
    ] = None,
    scheduler: Annotated[
        str | None, option("Measure on the dask workers there instead, as in tcp://HOST:8786.", "none")
    ] = None,
    models: Annotated[
        Path | None,
        option(
            "Models whose layers are measured, in the family's format (MoE: a CSV of model, num_experts, ...).",
            "the family's own",
        ),
    ] = None,
    budget: Budget = None,
    tokens: Annotated[str | None, option("Token counts, as in 16,256,4096.", "16 ... 65536")] = None,
    per_layer: Annotated[int, count("Problems of each distinct layer shape.", 0, 100)] = 2,
    random: Annotated[int, count("Random shapes besides the models' layers.", 0, 10_000)] = 40,
    invented: Annotated[
        int | None, count("Layers of models that nobody has made, if the family can.", 0, 10_000, "none")
    ] = None,
    seed: Annotated[int, count("Draws other problems.", 0, MOST)] = 0,
    plan: Annotated[
        str,
        option(
            "exhaustive: all configs of each problem; adaptive: a tenth, which a model learns to choose; thin: an "
            "eighth, which a bundle chooses; missing: what --like has no row of, "
            "beside its fastest."
        ),
    ] = "exhaustive",
    share: Annotated[
        float | None,
        amount(
            "Share of each problem's configs that the adaptive or the thin plan tries.", 0.001, 1.0, "the plan's own"
        ),
    ] = None,
    dtype: Annotated[list[str] | None, option("Only problems of this element type; may be repeated.", "all")] = None,
    max_tflop: Annotated[
        float | None,
        amount("Only problems of so many TFLOP: fewer for a small GPU.", 0.0, 1e6, "the family's", "NUMBER"),
    ] = None,
    suite: Annotated[bool, option("First the problems that kernels are compared on.")] = False,
    like: Annotated[
        str | None,
        option("First the problems of this dataset (a folder or shipped name).", "none", dataset_names),
    ] = None,
    replay: Annotated[
        str | None,
        option("Replay this dataset's times (a folder or shipped name) without a GPU.", "none", dataset_names),
    ] = None,
    limit: Annotated[int | None, count("At most so many problems of each family.", 1, MOST, "all")] = None,
    resume: Annotated[bool, option("Continue an earlier run, or refuse a folder that has one.")] = True,
    as_json: AsJson = False,
) -> None:
    """Measure kernels' config spaces, on this machine's GPUs or a cluster's.

    If it is killed or interrupted, run it again to continue.
    """
    if replay is not None:
        others = {"--gpus": gpus != "all", "--sms": sms, "--scheduler": scheduler, "--models": models}
        others |= {"--tokens": tokens, "--invented": invented, "--suite": suite, "--like": like}
        for other in (name for name, value in others.items() if value):
            raise typer.BadParameter("a replay uses no GPU, and has the problems of its data", param_hint=other)
    gpu_count = None if gpus == "all" else given_as("--gpus (a number, or all)", whole_number, gpus, 1, _MOST_GPUS)
    token_counts = None if tokens is None else given_as("--tokens", whole_numbers, tokens)
    parts = given_as("--sms", whole_numbers, ",".join(sms), 1, MOST_SMS) if sms else ()
    if scheduler is not None and gpu_count is not None:
        raise typer.BadParameter("a cluster's GPUs are its workers: start as many as you want", param_hint="--gpus")
    if scheduler is not None and parts:
        raise typer.BadParameter("only this machine's GPUs can be parted, not a scheduler's", param_hint="--sms")

    from ...collect import campaign
    from ...collect import cluster as on_cluster
    from ...collect.cases import cases_like, draw_cases, first_cases
    from ...datasets import load
    from ...datasets.progress import showing_steps
    from ..comparisons import comparison_of

    kernels = [find_measurable(name) for name in dict.fromkeys(family)]
    known = load(like) if like else None
    adds = plan == "missing"  # to what `known` has, and so to its problems alone
    drawing: dict[str, Any] = {"models": models, "tokens": token_counts, "per_layer": per_layer, "random": random}
    drawing |= {"invented": invented, "max_tflop": max_tflop, "seed": seed}
    recorded = load(replay) if replay else None
    source = known if recorded is None else recorded
    cases: list[Any] = []
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
    share: Annotated[float, amount("Share of the configs that the plan tries on each problem.", 0.001, 1.0)] = 0.09,
    family: OnlyFamilies = None,
    as_json: AsJson = False,
) -> None:
    """Show what measuring by the adaptive plan is worth, on data that were measured exhaustively. Needs no GPU.

    Cross-validates a ranker that learns from what the plan would have measured beside one that learns from everything.
    """
    from ...collect.plan import Adaptive
    from ...collect.replay import replay_plan

    dataset, adaptive = datasets_merged(data), partial(Adaptive, share=share)

    def replayed(kernel: Family) -> Replay:
        return replay_plan(dataset, kernel, adaptive)

    what = "measuring by the plan, training and judging"
    emit(ByFamily(for_each_family(replayed, dataset, families_in(dataset, family), what, _REPLAYING_S)), as_json)
