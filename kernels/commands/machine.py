"""Commands about this machine: its GPU, the speed of kernels on it, and the cost of choosing a config."""

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
from .app import bench, command, emit
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
    data_option,
    device_names,
    family_names,
    option,
)

_GROUPED_GEMMS = (FAMILY, "grouped_gemm_dx", "grouped_gemm_dw")


#: Defines the rows and columns of the table of `bench runtime`.
_FIRST_CALLS_CAPTION = (
    "Rows: ways to tune. Columns: configs declared and benchmarked, seconds of the first call, microseconds of "
    "the chosen config, and how many times sooner the first call ends than with the whole space."
)
#: Defines the columns of the table of `bench predictions`.
_PREDICTIONS_CAPTION = (
    "Columns: configs in the space; the first prediction in a process; the best config of a new problem; its "
    "shortlist; the shortlist of a problem whose answer is cached. Times are the least and the median."
)
#: Defines the rows and columns of the tables of `bench kernels`.
_KERNELS_CAPTION = (
    "Rows: problems. Columns: microseconds with the best known config, with the predicted config, of other "
    "implementations, and the least that the rates of the GPU allow (roofline). A second table has the times of others "
    "over ours with the predicted config, by routing or kind of problem. Goals compare them over all problems."
)


@command("device", "foretune device --out my-gpu.json")
def device(
    spec: Annotated[
        str | None,
        argument(
            "[DEVICE]", "Show this device: the name of a shipped one, or its JSON file.", device_names, "this GPU"
        ),
    ] = None,
    sms: Annotated[int | None, count("Describe a partition with this number of SMs.", 1, MOST_SMS, "all")] = None,
    out: Annotated[Path | None, option("JSON file to write, for --device on other machines.", metavar="FILE")] = None,
    as_json: AsJson = False,
) -> None:
    """Print the properties of this machine's GPU that decide how fast kernels are: limits, and rates measured now.

    For a named device, the stored values are printed and nothing is measured; with --sms, its rates are scaled to the
    partition.
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
        typer.echo(f"Written to {printable(str(out))}", err=True)
    emit(found, as_json)  # the same JSON as in the file of --out


@command("runtime", "foretune bench runtime --skip-whole-space", into=bench)
def bench_runtime(
    bundle: Predictor = None,
    repeats: Annotated[
        int,
        typer.Option(min=1, metavar="N", help="Number of first calls of each method, in turn; the median is reported."),
    ] = 3,
    whole_space: Annotated[
        bool,
        typer.Option(
            "--whole-space/--skip-whole-space", help="Also tune over all configs, which takes minutes, or not."
        ),
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Time the first call of a kernel on this machine's GPU, with empty caches, for several ways to tune it.

    Compares triton.autotune over the whole space, triton.autotune with a predicted shortlist, and foretune.autotune:
    the duration of the first call, and the speed of the chosen config.
    """
    from ...runtime.bench import compare_first_calls
    from ..grouped_gemm.contenders import autotuned

    gpu = gpu_needed("tuning")
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
    emit(compared, as_json, _FIRST_CALLS_CAPTION)


@command("predictions", "foretune bench predictions --json", into=bench)
def bench_predictions(
    family: Annotated[
        str | None,
        option("Only this kernel family.", "all of the bundle", family_names, metavar="FAMILY"),
    ] = None,
    device: Annotated[
        str,
        option("GPU to predict for; this machine need not have it.", names=device_names, metavar="DEVICE"),
    ] = "h200",
    bundle: Predictor = None,
    as_json: AsJson = False,
) -> None:
    """Time predictions on this machine's CPU.

    Each prediction ranks a family's whole config space, for new problems and for a problem whose ranking is cached.
    """
    from ...model import load_bundle
    from ...runtime.bench import time_predictions

    known = load_bundle(bundle)
    families = [find_family(name) for name in ([family] if family else known.families)]
    emit(time_predictions(families, DeviceSpec.find(device), known), as_json, _PREDICTIONS_CAPTION)


@command("kernels", "foretune bench kernels --json", into=bench)
def bench_kernels(
    family: Annotated[
        list[str] | None,
        option("Only this kernel family. May be repeated.", "the grouped GEMMs", family_names, metavar="FAMILY"),
    ] = None,
    only: Annotated[
        str, option("Only problems whose name contains this text, for example training.", "all", metavar="TEXT")
    ] = "",
    against: Annotated[
        list[str] | None,
        option(
            "Compare only with this implementation, for example cublas. May be repeated.",
            "all; some take long to compile",
            metavar="NAME",
        ),
    ] = None,
    budget: Budget = None,
    data: Annotated[
        list[str] | None,
        data_option(
            "Dataset with the best known configs: a folder, or the name of a shipped one. May be repeated.",
            "shipped datasets with the families",
        ),
    ] = None,
    bundle: Predictor = None,
    as_json: AsJson = False,
) -> None:
    """Time kernels on this machine's GPU, next to other implementations and the GPU's limits.

    Grouped GEMMs are compared with torch._grouped_mm, cuBLAS and, if installed, QuACK on a suite of real layers from
    decode to training, each with its best known config and with the predicted one. Every family of Foretune has such a
    suite. Each result is printed to stderr as soon as it is measured.
    """
    from ...collect.compiling import compile_ahead
    from ...datasets import describe, names
    from ...runtime.timing.compare import Row, compare_kernels
    from ...runtime.timing.device_rates import measured
    from ..registry import comparison_of

    gpu = gpu_needed("bench kernels")
    comparisons = {kernel: comparison_of(kernel) for kernel in map(find_measurable, family or _GROUPED_GEMMS)}
    suite = [name for kernel, comparison in comparisons.items() for name in comparison.suite(kernel)]
    if not any(only in name for name in suite):
        raise ForetuneError(
            f"no problem of the suite has {only!r} in its name; its problems: {abridged(', '.join(suite))}"
        )
    with showing("measuring the GPU") as say:

        def print_row(row: Row) -> None:
            say(f"{row.family} {row.name}")
            typer.echo(str(row), err=True)  # an interrupted run has printed its results

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
    emit(compared, as_json, _KERNELS_CAPTION)
