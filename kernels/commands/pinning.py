"""The command that pins configs: one file that fixes them for every rank, restart and node."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ...datasets import ForetuneError
from ...datasets.errors import abridged
from ...datasets.progress import showing
from .. import families, find_family
from ..learning import datasets_merged
from .app import command
from .cache import kernel_names
from .inputs import bundle_at, device_or_this_gpu, live_gpu, names_kernel
from .options import FAMILY_FORMS, AsJson, Device, Predictor, argument, dataset_names, option
from .printing import Printed, emit

#: Defines the rows and columns of the table of `pin --check`.
_CHECK_CAPTION = (
    "Rows: differences. Columns: the kernel or function; what differs; what the file has; what this machine has, or "
    "why the file's config cannot run."
)


@command("pin", "foretune pin --out foretune.lock")
def pin(
    kernels: Annotated[
        list[str] | None,
        argument(
            "[KERNEL]...",
            "Only these kernels and functions, by their names in `cache show`. With --shapes or --data, one kernel "
            f"family ({FAMILY_FORMS}), or a kernel with foretune.prune, package.module.kernel. With --check, families "
            "that have no name.",
            kernel_names,
            "all",
        ),
    ] = None,
    out: Annotated[
        Path | None, option("Pin file to write: a new one, or one that this command wrote.", "none", metavar="FILE")
    ] = None,
    check: Annotated[
        Path | None,
        option("Compare this pin file with this machine; exit code 1 if they differ.", "none", metavar="FILE"),
    ] = None,
    add: Annotated[
        bool, typer.Option("--add", help="Keep what the file at --out has for other kernels, devices and problems.")
    ] = False,
    shapes: Annotated[
        Path | None,
        option(
            "Pin what a bundle predicts for these problems of the kernel's family: a CSV file with one problem a row "
            "and one column for each dimension, optionally dtype and flags (separated by spaces; without any, the "
            "problems have no flags).",
            "tuning results",
            metavar="FILE",
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        option(
            "Pin what a bundle predicts for the family's problems in this dataset, for example a FORETUNE_LOG folder. "
            "May be repeated.",
            "tuning results",
            dataset_names,
            metavar="DATA",
        ),
    ] = None,
    device: Device = None,
    bundle: Predictor = None,
    as_json: AsJson = False,
) -> None:
    """Write the configs of a run to a file that fixes them (FORETUNE_PIN), or compare such a file with this machine.

    Without --shapes and --data, the file has the newest tuning results in the choice cache (FORETUNE_CACHE_DIR). It is
    sorted JSON for review in git. Where it is in force nothing is tuned, and what it does not cover is an error.
    """
    if (out is None) == (check is None):
        raise typer.BadParameter("give one of --out and --check", param_hint="--out")
    predicts = shapes is not None or bool(data)
    for name, value, applies in (
        ("--device", device, predicts or check is not None),
        ("--bundle", bundle, predicts),
        ("--add", add or None, check is None),
        ("--shapes", shapes, check is None),
        ("--data", data or None, check is None),
    ):
        if value is not None and not applies:
            raise typer.BadParameter(
                "does not apply to --check" if check is not None else "needs --shapes or --data", param_hint=name
            )
    if check is not None:
        _check(check, kernels or [], device, as_json)
        return
    assert out is not None
    from ...runtime.pin_file import PinFile, PinnedFunction, PinnedKernel, check_pin_file
    from ...runtime.tuning.cache.pinning import pins_of_cache, pins_of_predictions, pins_of_pruned
    from ...runtime.tuning.warmup import problems_from_csv

    check_pin_file(out)
    if predicts:
        if not kernels or len(kernels) != 1:
            raise typer.BadParameter("name one kernel family or pruned kernel", param_hint="KERNEL")
        tuner = None
        if names_kernel(kernels[0]):
            tuner = _pruned_kernel(kernels[0])
            family = tuner.early_config_prune.family
        else:
            family = find_family(kernels[0])
        problems = [] if shapes is None else problems_from_csv(shapes, family)
        logged = [case.problem for case in datasets_merged(data).cases] if data else []
        problems += [one for one in logged if one.family == family.name]
        if not problems:
            raise typer.BadParameter(f"has no problem of {family.name}", param_hint="--shapes" if shapes else "--data")
        spec = device_or_this_gpu(device)
        with showing(f"predicting for {len(problems)} problems"):
            if tuner is None:
                pinned = pins_of_predictions(family, problems, spec, bundle=bundle_at(bundle))
            else:
                pinned = pins_of_pruned(tuner, problems, spec, bundle=bundle_at(bundle))
        pins = PinFile((pinned,))
    else:
        pins = pins_of_cache(kernels or ())
    if add and out.exists():
        pins = pins.with_those_of(PinFile.read(out))
    pins.save(out)
    entries: list[PinnedKernel | PinnedFunction] = [*pins.kernels, *pins.functions]
    counts = {"kernels": len(pins.kernels), "functions": len(pins.functions)}
    counts |= {"choices": sum(len(one.choices) for one in entries)}
    devices = ", ".join(dict.fromkeys(getattr(one.device, "name", str(one.device)) for one in entries))
    line = f"Pinned: {counts['choices']} choices of {len(entries)} kernels and functions on {abridged(devices)}."
    if predicts and family.flags and not any(problem.flags for problem in problems):
        line += f" No problem has a flag ({', '.join(family.flags)}): launches with flags are not covered."
    emit(Printed(counts, line), as_json, out=out)


def _pruned_kernel(name: str) -> Any:
    """Return the autotuner of a kernel with `foretune.prune`."""
    from ...runtime import Pruner
    from ...runtime.tuning.launches import LaunchFamily, autotuners_named

    def pruned(word: str) -> list[Any]:
        return [one for one in autotuners_named(word) if isinstance(one.early_config_prune, Pruner)]

    if len(found := pruned(name)) == 1:
        return found[0]
    able = found or pruned(name.rpartition(".")[0] or name)
    names = abridged(", ".join(sorted(LaunchFamily(one).name for one in able)) or "none", 300)
    raise ForetuneError(f"{abridged(name, 100)} must name a kernel with foretune.prune; known here: {names}")


def _check(file: Path, given: list[str], device: str | None, as_json: bool) -> None:
    """Compare a pin file with this machine, or with a named device; exit with 1 if they differ.

    `given` are the families of kernels in the file that have no registered family.
    """
    from ...runtime.tuning.cache.pinning import check_pins

    known = {one.name: one for one in map(find_family, given)}
    spec = live_gpu() if device is None else device_or_this_gpu(device)
    result = check_pins(file, spec, (families() | known).get)
    emit(result, as_json, _CHECK_CAPTION if result.differences else "")
    if result.differences:
        raise typer.Exit(1)
