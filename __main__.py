"""The command line: each command parses, calls a floor and prints. Results render themselves: tables go to stdout,
progress to stderr. Here is what needs both collect/ and kernels/; the other commands are in kernels/command_line/.

Exit codes: 0 done; 1 bad input or a failed run, with one line that names it, or nobody reads what is printed; 2 wrong
usage; 130 ended by Ctrl-C. With --json, stdout has {"error": ...} for all of them but 0.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import __version__
from .datasets import DeviceSpec, Family, ForetuneError
from .datasets.console.numbers_from_text import number, whole_number, whole_numbers
from .datasets.console.progress_bar import showing
from .datasets.errors import MOST, abridged
from .kernels import find_measurable
from .kernels.command_line.asked_for import families_of, for_each_family, live_gpu, load_all, this_gpu
from .kernels.command_line.groups import INTERRUPTED, app, bench, command
from .kernels.command_line.options import (
    FAMILY,
    MOST_SMS,
    AsJson,
    Budget,
    Data,
    OnlyFamilies,
    Predictor,
    amount,
    count,
    dataset_names,
    device_names,
    family_names,
    given_as,
    read_by,
)
from .kernels.command_line.results import Said, emit, left_out_of
from .kernels.command_line.stdout import leave_to_stderr

if TYPE_CHECKING:
    from .collect.replay import Replay

#: More than any machine has.
_MOST_GPUS = 1024
_GROUPED_GEMMS = (FAMILY, "grouped_gemm_dx", "grouped_gemm_dw")
#: Seconds that a command takes for each measurement, on two cores of 2026: what is said beforehand.
_REPLAYING_S = 8e-4
_EXPORTING_S = {"csv": 4e-6, "t4": 6e-5}


def main() -> None:
    """The console script, and `python -m foretune`."""
    try:
        app(prog_name="foretune")
    except SystemExit as ended:
        if ended.code == INTERRUPTED:  # at once: a thread may be in the middle of what nobody waits for any more
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(INTERRUPTED)
        raise
    finally:
        if "--json" in sys.argv:
            leave_to_stderr()  # what somebody's module prints when the program ends


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"foretune {__version__}")
        raise typer.Exit


@app.callback()
def command_line(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Know the fast configs of a Triton kernel before you tune."""


@command("collect", f"foretune collect {FAMILY} --models models.csv --out measured --budget 20m")
def collect(
    family: Annotated[
        list[str],
        typer.Argument(
            metavar="FAMILY...",
            help=f"Kernel families, as {FAMILY}, or package.module:attribute.",
            show_default=False,
            autocompletion=family_names,
        ),
    ],
    out: Annotated[Path, typer.Option(help="Dataset folder; an earlier run's is continued.")],
    gpus: Annotated[str, typer.Option(help="How many of the visible GPUs to measure on.")] = "all",
    sms: Annotated[
        list[str] | None,
        typer.Option(
            help="Measure on so many SMs of each GPU, as a device of its own; 32,64,96 for one after the other.",
            show_default="all",
        ),
    ] = None,
    scheduler: Annotated[
        str | None,
        typer.Option(help="Measure on the dask workers there instead, as in tcp://HOST:8786.", show_default="none"),
    ] = None,
    models: Annotated[
        Path | None,
        typer.Option(
            help="Models whose layers are measured, in the family's format (MoE: a CSV of model, num_experts, ...).",
            show_default="the family's own",
        ),
    ] = None,
    budget: Budget = None,
    tokens: Annotated[
        str | None, typer.Option(help="Token counts, as in 16,256,4096.", show_default="16 ... 65536")
    ] = None,
    per_layer: Annotated[int, count("Problems of each distinct layer shape.", 0, 100)] = 2,
    random: Annotated[int, count("Random shapes besides the models' layers.", 0, 10_000)] = 40,
    invented: Annotated[
        int | None, count("Layers of models that nobody has made, if the family can.", 0, 10_000, show_default="none")
    ] = None,
    seed: Annotated[int, count("Draws other problems.", 0, MOST)] = 0,
    plan: Annotated[
        str,
        typer.Option(
            help="exhaustive: all configs of each problem; adaptive: a tenth, which a model learns to choose; thin: an "
            "eighth, which a bundle chooses; missing: what --like has no row of, "
            "beside its fastest."
        ),
    ] = "exhaustive",
    share: Annotated[
        float | None,
        amount(
            "Share of each problem's configs that the adaptive or the thin plan tries.",
            0.001,
            1.0,
            show_default="the plan's own",
        ),
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(help="Only problems of this element type; may be repeated.", show_default="all"),
    ] = None,
    max_tflop: Annotated[
        float | None,
        typer.Option(
            help="Only problems of so many TFLOP: fewer for a small GPU.",
            parser=read_by(number, 0.0, 1e6),
            metavar="NUMBER",
            show_default="the family's",
        ),
    ] = None,
    suite: Annotated[bool, typer.Option(help="First the problems that kernels are compared on.")] = False,
    like: Annotated[
        str | None,
        typer.Option(
            help="First the problems of this dataset (a folder or shipped name).",
            show_default="none",
            autocompletion=dataset_names,
        ),
    ] = None,
    limit: Annotated[int | None, count("At most so many problems of each family.", 1, MOST, show_default="all")] = None,
    resume: Annotated[bool, typer.Option(help="Continue an earlier run, or refuse a folder that has one.")] = True,
    as_json: AsJson = False,
) -> None:
    """Measure kernels' config spaces, on this machine's GPUs or a cluster's.

    Killed or interrupted, it goes on when run again.
    """
    gpu_count = None if gpus == "all" else given_as("--gpus (a number, or all)", whole_number, gpus, 1, _MOST_GPUS)
    token_counts = None if tokens is None else given_as("--tokens", whole_numbers, tokens)
    parts = given_as("--sms", whole_numbers, ",".join(sms), 1, MOST_SMS) if sms else ()
    if scheduler is not None and gpu_count is not None:
        raise typer.BadParameter("a cluster's GPUs are its workers: start as many as you want", param_hint="--gpus")
    if scheduler is not None and parts:
        raise typer.BadParameter("only this machine's GPUs can be parted, not a scheduler's", param_hint="--sms")

    from .collect import campaign
    from .collect.cases import cases_like, draw_cases, first_cases
    from .collect.cluster import dask_campaign
    from .collect.progress import showing_progress
    from .datasets import load
    from .kernels.comparisons import comparison_of

    kernels = [find_measurable(name) for name in dict.fromkeys(family)]
    known = load(like) if like else None
    cases: list[Any] = []
    adds = plan == "missing"  # to what `known` has, and so to its problems alone
    for kernel in kernels:
        drawn: tuple[Any, ...] = ()
        if not adds:
            drawn = draw_cases(
                kernel,
                models=models,
                tokens=token_counts,
                per_layer=per_layer,
                random=random,
                invented=invented,
                max_tflop=max_tflop,
                seed=seed,
            )
        compared = comparison_of(kernel).suite(kernel).values() if suite else ()
        shared = cases_like(known, kernel.name, seed=seed) if known else ()
        cases += first_cases(kernel, (*compared, *shared, *drawn), limit, max_tflop=max_tflop, dtypes=dtype or ())
    collected = (
        partial(campaign.collect_on_gpus, gpus=gpu_count, sms=tuple(dict.fromkeys(parts)))
        if scheduler is None
        else partial(dask_campaign.collect_on_cluster, scheduler=scheduler)
    )
    with showing_progress() as on_progress:
        summary = collected(
            kernels,
            cases,
            out,
            plan=plan,
            known=known if adds else None,
            share=share,
            budget_s=budget,
            resume=resume,
            on_progress=on_progress,
        )
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
    from .collect.plan import Adaptive
    from .collect.replay import replay_plan

    dataset, adaptive = load_all(data), partial(Adaptive, share=share)

    def replayed(kernel: Family) -> Replay:
        return replay_plan(dataset, kernel, adaptive)

    what = "measuring by the plan, training and judging"
    emit(for_each_family(replayed, dataset, families_of(dataset, family), what, _REPLAYING_S), as_json)


@command("kernels", "foretune bench kernels --json", into=bench)
def bench_kernels(
    family: Annotated[
        list[str] | None,
        typer.Option(
            help="Only this family; may be repeated.", show_default="the grouped GEMMs", autocompletion=family_names
        ),
    ] = None,
    only: Annotated[str, typer.Option(help="Only problems whose name contains this, as in 'training'.")] = "",
    against: Annotated[
        list[str] | None,
        typer.Option(
            help="Only next to this contender, as in 'cublas'; may be repeated.", show_default="all: some compile long"
        ),
    ] = None,
    budget: Budget = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="Dataset folder or shipped name: who knows the best configs; may be repeated.",
            show_default="those shipped that have the families",
            autocompletion=dataset_names,
        ),
    ] = None,
    bundle: Predictor = None,
    as_json: AsJson = False,
) -> None:
    """Time kernels on this machine's GPU next to what people have and to the card's limits.

    Grouped GEMMs: next to torch._grouped_mm and cuBLAS, over a suite of real layers from decode to training, each at
    its best known config and at the predicted one. Every family of Foretune's has such a suite, and contenders. Each
    problem is told on stderr when it is measured.
    """
    from .collect.compiling import compile_ahead
    from .datasets import describe, names
    from .kernels.comparisons import comparison_of
    from .model import load_bundle
    from .runtime.timing.compare import Row, compare_kernels
    from .runtime.timing.device_rates import measured

    gpu = live_gpu()
    if gpu is None:
        raise ForetuneError("no GPU is visible here: there is nothing to bench kernels on")
    comparisons = {kernel: comparison_of(kernel) for kernel in map(find_measurable, family or _GROUPED_GEMMS)}
    suite = [name for kernel, comparison in comparisons.items() for name in comparison.suite(kernel)]
    if not any(only in name for name in suite):
        raise ForetuneError(f"no problem of the suite has {only!r} in its name; there are {abridged(', '.join(suite))}")
    with showing("measuring the card") as say:

        def told(row: Row) -> None:
            say(f"{row.family} {row.name}")
            typer.echo(str(row), err=True)  # a run that is cut has said what it measured

        wanted = {kernel.name for kernel in comparisons}
        known = data or [name for name in names() if wanted & describe(name)["families"].keys()]
        compared = compare_kernels(
            comparisons,
            measured(gpu),
            load_all(known) if known else None,
            None if bundle is None else load_bundle(bundle),
            only=only,
            against=against or (),
            budget_s=budget,
            compile_ahead=compile_ahead,
            on_row=told,
        )
    emit(compared, as_json)


@command("export", "foretune export sglang --model Qwen3-30B-A3B --tp 2 --device h200 --out tuned")
def export(
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA|vllm|sglang",
            help="Dataset folder, or the name of a shipped one; or a serving engine.",
            autocompletion=dataset_names,
        ),
    ],
    out: Annotated[Path, typer.Option(help="The file to write; an engine's files, the folder.")],
    format: Annotated[
        str | None, typer.Option(help="Of a dataset: t4, the autotuning community's JSON (schema 1.0.0), or csv.")
    ] = None,
    family: Annotated[
        str | None,
        typer.Option(help="Of a dataset only this family.", show_default="all", autocompletion=family_names),
    ] = None,
    problem: Annotated[
        int | None,
        count("Of a dataset only this one, counted from 0. T4 tools expect one.", 0, MOST, show_default="all"),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="The model, of our table, whose MoE layer an engine's files are for.")
    ] = None,
    experts: Annotated[int | None, count("Of another model: its experts.", 1, MOST)] = None,
    topk: Annotated[int | None, count("... the experts that each token chooses.", 1, MOST)] = None,
    hidden: Annotated[int | None, count("... its hidden size.", 1, MOST)] = None,
    inter: Annotated[int | None, count("... the intermediate size of an expert.", 1, MOST)] = None,
    tp: Annotated[int, count("Ranks that share each expert.", 1, 1024)] = 1,
    dtype: Annotated[str, typer.Option(help="bf16, fp16, or fp8e4m3 with scales of 128x128 blocks.")] = "bf16",
    device: Annotated[
        str | None,
        typer.Option(
            help="The GPU that an engine's files are for: a shipped device, or a spec's JSON file.",
            show_default="this GPU",
            autocompletion=device_names,
        ),
    ] = None,
    measure: Annotated[
        bool | None,
        typer.Option(
            help="Time the best of what is predicted, with the engine's own kernel.",
            show_default="where GPU and engine are here",
        ),
    ] = None,
    force: Annotated[bool | None, typer.Option(help="Replace the engine's files there.", show_default=False)] = None,
    bundle: Predictor = None,
    as_json: AsJson = False,
) -> None:
    """Write measurements in a format that other tools read, or a serving engine's tuned files of a MoE layer.

    An engine's files are compared with what the engine runs now: the layer's file in the folder, in the one that its
    environment variable names, or in the engine; else its default. Rows that gain nothing say what runs anyway.
    """
    from .collect.compiling import compile_ahead
    from .datasets.disk.writable import check_file, check_folder
    from .kernels.fused_moe import engines, installed, tuned_files, tuning, workload
    from .model import load_bundle

    of_dataset = {"--format": format, "--family": family, "--problem": problem}
    of_engine = {"--model": model, "--experts": experts, "--topk": topk, "--hidden": hidden, "--inter": inter}
    of_engine_only: dict[str, object] = {**of_engine, "--device": device, "--measure": measure, "--force": force}
    is_engine = data in engines.ENGINES
    for option, value in (of_dataset if is_engine else of_engine_only).items():
        if value is not None:
            what = "an engine" if is_engine else f"no engine, which are {' and '.join(engines.ENGINES)}"
            raise typer.BadParameter(f"not taken: {abridged(data, 60)} is {what}", param_hint=option)
    if not is_engine:
        from .datasets import load
        from .datasets.store.export import export_dataset

        if format is None:
            raise typer.BadParameter("of a dataset it must be given: t4 or csv", param_hint="--format")
        check_file(out)
        dataset = load(data)
        rows = len(dataset.measurements if family is None or problem is not None else dataset.rows(family))
        with showing(f"writing {out}", _EXPORTING_S.get(format, 0.0) * (rows if problem is None else 0)):
            results = export_dataset(dataset, out, format, family=family, problem=problem)
        result = {"format": format, "results": results} | left_out_of(dataset)
        emit(Said(result, f"{results} results."), as_json, out=out)
        return
    layer = workload.requested_layer(model, experts=experts, topk=topk, hidden=hidden, inter=inter, tp=tp, dtype=dtype)
    gpu = live_gpu()
    spec = gpu if device is None and gpu is not None else this_gpu() if device is None else DeviceSpec.find(device)
    is_here = gpu is not None and gpu.name == spec.name
    if measure and not is_here:
        raise typer.BadParameter(f"{spec.name} is not here to be measured on", param_hint="--measure")
    check_folder(out)
    if not force:
        tuned_files.check_none_there(data, layer, spec, tuning.triton_version(), out)
    with showing(f"{data}: {len(engines.BATCH_SIZES)} batch sizes") as say:
        files = tuning.tune_layer(
            data,
            layer,
            spec,
            bundle=None if bundle is None else load_bundle(bundle),
            measure=is_here and data in installed() if measure is None else measure,
            compile_ahead=compile_ahead,
            out=out,
            on_row=lambda row: say(f"{data}: {row.tokens} tokens"),
        )
    files.save(out, force=bool(force))
    emit(files, as_json, out=out)


if __name__ == "__main__":
    main()
