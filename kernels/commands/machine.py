"""Commands about this machine: its GPU, how fast kernels are on it, and what choosing a config costs."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from ...datasets import DeviceSpec, ForetuneError
from ...datasets.errors import abridged, printable
from ...datasets.progress import showing
from .. import find_family, find_measurable
from ..learning import datasets_merged
from .app import bench, command
from .inputs import bundle_at, gpu_needed
from .options import (
    EXAMPLE,
    FAMILY,
    MOST_SMS,
    AsJson,
    Budget,
    Predictor,
    argument,
    count,
    dataset_names,
    device_names,
    family_names,
    option,
)
from .printing import emit

_GROUPED_GEMMS = (FAMILY, "grouped_gemm_dx", "grouped_gemm_dw")


@command("device", "foretune device --out my-gpu.json")
def device(
    spec: Annotated[
        str | None,
        argument("[DEVICE]", "A shipped device or a spec's JSON file, to show as it is.", device_names, "this GPU"),
    ] = None,
    sms: Annotated[int | None, count("Only so many of its SMs, as a device.", 1, MOST_SMS, "all")] = None,
    out: Annotated[Path | None, option("JSON file to save the spec in, for --device elsewhere.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print what this machine's GPU is to a kernel: its limits, and the rates that it reaches, measured now.

    A device that is named is shown as it is; with --sms, by the rule that partitions of it go by.
    """
    from ...datasets.files import check_file
    from ...runtime import sm_partition
    from ...runtime.timing.device_rates import measured

    if out is not None:
        check_file(out)
    if spec is None:
        live = DeviceSpec.live()
        with showing(f"measuring {live.name}"), sm_partition(sms, live) if sms else nullcontext(live) as part:
            found = measured(part)
    else:
        found = DeviceSpec.find(spec)
        found = found.with_sms(sms) if sms else found
    if out is not None:
        found.save(out)
        typer.echo(f"The spec lies in {printable(str(out))}", err=True)
    emit(found, as_json)  # nothing but the spec: the JSON is what --out saves


@command("runtime", "foretune bench runtime --skip-whole-space", into=bench)
def bench_runtime(
    bundle: Predictor = None,
    repeats: Annotated[int, typer.Option(min=1, help="First calls each way, in turn; their median counts.")] = 3,
    whole_space: Annotated[
        bool, typer.Option("--whole-space/--skip-whole-space", help="Also tune over all configs, which takes minutes.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Time the first call of a kernel on this machine's GPU, from empty caches, each way to choose its config.

    triton.autotune with a predicted shortlist and foretune.autotune, next to triton.autotune over the whole space; and
    how fast the config is that each of them chose.
    """
    from ...runtime.bench import compare_first_calls
    from ..grouped_gemm.contenders import autotuned

    gpu = gpu_needed("tune")
    with showing("first calls") as say:
        compared = compare_first_calls(
            find_measurable(FAMILY),
            EXAMPLE,
            gpu,
            bundle_at(bundle),
            autotuned,
            whole_space=whole_space,
            repeats=repeats,
            on_start=say,
        )
    emit(compared, as_json)


@command("predictions", "foretune bench predictions --json", into=bench)
def bench_predictions(
    family: Annotated[
        str | None,
        option("Only this family.", "the bundle's", family_names),
    ] = None,
    device: Annotated[str, option("The GPU to predict for, which need not be here.", names=device_names)] = "h200",
    bundle: Predictor = None,
    as_json: AsJson = False,
) -> None:
    """Time predictions over the whole space on this machine's CPU: new problems, and one asked about before."""
    from ...model import load_bundle
    from ...runtime.bench import time_predictions

    known = load_bundle(bundle)
    families = [find_family(name) for name in ([family] if family else known.families)]
    emit(time_predictions(families, DeviceSpec.find(device), known), as_json)


@command("kernels", "foretune bench kernels --json", into=bench)
def bench_kernels(
    family: Annotated[
        list[str] | None, option("Only this family; may be repeated.", "the grouped GEMMs", family_names)
    ] = None,
    only: Annotated[str, option("Only problems whose name contains this, as in 'training'.")] = "",
    against: Annotated[
        list[str] | None,
        option("Only next to this contender, as in 'cublas'; may be repeated.", "all: some compile long"),
    ] = None,
    budget: Budget = None,
    data: Annotated[
        list[str] | None,
        option(
            "Dataset folder or shipped name: who knows the best configs; may be repeated.",
            "those shipped that have the families",
            dataset_names,
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
    from ...collect.compiling import compile_ahead
    from ...datasets import describe, names
    from ...runtime.timing.compare import Row, compare_kernels
    from ...runtime.timing.device_rates import measured
    from ..comparisons import comparison_of

    gpu = gpu_needed("bench kernels")
    comparisons = {kernel: comparison_of(kernel) for kernel in map(find_measurable, family or _GROUPED_GEMMS)}
    suite = [name for kernel, comparison in comparisons.items() for name in comparison.suite(kernel)]
    if not any(only in name for name in suite):
        raise ForetuneError(f"no problem of the suite has {only!r} in its name; there are {abridged(', '.join(suite))}")
    with showing("measuring the card") as say:

        def print_row(row: Row) -> None:
            say(f"{row.family} {row.name}")
            typer.echo(str(row), err=True)  # a run that is cut has printed what it measured

        wanted = {kernel.name for kernel in comparisons}
        known = data or [name for name in names() if wanted & describe(name)["families"].keys()]
        compared = compare_kernels(
            comparisons,
            measured(gpu),
            datasets_merged(known) if known else None,
            bundle_at(bundle),
            only=only,
            against=against or (),
            budget_s=budget,
            compile_ahead=compile_ahead,
            on_row=print_row,
        )
    emit(compared, as_json)
