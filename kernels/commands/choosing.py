"""Commands that choose configs, and compile what was chosen."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from ...datasets import ForetuneError, ForetuneWarning
from ...datasets.console import span, whole_numbers
from ...datasets.errors import MOST, abridged
from ...datasets.progress import showing
from .. import families, find_family, find_measurable
from .app import command
from .inputs import TAKES_DIMENSIONS, device_or_this_gpu, load_all, problem_of
from .options import (
    FAMILY,
    AsJson,
    Device,
    Dtype,
    FamilyName,
    Predictor,
    amount,
    argument,
    count,
    dataset_names,
    family_names,
    given_as,
    option,
    read_by,
    shortlist_length,
)
from .printing import Result, emit


@command(
    "predict",
    f"foretune predict {FAMILY} --device h200 --groups 64 --rows 8192 --n 2048 --k 1024 --top 4",
    **TAKES_DIMENSIONS,
)
def predict(
    context: typer.Context,
    family: FamilyName,
    device: Device = None,
    top: Annotated[
        str,
        option(
            "Length of the shortlist; auto: as many as hold one within 1 % of the best in 95 % of cases.",
            parser=shortlist_length,
            metavar=f"auto or 1..{MOST}",
        ),
    ] = "auto",
    expected_calls: Annotated[
        float | None,
        amount("As many configs as pay for themselves over so many calls.", 0.0, 1e18, metavar="CALLS"),
    ] = None,
    call_us: Annotated[
        float | None,
        amount(
            "How long one call takes, in microseconds, for --expected-calls.",
            0.0,
            1e12,
            "what the family estimates",
            "US",
        ),
    ] = None,
    dtype: Dtype = None,
    bundle: Predictor = None,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain", help="Print why each config is on the list, and knob values that were never measured."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print the configs predicted to be fastest for one shape. Needs no GPU.

    The family's dimensions are options of their own (a grouped GEMM has --groups, --rows, --n and --k), and so are its
    flags, without a value: `foretune predict FAMILY --help` lists them.
    """
    from ...model import load_bundle
    from ...runtime import make_explanation, make_shortlist

    kernel = find_family(family)
    problem = problem_of(context.args, kernel, dtype)
    spec = device_or_this_gpu(device)
    asked: dict[str, Any] = {"k": top, "expected_calls": expected_calls, "call_us": call_us}
    asked["bundle"] = load_bundle(bundle)
    with warnings.catch_warnings():  # what a launch is only warned of is the answer here
        warnings.simplefilter("ignore", ForetuneWarning)
        chosen = make_shortlist(kernel, problem, spec, **asked)
    if not chosen.predicted:  # then it holds every config, in no order that means anything
        can_run = any(kernel.supports(config, problem, spec) is None for config in chosen.configs)
        instead = f"; a launch there has {len(chosen.configs)} configs go through" if can_run else ""
        raise ForetuneError(chosen.reason + instead)
    emit(make_explanation(kernel, problem, spec, **asked) if explain else chosen, as_json)


@command(
    "cover",
    f"foretune cover {FAMILY} --dynamic rows --range 64:4096 --device h200 --groups 64 --n 2048 --k 1024",
    **TAKES_DIMENSIONS,
)
def cover(
    context: typer.Context,
    family: FamilyName,
    dynamic: Annotated[str, option("The dimension whose size is only known at run time.")],
    sizes: Annotated[
        Any,
        option("Its smallest and largest size.", True, None, "--range", parser=read_by(span), metavar="LOW:HIGH"),
    ],
    configs: Annotated[int | None, count("How many configs.", 1, 16, "3")] = None,
    within: Annotated[
        float | None,
        amount("Instead, as few as lose no more than this at any size, as 0.02 for 2 %.", 0.0, 100.0, "none"),
    ] = None,
    ranges: Annotated[
        int | None,
        count(
            "Ranges of sizes at most: so often is a dynamic graph compiled.",
            1,
            256,
            "8; with --within as many as it takes",
        ),
    ] = None,
    device: Device = None,
    data: Annotated[
        str | None,
        option("Choose by the times in this dataset (a folder or shipped name).", "by predicted times", dataset_names),
    ] = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="Time those predicted to be best at each size on this machine's GPU, and choose by that."
        ),
    ] = False,
    hints: Annotated[
        str | None,
        option(
            "With --data: what the config that is best at each of these sizes, as 64,256,4096, loses at all "
            "others, beside the covers predicted and measured.",
            "none",
        ),
    ] = None,
    dtype: Dtype = None,
    bundle: Predictor = None,
    as_json: AsJson = False,
) -> None:
    """Print the few configs that together lose least over a range of a dynamic dimension, and which runs when.

    The family's other dimensions and its flags are options of their own, as for predict. Needs no GPU but with
    --measure.
    """
    from ...datasets import load
    from ...runtime.covering import make_hint_matrix
    from ..api import cover as covered

    if configs is not None and within is not None:
        raise typer.BadParameter("say how many configs, or how much they may lose", param_hint="--within")
    if measure and data is not None:
        raise typer.BadParameter("the times are those of --data", param_hint="--measure")
    if hints is not None and data is None:
        raise typer.BadParameter("what a hint loses is measured: give --data", param_hint="--hints")
    kernel = find_family(family)
    if dynamic not in kernel.dims:
        raise typer.BadParameter(
            f"{abridged(dynamic, 60)!r} is not one of {', '.join(kernel.dims)}", param_hint="--dynamic"
        )
    if any(argument.partition("=")[0] == f"--{dynamic}" for argument in context.args):
        raise typer.BadParameter("it is dynamic, so --range says its sizes", param_hint=f"--{dynamic}")
    problem = problem_of([*context.args, f"--{dynamic}", str(sizes[0])], kernel, dtype)
    spec = device_or_this_gpu(device)
    limits: dict[str, Any] = {"within": within, "ranges": ranges, "bundle": bundle}
    with showing(f"covering {dynamic} from {sizes[0]} to {sizes[1]}"):
        found: Result
        if hints is not None and data is not None:
            at = given_as("--hints", whole_numbers, hints)
            dataset = load(data)
            found = make_hint_matrix(kernel, problem, dynamic, sizes, configs, spec, dataset, hints=at, **limits)
        else:
            found = covered(kernel, problem, dynamic, sizes, configs, device=spec, data=data, measure=measure, **limits)
    emit(found, as_json)


@command("warmup", f"foretune warmup {FAMILY} --shapes shapes.csv")
def warmup(
    family: Annotated[
        str,
        argument(
            "FAMILY",
            "A kernel family's name, its package.module:attribute; or a package, or one package.module.kernel, "
            "of which kernels were tuned.",
            family_names,
        ),
    ],
    shapes: Annotated[
        Path | None,
        option(
            "CSV file of problems: a column for each dimension, dtype and flags if need be; of a "
            "package.module.kernel, for each argument that changes."
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        option("Dataset folder, for example a FORETUNE_LOG, whose problems to take; may be repeated."),
    ] = None,
    device: Device = None,
    top: Annotated[int, count("Configs to compile for each problem, the fastest by prediction.", 1, MOST)] = 1,
    as_json: AsJson = False,
) -> None:
    """Compile what a run will ask for, into Triton's cache (TRITON_CACHE_DIR), before it does. Launches nothing: with
    --device it needs no GPU.

    Of a family, the predicted configs of these problems. Of a package or package.module.kernel, what `attach` and
    `foretune.autotune` have tuned there (see `cache show`): the launches that were seen, or with --shapes or --data
    launches like them, with the configs that the kernel's own timings predict.
    """
    from ...runtime import use_stub_driver
    from ...runtime.tuning.warmup import problems_from_csv, warm_up, warm_up_seen

    logged = [case.problem for case in load_all(data).cases] if data else []
    if family in families() or ":" in family or not ("." in family or _is_module(family)):
        kernel = find_measurable(family)
        if shapes is None and not data:
            raise typer.BadParameter("say which problems, with --shapes or --data", param_hint="--shapes")
        problems = [] if shapes is None else problems_from_csv(shapes, kernel)
        problems += [one for one in logged if one.family == kernel.name and one not in problems]
        what, compiled = f"for {len(problems)} problems", partial(warm_up, kernel, problems, k=top)
    else:
        what = f"what was tuned of {abridged(family, 60)}"
        compiled = partial(warm_up_seen, family, shapes=shapes, logged=logged, k=top)
    spec = device_or_this_gpu(device)
    with showing(f"compiling {what}"), use_stub_driver(spec) if device else nullcontext():
        warmed = compiled(device=spec)
    emit(warmed, as_json)
    if warmed.failed and not warmed.binaries:
        raise ForetuneError(f"nothing could be compiled: {warmed.failed[0]}")


def _is_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ValueError:  # no name at all
        return False
