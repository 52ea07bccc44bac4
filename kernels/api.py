"""The public functions of `foretune` that choose configs; they also accept a kernel family by name.

They are documented only here; the classes and functions of runtime/ that do the work take the family as an object.
Each function imports what it needs when it is called, so importing this module imports neither torch, Triton nor NumPy.
The functions that collect and train are in `learning.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, cast

from ..datasets import ForetuneError, KernelConfig, Problem
from .learning import FamilyLike, dataset_of
from .registry import find_family

if TYPE_CHECKING:
    from pathlib import Path

    import triton

    from ..datasets import DeviceSpec
    from ..datasets.dataset import Dataset
    from ..model import Bundle
    from ..runtime import Explanation, Pruner, Shortlist
    from ..runtime.covering import Cover
    from ..runtime.tuning.functions import Advisor, CallTimer, ConfigCache, TunedFunction, Work

#: The parameters and the result of a function that `tune` decorates.
P = ParamSpec("P")
R = TypeVar("R")


def configs(family: FamilyLike) -> list[triton.Config]:
    """Return all configs of a kernel family's space, to declare to `triton.autotune`.

    No device is queried.

    Args:
        family: A family, its class, its name, or "package.module:attribute".

    Returns:
        New `triton.Config` objects.

    Raises:
        ForetuneError: The family is unknown; the message lists the known ones.

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
    same_bits: bool | None = None,
    invariant: str | None = None,
) -> Pruner:
    """Return an `early_config_prune` callback that keeps the `k` configs predicted to be fastest.

    The callback never makes a launch fail: where it cannot predict, every valid config is kept, with one warning
    that says why.

    Args:
        family: The kernel's family.
        k: How many configs to keep. "auto": as many as needed to hold one within 1 % of the best in 95 % of cases.
        problem: A function from a launch's arguments, by name, to a `Problem`, for a kernel whose parameters are not
            named as the family's.
        knobs: A mapping from the kernel's name of each knob to the family's name of it.
        fixed: Values of the family's knobs that the kernel does not have.
        configs: The autotuner's configs, which are only checked, so that a mistake is reported at the declaration.
        device: A spec, the name of a shipped one, or a spec's JSON file; the current device if None.
        bundle: The bundle that predicts, or its folder; the shipped one if None.
        expected_calls: Instead of `k`: keep as many configs as pay for themselves over this many calls.
        call_us: How long one call takes, in microseconds, for `expected_calls`; the family's estimate if None.
        same_bits: Keep only configs whose results have the same bits as those of the family's `same_bits_config`, the
            default config in most families, so that tuning changes no result. None: as FORETUNE_SAME_BITS says.
        invariant: Keep only configs with the same bits for all sizes of this dimension, so that the result of a row
            does not depend on the other rows: "m", or the family's own name of its rows.

    Raises:
        ForetuneError: An argument is not one of these.

    >>> prune("grouped_gemm_fwd", k=4, knobs={"BM": "BLOCK_M"})
    <Pruner of grouped_gemm_fwd, k=4>
    """
    given = _with_family(locals())
    from ..runtime import Pruner

    return Pruner(**given)


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
    same_bits: bool | None = None,
    invariant: str | None = None,
) -> Shortlist:
    """Return the `k` configs predicted to be fastest for a problem on a device, which need not be in this machine.

    Args:
        family: The kernel's family.
        problem: A problem of this family.
        device: A spec, the name of a shipped one, or a spec's JSON file.
        k: How many configs to return. "auto": as many as needed to hold one within 1 % of the best in 95 % of cases.
        configs: The configs to choose from; the family's space if None.
        bundle: The bundle that predicts, or its folder; the shipped one if None.
        expected_calls: Instead of `k`: as many configs as pay for themselves over this many calls.
        call_us: How long one call takes, in microseconds, for `expected_calls`; the family's estimate if None.
        same_bits: As for `prune`.
        invariant: As for `prune`.

    Returns:
        The shortlist: `configs`, fastest first, and the `reason` for its length.

    Raises:
        ForetuneError: An argument is not one of these, or the problem or a config is not of the family.

    >>> from foretune import Problem
    >>> problem = Problem.of("grouped_gemm_fwd", groups=64, rows=8192, n=2048, k=1024)
    >>> len(shortlist("grouped_gemm_fwd", problem, "h200", k=4).configs)
    4
    """
    given = _with_family(locals())
    from ..runtime import make_shortlist

    return make_shortlist(**given)


def explain(
    family: FamilyLike,
    problem: Problem,
    device: DeviceSpec | Path | str | None = None,
    k: int | Literal["auto"] = "auto",
    *,
    configs: Sequence[KernelConfig] | None = None,
    bundle: Bundle | Path | str | None = None,
    same_bits: bool | None = None,
    invariant: str | None = None,
) -> Explanation:
    """Return a problem's shortlist with the reasons for each config; too slow for launches.

    The result has each config's rank, its predicted slowdown, the features that contribute most to its predicted time
    (path-dependent TreeSHAP), knob values that were never measured, and the distance from the training domain; for a
    `TritonFamily` without data, facts of its source instead. The arguments are those of `shortlist`; a `device` of None
    is the current one. Raises `ForetuneError` if an argument is invalid or nothing can be predicted.

    >>> from foretune import Problem
    >>> problem = Problem.of("matmul", batch=1, m=64, n=1024, k=1024)
    >>> first = explain("matmul", problem, "h200", k=2).configs[0]
    >>> first.rank, first.why, len(first.contributions) > 3
    (1, 'predicted fastest', True)
    """
    given = _with_family(locals())
    from ..runtime import make_explanation

    return make_explanation(**given)


def cover(
    family: FamilyLike,
    problem: Problem,
    dynamic: str,
    range: tuple[int, int],
    k: int | None = None,
    *,
    within: float | None = None,
    device: DeviceSpec | Path | str | None = None,
    ranges: int | None = None,
    sizes: Iterable[int] | None = None,
    configs: Sequence[KernelConfig] | None = None,
    data: Dataset | Path | str | None = None,
    bundle: Bundle | Path | str | None = None,
    measure: bool = False,
    same_bits: bool | None = None,
    invariant: str | None = None,
) -> Cover:
    """Choose a few configs that together lose least over a range of run-time sizes, and which one runs at each size.

    `Cover.config_for(size)` is a few comparisons of Python integers, so nothing waits for the device. A function under
    `torch.compile` stays dynamic and is compiled once for each range of sizes that it meets.

    Args:
        family: The kernel's family.
        problem: The problem; its size of the dimension `dynamic` does not matter.
        dynamic: The dimension whose size is only known at run time.
        range: The smallest and the largest size.
        k: How many configs; 3 if None.
        within: Instead of `k`: choose the fewest configs that lose at most this at every size; 0.02 is 2 %.
        device: A spec, the name of a shipped one, or a spec's JSON file; this GPU if None.
        ranges: The maximum number of ranges of the dispatch; if None 8, which is Dynamo's limit, or with `within` as
            many as needed.
        sizes: The sizes to predict at, weighted by how often each is listed; None: 8 per octave and 64 evenly spaced.
        configs: The configs to choose from; the family's space if None.
        data: Choose by measured times instead: a dataset, its folder, or the name of a shipped one, which has the
            problem at several sizes.
        bundle: The bundle that predicts, which must have learned the family, or its folder; the shipped one if None.
        measure: Time the three configs predicted to be best at each size, at all sizes on this GPU, and choose by that.
        same_bits: As for `prune`, at each size; losses are against the best of these configs.
        invariant: As for `prune`.

    Raises:
        ForetuneError: An argument is not one of these; nothing is predicted; `data` has fewer than two sizes; no `k`
            configs can run all sizes; or no config that was timed ran.

    >>> from foretune import Problem
    >>> layer = Problem.of("grouped_gemm_fwd", groups=64, rows=1, n=2048, k=1024)
    >>> found = cover("grouped_gemm_fwd", layer, "rows", (64, 4096), k=2, device="h200", sizes=[64, 512, 4096])
    >>> found.config_for(64) != found.config_for(4096), len(found.crossovers)
    (True, 1)
    """
    from ..datasets import DeviceSpec
    from ..runtime.covering import make_cover, measured_cover
    from ..runtime.same_bits import keeping

    found = keeping(find_family(family), same_bits, invariant)
    spec = DeviceSpec.live() if device is None else DeviceSpec.find(device)
    arguments = (found, problem, dynamic, range, k, spec)
    limits: dict[str, Any] = {"within": within, "ranges": ranges}
    predicting: dict[str, Any] = {"sizes": sizes, "configs": configs, "bundle": bundle}
    if data is None:
        return make_cover(*arguments, measure=measure, **limits | predicting)
    if unused := [name for name, one in (predicting | {"measure": measure or None}).items() if one is not None]:
        raise ForetuneError(f"{unused[0]} is for predictions, but with data nothing is predicted")
    return measured_cover(*arguments, dataset_of(data), **limits)


def attach(
    kernel: Any,
    family: FamilyLike | None = None,
    k: int | Literal["auto"] = "auto",
    *,
    bundle: Bundle | Path | str | None = None,
    same_bits: bool | None = None,
    invariant: str | None = None,
    mode: str | None = None,
    max_cost: float | str | None = None,
) -> Any:
    """Let an existing `triton.autotune` kernel time only a shortlist for each new key, and return the kernel.

    With a `family`, its ranker picks `k` configs, as `prune` does. Without one, a model of the kernel's own timings
    searches each key: it starts with configs that are far apart, or that were fast on similar keys, and ends when the
    next config's expected gain does not pay for its compilation, or after `k` configs. Times are kept in the choice
    cache, so keys of earlier processes count too. The kernel's own `early_config_prune` runs before the prediction, its
    `perf_model` after it; without a family, in its place. If predicting fails, all configs are timed, with one warning.

    Args:
        kernel: The kernel; its autotuner may be a subclass, under `triton.heuristics`, or attached by FORETUNE_ATTACH.
        family: The kernel's family, if it has one.
        k: How many configs to time for each key.
        bundle: As for `prune`; needs a family.
        same_bits: As for `autotune`.
        invariant: As for `autotune`.
        mode: Overrides FORETUNE_MODE. With "predict", the best config runs untimed; without a family and earlier
            timings, as the kernel's source predicts. With "refine", launches run the configs of the shortlist in turn,
            the predicted one first, until one is known to be the fastest (see `refining`).
        max_cost: What exploring may cost in mode "refine": a share of the kernel's time so far, or seconds ("2s").
            FORETUNE_MAX_COST, or else 0.01, if None.

    Returns:
        The kernel itself, which is changed in place.

    Raises:
        ForetuneError: The kernel has no autotuner or is attached by `attach`, the family or mode is unknown, the bundle
            is invalid or lacks the family, or `k` or `max_cost` is out of range.

    >>> import triton
    >>> @triton.autotune([triton.Config({"BLOCK": size}) for size in (64, 128)], key=["n"])
    ... @triton.jit
    ... def fill(x, n, BLOCK: triton.language.constexpr): ...
    >>> attach(fill) is fill
    True
    >>> from foretune import detach
    >>> detach(fill)
    """
    given = _with_family(locals())
    from ..runtime.tuning.attach import attach_to

    return attach_to(**given)


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
    same_bits: bool | None = None,
    invariant: str | None = None,
    mode: str | None = None,
    max_cost: float | str | None = None,
    **options: Any,
) -> Callable[[Any], triton.runtime.Autotuner]:
    """Decorate a `triton.jit` function as `triton.autotune` does, but measure only the configs predicted to be fastest.

    These configs are compiled in parallel, and each time is written to disk at once. With a `family`, its ranker
    predicts; without one, a model of the kernel's own timings does after a few keys. A config that fails does not fail
    the others; if all fail, the launch raises `TuningFailed` with each reason. The first launch of a key finds its
    tensors reset and restored as after `triton.autotune`, also where times are known already or nothing is measured.
    With FORETUNE_MODE=predict nothing is measured, with `off` all configs are.

    Args:
        configs: The configs, as for `triton.autotune`.
        key: The arguments whose values need a choice of their own, as for `triton.autotune`.
        family: The kernel's family, if it has one.
        k: As for `prune`.
        problem: As for `prune`.
        knobs: As for `prune`.
        fixed: As for `prune`.
        device: As for `prune`.
        bundle: As for `prune`.
        bucket: Arguments of `key` (with a family, dimensions; the family's own `bucketed` are always included) whose
            sizes are tuned in 8 steps per octave. A new size within a step is a look-up among the configs that the
            kernel's own `prune_configs_by` allows for it.
        budget_s: Seconds after which no more configs are measured: the best so far runs, or the best predicted.
        isolate: Time configs in a separate process, so that an illegal memory access does not end this one.
        workers: The number of threads that compile; as many as there are cores if None.
        same_bits: As for `prune`; needs a family, as without one no configs are known to have equal bits.
        invariant: As for `prune`; needs a family.
        mode: As for `attach`.
        max_cost: As for `attach`.
        options: The other options of `triton.autotune` in Triton 3.6 to 3.9: prune_configs_by, reset_to_zero,
            restore_value, pre_hook, post_hook, warmup, rep, use_cuda_graph, do_bench, cache_results (times are kept
            anyway).

    Raises:
        ForetuneError: An argument is not one of these.

    >>> import triton
    >>> configs = [triton.Config({"BLOCK": size}) for size in (64, 128)]
    >>> decorator = autotune(configs, key=["n"], bucket=["n"], budget_s=5.0)
    """
    given = _with_family(locals())
    from ..runtime.tuning.autotuner import autotune as declare

    return declare(**given.pop("options"), **given)


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
) -> Callable[[Callable[P, R]], TunedFunction[P, R]]:
    """Decorate a function so that it runs with the fastest config of a space, found at the first call of each key.

    The function gets a config as keyword arguments. Each config is called `n_warmup` times and timed `n_repeat` times,
    so it must be possible to call the function often. A call with an argument that a run uses up (an iterator, an open
    file) is not tuned: the best known config runs, or the first. With FORETUNE_MODE=off nothing is tuned, and the first
    config runs.

    A call may pass `autotune=False` (run the best known config, or the first), `autotune_verbose=True`, and
    `autotune_pg=group`: all ranks of a torch process group tune together and choose what is fastest on the slowest.
    They must make the same calls with the same keys; else they get a `ForetuneError` that names the difference, at the
    latest after the group's timeout.

    Type checkers check calls of the result by the function's own signature. Knobs need defaults there, so that calls
    may omit them; the tuner replaces these defaults.

    Args:
        space: A dict of lists; a list or generator of dicts or of `triton.Config`s; or a function that returns one.
        key: A function of the call's arguments, or the names of those that count. If None all do: tensors by shape,
            dtype and layout, objects by type.
        prune: A function of a config and the call's arguments that returns True if the config is worth trying, and
            False or the reason if it is not.
        family: A family that refuses the configs it does not support, and turns a call into a problem.
        n_warmup: Calls of each config before it is timed.
        n_repeat: Timed calls of each config.
        search: "exhaustive"; or "model": a model of the timings of this and earlier keys chooses what is worth a trial.
        budget_s: Seconds after which tuning ends with the best config so far.
        max_trials: The number of configs after which tuning ends.
        reset: Called with the call's arguments before every run, to undo what the function changes.
        restore: Names of arguments whose contents, however deep, are put back in place before every run.
        work: Returns a call's `gemm_work`, `elementwise_work` or `Work`, for TFLOP/s, GB/s and percent of the roofline.
        device: The device of that roofline; the live one if None.
        cache: Where results are kept: True for the default file, False for memory only, or the path of a file. With
            FORETUNE_TUNE=strict, results of other versions are tuned again; with FORETUNE_TUNE=always, all are.
        timer: Replaces the clock that times calls.

    Raises:
        ForetuneError: An option is not valid, or the function's work is done after it returns (also in a call whose
            result is a future, a generator or the like). If no config works, a call raises the exception that all of
            them raised if it is of one type, else `TuningFailed` with each config's reason and the first exception as
            its cause; the next call tries again.

    >>> @tune({"chunk": [16, 64, 256]}, key=["rows"], cache=False)
    ... def total(rows: int, chunk: int = 16) -> int:
    ...     return sum(sum(range(at, min(at + chunk, rows))) for at in range(0, rows, chunk))
    >>> total(1000), len(total.tune(1000).trials)
    (499500, 3)
    """
    given = _with_family(locals())
    from ..runtime.tuning.functions import TunedFunction

    return cast("Callable[[Callable[P, R]], TunedFunction[P, R]]", partial(TunedFunction, **given))


def _with_family(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a public function's arguments with the `family` that they name replaced by the object; None stays None.

    `same_bits` and `invariant` are removed: the family then supports only the configs that they allow.
    """
    kept = {name: arguments.pop(name) for name in ("same_bits", "invariant") if name in arguments}
    family = arguments["family"]
    if family is not None:
        from ..runtime.same_bits import keeping

        return arguments | {"family": keeping(find_family(family), **kept)}
    if requested := [name for name, value in kept.items() if value]:
        raise ForetuneError(f"{requested[0]} needs a family, but family is None")
    return arguments
