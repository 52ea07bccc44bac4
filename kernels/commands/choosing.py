"""Commands that choose configs without measuring, and compile the chosen ones."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from ...datasets import ForetuneError, ForetuneWarning
from ...datasets.console import span, whole_number, whole_numbers
from ...datasets.errors import MOST, abridged, did_you_mean
from ...datasets.progress import showing
from .. import find_family, find_measurable
from ..learning import datasets_merged
from .app import ByProduct, command, emit
from .inputs import TAKES_DIMENSIONS, bundle_for, device_or_this_gpu, model_named, names_kernel, problem_of, show_config
from .options import (
    CONFIGS,
    FAMILY,
    FAMILY_FORMS,
    AsJson,
    Device,
    Dtype,
    Experts,
    FamilyName,
    Hidden,
    Inter,
    Invariant,
    LayerDtype,
    LayerModel,
    Predictor,
    SameBits,
    TensorParallel,
    Topk,
    amount,
    argument,
    completes,
    count,
    data_option,
    dimension_names,
    family_names,
    given_as,
    model_names,
    old_name,
    option,
    read_by,
    renamed,
    shortlist_length,
    switch,
)


@command(
    "predict",
    f"foretune predict {FAMILY} --device h200 --groups 64 --rows 8192 --n 2048 --k 1024 --configs 4",
    **TAKES_DIMENSIONS,
)
def predict(
    context: typer.Context,
    family: FamilyName,
    device: Device = None,
    configs: Annotated[
        str | None,
        option(
            "Number of configs, k. auto: as many as needed to include one within 1 % of the best in 95 % of cases.",
            "auto",
            completes(lambda: ("auto",)),
            CONFIGS,
            parser=shortlist_length,
            metavar="auto|N",
        ),
    ] = None,
    expected_calls: Annotated[
        float | None,
        amount(
            "Instead of --configs: as many configs as pay for their tuning over this many calls.",
            0.0,
            1e18,
            metavar="CALLS",
        ),
    ] = None,
    call_us: Annotated[
        float | None,
        amount(
            "Duration of one call in microseconds, for --expected-calls.",
            0.0,
            1e12,
            "the family's estimate",
            "US",
        ),
    ] = None,
    dtype: Dtype = None,
    model: Annotated[
        str | None,
        option(
            "Model whose MoE layer gives the family's sizes except for rows or tokens: the name of a known one, or its "
            "config.json (the file or its folder). If the layer has two products, both are printed.",
            "none",
            model_names,
            metavar="MODEL",
        ),
    ] = None,
    tp: TensorParallel = 1,
    bundle: Predictor = None,
    same_bits: SameBits = False,
    invariant: Invariant = None,
    explain: Annotated[
        bool,
        switch("--explain", "Print why each config is on the list, and knob values that were never measured."),
    ] = False,
    as_json: AsJson = False,
    top: Annotated[str | None, old_name("--top", shortlist_length)] = None,
) -> None:
    """Print the configs predicted to be fastest for one shape. Needs no GPU.

    The dimensions and flags of the family are further options: a grouped GEMM takes --groups, --rows, --n and --k.
    `foretune predict FAMILY --help` lists them. Dimensions take a number; flags take no value. Dashes may replace the
    underscores of these options.
    """
    from ...runtime import make_explanation, make_shortlist
    from ...runtime.same_bits import keeping

    if tp != 1 and model is None:
        raise typer.BadParameter("needs a model: give --model", param_hint="--tp")
    length = renamed("--top", top, CONFIGS, configs)
    kernel = keeping(find_family(family), same_bits or None, invariant)
    products = {"": {}} if model is None else model_named(model).on_rank(tp).dims_of(kernel)
    problems = {
        name: problem_of(
            context, kernel, dtype, *(word for dim, size in sizes.items() for word in (f"--{dim}", str(size)))
        )
        for name, sizes in products.items()
    }
    spec = device_or_this_gpu(device)
    requested: dict[str, Any] = {"k": "auto" if length is None else length, "expected_calls": expected_calls}
    requested |= {"call_us": call_us, "bundle": bundle_for(bundle, kernel)}
    results: dict[str, Any] = {}
    for name, problem in problems.items():
        with warnings.catch_warnings():  # the command reports the same reason as an error
            warnings.simplefilter("ignore", ForetuneWarning)
            chosen = make_shortlist(kernel, problem, spec, **requested)
        if not chosen.predicted:  # the list is then all configs, unsorted
            can_run = any(kernel.supports(config, problem, spec) is None for config in chosen.configs)
            instead = f"; a launch would try all {len(chosen.configs)} supported configs" if can_run else ""
            raise ForetuneError(chosen.reason + instead)
        results[name] = make_explanation(kernel, problem, spec, **requested) if explain else chosen
    emit(results[""] if "" in results else ByProduct(results, problems), as_json)


@command(
    "cover",
    f"foretune cover {FAMILY} --dynamic rows --range 64:4096 --device h200 --groups 64 --n 2048 --k 1024",
    **TAKES_DIMENSIONS,
)
def cover(
    context: typer.Context,
    family: FamilyName,
    dynamic: Annotated[
        str, option("Dimension whose size is known only at run time.", names=dimension_names, metavar="DIM")
    ],
    sizes: Annotated[
        Any,
        option(
            "Smallest and largest size of that dimension.",
            True,
            None,
            "--range",
            parser=read_by(span),
            metavar="LOW:HIGH",
        ),
    ],
    configs: Annotated[int | None, count("Number of configs, k.", 1, 16, "3")] = None,
    within: Annotated[
        float | None,
        amount(
            "Instead of --configs: the fewest configs that are at most this much slower than the best at every size; "
            "0.02 is 2 %.",
            0.0,
            100.0,
            "none",
            "LOSS",
        ),
    ] = None,
    ranges: Annotated[
        int | None,
        count(
            "Largest number of size ranges: torch.compile compiles a dynamic graph once for each.",
            1,
            256,
            "8; no limit with --within",
        ),
    ] = None,
    device: Device = None,
    data: Annotated[
        str | None,
        data_option("Choose by the times in this dataset: a folder, or the name of a shipped one.", "predicted times"),
    ] = None,
    measure: Annotated[
        bool,
        switch("--measure", "Time the configs predicted fastest for each size on this machine's GPU; choose by that."),
    ] = False,
    hints: Annotated[
        str | None,
        option(
            "With --data, compare: the loss over the whole range of the config that is best at each of these sizes, "
            "for example 64,256,4096, next to the predicted and the measured cover.",
            "none",
            metavar="SIZES",
        ),
    ] = None,
    dtype: Dtype = None,
    bundle: Predictor = None,
    same_bits: SameBits = False,
    invariant: Invariant = None,
    as_json: AsJson = False,
) -> None:
    """Choose a few configs that together serve a whole range of sizes, and print which one runs at which size.

    For a dimension that is known only at run time. The family's other dimensions and its flags are further options, as
    for predict. Only --measure needs a GPU. A family that the shipped bundle lacks needs measured data, unlike predict:
    `foretune collect`, then --data; or `foretune train`, then --bundle.
    """
    from ...datasets import load
    from ...runtime.covering import make_hint_matrix
    from ...runtime.same_bits import keeping
    from ..api import cover as covered

    if configs is not None and within is not None:
        raise typer.BadParameter("give --configs or --within, not both", param_hint="--within")
    if measure and data is not None:
        raise typer.BadParameter("give --measure or --data, not both", param_hint="--measure")
    if hints is not None and data is None:
        raise typer.BadParameter("needs measured times: give --data", param_hint="--hints")
    kernel = keeping(find_family(family), same_bits or None, invariant)
    if dynamic not in kernel.dims:
        raise typer.BadParameter(
            f"{abridged(dynamic, 60)!r} is not one of {', '.join(kernel.dims)}{did_you_mean(dynamic, kernel.dims)}",
            param_hint="--dynamic",
        )
    if any(argument.partition("=")[0].replace("-", "_") == f"__{dynamic}" for argument in context.args):
        raise typer.BadParameter("is the dynamic dimension: --range gives its sizes", param_hint=f"--{dynamic}")
    problem = problem_of(context, kernel, dtype, f"--{dynamic}", str(sizes[0]))
    spec = device_or_this_gpu(device)
    limits: dict[str, Any] = {"within": within, "ranges": ranges, "bundle": bundle_for(bundle, kernel)}
    with showing(f"covering {dynamic} from {sizes[0]} to {sizes[1]}"):
        found: Any
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
            "FAMILY|KERNEL|vllm",
            f"Kernel family: {FAMILY_FORMS}. Or a tuned kernel, package.module.kernel, or a package of tuned kernels. "
            "Or vllm, for the MoE kernel of an installed vLLM.",
            family_names,
        ),
    ],
    shapes: Annotated[
        Path | None,
        option(
            "CSV file with one problem a row and one column for each dimension, optionally dtype and flags "
            "(separated by spaces); for a tuned kernel, one column for each argument that varies.",
            metavar="FILE",
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        data_option("Compile for the problems of this dataset, for example a FORETUNE_LOG folder. May be repeated."),
    ] = None,
    device: Device = None,
    configs: Annotated[
        int | None, count("Number of configs, k, to compile for each problem: those predicted fastest.", 1, MOST, "1")
    ] = None,
    model: LayerModel = None,
    experts: Experts = None,
    topk: Topk = None,
    hidden: Hidden = None,
    inter: Inter = None,
    tp: TensorParallel = 1,
    dtype: LayerDtype = "bf16",
    bundle: Predictor = None,
    as_json: AsJson = False,
    top: Annotated[int | None, old_name("--top", read_by(whole_number, 1, MOST))] = None,
) -> None:
    """Compile the kernels of a later run into Triton's cache (TRITON_CACHE_DIR). Launches nothing.

    For a family: the configs predicted fastest for the problems of --shapes and --data. For a tuned kernel or a package
    of them: what `attach` and `foretune.autotune` have tuned (see `foretune cache show`), with the configs that the
    kernel's own timings predict; --shapes and --data add more launches. For vllm: what vLLM runs for a MoE layer with
    Foretune's plugin, for batches of up to 4,096 tokens. With --device, no GPU is needed.
    """
    from ...runtime import use_stub_driver
    from ...runtime.tuning.warmup import problems_from_csv, warm_up, warm_up_tuned

    k = renamed("--top", top, CONFIGS, configs) or 1
    of_others = {"--shapes": shapes, "--data": data, CONFIGS: configs if top is None else top}
    of_layer = {"--model": model, "--experts": experts, "--topk": topk, "--hidden": hidden, "--inter": inter}
    for name, value in (of_others if family == "vllm" else of_layer).items():
        if value is not None:
            raise typer.BadParameter(f"does not apply to {abridged(family, 60)}", param_hint=name)
    if bundle is not None and (family == "vllm" or names_kernel(family)):
        raise typer.BadParameter("needs a kernel family, whose configs a bundle predicts", param_hint="--bundle")
    logged = [case.problem for case in datasets_merged(data).cases] if data else []
    if family == "vllm":
        from ..fused_moe.warming import warm_up_vllm
        from ..fused_moe.workload import requested_layer

        sizes = {"experts": experts, "topk": topk, "hidden": hidden, "inter": inter}
        show_config(model)
        layer = requested_layer(model, **sizes, tp=tp, dtype=dtype)
        what, compiled = f"vLLM's kernel for {layer}", partial(warm_up_vllm, layer)
    elif not names_kernel(family):
        kernel = find_measurable(family)
        if shapes is None and not data:
            raise typer.BadParameter("give problems with --shapes or --data", param_hint="--shapes")
        problems = [] if shapes is None else problems_from_csv(shapes, kernel)
        problems += [one for one in logged if one.family == kernel.name and one not in problems]
        what = f"for {len(problems)} problems"
        compiled = partial(warm_up, kernel, problems, k=k, bundle=bundle_for(bundle, kernel))
    else:
        what = f"the tuned kernels of {abridged(family, 60)}"
        compiled = partial(warm_up_tuned, family, shapes=shapes, logged=logged, k=k)
    spec = device_or_this_gpu(device)
    with showing(f"compiling {what}"), use_stub_driver(spec) if device else nullcontext():
        warmed = compiled(device=spec)
    emit(warmed, as_json)
    if warmed.failed and not warmed.binaries:
        raise ForetuneError(f"no config could be compiled: {warmed.failed[0]}")
