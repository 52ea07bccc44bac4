"""Whether a ranker trained on other packages helps the search within a key: `python tests/studies/kernel_prior.py`.

Facts about each launch (`runtime/facts`) are the features of a LightGBM model of log slowdowns. For each package it is
trained on all other packages, and its predictions are the prior mean of the Gaussian process of `OwnTimings`. The data
are `h100_corpus`, the searches of fla-core and liger-kernel (`tunings_h200.jsonl.gz`), and lists drawn from the
measurements of nine of Foretune's own families, of which each counts as a package. Needs lightgbm and the packages of
the corpus on the path, of which flag-gems and gemlite can only be imported with a GPU; kernels that cannot are listed
and left out. `--save FILE` trains on everything and writes what Foretune ships as model/shipped/prior.npz. `--wide
FILE` adds wide lists of the same kernels; `--parts wide` then compares priors with and without them.
"""

from __future__ import annotations

import argparse
import gzip
import importlib
import importlib.util
import inspect
import json
import math
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from foretune.datasets import DeviceSpec, KernelConfig, Problem, load
from foretune.kernels import find_family
from foretune.model.scoring.trees import Forest
from foretune.runtime.facts.prior import NAMES, Prior, launch_features
from foretune.runtime.launching.kernel import Kernel
from foretune.runtime.tuning import gaussian_process, own_timings
from foretune.runtime.tuning.gaussian_process import MOST_SLOWDOWN
from foretune.runtime.tuning.launches import LaunchFamily, autotuners_named
from foretune.runtime.tuning.own_timings import USUAL_COST_S, OwnTimings

_CORPUS = Path(__file__).parents[2] / "datasets" / "h100_corpus" / "corpus.jsonl.gz"
_SEARCHES = Path(__file__).parents[1] / "third_party" / "tunings_h200.jsonl.gz"
_OWN = {
    "grouped_gemm_fwd": "h100",
    "grouped_gemm_dx": "h100",
    "grouped_gemm_dw": "h100",
    "matmul": "h100_kernels",
    "gated_mlp": "h100_kernels",
    "scaled_gemm": "h100_kernels",
    "scaled_grouped_gemm_fwd": "h100_kernels",
    "rms_norm_rope_fwd": "h100_kernels",
    "rms_norm_rope_bwd": "h100_kernels",
}
#: Families that share a kernel, or are each other's backward pass, count as one package, as do two of the same authors.
_SHARED = {
    "flash-kmeans": "flashlib",
    "grouped_gemm_dx": "grouped_gemm_fwd",
    "scaled_grouped_gemm_fwd": "scaled_gemm",
    "rms_norm_rope_bwd": "rms_norm_rope_fwd",
}
_H200, _H100 = DeviceSpec.named("h200"), DeviceSpec.named("h100")
_SEED, _LEAST_CONFIGS = 0, 6
#: The packages of the recorded searches.
_JUDGED = ("fla-core", "liger-kernel")


@dataclass
class Key:
    """A full search of one key of a kernel, with the features of each config."""

    package: str
    kernel: str
    problem: Problem
    configs: tuple[KernelConfig, ...]
    times: np.ndarray  # log times (n_configs,); inf for a failed config
    features: np.ndarray  # (n_configs, 2 * len(NAMES))
    wide: bool = False  # whether the list is wider than the authors'
    seconds: np.ndarray | None = None  # to compile and, as the authors do, to time each config (n_configs, 2)

    @property
    def slowdowns(self) -> np.ndarray:
        """Log slowdowns over the best config, at most `MOST_SLOWDOWN`."""
        return np.minimum(self.times - self.times.min(), MOST_SLOWDOWN)


class Tensor(SimpleNamespace):
    """The shape and dtype of a tensor."""


def argument(value: Any) -> Any:
    """An argument as the recorded searches store it."""
    if isinstance(value, dict) and "descriptor" in value:
        return SimpleNamespace(base=argument(value["descriptor"]), block_shape=value["block"])
    if isinstance(value, dict) and "dtype" in value:
        return Tensor(shape=tuple(value["shape"]), dtype=value["dtype"])
    return value


# Data.


@cache
def _functions(package: str) -> dict[str, str]:
    """The modules of a package's functions, by the functions' names; of several, the one nearest to the root."""
    found: dict[str, str] = {}
    spec = importlib.util.find_spec(package)
    root = Path(spec.origin).parent if spec and spec.origin else Path()
    for file in sorted(root.rglob("*.py"), key=lambda one: (len(one.parts), str(one))):
        module = ".".join((package, *file.relative_to(root).with_suffix("").parts))
        for name in re.findall(r"^def (\w+)\(", file.read_text(), re.M):
            found.setdefault(name, module)
    return found


@cache
def _kernel(package: str, name: str) -> Kernel:
    return Kernel(getattr(importlib.import_module(_functions(package)[name]), name))


def third_party(path: Path, least: int = _LEAST_CONFIGS) -> Iterator[Key]:
    """The searches of fla-core and liger-kernel that `autotuners_on_gpu.py` recorded, which have no grid.

    Args:
        path: Their file.
        least: The length of the shortest lists.
    """
    sys.path.insert(0, str(path.parent))
    from autotuners_on_gpu import tunings_in
    from key_search import _Recorded

    seen = set()
    for line in tunings_in(path):
        key, name = (line["kernel"], json.dumps(line["key"])), line["kernel"]
        if key in seen or len(line["times"]) < least:
            continue
        seen.add(key)
        module = next(one for one in ("fla", "liger_kernel") if name in _functions(one))
        package = {"fla": "fla-core"}.get(module, module.replace("_", "-"))
        given = {name: argument(value) for name, value in line["arguments"].items()}
        knobs = [one for one, *_ in line["times"]]
        times = np.log([math.inf if ms is None else ms for _, ms, *_ in line["times"]])
        features = launch_features(_kernel(module, name), given, knobs, _H200)
        full = f"{_functions(module)[name]}.{name}"
        problem, seconds = _Recorded(line).problem_from_call(given), np.array([s for _, _, *s, _ in line["times"]])
        yield Key(package, full, problem, _configs(knobs), times, features, seconds=seconds)


def _configs(knobs: Sequence[Mapping[str, Any]]) -> tuple[KernelConfig, ...]:
    return tuple(
        KernelConfig.of(**{name: str(v) if isinstance(v, bool) else v for name, v in one.items() if v is not None})
        for one in knobs
    )


def corpus(path: Path, problems: list[str], wide: bool = False) -> Iterator[Key]:
    """The searches of studies/corpus. Kernels that cannot be imported are listed."""
    lines = [json.loads(line) for line in gzip.decompress(path.read_bytes()).decode().splitlines()]
    by_key: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        by_key[line["kernel"], json.dumps(line["key"]), json.dumps(line["arguments"])].append(line)
    for (full, *_), phases in by_key.items():
        trials = list({json.dumps(one["config"]): one for line in phases for one in line["trials"]}.values())
        trials = comparable([one for one in trials if "grid" in one or "failure" in one])
        times = np.log([one.get("us") or math.inf for one in trials]) if trials else np.zeros(0)
        if len(trials) < _LEAST_CONFIGS or not np.isfinite(times).any():
            continue
        first, knobs = phases[0], [one["config"] for one in trials]
        try:
            kernel = Kernel(_tuner(full))
            given = {name: argument(value) for name, value in first["arguments"].items()}
            given["grid"] = _Grids(trials)
            features = launch_features(kernel, given, knobs, _H100)
        except Exception as error:  # noqa: BLE001 - a package may fail in any way
            problems.append(f"{full}: {type(error).__name__}: {error}")
            continue
        problem = LaunchFamily(_tuner(full)).problem_from_call(given)
        package = _SHARED.get(first["package"], first["package"])
        yield Key(package, full, problem, _configs(knobs), times, features, wide)


def comparable(trials: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the trials of a key without those that compute something else than the authors' first config.

    If another one of the authors' does, too, results are not reproducible, and all trials are returned.
    """
    if any("own" in one and "differs" in one for one in trials):
        return trials
    return [one for one in trials if "differs" not in one]


@cache
def _tuner(name: str) -> Any:
    return autotuners_named(name)[0]


class _Grids:
    """The recorded grids, as a function of a config; a config that was not launched has that of the first one."""

    def __init__(self, trials: Sequence[Mapping[str, Any]]) -> None:
        self._names = sorted({name for one in trials for name in one["config"]})
        self._grids = {self._of(one["config"]): one["grid"] for one in trials if "grid" in one}

    def _of(self, knobs: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(knobs.get(name) for name in self._names)

    def __call__(self, given: Mapping[str, Any]) -> list[int]:
        return self._grids.get(self._of(given)) or next(iter(self._grids.values()))


def _at_grid(kernel: Kernel, arguments: Mapping[str, Any], knobs: Mapping[str, Any], grid: Any) -> np.ndarray:
    """The absolute features of one config."""
    return launch_features(kernel, {**arguments, "grid": grid}, [knobs], _H100)[0, : len(NAMES)]


class _CaughtError(BaseException):
    """A launch that was caught."""


def own_families(n_problems: int = 24, sizes: Sequence[int] = (12, 48)) -> Iterator[Key]:
    """Lists drawn from the measurements of Foretune's families, from configs that are not far from the best."""
    from foretune.runtime.testing import use_stub_device
    from triton.runtime.jit import JITFunction

    source, run = np.random.default_rng(_SEED), JITFunction.run

    def caught(self: Any, *args: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        raise _CaughtError(self, dict(zip(inspect.signature(self.fn).parameters, args, strict=False)) | keywords)

    for name, dataset in _OWN.items():
        grid, family = load(dataset).grid(name), find_family(name)
        times = grid.times_us
        rows = np.flatnonzero(np.isfinite(times).mean(axis=1) > 0.5)[:n_problems]
        slowdowns = times[rows] / np.nanmin(np.where(np.isfinite(times[rows]), times[rows], np.nan), axis=1)[:, None]
        usual = (np.isfinite(times).mean(axis=0) > 0.9) & (np.nan_to_num(np.median(slowdowns, axis=0), nan=9) < 4)
        knobs = [one.to_json() for one in grid.configs]
        # The others launch several kernels, or are not written in Triton.
        usual &= np.array([one.get("SPLIT_K", 1) == 1 and not one.get("CONSUMERS", 0) for one in knobs])
        for size in sizes:
            columns = np.sort(source.choice(np.flatnonzero(usual), min(size, usual.sum()), replace=False))
            configs = tuple(grid.configs[at] for at in columns)
            for row in rows:
                problem, features = grid.cases[row].problem, []
                with use_stub_device("h200"):
                    JITFunction.run = caught
                    try:
                        for config in configs:
                            try:
                                family.compile(config, problem)
                            except _CaughtError as launch:
                                jit, arguments = launch.args
                            given, programs = _launched(problem, config.to_json(), arguments)
                            features.append(_at_grid(Kernel(jit), given, config.to_json(), programs))
                    finally:
                        JITFunction.run = run
                table = np.array(features)
                log_times = np.log(np.where(np.isfinite(times[row, columns]), times[row, columns], math.inf))
                features = np.hstack([table, table - table.mean(axis=0)])
                package = f"own {_SHARED.get(name, name)}"
                yield Key(package, f"{name} ({size})", problem, configs, log_times, features)


def _launched(problem: Problem, knobs: Mapping[str, Any], arguments: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """The sizes that a compiled kernel does not have, and the grid."""
    dims = defaultdict(lambda: 1, problem.dims)
    m, n, k, groups = dims.get("m", dims["rows"]), dims["n"], dims["k"], dims["groups"]
    sizes = {"M": m, "N": n, "K": k, "rows": m, "x_rows": m, "groups": groups, "batch": dims["batch"]}
    sizes |= {"N8": n // 8, "K8": k // 8, "N16": n // 16, "K16": k // 16, "lda": k, "ldb": k, "ldy": n}
    sizes |= {"tokens": dims["tokens"], "q_heads": dims["q_heads"], "k_heads": dims["kv_heads"]}
    if problem.family.endswith("_dx"):
        sizes |= {"N8": k // 8, "K8": n // 8}
        n = k
    given = {name: sizes.get(name, value) for name, value in arguments.items()}
    if "HEADS" in knobs:
        rows, heads = knobs["ROWS"] * knobs.get("STEPS", 1), dims["q_heads"] + dims["kv_heads"]
        return given, (math.ceil(dims["tokens"] / rows), math.ceil(heads / knobs["HEADS"]))
    tiles = (math.ceil(m / knobs["BLOCK_M"]) + groups - 1) * math.ceil(n / knobs["BLOCK_N"]) * dims["batch"]
    if problem.family == "grouped_gemm_dw":
        tiles = groups * math.ceil(n / knobs["BLOCK_M"]) * math.ceil(k / knobs["BLOCK_N"])
    per_sm = knobs.get("PROGRAMS_PER_SM", 0)
    return given, (min(tiles, _H100.sm_count * per_sm) if per_sm else tiles,)


# Models.

#: Returns the predicted log slowdowns of a key's configs, up to a constant.
Predict = Callable[[Key], np.ndarray]


def columns_without(*names: str) -> list[int]:
    """The columns of the features, without some, absolute and relative."""
    kept = [at for at, name in enumerate(NAMES) if name not in names]
    return [*kept, *(len(NAMES) + at for at in kept)]


def booster(keys: Sequence[Key], columns: Sequence[int], rounds: int = 300, seed: int = _SEED) -> Any:
    """A LightGBM model of the centered log slowdowns; each kernel counts the same."""
    import lightgbm

    targets = [key.slowdowns - key.slowdowns.mean() for key in keys]
    n_rows: dict[str, int] = defaultdict(int)
    for key in keys:
        n_rows[key.kernel] += len(key.configs)
    weights = [np.full(len(key.configs), 1000.0 / n_rows[key.kernel]) for key in keys]
    options = {"objective": "regression", "num_leaves": 15, "learning_rate": 0.05, "min_data_in_leaf": 40}
    options |= {"feature_fraction": 0.5, "bagging_fraction": 0.7, "bagging_freq": 1, "lambda_l2": 5.0, "verbose": -1}
    options |= {"num_threads": 1, "seed": seed, "deterministic": True, "use_missing": False}
    table = np.concatenate([key.features[:, columns] for key in keys])
    data = lightgbm.Dataset(table, np.concatenate(targets), weight=np.concatenate(weights))
    return lightgbm.train(options, data, rounds)


def trees(keys: Sequence[Key], columns: Sequence[int], rounds: int = 300, seed: int = _SEED) -> Predict:
    """The ranker."""
    model = booster(keys, columns, rounds, seed)
    return lambda key: model.predict(key.features[:, columns])


def ridge(keys: Sequence[Key], columns: Sequence[int]) -> Predict:
    """A simple alternative: ridge regression by the relative features and their squares."""

    def table(key: Key) -> np.ndarray:
        relative = key.features[:, [at for at in columns if at >= len(NAMES)]]
        return np.hstack([relative, relative**2 - (relative**2).mean(axis=0)])

    x = np.concatenate([table(key) for key in keys])
    scale = x.std(axis=0) + 1e-9
    y = np.concatenate([key.slowdowns - key.slowdowns.mean() for key in keys])
    x = x / scale
    weight = np.linalg.solve(x.T @ x + 0.01 * len(x) * np.eye(x.shape[1]), x.T @ y)
    return lambda key: table(key) / scale @ weight


# Searches.


def searched(key: Key, prior: np.ndarray | None, k: int | str, own: OwnTimings | None = None) -> list[int]:
    """The configs that `OwnTimings` times on a key; without `own` it knows nothing of the kernel."""
    own, here = own or OwnTimings(SimpleNamespace(name=key.problem.family)), list[int]()
    while new := own.advise(key.problem, key.configs, k, **({} if prior is None else {"prior": prior})).new:
        times = {key.configs[at]: math.exp(key.times[at]) if math.isfinite(key.times[at]) else None for at in new}
        own.learn(key.problem, times)
        here += new
    return here


def regret(key: Key, chosen: Sequence[int]) -> float:
    """The log slowdown of the best chosen config, at most 2."""
    return min(key.times[list(chosen)].min() - key.times.min(), 2.0)


def random_regret(key: Key, count: int) -> float:
    """The expected log slowdown of the best of `count` random configs."""
    source = np.random.default_rng(_SEED)
    return float(np.mean([regret(key, source.permutation(len(key.configs))[:count]) for _ in range(16)]))


#: The facts, in groups whose worth is reported.
GROUPS = {
    "grid": ("programs", "waves", "fill", "residency", "warps_per_sm"),
    "bytes": ("loaded", "stored", "atomic", "loaded_by_thread", "iteration_by_thread", "in_flight"),
    "access pattern": ("piece", "scattered"),
    "dots": ("dot_flops", "dot_m", "dot_n", "dot_k", "dot_by_warp", "is_dot", "dot_itemsize", "intensity"),
    "live values": ("carried_by_thread", "largest_by_thread", "registers", "smem"),
    "loops": ("trips", "loops"),
    "arithmetic": ("operations", "operations_by_thread", "special", "reduced_by_thread", "scanned_by_thread"),
    "roofline": ("roofline",),
}
#: How much of a prediction the search believes; chosen among 0.5, 0.7 and 1.
TRUST = 0.7


def held_out(
    keys: Sequence[Key], fit: Callable[..., Predict], columns: Sequence[int], kernels: int = 0, wide: bool = True
) -> list[Any]:
    """For each key the prediction of a model of the other packages.

    Args:
        keys: The keys.
        fit: Trains a model.
        columns: The features that it has.
        kernels: At how many kernels of the other packages it is trained; 0: all of them.
        wide: Whether it is trained on wide lists, too.
    """
    found: list[Any] = [None] * len(keys)
    source = np.random.default_rng(_SEED)
    for package in sorted({key.package for key in keys}):
        others = [key for key in keys if key.package != package and (wide or not key.wide)]
        names = sorted({key.kernel for key in others})
        chosen = set(source.permutation(names)[:kernels] if kernels else names)
        predict = fit([key for key in others if key.kernel in chosen], columns)
        for at, key in enumerate(keys):
            if key.package == package:
                found[at] = predict(key)
    return found


def count_of(key: Key, share: float) -> int:
    """The number of configs in a share of a key's list, at least two."""
    return max(2, math.ceil(len(key.configs) * share))


class Table:
    """Prints the share timed, the mean regret (geometric over kernels), its 95th percentile and the keys within 5 %.

    Columns: lists of 16 and more of other packages, shorter ones, those of Foretune's own families, and wide lists.
    """

    HEADS = ("packages, lists of 16-", "packages, lists of 6-15", "own families, lists of 48", "packages, wide lists")

    def __init__(self, keys: Sequence[Key]) -> None:
        self._keys = keys
        self._columns = 3 + any(key.wide for key in keys)
        print(f"{'':32}" + "".join(f"{head:>34}" for head in self.HEADS[: self._columns]))
        print(f"{'first keys':32}" + f"{'share regret %    p95  <5 %':>34}" * self._columns)

    def row(self, label: str, chosen: Callable[[int, Key], Sequence[int] | tuple[float, float]]) -> None:
        """A row, for a function that returns the timed configs of a key, or their share and the regret."""
        by_kernel: dict[int, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
        for at, key in enumerate(self._keys):
            own, short = key.package.startswith("own "), len(key.configs) < 16
            if own and short:
                continue
            timed = chosen(at, key)
            one = timed if isinstance(timed, tuple) else (len(timed) / len(key.configs), regret(key, timed))
            by_kernel[3 if key.wide else 2 if own else int(short)][key.kernel].append(one)
        cells = ""
        for group in range(self._columns):
            found = [np.array(one) for one in by_kernel[group].values()]
            share, mean = np.mean([one.mean(axis=0) for one in found], axis=0)
            each = np.concatenate(found)[:, 1]
            percents = " ".join(f"{100 * math.expm1(one):8.1f}" for one in (mean, np.quantile(each, 0.95)))
            cells += f"{share:11.2f}{percents}{100 * np.mean(each <= math.log(1.05)):6.0f}"
        print(f"{label:32}{cells}", flush=True)


def compare(keys: Sequence[Key]) -> None:
    """Print what each search loses with and without the prior."""
    columns = columns_without()
    by_trees, by_ridge = held_out(keys, trees, columns), held_out(keys, ridge, columns)
    table = Table(keys)
    for share in (1 / 8, 1 / 4, 1 / 2, "auto"):
        k = (lambda key, share=share: share) if share == "auto" else (lambda key, share=share: count_of(key, share))
        if share != "auto":
            counts = [(k(key) / len(key.configs), random_regret(key, k(key))) for key in keys]
            table.row(f"{share:.3f}: random", lambda at, key, counts=counts: counts[at])
            table.row(f"{share:.3f}: best predicted", lambda at, key, k=k: np.argsort(by_trees[at])[: k(key)].tolist())
        text = share if share == "auto" else f"{share:.3f}"
        table.row(f"{text}: Gaussian process", lambda at, key, k=k: searched(key, None, k(key)))
        for name, prior in (("trees", by_trees), ("ridge", by_ridge)):
            table.row(
                f"{text}: with the prior ({name})",
                lambda at, key, k=k, prior=prior: searched(key, TRUST * prior[at], k(key)),
            )


def later(keys: Sequence[Key]) -> None:
    """Print what the product loses on up to eight keys of each kernel, in eight orders, with and without the prior."""
    replay(keys, {"no": None, "yes": held_out(keys, trees, columns_without())})


def replay(keys: Sequence[Key], priors: Mapping[str, Sequence[Any] | None], kernel: str = "", orders: int = 8) -> None:
    """Print what the product loses with each of some priors, on all kernels or the one of this name."""
    by_list: dict[tuple[str, Any], dict[Problem, int]] = defaultdict(dict)
    for at, key in enumerate(keys):
        if key.kernel.endswith(kernel):
            by_list[key.kernel, key.configs][key.problem] = at
    width = max(map(len, priors))
    print(f"keys     lists  {'prior':{width}}  share  regret %    p95")
    found: dict[tuple[str, str, str], dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    source = np.random.default_rng(_SEED)
    for (name, configs), places in by_list.items():
        length = "wide" if keys[next(iter(places.values()))].wide else "16-" if len(configs) >= 16 else "6-15"
        for order in [source.permutation([*places.values()])[:8] for _ in range(orders)]:
            for label, prior in priors.items():
                own = OwnTimings(SimpleNamespace(name=keys[order[0]].problem.family))
                for place, at in enumerate(order):
                    timed = searched(keys[at], None if prior is None else TRUST * prior[at], "auto", own)
                    part = ("first" if not place else "2 to 8", length, label)
                    found[part][name].append((len(timed) / len(configs), regret(keys[at], timed)))
    for part, by_kernel in sorted(found.items()):
        share, mean = np.mean([np.mean(one, axis=0) for one in by_kernel.values()], axis=0)
        p95 = np.quantile([lost for one in by_kernel.values() for _, lost in one], 0.95)
        percents = f"{100 * math.expm1(mean):10.1f}{100 * math.expm1(p95):7.1f}"
        print(f"{part[0]:8} {part[1]:6} {part[2]:{width}}{share:7.2f}{percents}", flush=True)


def first_eight(keys: Sequence[Key], path: Path = _SEARCHES) -> None:
    """Print what the first eight keys of fla-core's and Liger's kernels take, in the order of key_search_on_gpu.py.

    The prior is that of the other packages. A key's seconds are compared with those of the authors' search.
    """
    recorded: dict[str, list[tuple[Key, np.ndarray]]] = defaultdict(list)
    models = {name: trees([key for key in keys if key.package != name], columns_without()) for name in _JUDGED}
    for key in third_party(path, least=2):
        recorded[key.kernel].append((key, TRUST * models[key.package](key)))
    for label in ("without a prior", "with the prior"):
        places: dict[tuple[str, str], list[Any]] = defaultdict(list)  # shares, rounds and seconds of keys
        lost: dict[str, list[list[float]]] = defaultdict(list)  # of each kernel's keys
        for some in recorded.values():
            own, here = OwnTimings(SimpleNamespace(name=some[0][0].problem.family)), list[float]()
            length = "lists of 16-48" if len(some[0][0].configs) >= 16 else "lists of 3-9"
            for place, (key, prior) in enumerate(some[:8]):
                timed, rounds, *spent = _timed(key, prior if label == "with the prior" else None, own)
                row = (len(timed) / len(key.configs), rounds, *spent, key.seconds.sum())
                part = ("key 1", "key 2", *["key 3-7"] * 5, "key 8")[place]
                for of in ((length, part), (length, "all"), ("all", "all")):
                    places[of].append(row)
                here.append(regret(key, timed))
            lost[length].append(here)
            lost["all"].append(here)
        print(f"{label:32}{'keys':>6}{'share':>7}{'rounds':>8}{'compiling s':>13}{'timing s':>10}{'authors s':>11}")
        for (length, part), some in sorted(places.items()):
            share, rounds, compiling, timing, authors = np.mean(some, axis=0)
            line = f"{length:16}{part:16}{len(some):6}{share:7.2f}{rounds:8.1f}{compiling:13.2f}{timing:10.2f}"
            line += f"{authors:11.1f}"
            if part == "all":
                means, worst = [np.mean(here) for here in lost[length]], max(max(here) for here in lost[length])
                said = f"regret {100 * math.expm1(np.mean(means)):.2f} % (worst {100 * math.expm1(worst):.1f})"
                line += f"{(compiling + timing) / authors:7.3f} of the authors' seconds, {said}"
            print(line)
        print(flush=True)


def _timed(key: Key, prior: np.ndarray | None, own: OwnTimings) -> tuple[list[int], int, float, float]:
    """The configs that the product times on a key, the rounds, and the seconds of compiling and timing."""
    from key_search import seconds_of

    here, rounds, spent, cost = list[int](), 0, np.zeros(2), USUAL_COST_S
    while new := own.advise(key.problem, key.configs, cost_s=cost, prior=prior).new:
        times = {key.configs[at]: math.exp(key.times[at]) if math.isfinite(key.times[at]) else None for at in new}
        own.learn(key.problem, times)
        here += new
        rounds += 1
        spent += seconds_of(key.seconds[[*new], 0])
        cost = spent.sum() / len(here)
    return here, rounds, *spent


def with_wide_lists(keys: Sequence[Key]) -> None:
    """Print what priors lose that are trained without wide lists, and with them if there are any; three seeds each."""
    columns, seeds = columns_without(), range(3)
    trained = {"without": False} | ({"with": True} if any(key.wide for key in keys) else {})
    priors = {
        f"{label}, seed {seed}": held_out(keys, partial(trees, seed=seed), columns, wide=has)
        for seed in seeds
        for label, has in trained.items()
    }
    table = Table(keys)
    for share in (1 / 8, 1 / 4, 1 / 2, "auto"):
        k = (lambda key, share=share: share) if share == "auto" else (lambda key, share=share: count_of(key, share))
        text = share if share == "auto" else f"{share:.3f}"
        for label, prior in sorted(priors.items()):
            table.row(f"{text}: {label}", lambda at, key, k=k, prior=prior: searched(key, TRUST * prior[at], k(key)))
    print()
    replay(keys, {label: prior for label, prior in priors.items() if label.endswith("seed 0")})
    print("\nchunk_fwd_kernel_h")
    replay(keys, {"none": None, **priors}, ".chunk_fwd_kernel_h")


def worth(keys: Sequence[Key]) -> None:
    """Print what each group of facts is worth: the best predicted quarter with it alone, and without it.

    The models have 100 trees, to save time.
    """
    table = Table(keys)
    every = {name for names in GROUPS.values() for name in names}
    for label, left_out in {
        "warps and stages": every,
        **{f"and {group}": every - {*names} for group, names in GROUPS.items()},
        "all facts": set[str](),
        **{f"all without {group}": {*names} for group, names in GROUPS.items()},
    }.items():
        columns = columns_without(*left_out)
        prior = held_out(keys, partial(trees, rounds=100), columns)
        table.row(label, lambda at, key, prior=prior: np.argsort(prior[at])[: count_of(key, 1 / 4)].tolist())


def curve(keys: Sequence[Key]) -> None:
    """Print the regret with a prior trained on few or many kernels."""
    table, total = Table(keys), len({key.kernel for key in keys})
    for kernels in (10, 25, 50, 100, 200):
        if kernels < total:
            prior = held_out(keys, trees, columns_without(), kernels)
            table.row(f"{kernels} kernels", lambda at, key, p=prior: searched(key, TRUST * p[at], count_of(key, 1 / 8)))


PARTS = {
    "compare": compare,
    "later": later,
    "eight": first_eight,
    "worth": worth,
    "curve": curve,
    "wide": with_wide_lists,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--searches", type=Path, default=_SEARCHES, help="what autotuners_on_gpu.py wrote")
    parser.add_argument("--corpus", type=Path, default=_CORPUS, help="what studies/corpus measured")
    parser.add_argument("--wide", type=Path, help="wide lists, which studies/corpus measured with --wide")
    parser.add_argument(
        "--parts", nargs="*", default=[*PARTS][:-1], choices=[*PARTS], metavar="PART", help=", ".join(PARTS)
    )
    parser.add_argument("--launches-s", type=float, default=own_timings._LAUNCHES_S, help="see own_timings.py")
    parser.add_argument("--plausible", type=float, default=own_timings._PLAUSIBLE, help="see own_timings.py")
    parser.add_argument("--far", type=float, default=gaussian_process._FAR_WITH_PRIOR, help="see gaussian_process.py")
    parser.add_argument("--save", type=Path, help="train on everything and write the prior to this file")
    parser.add_argument("--without", nargs="+", default=(), metavar="PACKAGE", help="leave these out of --save")
    options = parser.parse_args()
    own_timings._LAUNCHES_S, own_timings._PLAUSIBLE = options.launches_s, options.plausible
    gaussian_process._FAR_WITH_PRIOR = options.far
    problems: list[str] = []
    keys = [*third_party(options.searches), *own_families(), *corpus(options.corpus, problems)]
    keys += corpus(options.wide, problems, wide=True) if options.wide else []
    for problem in sorted(set(problems)):
        print(f"left out: {problem}")
    counted = {(key.package, key.kernel) for key in keys}
    print(f"{len(keys)} keys of {len(counted)} kernels in {len({package for package, _ in counted})} packages")
    if unknown := {*options.without} - {package for package, _ in counted}:
        parser.error(f"--without {min(unknown)}: packages are {', '.join(sorted({package for package, _ in counted}))}")
    for part in options.parts:
        print(f"\n{part}")
        PARTS[part](keys)
    if options.save:
        known = [key for key in keys if key.package not in options.without]
        forest = Forest.from_lightgbm(booster(known, columns_without()).dump_model()).affine(TRUST).compact()
        options.save.write_bytes(Prior(forest).dumps())


if __name__ == "__main__":
    main()
