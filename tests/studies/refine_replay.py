"""Replay shipped measurements as the calls of an op under drifting routings, and print what algorithms lose and cost.

`python tests/studies/refine_replay.py` (four minutes on two cores, half of it to train rankers; no GPU). Each layer
that was measured with several routings is an op. Its first config and its candidates are the diversified shortlist of a
ranker that saw no problem of the layer's model family. Each call has the times of a mixture of the measured routings,
the noise of one timing pass against the other (doubled, because a real call is timed once), a clock that drifts by up
to 3 %, and in one call of a hundred a delay of 20 to 200 %. "drift": the mixture moves slowly. "iid": it is drawn anew
for each call. "card": 16 mixtures take turns; in addition, a config's first launch takes up to three times as long, its
time drifts by itself (standard deviation 1 %, correlation 0.95 from call to call), and in one call of 25 the device
idles for 5 to 40 us between the two events.

Regret is the time of the current choice over that of the best config of a full search under the same mixtures. Both are
chosen by the first timing pass and judged by the second. Cost is the time of all 200 calls, exploration included, over
that of the predicted config alone.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
from foretune.datasets import load
from foretune.kernels import find_family
from foretune.model.calibration.conformal import diversified_places
from foretune.model.cross_validation import _Split
from foretune.model.gbdt import LightGBMRanker
from foretune.model.metrics import geomean
from foretune.runtime.tuning.refine.race import CALLS, Race
from numpy.typing import NDArray

AFTER = (0, 10, 25, 50, 100, 200)
FAMILIES = ("grouped_gemm_fwd", "grouped_gemm_dx", "grouped_gemm_dw")
MOST = 32  # candidates that are prepared for each layer


class Layer(NamedTuple):
    """The replayed data of one layer; (n_routings, n_configs) in microseconds, the shortlist first."""

    first_us: NDArray[np.float64]
    second_us: NDArray[np.float64]
    slowdowns: NDArray[np.float64]  # predicted, (MOST,)
    noise: NDArray[np.float64]  # log ratios of the two passes of configs near the best


class Algorithm(Protocol):
    """What decides which config each call runs."""

    best: int

    def pick(self) -> int: ...

    def see(self, config: int, log_time: float) -> None: ...


class Predicted:
    """Always the predicted config."""

    def __init__(self, slowdowns: Sequence[float]) -> None:
        self.best = 0

    def pick(self) -> int:
        return 0

    def see(self, config: int, log_time: float) -> None:
        pass


class Rounds:
    """F-Race without a prior or a limit on its cost: rounds over the remaining configs, and a paired test."""

    def __init__(self, slowdowns: Sequence[float]) -> None:
        self.best, self.alive = 0, list(range(len(slowdowns)))
        self.rounds: list[NDArray[np.float64]] = []
        self._begin()

    def _begin(self) -> None:
        self.queue, self.now = list(self.alive), np.full(max(self.alive) + 1, np.nan)

    def pick(self) -> int:
        return self.queue.pop(0)

    def see(self, config: int, log_time: float) -> None:
        self.now[config] = log_time
        if self.queue:
            return
        self.rounds.append(self.now[self.alive])
        times = np.array(self.rounds)
        self.best = self.alive[int(times.mean(axis=0).argmin())]
        if len(times) > 2 and len(self.alive) > 1:
            behind = times - times[:, [times.mean(axis=0).argmin()]]
            error = 1.25 * behind.std(axis=0, ddof=1) / math.sqrt(len(times))
            kept = np.median(behind, axis=0) <= 2 * error
            self.alive = [config for config, is_kept in zip(self.alive, kept, strict=True) if is_kept]
            self.rounds = list(times[:, kept])
        self._begin()


class Halving:
    """Sequential halving (Karnin et al. 2013) over 200 calls."""

    def __init__(self, slowdowns: Sequence[float]) -> None:
        self.best, self.alive = 0, list(range(len(slowdowns)))
        self._calls = CALLS // math.ceil(math.log2(len(slowdowns)))
        self._begin()

    def _begin(self) -> None:
        self.queue = self.alive * max(1, self._calls // len(self.alive))
        self.logs: dict[int, list[float]] = {config: [] for config in self.alive}

    def pick(self) -> int:
        return self.queue.pop(0) if self.queue else self.best

    def see(self, config: int, log_time: float) -> None:
        if len(self.alive) == 1:
            return
        self.logs[config].append(log_time)
        if not self.queue:
            self.alive = sorted(self.alive, key=lambda one: np.mean(self.logs[one]))[: len(self.alive) // 2]
            self.best = self.alive[0]
            self._begin()


class UCB:
    """UCB1 (Auer et al. 2002) on log times, for a minimum."""

    def __init__(self, slowdowns: Sequence[float], width: float = 0.02) -> None:
        self.best, self._width = 0, width
        self.calls, self.sums = np.zeros(len(slowdowns)), np.zeros(len(slowdowns))

    def pick(self) -> int:
        if not self.calls.all():
            return int(self.calls.argmin())
        bonus = self._width * np.sqrt(2 * math.log(self.calls.sum()) / self.calls)
        return int((self.sums / self.calls - bonus).argmin())

    def see(self, config: int, log_time: float) -> None:
        self.calls[config] += 1
        self.sums[config] += log_time
        self.best = int(np.where(self.calls > 0, self.sums / np.maximum(self.calls, 1), np.inf).argmin())


class Thompson(Race):
    """The model and the limit of `Race`, but each call runs the fastest of a draw from the posterior."""

    def __init__(self, slowdowns: Sequence[float]) -> None:
        super().__init__(slowdowns)
        self.ready[:], self._random = True, np.random.default_rng(0)

    def pick(self) -> int:
        excess = np.exp(self._mean[1:] - self._mean[1]) - 1
        affordable = (self.calls * excess).sum() + excess <= 0.007 * (self.calls.sum() + 1)
        affordable[self.best] = True
        drawn = self._random.multivariate_normal(self._mean[1:], self._cov[1:, 1:])
        picked = int(np.where(affordable & self.alive, drawn, np.inf).argmin())
        self.calls[picked] += 1
        return picked

    def see(self, config: int, log_time: float) -> None:  # type: ignore[override]
        super().see([config], [log_time])


class Raced:
    """The product's own race with all binaries ready, which learns times once all planned calls have run.

    As in the product, the call that plans runs the choice and is not timed.
    """

    def __init__(self, slowdowns: Sequence[float], max_cost: float = 0.01) -> None:
        self.race = Race(slowdowns, max_cost)
        self.race.ready[:] = True
        self._planned: list[int] = []
        self._configs: list[int] = []
        self._logs: list[float] = []

    @property
    def best(self) -> int:
        return self.race.best

    def pick(self) -> int:
        self._is_timed = bool(self._planned)
        if self._planned:
            return self._planned.pop()
        if self._configs:
            self.race.see(self._configs, self._logs)
        self._configs, self._logs = [], []
        self.race.count([self.race.best])
        self._planned = self.race.plan()[::-1]
        return self.race.best

    def see(self, config: int, log_time: float) -> None:
        if self._is_timed:
            self._configs.append(config)
            self._logs.append(log_time)


class Loading(Raced):
    """The same where the device waits for each config's binary, so that the first call of a config takes twice as long.

    The cost does not include this delay.
    """

    def __init__(self, slowdowns: Sequence[float]) -> None:
        super().__init__(slowdowns)
        self._loaded = {0}

    def see(self, config: int, log_time: float) -> None:
        super().see(config, log_time + (0.0 if config in self._loaded else math.log(2.0)))
        self._loaded.add(config)


def layers_of(dataset: str, name: str) -> list[Layer]:
    """Return the layers that have several measured routings, with the scores of held-out model families."""
    split = _Split(load(dataset), find_family(name), (1,), 3, 1)
    _, scores = split.held_out(LightGBMRanker)  # as at call time
    grid, scores = split.data.grid, np.where(split.data.judged, scores, np.nan)
    places = diversified_places(scores, grid.configs)
    rows: dict[object, list[int]] = defaultdict(list)
    for row, (case, device) in enumerate(zip(grid.cases, grid.devices, strict=True)):
        rows[case.problem.without_sizes(), device.name].append(row)
    found = []
    for own in (own for own in rows.values() if len(own) > 1):
        first, second = grid.first_us[own], grid.second_us[own]
        works = np.isfinite(first).all(axis=0) & np.isfinite(scores[own]).all(axis=0)
        order = np.argsort(np.where(works, places[own[0]], np.inf))[: works.sum()]
        ratios = np.log(first / second)
        is_near = (first < 1.1 * np.nanmin(first, axis=1, keepdims=True)) & np.isfinite(ratios) & (ratios != 0)
        predicted = scores[own[0]][order[:MOST]]
        found.append(Layer(first[:, order], second[:, order], predicted / predicted[0], ratios[is_near]))
    return found


def misjudged(layer: Layer, candidates: int = 16) -> NDArray[np.float64]:
    """Return the log of each candidate's mean measured slowdown over the predicted one, without the first config."""
    times = layer.first_us[:, :candidates].mean(axis=0)
    result: NDArray[np.float64] = np.log(times / times[0] / layer.slowdowns[:candidates])[1:]
    return result


def limit_of(layer: Layer, candidates: int) -> float:
    """Return the loss of the best of the first candidates under equally mixed routings, as regret is defined."""
    first, second = (np.exp(np.log(times).mean(axis=0)) for times in (layer.first_us, layer.second_us))
    return float(second[first[:candidates].argmin()] / second[first.argmin()])


class Played(NamedTuple):
    """The results of one layer.

    They are the regret after each number of calls in `AFTER`, the cost, and the time of the last choice over that of
    the predicted config.
    """

    regrets: list[float]
    cost: float
    chosen: float


def play(layer: Layer, make: Callable[[Sequence[float]], Algorithm], candidates: int, calls: str, seed: int) -> Played:
    """Replay 200 calls of a layer; `calls` is "drift", "iid" or "card"."""
    random, count = np.random.default_rng(seed), len(layer.first_us)
    if calls == "card":
        mixture = random.dirichlet(np.full(count, 0.7), 16)[np.arange(CALLS) % 16]
    elif calls == "iid":
        mixture = random.dirichlet(np.full(count, 0.7), CALLS)
    else:
        walk = np.zeros((CALLS, count))
        walk[0] = random.normal(0, 1.5, count)
        for call in range(1, CALLS):
            walk[call] = 0.97 * walk[call - 1] + random.normal(0, 1.5 * math.sqrt(1 - 0.97**2), count)
        mixture = np.exp(walk + random.normal(0, 0.3, walk.shape))
        mixture /= mixture.sum(axis=1, keepdims=True)
    logs = mixture @ np.log(layer.first_us)  # (CALLS, n_configs)
    judged_us = np.exp(mixture @ np.log(layer.second_us)).mean(axis=0)
    searched = judged_us[np.exp(logs).mean(axis=0).argmin()]
    noise = math.sqrt(2) * random.choice(layer.noise, CALLS)
    clock = 0.03 * np.sin(np.linspace(0, 2 * math.pi * random.uniform(0.5, 2), CALLS) + random.uniform(0, 6))
    delays = np.where(random.random(CALLS) < 0.01, np.log(random.uniform(1.2, 3.0, CALLS)), 0.0)
    first = np.zeros(logs.shape[1])  # the log of how much longer the first launch of a config takes
    if calls == "card":
        own = np.empty(logs.shape)
        own[0] = random.normal(0, 0.01, logs.shape[1])
        for call in range(1, CALLS):
            own[call] = 0.95 * own[call - 1] + random.normal(0, 0.01 * math.sqrt(1 - 0.95**2), logs.shape[1])
        logs += own - own.mean(axis=0)
        idle_us = np.where(random.random(CALLS) < 0.04, random.uniform(5, 40, CALLS), 0.0)
        delays += np.log1p(idle_us / np.exp(logs[:, 0]))
        first[1:] = random.uniform(0, math.log(3.0), logs.shape[1] - 1)
    algorithm, regrets, spent = make(layer.slowdowns[:candidates]), [], 0.0
    for call in range(CALLS):
        if call in AFTER:
            regrets.append(float(judged_us[algorithm.best] / searched))
        config = algorithm.pick()
        spent += math.exp(logs[call, config])
        algorithm.see(config, logs[call, config] + noise[call] + clock[call] + delays[call] + first[config])
        first[config] = 0.0
    chosen = float(judged_us[algorithm.best])
    regrets.append(chosen / searched)
    return Played(regrets, spent / float(np.exp(logs[:, 0]).sum()), chosen / float(judged_us[0]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="Replays of each layer.")
    given = parser.parse_args()
    layers = [layer for dataset in ("h200", "h100") for name in FAMILIES for layer in layers_of(dataset, name)]
    algorithms: dict[str, tuple[Callable[[Sequence[float]], Algorithm], int]] = {
        "predicted alone": (Predicted, 16),
        "rounds, F-Race": (Rounds, 16),
        "sequential halving": (Halving, 16),
        "UCB1": (UCB, 16),
        "Thompson, prior and limit": (Thompson, 16),
        "Race of 8": (Raced, 8),
        "Race of 12": (Raced, 12),
        "Race of 16": (Raced, 16),
        "Race of 32": (Raced, 32),
        "Race of 12, late binaries": (Loading, 12),
        "Race of 12, max_cost=0.02": (partial(Raced, max_cost=0.02), 12),
    }
    behind = [misjudged(layer) for layer in layers]
    predicted = np.concatenate([np.log(layer.slowdowns[1:16]) for layer in layers])
    slope, bias = np.polyfit(predicted, predicted + np.concatenate(behind), 1)
    within = np.concatenate([one - one.mean() for one in behind]).std()
    sys.stdout.write(
        f"log slowdowns of configs 2 to 16: measured = {slope:.2f} * predicted {bias:+.3f}; standard deviation "
        f"around the prediction within a layer {within:.3f}, of all {np.concatenate(behind).std():.3f}\n"
    )
    for candidates in (8, 12, 16, 32):
        left = [limit_of(layer, candidates) for layer in layers]
        sys.stdout.write(
            f"the best of {candidates:2} candidates over that of all configs: {100 * (geomean(left) - 1):.2f} %, worst "
            f"{100 * (max(left) - 1):.2f} %\n"
        )
    head = "  ".join(f"{after:>5}" for after in AFTER)
    sys.stdout.write(
        f"{len(layers)} layers, {given.seeds} replays each. In %: geometric mean of the regret after these calls, the "
        f"worst after 200, the geometric mean and the worst of the cost, replays that cost more than 1 %, and replays "
        f"whose choice is more than 0.5 % slower than the predicted config\n"
        f"{'':36}{head}   worst    cost   worst    >1 %  slower\n"
    )
    for calls in ("drift", "iid", "card"):
        for name, (make, candidates) in algorithms.items():
            played = [play(layer, make, candidates, calls, seed) for layer in layers for seed in range(given.seeds)]
            means = [100 * (geomean([one.regrets[at] for one in played]) - 1) for at in range(len(AFTER))]
            costs = [one.cost for one in played]
            numbers = [
                100 * (max(one.regrets[-1] for one in played) - 1),
                100 * (geomean(costs) - 1),
                100 * (max(costs) - 1),
                100 * float(np.mean([cost > 1.01 for cost in costs])),
                100 * float(np.mean([one.chosen > 1.005 for one in played])),
            ]
            row = "  ".join(f"{mean:5.2f}" for mean in means) + "".join(f"{number:8.2f}" for number in numbers)
            sys.stdout.write(f"{calls:6}{name:30}{row}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
