"""The command line: each command parses, calls a floor and prints. Tables go to stdout, progress to stderr.

Exit codes: 0 done; 1 bad input or a failed run, with one line that names it; 2 wrong usage; 130 ended by Ctrl-C.
"""

from __future__ import annotations

import functools
import json
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec

import typer

from .datasets import ForetuneError

if TYPE_CHECKING:
    from .collect.run_state import Progress
    from .datasets import Case, DeviceSpec, Family
    from .datasets.dataset import Dataset
    from .runtime import Shortlist

P = ParamSpec("P")
app = typer.Typer(
    help="Know the fast configs of a Triton kernel before you tune.", no_args_is_help=True, add_completion=False
)

bench = typer.Typer(help="Measure Foretune itself, next to what people have.", no_args_is_help=True)
app.add_typer(bench, name="bench")

SHIPPED = "h200"  # the dataset that quickstart and evaluate take where none is named
FAMILY = "grouped_gemm_fwd"

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON to stdout instead of tables.")]
FamilyName = Annotated[str, typer.Argument(metavar="FAMILY", help=f"A kernel family, for example {FAMILY}.")]


def main() -> None:
    """The console script."""
    app()


def _command(
    name: str, example: str, into: typer.Typer = app, **settings: Any
) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Registers a command. Bad input ends it with one line and exit code 1, never with a traceback."""

    def register(function: Callable[P, None]) -> Callable[P, None]:
        @functools.wraps(function)
        def run(*args: P.args, **options: P.kwargs) -> None:
            try:
                with warnings.catch_warnings():
                    warnings.showwarning = _show_warning
                    function(*args, **options)
            except (ForetuneError, OSError) as error:
                if options.get("as_json"):
                    typer.echo(json.dumps({"error": str(error)}))
                typer.echo(f"Error: {error}", err=True)
                raise typer.Exit(1) from None

        into.command(name, epilog=f"Example: {example}", **settings)(run)
        return run

    return register


def _show_warning(message: Warning | str, *where: object, **more: object) -> None:
    """One line, without the place in the code that a person at a terminal cannot do anything about."""
    typer.echo(f"Warning: {message}", err=True)


@_command("quickstart", "foretune quickstart")
def quickstart(
    out: Annotated[
        Path | None, typer.Option(help="Folder for the bundle.", show_default="~/.cache/foretune/quickstart")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train on the shipped H200 measurements and see what the ranker is worth, without a GPU.

    Prints how far off its choices are on models it never saw, next to simpler choices, and the shortlist of
    an example layer. On a machine with a GPU it also tunes that layer there, with and without the shortlist.
    """
    from .datasets import DeviceSpec, Problem, load
    from .kernels import family, first_call
    from .model.evaluate import cross_validate, prediction_ms
    from .model.train import train as fit
    from .runtime import shortlist

    out = out or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "foretune" / "quickstart"
    problem, kernel = Problem.of(FAMILY, groups=64, rows=8192, n=2048, k=1024), family(FAMILY)
    with _status("loading the shipped measurements") as say:
        dataset = load(SHIPPED)
        say("training on all layers, and without some models' layers to rank those")
        with ThreadPoolExecutor(1) as aside:  # side by side: a training keeps one core busy, and a second one at times
            trained = aside.submit(fit, dataset, {FAMILY: kernel})
            judged = cross_validate(dataset, kernel, tested=1)
            bundle = trained.result()
        bundle.save(out)
        spec = DeviceSpec.named(SHIPPED)
        chosen = shortlist(kernel, problem, spec, k=4, bundle=bundle)
        say("timing one prediction over the whole space")
        decision_ms = prediction_ms(bundle.ranker(FAMILY), kernel, spec)
        gpu = _live()
        compared = [] if gpu is None else first_call.compare(kernel, problem, gpu, bundle, on_start=say)
    result = {
        "evaluation": {"families": {FAMILY: judged.to_json()}},
        "prediction": {"problem": problem.to_json(), **_prediction(chosen, spec.name)},
        "prediction_ms": round(decision_ms, 2),
        "first_call": [asdict(way) | {"chosen": way.chosen.to_json()} for way in compared],
        "bundle": str(out),
    }
    _emit(result, as_json, _show_quickstart)


@_command("collect", f"foretune collect {FAMILY} --models models.csv --out measured --budget 20m")
def collect(
    family: Annotated[
        list[str],
        typer.Argument(metavar="FAMILY...", help=f"Kernel families, for example {FAMILY}.", show_default=False),
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
            help="CSV of MoE models: model, num_experts, top_k, hidden_size, ...",
            show_default="the shipped models.csv",
        ),
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="Stop in time, for example 90s, 20m or 1h.", show_default="none")
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(help="Token counts, as in 16,256,4096.", show_default="16 ... 65536")
    ] = None,
    per_layer: Annotated[int, typer.Option(min=0, help="Problems of each distinct layer shape.")] = 2,
    random: Annotated[int, typer.Option(min=0, help="Random shapes besides the models' layers.")] = 40,
    seed: Annotated[int, typer.Option(min=0, help="Draws other problems.")] = 0,
    plan: Annotated[
        str,
        typer.Option(
            help="exhaustive: all configs of each problem; adaptive: a tenth, which a model learns to choose."
        ),
    ] = "exhaustive",
    max_tflop: Annotated[
        float, typer.Option(min=0.0, help="Problems of at most so many TFLOP: fewer for a small GPU.")
    ] = 2.5,
    suite: Annotated[bool, typer.Option(help="First the problems that kernels are compared on.")] = False,
    like: Annotated[
        str | None,
        typer.Option(help="First the problems of this dataset (a folder or shipped name).", show_default="none"),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="At most so many problems of each family.", show_default="all")
    ] = None,
    resume: Annotated[bool, typer.Option(help="Continue an earlier run, or refuse a folder that has one.")] = True,
    as_json: AsJson = False,
) -> None:
    """Measure kernels' config spaces, on this machine's GPUs or a cluster's.

    Killed or interrupted, it goes on when run again.
    """
    budget_s, gpu_count = _seconds(budget), _gpus(gpus)
    token_counts, parts = _integers(tokens, "--tokens"), _integers(",".join(sms) if sms else None, "--sms") or ()
    if scheduler is not None and gpu_count is not None:
        raise typer.BadParameter("a cluster's GPUs are its workers: start as many as you want", param_hint="--gpus")
    if scheduler is not None and parts:
        raise typer.BadParameter("only this machine's GPUs can be parted, not a scheduler's", param_hint="--sms")

    from .collect import campaign, cluster, shapes
    from .datasets import load, load_models
    from .kernels import family as find
    from .kernels.grouped_gemm.suite import suite as suite_of

    kernels = [find(name) for name in dict.fromkeys(family)]
    layers = load_models(models)
    shipped = load_models()
    known = load(like) if like else None
    cases: list[Case] = []
    for kernel in kernels:
        drawn = shapes.cases(
            kernel.name,
            layers,
            tokens=token_counts,
            per_layer=per_layer,
            random=random,
            most_tflop=max_tflop,
            seed=seed,
        )
        compared = suite_of(kernel.name, shipped).values() if suite else ()
        shared = shapes.like(known, kernel.name, seed=seed) if known else ()
        cases += shapes.first((*compared, *shared, *drawn), limit, most_tflop=max_tflop)
    collected = (
        partial(campaign.collect, gpus=gpu_count, sms=tuple(dict.fromkeys(parts)))
        if scheduler is None
        else partial(cluster.collect_on_cluster, scheduler=scheduler)
    )
    with _bar() as on_progress:
        summary = collected(kernels, cases, out, plan=plan, budget_s=budget_s, resume=resume, on_progress=on_progress)
    _emit({**asdict(summary), "out": str(out)}, as_json, _show_summary)
    if summary.interrupted:
        raise typer.Exit(130)


@_command("train", "foretune train --data measured --out my-bundle")
def train(
    data: Annotated[str, typer.Option(help="Dataset folder, or the name of a shipped one.")],
    out: Annotated[Path, typer.Option(help="Folder for the bundle.")],
    family: Annotated[str | None, typer.Option(help="Only this family.", show_default="all in the data")] = None,
    as_json: AsJson = False,
) -> None:
    """Train a bundle on measurements."""
    from .datasets import load
    from .model.train import train as fit

    with _status(f"training on {data}"):
        dataset = load(data)
        families = _families(dataset, family)
        fit(dataset, families).save(out)
    _emit({"bundle": str(out), "families": sorted(families)}, as_json, _show_trained)


@_command("evaluate", "foretune evaluate --data measured --bundle my-bundle --json")
def evaluate(
    data: Annotated[str | None, typer.Option(help="Dataset folder or shipped name.", show_default=SHIPPED)] = None,
    bundle: Annotated[
        Path | None, typer.Option(help="Judge this bundle as it is.", show_default="cross-validate")
    ] = None,
    split: Annotated[
        str, typer.Option(help="What cross-validation holds out: model families, or each device that was measured on.")
    ] = "model",
    as_json: AsJson = False,
) -> None:
    """Print regret@k: how much slower the best of the first k choices runs than the best config there is.

    With a bundle, that bundle is judged as it is: name data that it was not trained on. Without one, new ones
    are trained and judged, each on the layers of models it never saw; with --split device, on a device it never saw.
    """
    if bundle is not None and split != "model":
        raise typer.BadParameter("a bundle is judged as it is: nothing is split", param_hint="--split")

    from .datasets import load
    from .model import load_bundle
    from .model.evaluate import cross_validate, evaluate_bundle

    given = None if bundle is None else load_bundle(bundle)
    with _status("judging the bundle" if given else f"training and judging, split by {split}"):
        dataset = load(data or SHIPPED)
        kernels = {
            name: kernel for name, kernel in _families(dataset).items() if given is None or name in given.families
        }
        if not kernels:
            raise ForetuneError(f"the bundle has none of the families in {dataset.name}: {', '.join(dataset.families)}")
        judged = {
            name: evaluate_bundle(dataset, given, kernel) if given else cross_validate(dataset, kernel, split=split)
            for name, kernel in kernels.items()
        }
    _emit({"families": {name: one.to_json() for name, one in judged.items()}}, as_json, _show_evaluation)


@_command("replay", "foretune replay --data h200 --share 0.1")
def replay(
    data: Annotated[str | None, typer.Option(help="Dataset folder or shipped name.", show_default=SHIPPED)] = None,
    share: Annotated[
        float, typer.Option(min=0.001, max=1.0, help="Share of the configs that the plan tries on each problem.")
    ] = 0.09,
    as_json: AsJson = False,
) -> None:
    """Show what measuring by the adaptive plan is worth, on data that were measured exhaustively. Needs no GPU.

    Cross-validates a ranker that learns from what the plan would have measured beside one that learns from everything.
    """
    from .collect.plan import Adaptive
    from .collect.replay import replay as compare
    from .datasets import load

    with _status("measuring by the plan, training and judging, split by model family"):
        dataset = load(data or SHIPPED)
        adaptive = partial(Adaptive, share=share)
        replays = {name: compare(dataset, kernel, adaptive) for name, kernel in _families(dataset).items()}
    _emit({"families": {name: one.to_json() for name, one in replays.items()}}, as_json, _show_replay)


@_command(
    "predict",
    f"foretune predict {FAMILY} --device h200 --groups 64 --rows 8192 --n 2048 --k 1024 --top 4",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},  # a family's own dimensions
)
def predict(
    context: typer.Context,
    family: FamilyName,
    device: Annotated[
        str | None,
        typer.Option(help="A shipped device, for example h200, or a spec's JSON file.", show_default="this GPU"),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Length of the shortlist.")] = 8,
    dtype: Annotated[str, typer.Option(help="Element type: bf16 or fp16.")] = "bf16",
    bundle: Annotated[Path | None, typer.Option(help="A bundle of `foretune train`.", show_default="shipped")] = None,
    as_json: AsJson = False,
) -> None:
    """Print the configs predicted to be fastest for one shape. Needs no GPU.

    The family's dimensions are options of their own: a grouped GEMM has --groups, --rows, --n and --k.
    """
    from .datasets import DeviceSpec, Problem
    from .kernels import family as find
    from .model import load_bundle
    from .runtime import ForetuneWarning, shortlist

    kernel = find(family)
    dims = _dimensions(context.args, kernel)
    if dtype not in kernel.dtypes:
        raise typer.BadParameter(f"{dtype!r} is not one of {', '.join(kernel.dtypes)}", param_hint="--dtype")
    spec = DeviceSpec.live() if device is None else DeviceSpec.find(device)
    problem = Problem(family, tuple(sorted(dims.items())), dtype)
    with warnings.catch_warnings():  # what a launch is only warned of is the answer here: see _prediction
        warnings.simplefilter("ignore", ForetuneWarning)
        chosen = shortlist(kernel, problem, spec, k=top, bundle=load_bundle(bundle))
    _emit(_prediction(chosen, spec.name), as_json, _show_prediction)


@_command("device", "foretune device --out my-gpu.json")
def device(
    spec: Annotated[
        str | None,
        typer.Argument(
            metavar="[DEVICE]",
            help="A shipped device or a spec's JSON file, to show as it is.",
            show_default="this GPU",
        ),
    ] = None,
    sms: Annotated[
        int | None, typer.Option(min=1, help="Only so many of its SMs, as a device.", show_default="all")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file to save the spec in, for --device elsewhere.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print what this machine's GPU is to a kernel: its limits, and the rates that it reaches, measured now.

    A device that is named is shown as it is; with --sms, by the rule that partitions of it go by.
    """
    from .datasets import DeviceSpec
    from .runtime import partition
    from .runtime.timing.device_rates import measured

    if spec is None:
        live = DeviceSpec.live()
        with _status(f"measuring {live.name}"), partition(sms, live) if sms else nullcontext(live) as part:
            found = measured(part)
    else:
        found = DeviceSpec.find(spec)
        found = found.with_sms(sms) if sms else found
    _emit(found.to_json(), as_json, _show_device)  # nothing but the spec: the JSON is what --out saves
    if out is not None:
        found.save(out)
        typer.echo(f"The spec lies in {out}", err=True)


@_command("kernels", "foretune bench kernels --json", into=bench)
def bench_kernels(
    family: Annotated[str | None, typer.Option(help="Only this family.", show_default="all")] = None,
    only: Annotated[str, typer.Option(help="Only problems whose name contains this, as in 'training'.")] = "",
    data: Annotated[str, typer.Option(help="Dataset folder or shipped name: who knows the best configs.")] = SHIPPED,
    bundle: Annotated[Path | None, typer.Option(help="Who predicts.", show_default="the shipped bundle")] = None,
    as_json: AsJson = False,
) -> None:
    """Time the grouped GEMMs on this machine's GPU next to torch._grouped_mm, cuBLAS and the card's limits.

    Over a suite of real layers from decode to training, each at its best known config and at the predicted one.
    """
    from .collect import versus
    from .datasets import load, load_models
    from .kernels import families
    from .kernels import family as find
    from .kernels.grouped_gemm.suite import suite
    from .model import load_bundle
    from .runtime.timing.device_rates import measured

    device = _live()
    if device is None:
        raise ForetuneError("no GPU is visible here: there is nothing to bench kernels on")
    kernels = [find(family)] if family else list(families().values())
    models = load_models()
    suites = {
        kernel: {name: case for name, case in suite(kernel.name, models).items() if only in name} for kernel in kernels
    }
    if not any(suites.values()):
        raise ForetuneError(f"no problem of the suite has {only!r} in its name; there are decode, mid and training")
    with _status("measuring the card") as say:
        device = measured(device)
        rows = versus.compare(
            suites,
            device,
            load(data),
            None if bundle is None else load_bundle(bundle),
            on_row=lambda row: say(f"{row.family} {row.name}"),
        )
        path = versus.launch_path(find(FAMILY), device)
    _emit(versus.as_json(rows, device, path), as_json, _show_bench)


@_command("datasets", "foretune datasets --json")
def datasets(
    name: Annotated[str | None, typer.Argument(help="One shipped name or folder.", show_default="all shipped")] = None,
    as_json: AsJson = False,
) -> None:
    """List the measurements that are shipped, or describe one dataset."""
    from .datasets import load, names
    from .kernels import families
    from .model import check_sources

    listed = [load(one) for one in ([name] if name else names())]
    for dataset in listed:
        for known in families().values():
            check_sources(dataset, known)
    _emit([dataset.describe() for dataset in listed], as_json, _show_datasets)


@_command("export", "foretune export h200 --format csv --out h200.csv")
def export(
    data: Annotated[str, typer.Argument(metavar="DATA", help="Dataset folder, or the name of a shipped one.")],
    out: Annotated[Path, typer.Option(help="The file to write.")],
    format: Annotated[str, typer.Option(help="t4, the autotuning community's JSON (schema 1.0.0), or csv.")],
    family: Annotated[str | None, typer.Option(help="Only this family.", show_default="all in the data")] = None,
    problem: Annotated[
        int | None, typer.Option(min=0, help="Only this one, counted from 0. T4 tools expect one.", show_default="all")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write measurements in a format that other tools read."""
    from .datasets import load
    from .datasets.export import export as write

    with _status(f"writing {out}"):
        results = write(load(data), out, format, family=family, problem=problem)
    _emit({"out": str(out), "format": format, "results": results}, as_json, _show_exported)


# What a command needs besides the floors: values from text, one way each.


def _seconds(text: str | None) -> float | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    if not match or not float(match[1]):
        raise typer.BadParameter(f"{text!r} is not a duration such as 90s, 20m or 1h", param_hint="--budget")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]


def _integers(text: str | None, option: str) -> tuple[int, ...] | None:
    if text is None:
        return None
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        raise typer.BadParameter(f"{text!r} is not a list of counts such as 32,64,96", param_hint=option)
    return tuple(int(part) for part in text.split(","))


def _gpus(text: str) -> int | None:
    """A number of GPUs; None for all."""
    if text == "all":
        return None
    if not re.fullmatch(r"[1-9]\d*", text):
        raise typer.BadParameter(f"{text!r} is neither a number of GPUs nor all", param_hint="--gpus")
    return int(text)


def _dimensions(arguments: Sequence[str], family: Family) -> dict[str, int]:
    """`--rows 8192 --n=2048` as numbers, if they are the family's dimensions, each once."""
    wanted = " ".join(f"--{dim} N" for dim in family.dims)
    parts = [part for argument in arguments for part in argument.split("=", 1)]
    dims: dict[str, int] = {}
    for option, value in zip(parts[::2], [*parts[1::2], ""], strict=False):
        dim = option.removeprefix("--")
        if dim not in family.dims or dim == option or dim in dims:
            raise typer.BadParameter(f"{option!r} is unknown or given twice; {family.name} takes {wanted}")
        if not value.isdecimal():
            raise typer.BadParameter(f"must be an integer >= 0 but got {value!r}", param_hint=option)
        dims[dim] = int(value)
    if missing := [f"--{dim}" for dim in family.dims if dim not in dims]:
        raise typer.BadParameter(f"{' '.join(missing)} missing; {family.name} takes {wanted}")
    return dims


def _live() -> DeviceSpec | None:
    from .datasets import DeviceSpec

    try:
        return DeviceSpec.live()
    except ForetuneError:
        return None


def _families(dataset: Dataset, only: str | None = None) -> dict[str, Family]:
    from .kernels import family

    return {name: family(name) for name in ([only] if only else dataset.families)}


def _prediction(chosen: Shortlist, device: str) -> dict[str, Any]:
    if not chosen.predicted:  # then it holds every config, in no order that means anything
        raise ForetuneError(chosen.reason)
    ranked = zip(chosen.configs, chosen.predicted_slowdown, strict=True)
    return {
        "shortlist": [
            {"config": config.to_json(), "predicted_slowdown": round(float(slowdown), 4)} for config, slowdown in ranked
        ],
        "device": device,
        "reason": chosen.reason,
    }


# How results look to a person.


def _emit(result: Any, as_json: bool, show: Callable[[Any], None]) -> None:
    if as_json:
        typer.echo(json.dumps(result, indent=1))
    else:
        show(result)


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*map(str, row))
    console = Console()
    if not console.is_terminal:
        console.width = 200  # a file has no edge to wrap at
    console.print(table)


@contextmanager
def _status(text: str) -> Iterator[Callable[[str], None]]:
    from rich.console import Console

    with Console(stderr=True).status(text) as status:
        yield status.update


@contextmanager
def _bar() -> Iterator[Callable[[Progress], None]]:
    """Shows a campaign's progress: a bar on a terminal, else one line a problem, for logs."""
    from rich import progress as rich
    from rich.console import Console

    console = Console(stderr=True)
    columns = (rich.TextColumn("{task.description}"), rich.BarColumn(), rich.MofNCompleteColumn())
    with rich.Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=None)

        def show(now: Progress) -> None:
            eta = "?" if now.eta_s is None else f"{now.eta_s / 60:.0f} min"
            text = f"{now.case.problem} · {now.rate_per_s:.0f} configs/s · {eta} left"
            bar.update(task, description=text, completed=now.done, total=now.total)
            if not console.is_terminal:
                console.print(f"{now.done}/{now.total} {text}", soft_wrap=True)

        yield show


def _show_quickstart(result: Mapping[str, Any]) -> None:
    _show_evaluation(result["evaluation"])
    problem = " ".join(f"{name}={size}" for name, size in result["prediction"]["problem"]["dims"].items())
    typer.echo(f"\nAn example layer: {problem}")
    _show_prediction(result["prediction"])
    typer.echo(f"One prediction over the whole space takes {result['prediction_ms']} ms on one core.")
    if ways := result["first_call"]:
        columns = ("label", "declared", "benchmarked", "first_call_s", "time_us")
        rows = [[f"{way[name]:.1f}" if name.endswith("s") else way[name] for name in columns] for way in ways]
        _table("That layer on this machine's GPU, tuned from cold", columns, rows)
    typer.echo(f"\nThe bundle lies in {result['bundle']}")


def _show_summary(result: Mapping[str, Any]) -> None:
    statuses = ", ".join(f"{count} {status}" for status, count in result["statuses"].items()) or "none"
    typer.echo(
        f"{result['cases']} problems in {result['seconds']:.0f} s, {result['plan']} plan; measurements: {statuses}"
    )
    typer.echo(
        f"{result['configs_per_s']:.0f} configs/s; GPUs: {result['gpus']}, busy {100 * result['gpu_busy_share']:.0f} % "
        f"of the time; {result['compile_s']:.0f} s of compiling, {result['lost_s']:.0f} s lost to aborts"
    )
    for problem in result["skipped"]:
        typer.echo(f"Skipped {problem}")
    for problem, slowdown in result["drifted"].items():
        typer.echo(f"The GPU was up to {_percent(slowdown)} % slower than usual during {problem}")
    if result["interrupted"]:
        typer.echo("Interrupted.")
    if not result["complete"]:
        typer.echo("Some problems are not measured yet: run the same command again to go on.")
    typer.echo(f"The dataset lies in {result['out']}")


def _show_trained(result: Mapping[str, Any]) -> None:
    typer.echo(f"Trained {', '.join(result['families'])}. The bundle lies in {result['bundle']}")


def _show_evaluation(result: Mapping[str, Any]) -> None:
    for name, family in result["families"].items():
        regret, ks = family["regret"], list(family["regret"])
        rows = [["foretune", *(_percent(regret[k]["geomean"]) for k in ks)]]
        rows += [["  95 % interval", *(" - ".join(map(_percent, regret[k]["ci95"])) for k in ks)]]
        rows += [[f"  {key}", *(_percent(regret[k][key]) for k in ks)] for key in ("p95", "max")]
        devices = family["regret_by_device"] if len(family["regret_by_device"]) > 1 else {}
        for apart, part in (family["regret_by_origin"] | devices).items():
            label = f"  {apart} only ({part['problems']}, noise {_percent(part['noise_floor'])} %)"
            rows += [[label, *(_percent(part["regret"][k]["geomean"]) for k in ks)]]
        rows += [["  group sizes unknown", *(_percent(family["regret_sizes_unknown"][k]["geomean"]) for k in ks)]]
        for baseline, curve in family["baselines"].items():
            rows += [[baseline, *(_percent(curve[k]["geomean"]) for k in ks)]]
        noise = _percent(family["noise_floor"])
        _table(
            f"{name}: % slower than the best config that was tried ({100 * family['tried']:.0f} % of them were), "
            f"over {family['problems']} problems (noise {noise} %)",
            ("best of first", *ks),
            rows,
        )


def _show_replay(result: Mapping[str, Any]) -> None:
    for name, family in result["families"].items():
        ks = list(family["everything"]["regret"])
        rows = []
        for label, key in (("everything", "everything"), ("the plan", "planned")):
            one = family[key]
            configs, measurements = (f"{100 * one[share]:.1f} %" for share in ("configs", "measurements"))
            label = f"{label}: {configs} of the configs, {measurements} of the measurements"
            rows += [[label, *(_percent(one["regret"][k]["geomean"]) for k in ks)]]
            rows += [["  group sizes unknown", *(_percent(one["regret_sizes_unknown"][k]["geomean"]) for k in ks)]]
        for label, key in (("the plan loses", "regret"), ("  group sizes unknown", "regret_sizes_unknown")):
            ratio = family["ratio"][key]
            rows += [[label, *(_percent(ratio[k]["geomean"]) for k in ks)]]
            rows += [["  95 % interval", *(" - ".join(map(_percent, ratio[k]["ci95"])) for k in ks)]]
        noise = _percent(family["noise_floor"])
        _table(
            f"{name}: % slower than the best config, over {family['problems']} problems (noise {noise} %)",
            ("best of first", *ks),
            rows,
        )


def _percent(ratio: float) -> str:
    return f"{(ratio - 1) * 100:.1f}"


def _show_prediction(result: Mapping[str, Any]) -> None:
    listed = result["shortlist"]
    knobs = [knob for knob in dict.fromkeys(knob for entry in listed for knob in entry["config"]) if knob != "num_ctas"]
    rows = [
        [f"{entry['predicted_slowdown']:.3f}x", *(entry["config"].get(knob, "") for knob in knobs)] for entry in listed
    ]
    _table(f"Predicted fastest on {result['device']}", ("slowdown", *knobs), rows)
    typer.echo(result["reason"])


def _show_device(result: Mapping[str, Any]) -> None:
    rates = {f"matrix_tflops, {dtype}": rate for dtype, rate in result.get("matrix_tflops_by_dtype", {}).items()}
    rows = [[name, value] for name, value in (dict(result) | rates).items() if not isinstance(value, Mapping)]
    _table(result["name"], ("", "value"), rows[1:])


def _show_exported(result: Mapping[str, Any]) -> None:
    typer.echo(f"{result['results']} results lie in {result['out']}")


def _show_bench(result: Mapping[str, Any]) -> None:
    columns = ("best_us", "predicted_us", "torch_us", "dense_us", "unfused_us", "separate_us", "roofline_us")
    rows = [
        [row["family"], row["name"], *("" if row[name] is None else f"{row[name]:.1f}" for name in columns)]
        for row in result["rows"]
    ]
    _table(f"Kernel time on {result['device']['name']}, us", ("family", "problem", *columns), rows)
    goals = [[g["goal"], g["aim"], g["figure"], "yes" if g["met"] else "NO", g["worst"]] for g in result["goals"]]
    _table("Goals", ("goal", "aim", "reached", "met", "worst"), goals)
    path = result["launch_path"]
    typer.echo(
        f"A hot call of the op takes {path['op_us']:.1f} us of the host, a bare launch of its kernel "
        f"{path['bare_us']:.1f} us: {path['ratio']:.2f}x"
    )


def _show_datasets(listed: Sequence[Mapping[str, Any]]) -> None:
    rows = [
        [
            one["name"],
            name,
            device,
            there["problems"],
            family["configs"],
            there["measurements"],
            ", ".join(family["plans"]),
        ]
        for one in listed
        for name, family in one["families"].items()
        for device, there in family["devices"].items()
    ]
    columns = ("name", "family", "device", "problems", "configs", "measurements", "plan")
    _table("Datasets", columns, rows)
    for one in listed:
        if one["ignored"]:
            typer.echo(f"{one['name']}: ignored half-written parts: {', '.join(one['ignored'])}")


if __name__ == "__main__":
    main()
