"""Commands about this machine: its GPU, and what a choice costs here."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from ...datasets import DeviceSpec, ForetuneError
from ...datasets.console.progress_bar import showing
from ...datasets.console.tables import printable
from .. import find_family, find_measurable
from .asked_for import live_gpu
from .groups import bench, command
from .options import EXAMPLE, FAMILY, MOST_SMS, AsJson, Predictor, count, device_names, family_names
from .results import emit


@command("device", "foretune device --out my-gpu.json")
def device(
    spec: Annotated[
        str | None,
        typer.Argument(
            metavar="[DEVICE]",
            help="A shipped device or a spec's JSON file, to show as it is.",
            show_default="this GPU",
            autocompletion=device_names,
        ),
    ] = None,
    sms: Annotated[int | None, count("Only so many of its SMs, as a device.", 1, MOST_SMS, show_default="all")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file to save the spec in, for --device elsewhere.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print what this machine's GPU is to a kernel: its limits, and the rates that it reaches, measured now.

    A device that is named is shown as it is; with --sms, by the rule that partitions of it go by.
    """
    from ...datasets.disk.writable import check_file
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
    from ...model import load_bundle
    from ...runtime.bench import compare_first_calls
    from ..grouped_gemm.contenders import autotuned

    gpu = live_gpu()
    if gpu is None:
        raise ForetuneError("no GPU is visible here: there is nothing to tune on")
    with showing("first calls") as say:
        compared = compare_first_calls(
            find_measurable(FAMILY),
            EXAMPLE,
            gpu,
            None if bundle is None else load_bundle(bundle),
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
        typer.Option(help="Only this family.", show_default="the bundle's", autocompletion=family_names),
    ] = None,
    device: Annotated[
        str, typer.Option(help="The GPU to predict for, which need not be here.", autocompletion=device_names)
    ] = "h200",
    bundle: Predictor = None,
    as_json: AsJson = False,
) -> None:
    """Time predictions over the whole space on this machine's CPU: new problems, and one asked about before."""
    from ...model import load_bundle
    from ...runtime.bench import time_predictions

    known = load_bundle(bundle)
    families = [find_family(name) for name in ([family] if family else known.families)]
    emit(time_predictions(families, DeviceSpec.find(device), known), as_json)
