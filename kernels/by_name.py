"""The functions of `foretune` that take a family also by name: names become objects here, and runtime/ does the work.

What each needs is imported by its call: torch, triton and NumPy are none of that before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from ..datasets import Family, ForetuneError, KernelConfig, Problem
from . import find_family

if TYPE_CHECKING:
    from pathlib import Path

    import triton

    from ..datasets import DeviceSpec
    from ..datasets.dataset import Dataset
    from ..model import Bundle
    from ..runtime import Pruner, Shortlist
    from ..runtime.covering import Cover
    from ..runtime.tuning.functions import Advisor, CallTimer, ConfigCache, TunedFunction, Work

#: A family, its name, or "package.module:attribute".
FamilyLike: TypeAlias = Family | type[Family] | str


def configs(family: FamilyLike) -> list[triton.Config]:
    """The whole space of a kernel family, to declare to `triton.autotune`. Fresh objects; no device is queried.

    Raises `ForetuneError` listing the families where there is none of that name.

    >>> len(configs("grouped_gemm_fwd")) > 700
    True
    """
    return [config.to_triton() for config in find_family(family).space()]


def prune(
    family: FamilyLike,
    k: int | Literal["auto"] = "auto",
    *,
    problem: Callable[[Mapping[str, Any]], Problem] | None = None,
    knobs: Mapping[str, str] | None = None,
    fixed: Mapping[str, Any] | None = None,
    configs: Sequence[triton.Config] | None = None,
    device: DeviceSpec | Path | str | None = None,
    bundle: Bundle | Path | str | None = None,
    expected_calls: float | None = None,
    call_us: float | None = None,
) -> Pruner:
    """An `early_config_prune` callback that keeps the `k` configs predicted to be fastest: with "auto" as many as hold
    one within 1 % of the best in 95 % of cases, or with `expected_calls` as many as pay for themselves over so many
    calls of `call_us` microseconds (see `foretune.runtime.make_shortlist`).

    For a kernel of other words than the family's: `problem` turns a launch's arguments into a `Problem`, `knobs` maps
    the kernel's own knobs to the family's, and `fixed` has values for those that it lacks. `configs`, those of the
    autotuner, are checked and no more. `device` replaces the current one, `bundle` the shipped one.

    Raises `ForetuneError` for what is none of that. The callback never fails a launch: where it cannot predict, it
    hands every valid config through, with one warning that says why.

    >>> prune("grouped_gemm_fwd", k=4, knobs={"BM": "BLOCK_M"})
    <Pruner of grouped_gemm_fwd, k=4>
    """
    from ..runtime import Pruner

    return Pruner(
        find_family(family),
        k,
        problem=problem,
        knobs=knobs,
        fixed=fixed,
        configs=configs,
        device=device,
        bundle=bundle,
        expected_calls=expected_calls,
        call_us=call_us,
    )


def shortlist(
    family: FamilyLike,
    problem: Problem,
    device: DeviceSpec | Path | str,
    k: int | Literal["auto"] = "auto",
    *,
    configs: Sequence[KernelConfig] | None = None,
    bundle: Bundle | Path | str | None = None,
    expected_calls: float | None = None,
    call_us: float | None = None,
) -> Shortlist:
    """The `k` configs predicted to be fastest for a problem on a device, which need not be here. With "auto" there are
    as many as hold one within 1 % of the best in 95 % of cases, or with `expected_calls` as many as pay for themselves
    over so many calls of `call_us` microseconds (see `foretune.runtime.make_shortlist`); the `reason` says which.

    `device` is a spec, the name of a shipped one, or a spec's JSON file; `configs` narrows the choice to these;
    `bundle`, or its folder, replaces the shipped one. Raises `ForetuneError` for what is none of that, and for a
    problem or a config that is not the family's.

    >>> from foretune import Problem
    >>> problem = Problem.of("grouped_gemm_fwd", groups=64, rows=8192, n=2048, k=1024)
    >>> len(shortlist("grouped_gemm_fwd", problem, "h200", k=4).configs)
    4
    """
    from ..runtime import make_shortlist

    return make_shortlist(
        find_family(family),
        problem,
        device,
        k=k,
        configs=configs,
        bundle=bundle,
        expected_calls=expected_calls,
        call_us=call_us,
    )


def cover(
    family: FamilyLike,
    problem: Problem,
    dynamic: str,
    range: tuple[int, int],
    n: int | None = None,
    *,
    within: float | None = None,
    device: DeviceSpec | Path | str | None = None,
    ranges: int | None = None,
    sizes: Iterable[int] | None = None,
    configs: Sequence[KernelConfig] | None = None,
    data: Dataset | Path | str | None = None,
    bundle: Bundle | Path | str | None = None,
    measure: bool = False,
) -> Cover:
    """The `n` configs (left out: 3) that together lose least over a `range` of sizes of a dimension that is only known
    at run time, or with `within` as few as lose no more than that at any size (0.02 for 2 %); and the dispatch table
    between them: `config_for(size)` is a few comparisons of Python integers. Nobody waits for the device; a function
    under `torch.compile` stays dynamic, and is compiled once for each of at most `ranges` ranges that it meets (left
    out: 8, which is Dynamo's limit; with `within` as many as it takes; see `foretune.runtime.covering.Cover`).

    Chosen by predicted times, at `sizes` (left out: 8 an octave and 64 evenly spaced; how often a size is in there is
    its weight), or by the measured times in `data`: a dataset, its folder, or the name of a shipped one, with the
    problem at several sizes. What `dynamic` is in the problem does not matter. `device` is a spec, the name of a
    shipped one, or a spec's file (left out: this GPU); `configs` narrows the choice to these, `bundle` replaces the
    shipped one. With `measure` the two that are predicted to be best at each size are timed at all of them, on this
    GPU, and the choice is among them by these times.

    Raises `ForetuneError` for what is none of that, where nothing is predicted, where `data` has fewer than two sizes,
    where no `n` configs can run all of them, and where none that was timed ran.

    >>> from foretune import Problem
    >>> layer = Problem.of("grouped_gemm_fwd", groups=64, rows=1, n=2048, k=1024)
    >>> found = cover("grouped_gemm_fwd", layer, "rows", (64, 4096), n=2, device="h200", sizes=[64, 512, 4096])
    >>> found.config_for(64) != found.config_for(4096), len(found.crossovers)
    (True, 1)
    """
    from ..datasets import DeviceSpec
    from ..runtime.covering import make_cover, measured_cover

    found = find_family(family)
    spec = DeviceSpec.live() if device is None else DeviceSpec.find(device)
    if data is None:
        return make_cover(
            found,
            problem,
            dynamic,
            range,
            n,
            spec,
            within=within,
            ranges=ranges,
            sizes=sizes,
            configs=configs,
            bundle=bundle,
            measure=measure,
        )
    predicting = {"sizes": sizes, "configs": configs, "bundle": bundle, "measure": measure or None}
    if given := [name for name, one in predicting.items() if one is not None]:
        raise ForetuneError(f"{given[0]} is for predictions, but with data nothing is predicted")
    return measured_cover(found, problem, dynamic, range, n, spec, _dataset(data), within=within, ranges=ranges)


def adapt(
    data: Dataset | Path | str,
    *,
    bundle: Bundle | Path | str | None = None,
    family: FamilyLike | Sequence[FamilyLike] | None = None,
) -> Bundle:
    """A bundle that knows another card as well: the `bundle`, or the one in that folder (the shipped one if left out),
    with more trees that learned from a few measurements of the card. Its own measurements are not needed.

    `data` is a dataset, its folder, or the name of a shipped one; five minutes of `foretune collect --plan adaptive` on
    the card are enough. Of its families only `family`, one or several (left out, all that the bundle knows). Raises
    `ForetuneError` where the two have no family in common, and for what is none of that.

    >>> adapt("small").save("my-bundle")  # doctest: +SKIP
    """
    from ..model import load_bundle
    from ..model.bundle import Bundle
    from ..model.train import adapt_bundle

    dataset = _dataset(data)
    given = bundle if isinstance(bundle, Bundle) else load_bundle(bundle)
    wanted: Sequence[FamilyLike]
    if family is None:
        wanted = [name for name in dataset.families if name in given.families]
    else:
        wanted = [family] if isinstance(family, (str, type)) or not isinstance(family, Sequence) else family
    found = [find_family(one) for one in wanted]
    return adapt_bundle(given, dataset, {one.name: one for one in found})


def attach(kernel: Any, family: FamilyLike | None = None, k: int | Literal["auto"] = "auto") -> Any:
    """Gives a kernel that somebody declared under `triton.autotune` a shortlist, from its next new key on, and returns
    the kernel. It may be under `triton.heuristics` as well, or of a class that inherits from Triton's.

    With a `family` its ranker picks `k` configs, as `prune` does. Without one the kernel's own timings do: eight keys
    are tuned as ever, and after that as many configs are timed as those eight say are needed, or `k`; all of them where
    a key is unlike what is known. Each time is kept in the choice cache as it is measured, so an earlier process's
    count too. The kernel's own `early_config_prune` goes before, its `perf_model` after. No trouble of ours fails a
    launch: then all configs are timed, with one warning.

    Raises `ForetuneError` for what has no autotuner, is attached already, or is no family, and for `k` < 1.

    >>> import triton
    >>> @triton.autotune([triton.Config({"BLOCK": size}) for size in (64, 128)], key=["n"])
    ... @triton.jit
    ... def fill(x, n, BLOCK: triton.language.constexpr): ...
    >>> attach(fill) is fill
    True
    >>> from foretune import detach
    >>> detach(fill)
    """
    from ..runtime.tuning.attach import attach_to

    return attach_to(kernel, None if family is None else find_family(family), k)


def autotune(
    configs: Sequence[triton.Config],
    key: Sequence[str],
    family: FamilyLike | None = None,
    *,
    k: int | Literal["auto"] = "auto",
    problem: Callable[[Mapping[str, Any]], Problem] | None = None,
    knobs: Mapping[str, str] | None = None,
    fixed: Mapping[str, Any] | None = None,
    device: DeviceSpec | Path | str | None = None,
    bundle: Bundle | Path | str | None = None,
    bucket: Sequence[str] = (),
    budget_s: float | None = None,
    isolate: bool = False,
    workers: int | None = None,
    **options: Any,
) -> Callable[[Any], triton.runtime.Autotuner]:
    """`triton.autotune`, with a shortlist: the decorator of a `triton.jit` function that measures the `k` configs
    predicted to be fastest, compiled in parallel, and remembers each time on disk at once.

    With a `family` its ranker predicts, and `problem`, `knobs`, `fixed`, `device` and `bundle` are as in `prune`.
    Without one, a model of the kernel's own timings does, once it has seen some keys. `options` are those of
    `triton.autotune` besides, of Triton 3.6 to 3.9: prune_configs_by, reset_to_zero, restore_value, pre_hook,
    post_hook, warmup, rep, use_cuda_graph, do_bench, cache_results (what is measured is kept anyway).

    - A config that fails is that config's failure. Where all do, the launch raises `TuningFailed`, with each reason.
    - `bucket` names arguments of `key` (dimensions, where there is a family, whose own `bucketed` count anyway) whose
      sizes are tuned in steps of 9 %. Within a step a new size is a look-up, among the configs that the kernel's own
      `prune_configs_by` allows for it.
    - The first launch of a key finds its tensors as after `triton.autotune`: reset and restored, also where times are
      known already or nothing is measured.
    - `budget_s`: after so many seconds no more configs are measured: the best so far runs, or the best predicted.
    - `isolate`: configs are timed in a process of their own, which one with an illegal access ends instead of yours.
    - `workers`: the threads that compile (left out: as many as there are cores).
    - FORETUNE_MODE: in `predict` nothing is measured, in `off` all configs are.

    Raises `ForetuneError` for what is none of that.

    >>> import triton
    >>> configs = [triton.Config({"BLOCK": size}) for size in (64, 128)]
    >>> decorator = autotune(configs, key=["n"], bucket=["n"], budget_s=5.0)
    """
    from ..runtime.tuning.autotuner import autotune as declare

    found = None if family is None else find_family(family)
    return declare(
        configs,
        key,
        found,
        k=k,
        problem=problem,
        knobs=knobs,
        fixed=fixed,
        device=device,
        bundle=bundle,
        bucket=bucket,
        budget_s=budget_s,
        isolate=isolate,
        workers=workers,
        **options,
    )


def tune(
    space: Any,
    *,
    key: Callable[..., Any] | Sequence[str] | None = None,
    prune: Callable[..., bool | str] | None = None,
    family: FamilyLike | None = None,
    n_warmup: int = 3,
    n_repeat: int = 10,
    search: Advisor | str = "exhaustive",
    budget_s: float | None = None,
    max_trials: int | None = None,
    reset: Callable[..., Any] | None = None,
    restore: Sequence[str] = (),
    work: Callable[..., Work | Mapping[str, Any]] | None = None,
    device: DeviceSpec | Path | str | None = None,
    cache: ConfigCache | Path | str | bool = True,
    timer: CallTimer | None = None,
) -> Callable[[Callable[..., Any]], TunedFunction]:
    """A decorator: the function runs with the fastest config of a space, found out at the first call of each key.

    `space` is a dict of lists, or a list or generator of dicts or of `triton.Config`s, or a function without arguments
    that returns one of these. The function gets a config as keyword arguments. `key` is a function of the call's
    arguments, or the names of those that count; left out, all do: tensors by shape, dtype and layout, objects by type.
    `prune(config, ...)`, with the call's arguments, says True to a config that is worth trying, else False or the
    reason; a `family` refuses what it does not support, and says what a call's problem is.

    Each config is called `n_warmup` times and then timed `n_repeat` times, so the function must bear to be called
    often: `reset`, called with the call's arguments before every run, and `restore`, names of arguments whose contents,
    however deep, are put back in place before every run, are for what it changes. A call with an argument that a run
    uses up (an iterator, an open file) is not tuned: the best known config runs, or the first. `search` is
    "exhaustive", or "guided": a model of the timings of earlier keys says which configs are worth it. Tuning ends
    after `budget_s` seconds or `max_trials` configs, with the best so far. `work` returns a call's `gemm_work`,
    `elementwise_work` or `Work`, for TFLOP/s, GB/s and per cent of the roofline of the `device` (the live one if left
    out). `cache` False remembers in memory, a path in that file; FORETUNE_TUNE=strict tunes again what other versions
    tuned, FORETUNE_TUNE=always everything.

    A call may say `autotune=False` (the best known config runs, or the first), `autotune_verbose=True`, and
    `autotune_pg=group` (all ranks of a torch process group tune together, and choose what is fastest on the slowest;
    they make the same calls with the same keys, or get a `ForetuneError` that names the difference, at the latest when
    the group's timeout is over).

    Raises `ForetuneError` for options that are not valid, and for functions whose work is done later than they return:
    also in a call, where the result is a future, a generator or the like. Where no config works, a call raises the
    exception that all of them raised, if it is of one type, else `TuningFailed`, with each config's reason and the
    first exception as its cause; the next call tries again.

    >>> @tune({"chunk": [16, 64, 256]}, key=["rows"], cache=False)
    ... def total(rows, chunk):
    ...     return sum(sum(range(at, min(at + chunk, rows))) for at in range(0, rows, chunk))
    >>> total(1000), len(total.tune(1000).trials)
    (499500, 3)
    """
    from ..runtime.tuning.functions import TunedFunction

    return partial(
        TunedFunction,
        space=space,
        key=key,
        prune=prune,
        family=None if family is None else find_family(family),
        n_warmup=n_warmup,
        n_repeat=n_repeat,
        search=search,
        budget_s=budget_s,
        max_trials=max_trials,
        reset=reset,
        restore=restore,
        work=work,
        device=device,
        cache=cache,
        timer=timer,
    )


def _dataset(data: Dataset | Path | str) -> Dataset:
    from ..datasets import load
    from ..datasets.dataset import Dataset

    return data if isinstance(data, Dataset) else load(data)
