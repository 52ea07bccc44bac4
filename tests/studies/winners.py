"""What the tuned files of vLLM and SGLang are worth as training data. Needs both packages; no GPU.

`python tests/studies/winners.py noise` compares winners with what was measured of `fused_moe` on an H100 and an H200,
and winners of the same layer, card and batch with each other.

`python tests/studies/winners.py cards` leaves out one kind of card after the other, its winners and its measurements,
and prints the rank of its winners by the engine's default (configs by their distance from it), by a ranker that was
trained on measurements alone, and by one that also learned the other cards' winners. For an H100 and an H200 it also
prints the regret of both rankers on the measurements left out. `layers` leaves out a third of the layers instead, on
all cards, but no measurements. At most three minutes on one core.
"""

from __future__ import annotations

import argparse
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from copy import copy
from itertools import combinations
from typing import NamedTuple

import numpy as np
from foretune.datasets import DeviceSpec, KernelConfig, Problem, load
from foretune.datasets.merge import merge_datasets
from foretune.kernels import find_family
from foretune.kernels.fused_moe.engines import ENGINES, default_config, engine_of
from foretune.kernels.fused_moe.family import DOWN, UP
from foretune.kernels.fused_moe.launching import KNOBS, with_tma
from foretune.kernels.fused_moe.shipped_winners import winners_of
from foretune.model import Ranker, geomean, ranker_on
from foretune.model.train import Winner, WinnerRanker
from foretune.model.training_set import TrainingSet
from numpy.typing import NDArray

#: Cards that are left out together, by a part of their names: the first one that fits.
KINDS = {"A100": "A100, A800", "A800": "A100, A800", "H200": "H200", "H20": "H20", "H100": "H100, H800"}
KINDS |= {"H800": "H100, H800", "L40S": "L40S, L20", "L20": "L40S, L20", "RTX": "RTX PRO 6000"}
KINDS |= {"B200": "B200, B300", "B300": "B200, B300"}
FAMILIES = {name: find_family(name) for name in (UP, DOWN)}
DATA = ("h200_fused_moe", "h100_kernels")
LISTS = (1, 4, 8)


class Pair(NamedTuple):
    """One row of a tuned file, which an engine runs for both products."""

    up: Winner
    down: Winner

    @property
    def kind(self) -> str:
        return next(kind for part, kind in KINDS.items() if part in self.up.device.name)

    @property
    def layer(self) -> tuple[object, ...]:
        """What a file's name has of the layer."""
        problem = self.up.problem
        return problem["experts"], problem["inter"], problem.dtype_name

    @property
    def default(self) -> KernelConfig:
        """The config that the engine runs without a file."""
        problem = self.up.problem
        return default_config(engine_of(problem), problem.dtype_name, problem["tokens"], problem["experts"])


def pairs_of(winners: dict[str, tuple[Winner, ...]]) -> list[Pair]:
    return [Pair(up, down) for up, down in zip(winners[UP], winners[DOWN], strict=True)]


# Label noise.


def times_of_both(names: Sequence[str] = DATA) -> dict[tuple[DeviceSpec, Problem], dict[KernelConfig, NDArray]]:
    """The times in both passes of configs that were measured for both products, (2,), by device and problem."""
    found: dict = defaultdict(dict)
    for name in names:
        up, down = map(load(name).grid, FAMILIES)
        row_of = {(case.problem.dims, case.problem.dtype): row for row, case in enumerate(down.cases)}
        column_of = {config: column for column, config in enumerate(down.configs)}
        for row, (case, device) in enumerate(zip(up.cases, up.devices, strict=True)):
            second = row_of.get((case.problem.dims, case.problem.dtype))
            for column, config in enumerate(up.configs):
                other = column_of.get(with_tma(config, 0))
                if second is not None and other is not None:
                    passes = [(up.first_us, down.first_us), (up.second_us, down.second_us)]
                    us = np.array([one[row, column] + two[second, other] for one, two in passes])
                    if np.isfinite(us).all():
                        found[device, case.problem][config] = us
    return found


def noise(pairs: Sequence[Pair]) -> None:
    print("winners over the best measured config, both products; their rank; the engine's default over the best")
    over = []
    for (device, problem), us in times_of_both().items():
        best = min(us, key=lambda config: us[config][0])
        order = sorted(us, key=lambda config: us[config].sum())
        nearest: dict[str, Pair] = {}
        for pair in pairs:
            one = pair.up.problem
            same = pair.up.device == device and all(one[dim] == problem[dim] for dim in ("experts", "inter", "hidden"))
            if same and one.dtype == problem.dtype and one["tokens"] == problem["tokens"]:
                nearest.setdefault(engine_of(one), pair)
        for engine, pair in nearest.items():
            config = pair.up.config
            if config in us:
                over.append(us[config][1] / us[best][1])
                default = f"{us[pair.default][1] / us[best][1]:.3f}" if pair.default in us else "-"
                rank = f"{order.index(config) + 1:3} of {len(us):4}"
                print(f"{device.name:22} {engine:6} {over[-1]:.3f} {rank} {default:>6}  {problem}")
    print(f"geometric mean of {len(over)}: {geomean(np.array(over)):.4f}, worst {max(over):.3f}")
    cells = defaultdict(list)
    for pair in pairs:
        cells[pair.up.device, pair.layer, pair.up.problem["tokens"]].append(pair.up)
    both = [two for found in cells.values() for two in combinations(found, 2)]
    for what, of in (
        ("vLLM and SGLang", [two for two in both if len({engine_of(one.problem) for one in two}) == 2]),
        ("two files of one engine", [two for two in both if len({engine_of(one.problem) for one in two}) == 1]),
    ):
        equal = sum(one.config == other.config for one, other in of)
        tile = sum(tile_of(one.config) == tile_of(other.config) for one, other in of)
        print(f"{what}: of {len(of)} pairs {equal} have the same winner, {tile} the same tile and warps")


def tile_of(config: KernelConfig) -> tuple[int, ...]:
    """The knobs of a config without GROUP_SIZE_M and num_stages, in which near ties differ most."""
    return tuple(config.to_json()[knob] for knob in KNOBS if knob not in ("GROUP_SIZE_M", "num_stages"))


# Ranks of winners that were left out.


class Ranks(NamedTuple):
    config: int  # of the winner
    tile: int  # of the first config with the winner's tile and warps


def ranks_of(pair: Pair, scores: NDArray[np.float64]) -> Ranks:
    space = pair.up.space
    order = [space[place] for place in np.argsort(scores, kind="stable").tolist()]
    tile = tile_of(pair.up.config)
    return Ranks(order.index(pair.up.config) + 1, next(at for at, one in enumerate(order, 1) if tile_of(one) == tile))


def distances(pair: Pair) -> NDArray[np.float64]:
    """The distance of each config from the engine's default, in doublings of knobs."""
    default, *space = (np.log2([config.to_json()[knob] for knob in KNOBS]) for config in (pair.default, *pair.up.space))
    return np.abs(np.array(space) - default).sum(axis=1)


def predicted_us(pair: Pair, rankers: dict[str, WinnerRanker], learned_on: Sequence[DeviceSpec]) -> NDArray[np.float64]:
    """The predicted time of both products, as `foretune export` predicts it."""
    total = np.zeros(len(pair.up.space))
    for one in pair:
        family = FAMILIES[one.problem.family]
        slowdowns = ranker_on(one.device, rankers[family.name], learned_on).predict(
            family, one.problem, one.device, one.space
        )
        fastest = int(slowdowns.argmin())
        estimate = family.estimate_us(one.problem, one.device, one.space)[fastest]
        total += slowdowns / slowdowns[fastest] * estimate
    return total


def regret(data: TrainingSet, ranker: Ranker, learned_on: Sequence[DeviceSpec], exhaustive: bool) -> str:
    """The mean and worst regret in percent of the best of the first `LISTS`, over problems of other devices."""
    found = []
    for row, device in enumerate(data.grid.devices):
        if device in learned_on or data.exhaustive[row] != exhaustive:
            continue
        mask = data.judged[row] & np.isfinite(data.grid.first_us[row])
        scores = ranker_on(device, ranker, learned_on).predict(
            data.family, data.grid.cases[row].problem, device, data.configs(mask)
        )
        first, second = data.grid.first_us[row][mask], data.grid.second_us[row][mask]
        order = np.argsort(scores, kind="stable")
        found.append([second[order[:k][first[order[:k]].argmin()]] / second.min() for k in LISTS])
    if not found:
        return "none"
    table = np.array(found)
    means = " / ".join(f"{100 * (geomean(column) - 1):.1f}" for column in table.T)
    return f"{means}, worst first {100 * (table[:, 0].max() - 1):.0f} ({len(table)} problems)"


def left_out(pairs: Sequence[Pair], parts: Sequence[Callable[[Pair], bool]], most: int) -> None:
    """Print the ranks of each part's winners by rankers that did not learn from them."""
    measured = merge_datasets([load(name) for name in DATA], name="+".join(DATA))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the installed engine may be another version
        sets = {name: TrainingSet.of(measured, family) for name, family in FAMILIES.items()}
    fitted: dict = {}
    random = np.random.default_rng(0)
    columns = "{:14} {:>7} {:>14} {:>7} {:>6} {:>6} {:>6} {:>12}"
    print(columns.format("left out", "winners", "ranked by", "median", "hit@1", "hit@8", "hit@32", "hit@8, tile"))
    for is_out in parts:
        out, rest = [pair for pair in pairs if is_out(pair)], [pair for pair in pairs if not is_out(pair)]
        learned_on = tuple(
            device for device in sets[UP].devices if not all(is_out(one) for one in pairs if one.up.device == device)
        )
        rankers: dict[str, dict[str, WinnerRanker]] = {"measurements": {}, "with winners": {}}
        for name, data in sets.items():
            grid = data.grid.select([row for row, one in enumerate(data.grid.devices) if one in learned_on])
            if (learned_on, name) not in fitted:
                fitted[learned_on, name] = WinnerRanker({}).fit(grid, data.family)
            rankers["measurements"][name] = fitted[learned_on, name]
            taught = copy(fitted[learned_on, name])
            taught.winners_ = {name: [one for pair in rest for one in pair if one.problem.family == name]}
            rankers["with winners"][name] = taught.learn_winners(grid, data.family)
        for kind in sorted({pair.kind for pair in out}):
            of_kind = [pair for pair in out if pair.kind == kind]
            drawn = [of_kind[at] for at in random.permutation(len(of_kind))[:most].tolist()]
            judged = {"default": [ranks_of(pair, distances(pair)) for pair in drawn]}
            for by, both in rankers.items():
                judged[by] = [ranks_of(pair, predicted_us(pair, both, learned_on)) for pair in drawn]
            for by, ranks in judged.items():
                config, tile = np.array(ranks).T
                shares = [f"{100 * hit.mean():.0f} %" for hit in (config <= 1, config <= 8, config <= 32, tile <= 8)]
                print(columns.format(kind, len(ranks), by, f"{np.median(config):.0f}", *shares), flush=True)
        for name, data in sets.items():
            for exhaustive in (True, False):
                for by, both in rankers.items():
                    if (found := regret(data, both[name], learned_on, exhaustive)) != "none":
                        kind = "exhaustive" if exhaustive else "sparse"
                        print(f"    regret, {name}, {kind}, {by}: {found}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("noise", "cards", "layers"))
    parser.add_argument("--most", type=int, default=150, help="winners that are ranked of each part")
    given = parser.parse_args()
    pairs = pairs_of(winners_of(ENGINES[::-1]))  # vLLM's first, because SGLang copied files of it
    if given.what == "noise":
        noise(pairs)
    elif given.what == "cards":
        kinds = sorted({pair.kind for pair in pairs})
        left_out(pairs, [lambda pair, kind=kind: pair.kind == kind for kind in kinds], given.most)
    else:
        third = set(sorted({pair.layer for pair in pairs})[::3])
        left_out(pairs, [lambda pair: pair.layer in third], given.most)


if __name__ == "__main__":
    main()
