"""Which search within a key times few configs and loses little: `python tests/studies/key_search.py` (a minute of CPU).

Replays full searches over many orders of a kernel's keys: those of fla-core and liger-kernel (`tunings_h200.jsonl.gz`),
and lists of 12 and 48 configs drawn from the measurements of Foretune's own families (`h100_kernels`). `OwnTimings` is
the product: a Gaussian process that stops by itself. On the packages it is compared with methods that may time a given
share of each list: of a kernel's first key 1/4 (1/2 of lists shorter than 16), of keys 2 to 8 1/8, later 1/12, but at
least two configs. All know what they timed on earlier keys of the kernel in that order. Needs scikit-learn and
lightgbm; `--methods` without names compares nothing. `--launches-s` and `--reach` replay other constants.

Columns: the share of the list that was timed, regret of the best timed config (mean over kernels of geometric means,
95th percentile and worst of all keys, %), timed configs that failed (%), and the mean and 99th percentile of the
milliseconds of CPU time that choosing a batch takes (set OMP_NUM_THREADS=1). Then the seconds of the first eight keys,
with eight compiles side by side, relative to the authors' search, which compiles one config at a time; and the
product's share, regret and worst regret by kernel.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from foretune.datasets import KernelConfig, Problem, load
from foretune.runtime.tuning import gaussian_process as model_of_times
from foretune.runtime.tuning import own_timings
from foretune.runtime.tuning.gaussian_process import MOST_SLOWDOWN, Predicted, distances, far_apart
from foretune.runtime.tuning.launches import ELEMENTS, LaunchFamily
from foretune.runtime.tuning.own_timings import USUAL_COST_S, OwnTimings, coordinates, knob_values

_SEARCHES = Path(__file__).parents[1] / "third_party" / "tunings_h200.jsonl.gz"
_FAMILIES = ("matmul", "gated_mlp", "scaled_gemm", "scaled_grouped_gemm_fwd", "rms_norm_rope_fwd", "rms_norm_rope_bwd")
_AT_ONCE = 4
#: Configs that compile side by side at most, how much longer each takes then, and the seconds that timing one takes.
#: With these, a replay of the order of `key_search_on_gpu.py` on an H200 took 85 s, where the card took 77 s.
_COMPILERS, _CONTENTION, _TIMING_S = 8, 1.3, 0.03
#: The number of orders for methods other than the product.
_COMPARED = 2


@dataclass
class Kernel:
    """The full searches of one kernel."""

    configs: tuple[KernelConfig, ...]
    problems: list[Problem]
    times: np.ndarray  # log times (n_problems, n_configs); inf for a failed config
    compile_s: np.ndarray  # (n_problems, n_configs)
    bench_s: np.ndarray  # (n_problems, n_configs), with Triton's benchmark
    points: np.ndarray = field(init=False)
    knobs: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.points, self.knobs = coordinates(self.problems), knob_values(self.configs)


class _Recorded(LaunchFamily):
    """A `LaunchFamily` of a kernel that is not here, from a recorded launch."""

    def __init__(self, line: dict[str, Any]) -> None:
        self.name, self._elements = line["kernel"], ELEMENTS
        self._parameters, self._defaults = tuple(name for name in line["arguments"] if name != "warmup"), {}
        # Constants as both libraries write them.
        constants = {name for name in self._parameters if name.isupper() and name != "T"}
        self._decisive = frozenset(line["keys"]) | constants


def packages(path: Path) -> dict[str, dict[str, Kernel]]:
    """The recorded searches with at least six configs, by package and kernel."""
    sys.path.insert(0, str(path.parent))
    from autotuners_on_gpu import tunings_in

    found: dict[str, dict[str, tuple[Problem, dict[KernelConfig, tuple[float, float, float]]]]] = defaultdict(dict)
    theirs = set()
    for line in tunings_in(path):
        if line["workload"] == "fused_moe":
            theirs.add(line["kernel"])
        times = {KernelConfig.of(**one): (math.inf if ms is None else ms, *s) for one, ms, *s, _ in line["times"]}
        given = {n: SimpleNamespace(**v) if isinstance(v, dict) else v for n, v in line["arguments"].items()}
        problem = _Recorded(line).problem_from_call(given)
        found[line["kernel"]].setdefault(json.dumps(line["key"]), (problem, times))
    kernels: dict[str, dict[str, Kernel]] = {"fla-core": {}, "liger-kernel": {}}
    for name, tuned in found.items():
        configs = tuple(next(iter(tuned.values()))[1])
        package = "liger-kernel" if name in theirs else "fla-core"
        alike = [one for one in tuned.values() if one[1].keys() == set(configs)]
        if len(configs) >= 6:
            table = np.array([[times[config] for config in configs] for _, times in alike])
            problems = [problem for problem, _ in alike]
            kernels[package][name] = Kernel(configs, problems, np.log(table[..., 0]), table[..., 1], table[..., 2])
    return kernels


def own_families() -> dict[str, Kernel]:
    """Lists of 12 and 48 configs of Foretune's families, drawn from those that are not far from the best."""
    source, data, kernels = np.random.default_rng(0), load("h100_kernels"), {}
    for family in _FAMILIES:
        grid = data.grid(family)
        times = grid.times_us
        rows = np.flatnonzero(np.isfinite(times).mean(axis=1) > 0.5)[:24]
        slowdowns = times[rows] / np.nanmin(np.where(np.isfinite(times[rows]), times[rows], np.nan), axis=1)[:, None]
        usual = (np.isfinite(times).mean(axis=0) > 0.9) & (np.nan_to_num(np.median(slowdowns, axis=0), nan=9) < 4)
        for size in (12, 48):
            columns = np.sort(source.choice(np.flatnonzero(usual), size, replace=False))
            table = times[np.ix_(rows, columns)]
            configs = tuple(grid.configs[at] for at in columns)
            problems = [grid.cases[row].problem for row in rows]
            table = np.log(np.where(np.isfinite(table), table, math.inf))
            kernels[f"{family} ({size})"] = Kernel(
                configs, problems, table, np.full_like(table, 0.5), np.full_like(table, 0.12)
            )
    return kernels


#: Returns the next configs to time: kernel, position of the key, (key, config) of everything timed, how many.
Method = Callable[[Kernel, int, Sequence[tuple[int, int]], int], list[int]]


def _rows(kernel: Kernel, key: int, timed: Sequence[tuple[int, int]]) -> tuple[list[tuple[int, int]], np.ndarray]:
    """What is known, with log slowdowns over the best config timed of the same key; failed configs count as slow."""
    least = defaultdict(lambda: math.inf)
    for row in timed:
        least[row[0]] = min(least[row[0]], kernel.times[row])
    rows = [row for row in timed if math.isfinite(least[row[0]])]
    return rows, np.array([min(kernel.times[row] - least[row[0]], MOST_SLOWDOWN) for row in rows])


def gaussian_process(kernel, key, timed, most):
    keys = [one for one in dict.fromkeys(at for at, _ in timed) if one != key]
    near = np.argsort(distances(kernel.points[[*keys, key]])[:-1], kind="stable")
    used, n_rows = [], sum(at == key for at, _ in timed)
    for one in (keys[at] for at in near):
        n_rows += sum(at == one for at, _ in timed)
        if n_rows > 160:
            break
        used.append(one)
    place = {one: at for at, one in enumerate([*used, key])}
    rows, times = _rows(kernel, key, [row for row in timed if row[0] in place])
    model = Predicted(kernel.points[[*used, key]], kernel.knobs, [(place[at], config) for at, config in rows], times)
    return model.next(_left(kernel, key, timed), 0.0 if any(at == key for at, _ in rows) else None, 0.0, most)


def _by_features(fit_and_score: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]) -> Method:
    """A method that fits log slowdowns by features and takes the configs of the least score."""

    def chosen(kernel, key, timed, most):
        def features(rows):
            points, knobs = kernel.points[[at for at, _ in rows]], kernel.knobs[[config for _, config in rows]]
            crossed = (points[:, :, None] - knobs[:, None, :]).reshape(len(rows), -1)
            return np.hstack([points, knobs, knobs**2, crossed, crossed**2])

        rows, times = _rows(kernel, key, timed)
        left = _left(kernel, key, timed)
        score = fit_and_score(features(rows), times, features([(key, config) for config in left]))
        return [left[at] for at in np.argsort(score, kind="stable")[:most]]

    return chosen


def _forest(known, times, asked):
    from sklearn.ensemble import RandomForestRegressor

    forest = RandomForestRegressor(20, min_samples_leaf=1, max_features=0.5, random_state=0).fit(known, times)
    by_tree = np.array([tree.predict(asked) for tree in forest.estimators_])
    return by_tree.mean(axis=0) - by_tree.std(axis=0)


def _quantile_trees(known, times, asked):
    import lightgbm

    options = {"objective": "quantile", "alpha": 0.2, "min_data_in_leaf": 2, "num_leaves": 15, "verbose": -1}
    options |= {"num_threads": 1, "min_data_in_bin": 1, "seed": 0, "deterministic": True}
    return lightgbm.train(options, lightgbm.Dataset(known, times), 40).predict(asked)


def _ridge(known, times, asked):
    center, scale = known.mean(axis=0), np.where(known.std(axis=0) > 0, known.std(axis=0), 1.0)
    known, asked = (known - center) / scale, (asked - center) / scale
    dual = np.linalg.solve(known @ known.T + 1e-2 * len(times) * np.eye(len(times)), times - times.mean())
    return asked @ (known.T @ dual)


def random_subset(kernel, key, timed, most):
    left = _left(kernel, key, timed)
    return [left[at] for at in np.random.default_rng([key, len(timed)]).permutation(len(left))[:most]]


METHODS: dict[str, Method] = {
    "Gaussian process": gaussian_process,
    "random forest with variance": _by_features(_forest),
    "quantile LightGBM": _by_features(_quantile_trees),
    "ridge with interactions": _by_features(_ridge),
    "random subset": random_subset,
}


def _left(kernel: Kernel, key: int, timed: Sequence[tuple[int, int]]) -> list[int]:
    done = {config for at, config in timed if at == key}
    return [at for at in range(len(kernel.configs)) if at not in done]


def searched(kernel: Kernel, order: Sequence[int], method: Method, steps: list[float]) -> Iterator[list[int]]:
    """Yield the configs timed for each key in this order."""
    timed: list[tuple[int, int]] = []
    for place, key in enumerate(order):
        size = len(kernel.configs)
        budget = max(2, math.ceil(size / ((4 if size >= 16 else 2) if place == 0 else 8 if place < 8 else 12)))
        here: list[int] = []
        while len(here) < budget:
            began, most = time.process_time(), min(_AT_ONCE, budget - len(here))
            is_random = method is random_subset
            if any(math.isfinite(kernel.times[row]) for row in timed) or is_random:
                here += (new := method(kernel, key, timed, most))
            else:
                here += (new := far_apart(kernel.knobs, min(budget, max(3, math.ceil(size / 6)))))
            steps.append(time.process_time() - began)
            timed += [(key, config) for config in new]
        yield here


def halved(kernel: Kernel, order: Sequence[int], steps: list[float]) -> Iterator[list[int]]:
    """Successive halving: compile all, launch each once (5 % of noise), and time the better half again and again."""
    source = np.random.default_rng(0)
    for key in order:
        left = np.arange(len(kernel.configs))
        noise = 0.05
        while len(left) > 1:
            left = left[np.argsort(kernel.times[key, left] + source.normal(0, noise, len(left)))[: len(left) // 2]]
            noise /= math.sqrt(2)
        yield [int(left[0])]


def stopping(
    kernel: Kernel, order: Sequence[int], steps: list[float], seconds: list[float] | None = None
) -> Iterator[list[int]]:
    """The product: `OwnTimings`, asked until no further config pays. `seconds` gets those that each key takes."""
    own = OwnTimings(cast(Any, SimpleNamespace(name=kernel.problems[0].family)))
    for key in order:
        here: list[int] = []
        spent_s = 0.0
        while True:
            cost_s = spent_s / len(here) if here else USUAL_COST_S
            began = time.process_time()
            new = own.advise(kernel.problems[key], kernel.configs, cost_s=cost_s).new
            steps.append(time.process_time() - began)
            if not new:
                break
            spent_s += sum(seconds_of(kernel.compile_s[key, list(new)]))
            times = {kernel.configs[at]: math.exp(kernel.times[key, at]) for at in new}
            own.learn(kernel.problems[key], {one: t if math.isfinite(t) else None for one, t in times.items()})
            here += new
        if seconds is not None:
            seconds.append(spent_s)
        yield here


def seconds_of(compile_s: np.ndarray) -> tuple[float, float]:
    """The seconds in which configs that take so long alone compile side by side, and those in which they are timed."""
    return _CONTENTION * max(compile_s.max(), compile_s.sum() / _COMPILERS), len(compile_s) * _TIMING_S


def share_of_seconds(kernels: dict[str, Kernel], orders: int) -> float:
    """The seconds that the first eight keys of kernels take, as a share of the authors' search."""
    ours, theirs = [], 0.0
    for kernel in kernels.values():
        source = np.random.default_rng(0)
        for _ in range(orders):
            order = source.permutation(len(kernel.problems))[:8]
            theirs += (kernel.compile_s + kernel.bench_s)[order].sum()
            list(stopping(kernel, order, [], ours))
    return sum(ours) / theirs


def table(kernels: dict[str, Kernel], orders: int, methods: dict[str, Method]) -> str:
    """The comparison, a row for each method, part of the keys, and length of the list."""
    ways: dict[str, Callable] = {"OwnTimings (stops by itself)": stopping}
    for name, method in methods.items():
        ways[name] = lambda kernel, order, steps, method=method: searched(kernel, order, method, steps)
    if methods:
        ways["successive halving"] = halved
    head = f"{'keys':6} {'configs':8} {'method':30} {'share':>6} {'timed':>6} {'mean %':>7} {'p95 %':>6} {'worst %':>8}"
    lines = [f"{head} {'failed %':>9} {'ms':>6} {'p99':>6}"]
    found: dict[tuple[str, str, str], list[str]] = {}
    for way, search in ways.items():
        regrets: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        timed, failed, steps = defaultdict(list), defaultdict(list), []
        for name, kernel in kernels.items():
            source, size = np.random.default_rng(0), len(kernel.configs)
            n_orders = orders if search is stopping else min(orders, _COMPARED)
            several = [source.permutation(len(kernel.problems)) for _ in range(n_orders)]
            for order in (*several, *([key] for key in range(len(kernel.problems)))):  # and each key as the first
                for place, (key, chosen) in enumerate(zip(order, search(kernel, order, steps), strict=True)):
                    part = ("1" if place == 0 else "2-8" if place < 8 else "9-", _length(size))
                    regrets[part][name].append(min(kernel.times[key, chosen].min() - kernel.times[key].min(), 2.0))
                    timed[part].append((1.0 if search is halved else len(chosen) / size, len(chosen)))
                    failed[part].append(np.isinf(kernel.times[key, chosen]).mean())
        for part, by_kernel in regrets.items():
            each = np.concatenate([np.array(one) for one in by_kernel.values()])
            mean = np.mean([np.mean(one) for one in by_kernel.values()])
            share, count = np.mean(timed[part], axis=0)
            loss = [100 * math.expm1(value) for value in (mean, np.quantile(each, 0.95), each.max())]
            ms = [1e3 * value for value in (np.mean(steps), np.quantile(steps, 0.99))] if steps else [0.0, 0.0]
            found[(*part, way)] = (
                f"{part[0]:6} {part[1]:8} {way:30} {share:6.2f} {count:6.1f} {loss[0]:7.1f} {loss[1]:6.0f} "
                f"{loss[2]:8.0f} {100 * np.mean(failed[part]):9.1f} {ms[0]:6.1f} {ms[1]:6.1f}"
            )
    return "\n".join([*lines, *(found[one] for one in sorted(found, key=lambda one: one[:2]))])


def by_kernel(kernels: dict[str, Kernel], orders: int) -> str:
    """The product's share, regret and worst regret of each kernel, of its first key, keys 2 to 8, and later ones."""
    lines = [f"{'kernel':40} {'configs':>7} {'keys':>4}  " + " ".join(f"{part:^18}" for part in ("1", "2-8", "9-"))]
    for name, kernel in kernels.items():
        source, parts = np.random.default_rng(0), defaultdict(list)
        for _ in range(orders):
            order = source.permutation(len(kernel.problems))
            for place, (key, chosen) in enumerate(zip(order, stopping(kernel, order, []), strict=True)):
                regret = min(kernel.times[key, chosen].min() - kernel.times[key].min(), 2.0)
                parts["1" if place == 0 else "2-8" if place < 8 else "9-"].append((len(chosen), regret))
        size, texts = len(kernel.configs), []
        for part in ("1", "2-8", "9-"):
            found = np.array(parts[part] or [(math.nan, math.nan)])
            count, loss, worst = found[:, 0].mean(), *(math.expm1(one(found[:, 1])) for one in (np.mean, np.max))
            texts.append(f"{count / size:5.2f} {100 * loss:5.1f} {100 * worst:6.0f}")
        lines.append(f"{name:40} {size:7} {len(kernel.problems):4}  " + " ".join(texts))
    return "\n".join(lines)


def _length(size: int) -> str:
    return "6-9" if size < 10 else "10-15" if size < 16 else "16-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--searches", type=Path, default=_SEARCHES, help="what autotuners_on_gpu.py wrote")
    parser.add_argument("--orders", type=int, default=8, help="the number of orders of each kernel's keys")
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=METHODS, help="the others to compare")
    parser.add_argument("--launches-s", type=float, default=own_timings._LAUNCHES_S, help="see `OwnTimings`")
    parser.add_argument("--reach", type=float, default=model_of_times._REACH, help="see gaussian_process.py")
    options = parser.parse_args()
    own_timings._LAUNCHES_S, model_of_times._REACH = options.launches_s, options.reach
    for name, kernels in (packages(options.searches) | {"own": own_families()}).items():
        methods = {} if name == "own" else {one: METHODS[one] for one in options.methods}
        n_keys = sum(len(kernel.problems) for kernel in kernels.values())
        print(f"{name}: {len(kernels)} kernels, {n_keys} keys, {options.orders} orders ({_COMPARED} of the others)")
        print(table(kernels, options.orders, methods))
        share = share_of_seconds(kernels, options.orders)
        print(f"seconds of the first eight keys: {share:.3f} of the authors' search")
        print(f"{by_kernel(kernels, options.orders)}\n", flush=True)


if __name__ == "__main__":
    main()
