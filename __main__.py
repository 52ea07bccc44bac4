"""The command line: each command parses, calls a floor and prints. Results render themselves: tables go to stdout,
progress to stderr.

Exit codes: 0 done; 1 bad input or a failed run, with one line that names it, or nobody reads what is printed; 2 wrong
usage; 130 ended by Ctrl-C. With --json, stdout has {"error": ...} for all of them but 0.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, Protocol, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from . import __version__
from .datasets import ForetuneError
from .datasets.console.numbers_from_text import duration_s, number, span, whole_number, whole_numbers
from .datasets.console.progress_bar import showing
from .datasets.console.tables import printable
from .datasets.errors import MOST, abridged
from .datasets.progress import share_of

if TYPE_CHECKING:
    from .collect.replay import Replay
    from .datasets import DeviceSpec, Family, Measurable, Problem
    from .datasets.dataset import Dataset
    from .model.bundle import Bundle
    from .model.evaluation import Evaluation

P = ParamSpec("P")
T = TypeVar("T")

#: What typer raises for wrong usage: its own copy of click's UsageError, or click's, by its version.
WrongUsage: type[Exception] = typer.BadParameter.__mro__[1]
#: Seconds that a command takes for each measurement, on two cores of 2026: what is said beforehand.
#: The layer that examples are about.
_EXAMPLE: dict[str, Any] = {"groups": 64, "rows": 8192, "n": 2048, "k": 1024}
_QUICKSTART_S, _TRAINING_S, _EVALUATING_S, _JUDGING_S, _REPLAYING_S = 1e-4, 5e-5, 2.5e-4, 5e-5, 8e-4
_CURVE_S = 6e-5
_EXPORTING_S = {"csv": 4e-6, "t4": 6e-5}
#: The exit code after Ctrl-C, as shells have it.
INTERRUPTED = 130
#: Where a context keeps the words of the command line.
GIVEN = "foretune.given"


class Commands(TyperGroup):
    """The whole command line: how a command ends that does not just end."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[GIVEN] = tuple(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        given = ctx.meta[GIVEN]
        try:
            _refuse_empty(given)
            with warnings.catch_warnings():
                warnings.showwarning = _show_warning
                return super().invoke(ctx)
        except WrongUsage as error:  # typer says it, and ends with 2
            _say_error(error.format_message() if hasattr(error, "format_message") else str(error), given)
            raise
        except BrokenPipeError:  # as `| head` does: typer ends with 1, and says nothing
            raise
        except (ForetuneError, OSError) as error:
            _say_error(str(error), given)
            typer.echo(f"Error: {printable(str(error))}", err=True)
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            _say_error("interrupted", given)
            typer.echo("Interrupted.", err=True)
            raise typer.Exit(INTERRUPTED) from None


class PredictCommand(TyperCommand):
    """Its help, asked for with a family, says what that family takes."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        for word in ctx.meta[GIVEN]:
            if word != self.name and not word.startswith("-"):
                with suppress(ForetuneError):
                    typer.echo(f" {_taken(_family(word))}\n")


def _refuse_empty(given: Sequence[str]) -> None:
    """An unset shell variable leaves an empty word, and nothing here has a use for one."""
    for before, word in zip(("", *given), given, strict=False):
        option, equals, value = word.partition("=") if word.startswith("--") else (before, "=", word)
        if equals and not value.strip():
            where = option if option.startswith("-") else "an argument"
            raise typer.BadParameter("is empty: is a shell variable unset?", param_hint=where)


def _say_error(text: str, given: Sequence[str]) -> None:
    if "--json" in given:
        with suppress(OSError):  # it may be stdout that cannot be written
            typer.echo(json.dumps({"error": text}))


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"foretune {__version__}")
        raise typer.Exit


def _family_names(incomplete: str) -> list[str]:
    from .kernels import families

    return [name for name in families() if name.startswith(incomplete)]


def _dataset_names(incomplete: str) -> list[str]:
    from .datasets import names

    return [name for name in names() if name.startswith(incomplete)]


def _device_names(incomplete: str) -> list[str]:
    from .datasets import DeviceSpec

    return [name for name in DeviceSpec.names() if name.startswith(incomplete)]


app = typer.Typer(cls=Commands, help="Know the fast configs of a Triton kernel before you tune.", no_args_is_help=True)
bench = typer.Typer(help="Measure kernels next to what people have.", no_args_is_help=True)
app.add_typer(bench, name="bench")
datasets = typer.Typer(help="List, describe, merge and seal datasets.", invoke_without_command=True)
app.add_typer(datasets, name="datasets")
cache = typer.Typer(help="Show, clear, carry and freeze what tuning remembers.", no_args_is_help=True)
app.add_typer(cache, name="cache")

#: More than any machine has.
MOST_GPUS, MOST_SMS = 1024, 10_000
SHIPPED = "h200"  # the dataset that quickstart and evaluate take where none is named
SHIPPED_BUNDLE = "shipped"  # what `train --keep` calls it
FAMILY = "grouped_gemm_fwd"
GROUPED_GEMMS = (FAMILY, "grouped_gemm_dx", "grouped_gemm_dw")


def _read(read: Callable[..., T], *bounds: float) -> Callable[[Any], T]:
    """What makes an option's value from its text, or says what would be right."""

    def parse(text: Any) -> T:  # a default is a number already
        try:
            return read(str(text), *bounds)
        except ForetuneError as error:
            raise typer.BadParameter(str(error)) from None

    return parse


def _count(help: str, low: int, high: int, **settings: Any) -> Any:
    """An option that is a whole number."""
    return typer.Option(help=help, parser=_read(whole_number, low, high), metavar=f"{low}..{high}", **settings)


def _length(text: Any) -> Any:
    """A shortlist's length from an option's text."""
    return "auto" if text == "auto" else _read(whole_number, 1, MOST)(text)


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON to stdout instead of tables.")]
FamilyName = Annotated[
    str,
    typer.Argument(
        metavar="FAMILY",
        help=f"A kernel family, as {FAMILY}, or package.module:attribute.",
        autocompletion=_family_names,
    ),
]
OnlyFamilies = Annotated[
    list[str] | None,
    typer.Option(
        help="Only this family, as for collect; may be repeated.",
        show_default="all in the data",
        autocompletion=_family_names,
    ),
]
Data = Annotated[
    list[str] | None,
    typer.Option(
        help="Dataset folder or shipped name; may be repeated.", show_default=SHIPPED, autocompletion=_dataset_names
    ),
]
OneDataset = Annotated[
    str,
    typer.Argument(metavar="DATA", help="Dataset folder, or the name of a shipped one.", autocompletion=_dataset_names),
]


OneKernel = Annotated[
    str | None,
    typer.Argument(
        metavar="[KERNEL]",
        help="Only this kernel or function, as `cache show` calls it.",
        show_default="all that are remembered",
    ),
]


class Result(Protocol):
    """What a command prints: a JSON value, and something that rich can print."""

    def to_json(self) -> Any: ...


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


@app.callback()
def command_line(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Know the fast configs of a Triton kernel before you tune."""


def _command(
    name: str, example: str, into: typer.Typer = app, **settings: Any
) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Registers a command."""
    return into.command(name, epilog=f"Example: {example}", **settings)


def _show_warning(message: Warning | str, *where: object, **more: object) -> None:
    """One line, without the place in the code that a person at a terminal cannot do anything about."""
    typer.echo(f"Warning: {printable(str(message))}", err=True)


@_command("quickstart", "foretune quickstart")
def quickstart(
    out: Annotated[
        Path | None, typer.Option(help="Folder for the bundle.", show_default="~/.cache/foretune/quickstart")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train on the shipped H200 measurements and see what the ranker is worth, without a GPU.

    Prints how far off its choices are on models it never saw, next to simpler choices, and the shortlist of
    an example layer. With a GPU and torch it also tunes that layer there, with and without the shortlist.
    """
    from .datasets import DeviceSpec, Problem, load
    from .kernels.grouped_gemm.contenders import autotuned
    from .model.folders import check_bundle_folder
    from .runtime.quickstart import run_quickstart

    out = out or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "foretune" / "quickstart"
    check_bundle_folder(out)
    problem, family = Problem.of(FAMILY, **_EXAMPLE), _measurable(FAMILY)
    device, dataset = DeviceSpec.named(SHIPPED), load(SHIPPED)
    rows = len(dataset.rows(family.name))
    with showing("training", _QUICKSTART_S * rows) as say:
        result = run_quickstart(family, problem, dataset, device, out, gpu=_live(), autotuned=autotuned, say=say)
    _emit(result, as_json)


@_command("collect", f"foretune collect {FAMILY} --models models.csv --out measured --budget 20m")
def collect(
    family: Annotated[
        list[str],
        typer.Argument(
            metavar="FAMILY...",
            help=f"Kernel families, as {FAMILY}, or package.module:attribute.",
            show_default=False,
            autocompletion=_family_names,
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
    budget: Annotated[
        float | None,
        typer.Option(
            help="Stop in time, for example 90s, 20m or 1h.",
            parser=_read(duration_s),
            metavar="DURATION",
            show_default="none",
        ),
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(help="Token counts, as in 16,256,4096.", show_default="16 ... 65536")
    ] = None,
    per_layer: Annotated[int, _count("Problems of each distinct layer shape.", 0, 100)] = 2,
    random: Annotated[int, _count("Random shapes besides the models' layers.", 0, 10_000)] = 40,
    invented: Annotated[
        int | None, _count("Layers of models that nobody has made, if the family can.", 0, 10_000, show_default="none")
    ] = None,
    seed: Annotated[int, _count("Draws other problems.", 0, MOST)] = 0,
    plan: Annotated[
        str,
        typer.Option(
            help="exhaustive: all configs of each problem; adaptive: a tenth, which a model learns to choose; thin: an "
            "eighth, which a bundle chooses."
        ),
    ] = "exhaustive",
    max_tflop: Annotated[
        float | None,
        typer.Option(
            help="Only problems of so many TFLOP: fewer for a small GPU.",
            parser=_read(number, 0.0, 1e6),
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
            autocompletion=_dataset_names,
        ),
    ] = None,
    limit: Annotated[
        int | None, _count("At most so many problems of each family.", 1, MOST, show_default="all")
    ] = None,
    resume: Annotated[bool, typer.Option(help="Continue an earlier run, or refuse a folder that has one.")] = True,
    as_json: AsJson = False,
) -> None:
    """Measure kernels' config spaces, on this machine's GPUs or a cluster's.

    Killed or interrupted, it goes on when run again.
    """
    gpu_count = None if gpus == "all" else _given("--gpus (a number, or all)", whole_number, gpus, 1, MOST_GPUS)
    token_counts = None if tokens is None else _given("--tokens", whole_numbers, tokens)
    parts = _given("--sms", whole_numbers, ",".join(sms), 1, MOST_SMS) if sms else ()
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

    kernels = [_measurable(name) for name in dict.fromkeys(family)]
    known = load(like) if like else None
    cases: list[Any] = []
    for kernel in kernels:
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
        cases += first_cases(kernel, (*compared, *shared, *drawn), limit, max_tflop=max_tflop)
    collected = (
        partial(campaign.collect_on_gpus, gpus=gpu_count, sms=tuple(dict.fromkeys(parts)))
        if scheduler is None
        else partial(dask_campaign.collect_on_cluster, scheduler=scheduler)
    )
    with showing_progress() as on_progress:
        summary = collected(kernels, cases, out, plan=plan, budget_s=budget, resume=resume, on_progress=on_progress)
    _emit(summary, as_json, out=out)
    if summary.interrupted:
        raise typer.Exit(INTERRUPTED)


@_command("train", "foretune train --data measured --data h200 --out my-bundle")
def train(
    data: Annotated[
        list[str],
        typer.Option(
            help="Dataset folder, or the name of a shipped one; may be repeated.", autocompletion=_dataset_names
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the bundle.")],
    family: OnlyFamilies = None,
    keep: Annotated[
        str | None,
        typer.Option(help=f"A bundle, or {SHIPPED_BUNDLE!r}: the families that are not trained now are taken from it."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train a bundle on measurements."""
    from .model import load_bundle
    from .model.folders import check_bundle_folder
    from .model.train import train_bundle

    check_bundle_folder(out)
    kept = None if keep is None else load_bundle(None if keep == SHIPPED_BUNDLE else keep)
    dataset = _load(data)
    families = _families(dataset, family)
    with showing(f"training on {' and '.join(data)}", _TRAINING_S * _rows(dataset, families)):
        trained = train_bundle(dataset, families)
    together = trained if kept is None else trained.beside(kept)
    together.save(out)
    others = [name for name in together.families if name not in trained.families]
    text = f"Trained {', '.join(trained.families)}." + f" Kept {', '.join(others)}." * bool(others)
    _emit(_Said({"families": list(together.families), "kept": others}, text), as_json, bundle=out)


@_command("adapt", "foretune adapt --data small --out my-bundle")
def adapt(
    data: Annotated[
        list[str],
        typer.Option(
            help="What was measured on the new card: a dataset folder; may be repeated.", autocompletion=_dataset_names
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the new bundle.")],
    bundle: Annotated[
        Path | None, typer.Option(help="The bundle to begin with.", show_default="the shipped bundle")
    ] = None,
    family: OnlyFamilies = None,
    as_json: AsJson = False,
) -> None:
    """Teach a bundle a card that it never saw, from a few measurements there and without its old ones.

    Five minutes are enough: `foretune collect FAMILY... --plan adaptive --budget 5m --out small`.
    """
    from .kernels.by_name import adapt as adapted_by_name
    from .model import load_bundle
    from .model.folders import check_bundle_folder

    check_bundle_folder(out)
    given, dataset = load_bundle(bundle), _load(data)
    families = family or [name for name in dataset.families if name in given.families]
    with showing(f"adapting to {' and '.join(data)}", _TRAINING_S * _rows(dataset, families)):
        adapted = adapted_by_name(dataset, bundle=given, family=families)
    adapted.save(out)
    known = sorted({spec.name for name in adapted.families for spec in adapted.trained_on(name)})
    said = {"families": sorted(set(families)), "devices": known}
    _emit(_Said(said, f"Adapted {', '.join(said['families'])}: knows {', '.join(known)}."), as_json, bundle=out)


@_command("evaluate", "foretune evaluate --data measured --bundle my-bundle --json")
def evaluate(
    data: Data = None,
    bundle: Annotated[
        Path | None, typer.Option(help="Judge this bundle as it is.", show_default="cross-validate")
    ] = None,
    split: Annotated[
        str, typer.Option(help="What cross-validation holds out: model families, each device, or the largest sizes.")
    ] = "model",
    baselines: Annotated[
        list[str] | None,
        typer.Option(
            help="What to compare with: fast, all, or a name: random, static, regimes (a static list for each), "
            "nearest, estimate, nvmatmulheuristics (of grouped GEMMs); 13 and 19 times as slow as our own: ck_tile, "
            "flagtune (the recipes of these projects). May be repeated.",
            show_default="fast",
            metavar="fast|all|NAME",
        ),
    ] = None,
    jobs: Annotated[int, _count("Folds that are trained and judged side by side.", 1, 256)] = 2,
    family: OnlyFamilies = None,
    max_regret1: Annotated[
        float | None,
        typer.Option(
            help="End with exit code 1 where a family's first choices are slower, as 0.02 for 2 %: geometric mean, "
            "ragged sizes known.",
            parser=_read(number, 0.0, 1000.0),
            metavar="0..1000",
            show_default="none",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print regret@k: how much slower the best of the first k choices runs than the best config there is.

    With a bundle, that bundle is judged as it is, and a warning says where it was trained on the data. Without one, new
    ones are trained and judged, each on the layers of models it never saw; with --split device, on a device it never
    saw; with --split size, on sizes above those it saw. Below the table: how often a shortlist of k="auto" holds a good
    config, and how long it is.
    """
    if bundle is not None and split != "model":
        raise typer.BadParameter("a bundle is judged as it is: nothing is split", param_hint="--split")

    from .kernels.comparisons import baselines_of
    from .model import load_bundle
    from .model.baselines import choose_rivals
    from .model.evaluate import cross_validate, evaluate_bundle

    given = None if bundle is None else load_bundle(bundle)
    names = ",".join(baselines or ["fast"]).split(",")
    with showing(f"loading {' and '.join(data or [SHIPPED])}"):
        dataset = _load(data)
        kernels = _judged(dataset, family, given)
        rivals = {name: choose_rivals(names, baselines_of(kernel)) for name, kernel in kernels.items()}
    what, row_s = ("judging the bundle", _JUDGING_S) if given else (f"training and judging, by {split}", _EVALUATING_S)
    row_s += _EVALUATING_S * max(chosen.cost for chosen in rivals.values())

    def judge(kernel: Family) -> Evaluation:
        chosen = rivals[kernel.name]
        if given:
            return evaluate_bundle(dataset, given, kernel, rivals=chosen, jobs=jobs)
        return cross_validate(dataset, kernel, split=split, rivals=chosen, jobs=jobs)

    judged = _for_each(judge, dataset, kernels, what, row_s)
    if max_regret1 is None:
        _emit(judged, as_json)
        return
    short = {
        name: regret1
        for name, one in judged.families.items()
        if (regret1 := one.to_json()["regret"]["1"]["geomean"] - 1) > max_regret1
    }
    named = ", ".join(f"{name} {100 * regret1:.2f} %" for name, regret1 in short.items())
    error = f"regret@1 must be at most {100 * max_regret1:g} % but is: {named}" if short else None
    _emit(_Held(judged, max_regret1, error), as_json)
    if error is not None:
        typer.echo(f"Error: {printable(error)}", err=True)
        raise typer.Exit(1)


@_command("report", "foretune report --data measured --bundle my-bundle --out report.html")
def report(
    out: Annotated[Path, typer.Option(help="The HTML file to write.")],
    data: Data = None,
    bundle: Annotated[
        Path | None, typer.Option(help="Judge this bundle as it is.", show_default="cross-validate")
    ] = None,
    plots: Annotated[
        Path | None, typer.Option(help="Folder for each figure as an SVG file.", show_default="none")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Without the learning curve, for which more is trained.")
    ] = False,
    family: OnlyFamilies = None,
    as_json: AsJson = False,
) -> None:
    """Write one HTML file on how good the shortlists are, for people to look at: what `evaluate` prints, drawn.

    Regret beside the baselines and by shape and device, the learning curve, what the trees look at, calibration, the
    slowest first choices. The file needs no network. Takes `foretune[report]`.
    """
    from .datasets.disk.writable import check_file, check_folder
    from .model import load_bundle
    from .model.report import check_installed, make_report

    check_installed()
    check_file(out)
    if plots is not None:
        check_folder(plots)
    given = None if bundle is None else load_bundle(bundle)
    dataset = _load(data)
    kernels = _judged(dataset, family, given)
    row_s = (_JUDGING_S if given else _EVALUATING_S) + (0.0 if quick else _CURVE_S)
    with showing("training and judging" if given is None else "judging the bundle", row_s * _rows(dataset, kernels)):
        made = make_report(dataset, kernels, given, quick=quick)
    made.save(out)
    places = {"out": out}
    if plots is not None:
        made.save_plots(plots)
        places["plots"] = plots
    _emit(made, as_json, **places)


@_command("replay", "foretune replay --data h200 --share 0.1")
def replay(
    data: Data = None,
    share: Annotated[
        float,
        typer.Option(
            help="Share of the configs that the plan tries on each problem.",
            parser=_read(number, 0.001, 1.0),
            metavar="0.001..1",
        ),
    ] = 0.09,
    family: OnlyFamilies = None,
    as_json: AsJson = False,
) -> None:
    """Show what measuring by the adaptive plan is worth, on data that were measured exhaustively. Needs no GPU.

    Cross-validates a ranker that learns from what the plan would have measured beside one that learns from everything.
    """
    from .collect.plan import Adaptive
    from .collect.replay import replay_plan

    dataset, adaptive = _load(data), partial(Adaptive, share=share)

    def replayed(kernel: Family) -> Replay:
        return replay_plan(dataset, kernel, adaptive)

    what = "measuring by the plan, training and judging"
    _emit(_for_each(replayed, dataset, _families(dataset, family), what, _REPLAYING_S), as_json)


@_command(
    "predict",
    f"foretune predict {FAMILY} --device h200 --groups 64 --rows 8192 --n 2048 --k 1024 --top 4",
    cls=PredictCommand,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},  # a family's own dimensions
)
def predict(
    context: typer.Context,
    family: FamilyName,
    device: Annotated[
        str | None,
        typer.Option(
            help="A shipped device, for example h200, or a spec's JSON file.",
            show_default="this GPU",
            autocompletion=_device_names,
        ),
    ] = None,
    top: Annotated[
        str,
        typer.Option(
            help="Length of the shortlist; auto: as many as hold one within 1 % of the best in 95 % of cases.",
            parser=_length,
            metavar=f"auto or 1..{MOST}",
        ),
    ] = "auto",
    expected_calls: Annotated[
        float | None,
        typer.Option(
            help="As many configs as pay for themselves over so many calls.",
            parser=_read(number, 0.0, 1e18),
            metavar="CALLS",
        ),
    ] = None,
    call_us: Annotated[
        float | None,
        typer.Option(
            help="How long one call takes, in microseconds, for --expected-calls.",
            show_default="what the family estimates",
            parser=_read(number, 0.0, 1e12),
            metavar="US",
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Element type, one of the family's.", show_default="the family's first")
    ] = None,
    bundle: Annotated[Path | None, typer.Option(help="A bundle of `foretune train`.", show_default="shipped")] = None,
    as_json: AsJson = False,
) -> None:
    """Print the configs predicted to be fastest for one shape. Needs no GPU.

    The family's dimensions are options of their own (a grouped GEMM has --groups, --rows, --n and --k), and so are its
    flags, without a value: `foretune predict FAMILY --help` lists them.
    """
    from .datasets import DeviceSpec, ForetuneWarning
    from .model import load_bundle
    from .runtime import make_shortlist

    kernel = _family(family)
    problem = _problem(context.args, kernel, dtype)
    spec = DeviceSpec.find(device) if device is not None else _this_gpu()
    with warnings.catch_warnings():  # what a launch is only warned of is the answer here
        warnings.simplefilter("ignore", ForetuneWarning)
        chosen = make_shortlist(
            kernel,
            problem,
            spec,
            k=top,  # type: ignore[arg-type]  # the parser made it a number, or left it "auto"
            expected_calls=expected_calls,
            call_us=call_us,
            bundle=load_bundle(bundle),
        )
    if not chosen.predicted:  # then it holds every config, in no order that means anything
        raise ForetuneError(f"{chosen.reason}; a launch there has {len(chosen.configs)} configs go through")
    _emit(chosen, as_json)


@_command(
    "cover",
    f"foretune cover {FAMILY} --dynamic rows --range 64:4096 --device h200 --groups 64 --n 2048 --k 1024",
    cls=PredictCommand,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},  # as above
)
def cover(
    context: typer.Context,
    family: FamilyName,
    dynamic: Annotated[str, typer.Option(help="The dimension whose size is only known at run time.")],
    sizes: Annotated[
        Any,
        typer.Option("--range", help="Its smallest and largest size.", parser=_read(span), metavar="LOW:HIGH"),
    ],
    configs: Annotated[int, _count("How many configs.", 1, 16)] = 3,
    ranges: Annotated[int, _count("Ranges of sizes at most: so often is a dynamic graph compiled.", 1, 256)] = 8,
    device: Annotated[
        str | None,
        typer.Option(
            help="A shipped device, or a spec's JSON file.", show_default="this GPU", autocompletion=_device_names
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Choose by the times in this dataset (a folder or shipped name).",
            show_default="by predicted times",
            autocompletion=_dataset_names,
        ),
    ] = None,
    hints: Annotated[
        str | None,
        typer.Option(
            help="With --data: what the config that is best at each of these sizes, as 64,256,4096, loses at all "
            "others, beside the covers predicted and measured.",
            show_default="none",
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Element type, one of the family's.", show_default="the family's first")
    ] = None,
    bundle: Annotated[Path | None, typer.Option(help="A bundle of `foretune train`.", show_default="shipped")] = None,
    as_json: AsJson = False,
) -> None:
    """Print the few configs that together lose least over a range of a dynamic dimension, and which runs when.

    The family's other dimensions and its flags are options of their own, as for predict. Needs no GPU.
    """
    from .datasets import load
    from .kernels.by_name import cover as covered
    from .runtime.covering import make_hint_matrix

    if hints is not None and data is None:
        raise typer.BadParameter("what a hint loses is measured: give --data", param_hint="--hints")
    kernel = _family(family)
    if dynamic not in kernel.dims:
        raise typer.BadParameter(
            f"{abridged(dynamic, 60)!r} is not one of {', '.join(kernel.dims)}", param_hint="--dynamic"
        )
    problem = _problem([*context.args, f"--{dynamic}", str(sizes[0])], kernel, dtype)
    spec = device if device is not None else _this_gpu()
    with showing(f"covering {dynamic} from {sizes[0]} to {sizes[1]}"):
        found: Result
        if hints is not None and data is not None:
            at = _given("--hints", whole_numbers, hints)
            found = make_hint_matrix(
                kernel, problem, dynamic, sizes, configs, spec, load(data), hints=at, ranges=ranges, bundle=bundle
            )
        else:
            found = covered(
                kernel, problem, dynamic, sizes, configs, device=spec, ranges=ranges, data=data, bundle=bundle
            )
    _emit(found, as_json)


@_command("warmup", f"foretune warmup {FAMILY} --shapes shapes.csv")
def warmup(
    family: Annotated[
        str,
        typer.Argument(
            metavar="FAMILY",
            help="A kernel family's name, its package.module:attribute, or a package whose kernels were tuned.",
            autocompletion=_family_names,
        ),
    ],
    shapes: Annotated[
        Path | None, typer.Option(help="CSV file of problems: a column for each dimension; dtype and flags if need be.")
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(help="Dataset folder, for example a FORETUNE_LOG, whose problems to take; may be repeated."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="A shipped device, or a spec's JSON file.", show_default="this GPU", autocompletion=_device_names
        ),
    ] = None,
    top: Annotated[int, _count("Configs to compile for each problem, the fastest by prediction.", 1, MOST)] = 1,
    as_json: AsJson = False,
) -> None:
    """Compile what a run will ask for, into Triton's cache (TRITON_CACHE_DIR), before it does. Launches nothing: with
    --device it needs no GPU.

    Of a family, the predicted configs of these problems. Of a package or package.module.kernel, without problems, what
    `attach` and `foretune.autotune` have tuned there: see `cache show`.
    """
    from .datasets import DeviceSpec
    from .kernels import families
    from .runtime import use_stub_driver
    from .runtime.tuning.warmup import problems_from_csv, warm_up, warm_up_seen

    has_problems = shapes is not None or bool(data)
    if has_problems or family in families() or ":" in family:
        kernel = _measurable(family)
        if not has_problems:
            raise typer.BadParameter("say which problems, with --shapes or --data", param_hint="--shapes")
        problems = [] if shapes is None else problems_from_csv(shapes, kernel)
        if data:
            measured = (case.problem for case in _load(data).cases)
            problems += [one for one in measured if one.family == kernel.name and one not in problems]
        what, compiled = f"for {len(problems)} problems", partial(warm_up, kernel, problems, k=top)
    else:
        what, compiled = f"what was tuned of {abridged(family, 60)}", partial(warm_up_seen, family)
    spec = DeviceSpec.find(device) if device is not None else _this_gpu()
    with showing(f"compiling {what}"), use_stub_driver(spec) if device else nullcontext():
        warmed = compiled(device=spec)
    _emit(warmed, as_json)
    if warmed.failed and not warmed.binaries:
        raise ForetuneError(f"nothing could be compiled: {warmed.failed[0]}")


@_command("device", "foretune device --out my-gpu.json")
def device(
    spec: Annotated[
        str | None,
        typer.Argument(
            metavar="[DEVICE]",
            help="A shipped device or a spec's JSON file, to show as it is.",
            show_default="this GPU",
            autocompletion=_device_names,
        ),
    ] = None,
    sms: Annotated[int | None, _count("Only so many of its SMs, as a device.", 1, MOST_SMS, show_default="all")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file to save the spec in, for --device elsewhere.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print what this machine's GPU is to a kernel: its limits, and the rates that it reaches, measured now.

    A device that is named is shown as it is; with --sms, by the rule that partitions of it go by.
    """
    from .datasets import DeviceSpec
    from .datasets.disk.writable import check_file
    from .runtime import sm_partition
    from .runtime.timing.device_rates import measured

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
    _emit(found, as_json)  # nothing but the spec: the JSON is what --out saves


@_command("kernels", "foretune bench kernels --json", into=bench)
def bench_kernels(
    family: Annotated[
        list[str] | None,
        typer.Option(
            help="Only this family; may be repeated.", show_default="the grouped GEMMs", autocompletion=_family_names
        ),
    ] = None,
    only: Annotated[str, typer.Option(help="Only problems whose name contains this, as in 'training'.")] = "",
    against: Annotated[
        list[str] | None,
        typer.Option(
            help="Only next to this contender, as in 'cublas'; may be repeated.", show_default="all: some compile long"
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="Dataset folder or shipped name: who knows the best configs; may be repeated.",
            show_default="those shipped that have the families",
            autocompletion=_dataset_names,
        ),
    ] = None,
    bundle: Annotated[Path | None, typer.Option(help="Who predicts.", show_default="the shipped bundle")] = None,
    as_json: AsJson = False,
) -> None:
    """Time kernels on this machine's GPU next to what people have and to the card's limits.

    Grouped GEMMs: next to torch._grouped_mm and cuBLAS, over a suite of real layers from decode to training, each at
    its best known config and at the predicted one. Every family of Foretune's has such a suite, and contenders. Each
    problem is told on stderr when it is measured.
    """
    from .collect.compiling import compile_ahead
    from .datasets import describe, names
    from .datasets.errors import abridged
    from .kernels.comparisons import comparison_of
    from .model import load_bundle
    from .runtime.timing.compare import Row, compare_kernels
    from .runtime.timing.device_rates import measured

    gpu = _live()
    if gpu is None:
        raise ForetuneError("no GPU is visible here: there is nothing to bench kernels on")
    comparisons = {kernel: comparison_of(kernel) for kernel in map(_measurable, family or GROUPED_GEMMS)}
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
            _load(known) if known else None,
            None if bundle is None else load_bundle(bundle),
            only=only,
            against=against or (),
            compile_ahead=compile_ahead,
            on_row=told,
        )
    _emit(compared, as_json)


@_command("runtime", "foretune bench runtime --skip-whole-space", into=bench)
def bench_runtime(
    bundle: Annotated[Path | None, typer.Option(help="Who predicts.", show_default="the shipped bundle")] = None,
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
    from .datasets import Problem
    from .kernels.grouped_gemm.contenders import autotuned
    from .model import load_bundle
    from .runtime.timing.first_call import compare_first_calls

    gpu = _live()
    if gpu is None:
        raise ForetuneError("no GPU is visible here: there is nothing to tune on")
    with showing("first calls") as say:
        compared = compare_first_calls(
            _measurable(FAMILY),
            Problem.of(FAMILY, **_EXAMPLE),
            gpu,
            None if bundle is None else load_bundle(bundle),
            autotuned,
            whole_space=whole_space,
            repeats=repeats,
            on_start=say,
        )
    _emit(compared, as_json)


@_command("predictions", "foretune bench predictions --json", into=bench)
def bench_predictions(
    family: Annotated[
        str | None,
        typer.Option(help="Only this family.", show_default="the bundle's", autocompletion=_family_names),
    ] = None,
    device: Annotated[
        str, typer.Option(help="The GPU to predict for, which need not be here.", autocompletion=_device_names)
    ] = "h200",
    bundle: Annotated[Path | None, typer.Option(help="Who predicts.", show_default="the shipped bundle")] = None,
    as_json: AsJson = False,
) -> None:
    """Time predictions over the whole space on this machine's CPU: new problems, and one asked about before."""
    from .datasets import DeviceSpec
    from .model import load_bundle
    from .runtime.timing.predictions import time_predictions

    known = load_bundle(bundle)
    families = [_family(name) for name in ([family] if family else known.families)]
    _emit(time_predictions(families, DeviceSpec.find(device), known), as_json)


@datasets.callback(epilog="Example: foretune datasets --json")
def list_datasets(context: typer.Context, as_json: AsJson = False) -> None:
    """List the measurements that are shipped. `foretune datasets show DATA` describes one dataset."""
    if context.invoked_subcommand is None:
        from .datasets import describe, names

        _emit(_Listed([describe(name) for name in names()]), as_json)


@_command("show", "foretune datasets show measured --json", into=datasets)
def show_dataset(
    data: OneDataset,
    as_json: AsJson = False,
) -> None:
    """Describe one dataset."""
    from .datasets import describe
    from .kernels import families
    from .model import check_sources

    described = describe(data)
    for name, known in families().items():
        if name in described["families"]:
            check_sources(described["name"], described["provenance"], known)
    _emit(_Listed([described]), as_json)


@_command("merge", "foretune datasets merge mine theirs --out both", into=datasets)
def merge(
    data: Annotated[
        list[str],
        typer.Argument(
            metavar="DATA...", help="Dataset folders, or names of shipped ones.", autocompletion=_dataset_names
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the new dataset, sealed.")],
    name: Annotated[str | None, typer.Option(help="What it is called.", show_default="the folder's name")] = None,
    other_sources: Annotated[
        bool, typer.Option("--other-sources", help="Also merge what was measured with other sources of a kernel.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write the measurements of several datasets as one. Exact repeats are dropped; each run keeps its provenance."""
    from .datasets import load
    from .datasets.merge import merge_datasets
    from .datasets.store import check_target, seal_dataset
    from .model.folders import check_dataset_folder

    check_dataset_folder(out)
    check_target(out)
    with showing(f"merging into {out}"):
        loaded = [load(one) for one in data]
        merged = merge_datasets(loaded, name=name or out.name, allow_other_sources=other_sources)
        seal_dataset(merged, out, name=merged.name)
    _emit(_counted(merged), as_json, out=out)


@_command("seal", "foretune datasets seal measured --out shipped", into=datasets)
def seal(
    data: Annotated[str, typer.Argument(metavar="DATA", help="Dataset folder.")],
    out: Annotated[Path, typer.Option(help="Folder for the sealed dataset.")],
    name: Annotated[str | None, typer.Option(help="What it is called.", show_default="the folder's name")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a dataset's parts as a few small tables with checksums, for shipping."""
    from .datasets import load
    from .datasets.store import seal_dataset
    from .model.folders import check_dataset_folder

    check_dataset_folder(out)
    with showing(f"sealing into {out}"):
        seal_dataset(data if Path(data).is_dir() else load(data), out, name=name or out.name)
        dataset = load(out)  # what was written, read as anybody will
    _emit(_counted(dataset), as_json, out=out)


@_command("export", "foretune export sglang --model Qwen3-30B-A3B --tp 2 --device h200 --out tuned")
def export(
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA|vllm|sglang",
            help="Dataset folder, or the name of a shipped one; or a serving engine.",
            autocompletion=_dataset_names,
        ),
    ],
    out: Annotated[Path, typer.Option(help="The file to write; an engine's files, the folder.")],
    format: Annotated[
        str | None, typer.Option(help="Of a dataset: t4, the autotuning community's JSON (schema 1.0.0), or csv.")
    ] = None,
    family: Annotated[
        str | None,
        typer.Option(help="Of a dataset only this family.", show_default="all", autocompletion=_family_names),
    ] = None,
    problem: Annotated[
        int | None,
        _count("Of a dataset only this one, counted from 0. T4 tools expect one.", 0, MOST, show_default="all"),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="The model, of our table, whose MoE layer an engine's files are for.")
    ] = None,
    experts: Annotated[int | None, _count("Of another model: its experts.", 1, MOST)] = None,
    topk: Annotated[int | None, _count("... the experts that each token chooses.", 1, MOST)] = None,
    hidden: Annotated[int | None, _count("... its hidden size.", 1, MOST)] = None,
    inter: Annotated[int | None, _count("... the intermediate size of an expert.", 1, MOST)] = None,
    tp: Annotated[int, _count("Ranks that share each expert.", 1, 1024)] = 1,
    dtype: Annotated[str, typer.Option(help="bf16, fp16, or fp8e4m3 with scales of 128x128 blocks.")] = "bf16",
    device: Annotated[
        str | None,
        typer.Option(
            help="The GPU that an engine's files are for: a shipped device, or a spec's JSON file.",
            show_default="this GPU",
            autocompletion=_device_names,
        ),
    ] = None,
    measure: Annotated[
        bool | None,
        typer.Option(
            help="Time the best of what is predicted, with the engine's own kernel.",
            show_default="where GPU and engine are here",
        ),
    ] = None,
    bundle: Annotated[Path | None, typer.Option(help="Who predicts.", show_default="the shipped bundle")] = None,
    as_json: AsJson = False,
) -> None:
    """Write measurements in a format that other tools read, or a serving engine's tuned files of a MoE layer.

    An engine's files come with a verdict: what they are worth next to the engine's default and the file that it ships,
    for each batch size. Rows that gain nothing say what the engine runs anyway.
    """
    from .collect.compiling import compile_ahead
    from .datasets import DeviceSpec
    from .datasets.disk.writable import check_file, check_folder
    from .kernels.fused_moe import asked, engines, installed, tuning
    from .model import load_bundle

    if data not in engines.ENGINES:
        from .datasets import load
        from .datasets.export import export_dataset

        if format is None:
            raise typer.BadParameter("of a dataset it must be given: t4 or csv", param_hint="--format")
        check_file(out)
        dataset = load(data)
        rows = len(dataset.measurements if family is None or problem is not None else dataset.rows(family))
        with showing(f"writing {out}", _EXPORTING_S.get(format, 0.0) * (rows if problem is None else 0)):
            results = export_dataset(dataset, out, format, family=family, problem=problem)
        _emit(_Said({"format": format, "results": results}, f"{results} results."), as_json, out=out)
        return
    layer = asked.layer_asked_for(model, experts=experts, topk=topk, hidden=hidden, inter=inter, tp=tp, dtype=dtype)
    gpu = _live()
    spec = gpu if device is None and gpu is not None else _this_gpu() if device is None else DeviceSpec.find(device)
    is_here = gpu is not None and gpu.name == spec.name
    if measure and not is_here:
        raise typer.BadParameter(f"{spec.name} is not here to be measured on", param_hint="--measure")
    check_folder(out)
    with showing(f"{data}: {len(engines.BATCH_SIZES)} batch sizes") as say:
        files = tuning.tune_layer(
            data,
            layer,
            spec,
            bundle=None if bundle is None else load_bundle(bundle),
            measure=is_here and data in installed() if measure is None else measure,
            compile_ahead=compile_ahead,
            on_row=lambda row: say(f"{data}: {row.tokens} tokens"),
        )
    files.save(out)
    _emit(files, as_json, out=out)


@_command("show", "foretune cache show", into=cache)
def show_cache(kernel: OneKernel = None, as_json: AsJson = False) -> None:
    """Show what tuning remembers: of each kernel and function, or of one of them each problem."""
    from .runtime.tuning.cache.cache_folder import cache_contents

    _emit(cache_contents(kernel), as_json)


@_command("clear", "foretune cache clear package.module.kernel", into=cache)
def clear(kernel: OneKernel = None, as_json: AsJson = False) -> None:
    """Forget everything, or one kernel or function."""
    from .runtime.tuning.cache.cache_folder import clear_cache

    _emit(clear_cache(kernel), as_json)


@_command("export", "foretune cache export --out choices.json", into=cache)
def export_cache(
    out: Annotated[Path, typer.Option(help="The file to write; of other projects' formats, the folder.")],
    kernel: OneKernel = None,
    format: Annotated[
        str,
        typer.Option(
            help="foretune, for `cache import` elsewhere; or what others read: megatron (pinned tables), fla "
            "(FLA_CONFIG_DIR) or axolotl (autotune_profiles)."
        ),
    ] = "foretune",
    as_json: AsJson = False,
) -> None:
    """Write what tuning remembers to a file, for another machine or another project's autotuner."""
    from .runtime.tuning.cache.cache_folder import export_choices
    from .runtime.tuning.cache.pinned_tables import FORMATS, export_tables

    if format not in ("foretune", *FORMATS):
        raise ForetuneError(f"format must be one of foretune, {', '.join(FORMATS)} but is {abridged(repr(format), 60)}")
    exported = export_choices(out, kernel) if format == "foretune" else export_tables(out, format, kernel)
    _emit(exported, as_json, out=out)


@_command("import", "foretune cache import choices.json", into=cache)
def import_cache(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `foretune cache export` wrote.")],
    as_json: AsJson = False,
) -> None:
    """Add another machine's times and choices to what is remembered here; what both have stays as it is here."""
    from .runtime.tuning.cache.cache_folder import import_choices

    _emit(import_choices(file), as_json)


@_command("freeze", f"foretune cache freeze {FAMILY} --device h200 --out heuristic.py", into=cache)
def freeze(
    kernel: Annotated[
        str,
        typer.Argument(
            metavar="KERNEL",
            help="As `cache show` calls it; with --device a kernel family, or package.module:attribute.",
            autocompletion=_family_names,
        ),
    ],
    out: Annotated[Path, typer.Option(help="The Python file to write.")],
    device: Annotated[
        str | None,
        typer.Option(
            help="Freeze what is predicted for the family's workload on this device: a shipped one, or a spec's file.",
            show_default="what the cache knows",
            autocompletion=_device_names,
        ),
    ] = None,
    rules: Annotated[int, _count("At most so many.", 1, 1000)] = 32,
    bundle: Annotated[Path | None, typer.Option(help="A bundle of `foretune train`.", show_default="shipped")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a kernel's configs as one plain Python file that needs nothing: rules over dimensions and device.

    Kernel hubs, which allow no dependency, can ship it. It says what it loses against the best configs known.
    """
    from .datasets.disk.writable import check_file
    from .kernels import families
    from .runtime.tuning.cache.freeze import freeze_choices, freeze_predictions

    check_file(out)
    if device is not None:
        family = _measurable(kernel)
        with showing(f"predicting for the workload of {family.name}"):
            frozen = freeze_predictions(family, device, bundle=bundle, most_rules=rules)
    else:
        frozen = freeze_choices(kernel, family=families().get(kernel), bundle=bundle, most_rules=rules)
    frozen.save(out)
    _emit(frozen, as_json, out=out)


# What a command needs besides the floors.


def _given(option: str, read: Callable[..., T], text: str, *bounds: float) -> T:
    """An option's value from its text; what is wrong with it is said with the option's name."""
    try:
        return read(text, *bounds)
    except ForetuneError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def _taken(family: Family) -> str:
    """What `predict` takes for a family."""
    dims, flags = " ".join(f"--{dim} N" for dim in family.dims), "".join(f" [--{flag}]" for flag in family.flags)
    return f"{family.name} takes {dims}{flags} [--dtype {'|'.join(family.dtypes)}]"


def _dimensions(arguments: Sequence[str], family: Family) -> tuple[dict[str, int], tuple[str, ...]]:
    """`--rows 8192 --n=2048 --permute_x` as numbers and flags, if they are the family's, each once."""
    parts = [part for argument in arguments for part in argument.split("=", 1)]
    dims: dict[str, int] = {}
    flags: list[str] = []
    while parts:
        option = parts.pop(0)
        name = option.removeprefix("--")
        if name == option or name in dims or name in flags or name not in (*family.dims, *family.flags):
            raise typer.BadParameter(f"{abridged(option, 60)!r} is unknown or given twice; {_taken(family)}")
        if name in family.flags:
            flags.append(name)
        else:
            dims[name] = _given(option, whole_number, parts.pop(0) if parts else "")
    if missing := [f"--{dim}" for dim in family.dims if dim not in dims]:
        raise typer.BadParameter(f"{' '.join(missing)} missing; {_taken(family)}")
    return dims, tuple(flags)


def _problem(arguments: Sequence[str], family: Family, dtype: str | None) -> Problem:
    """The problem that these words are, of a dtype of the family."""
    from .datasets import Problem

    dims, flags = _dimensions(arguments, family)
    dtype = dtype or family.dtypes[0]
    if dtype not in family.dtypes:
        raise typer.BadParameter(
            f"{abridged(dtype, 60)!r} is not one of {', '.join(family.dtypes)}", param_hint="--dtype"
        )
    return Problem(family.name, tuple(sorted(dims.items())), dtype, tuple(sorted(flags)))


def _this_gpu() -> DeviceSpec:
    from .datasets import DeviceSpec

    try:
        return DeviceSpec.live()
    except ForetuneError as error:
        raise ForetuneError(
            f"{error}. Give one with --device, or the file that `foretune device --out FILE` writes where the GPU is"
        ) from None


def _live() -> DeviceSpec | None:
    from .datasets import DeviceSpec

    try:
        return DeviceSpec.live()
    except ForetuneError:
        return None


def _family(name: str) -> Family:
    from .kernels import find_family

    return find_family(name)


def _measurable(name: str) -> Measurable:
    from .kernels import find_measurable

    return find_measurable(name)


def _load(data: Sequence[str] | None) -> Dataset:
    """One dataset, or several as one."""
    from .datasets import load

    loaded = [load(one) for one in data or [SHIPPED]]
    if len(loaded) == 1:
        return loaded[0]
    from .datasets.merge import merge_datasets

    return merge_datasets(loaded, name="+".join(one.name for one in loaded))


def _families(dataset: Dataset, only: Iterable[str] | None = None) -> dict[str, Family]:
    found = [_family(name) for name in (only or dataset.families)]
    return {family.name: family for family in found}


def _judged(dataset: Dataset, only: Iterable[str] | None, bundle: Bundle | None) -> dict[str, Family]:
    """The families in a dataset that can be judged: with a bundle, those that it has."""
    families = _families(dataset, only)
    kernels = {name: family for name, family in families.items() if bundle is None or name in bundle.families}
    if not kernels:
        raise ForetuneError(f"the bundle has none of the families in {dataset.name}: {', '.join(dataset.families)}")
    return kernels


def _for_each(
    call: Callable[[Family], Any], dataset: Dataset, families: Mapping[str, Family], what: str, row_s: float
) -> _ByFamily:
    """What is found for each family, while it is shown how far that is."""
    rows, found = _rows(dataset, families), {}
    with showing(what, row_s * rows) as say:
        for name, family in families.items():
            say(f"{name}: {what}")
            with share_of(len(dataset.rows(name)) / rows):
                found[name] = call(family)
    return _ByFamily(found)


def _rows(dataset: Dataset, families: Iterable[str]) -> int:
    return sum(len(dataset.rows(name)) for name in families)


def _counted(dataset: Dataset) -> _Said:
    rows = len(dataset.measurements)
    return _Said({"measurements": rows}, f"{dataset.name}: {rows} measurements.")


# How results look.


@dataclass(frozen=True)
class _Said:
    """A result that is a line."""

    value: Mapping[str, Any]
    line: str

    def to_json(self) -> Mapping[str, Any]:
        return self.value

    def __rich__(self) -> Any:
        from rich.text import Text

        return Text(printable(self.line))


@dataclass(frozen=True)
class _ByFamily:
    """A result for each family."""

    families: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        return {"families": {name: one.to_json() for name, one in self.families.items()}}

    def __rich__(self) -> Any:
        from rich.console import Group

        return Group(*self.families.values())


@dataclass(frozen=True)
class _Held:
    """Evaluations, held against the largest regret@1 that is allowed."""

    judged: _ByFamily
    max_regret1: float
    error: str | None  # which families fall short

    def to_json(self) -> dict[str, Any]:
        held = self.judged.to_json() | {"max_regret1": self.max_regret1}
        return held if self.error is None else held | {"error": self.error}

    def __rich__(self) -> Any:
        return self.judged.__rich__()


@dataclass(frozen=True)
class _Listed:
    """Datasets, in one table."""

    described: Sequence[Mapping[str, Any]]

    def to_json(self) -> list[Any]:
        return list(self.described)

    def __rich__(self) -> Any:
        from .datasets.contents import contents_table

        return contents_table(self.described)


def _emit(result: Result, as_json: bool, **places: Path) -> None:
    """Prints a result, and where on the disk things lie now."""
    if as_json:
        value = result.to_json()
        added = {what: str(path) for what, path in places.items()}
        typer.echo(json.dumps(dict(value) | added if added else value, indent=1))
        return
    from rich.console import Console

    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 200  # a file has no edge to wrap at
    console.print(result)
    for path in places.values():
        typer.echo(f"It lies in {printable(str(path))}")


if __name__ == "__main__":
    main()
