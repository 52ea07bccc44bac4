"""`python training_problems.py collect OUT --seconds S [--families FAMILY...]`: measure products of training on all
GPUs, for S seconds each, into OUT/FAMILY. Grouped GEMMs are layers of models.csv and synthetic ones, the same layer
with every routing; dense ones are layers of dense models and random shapes in bf16 or fp8. On each problem it tries the
configs that are often the fastest, a few that the shipped bundle or the prior ranks first, and a few at random.

`python training_problems.py regret FAMILY... --data DATA... --extra DATA`: how much slower than the best config the
best of the first k is, in percent, on models that were not learned from, by rankers that learned from `--data` alone
and with `--extra`. Both are judged on the problems of both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import rich
from foretune import collect_dataset
from foretune.datasets import Case, DeviceSpec, KernelConfig, Measurable, Problem, load
from foretune.datasets.console import table
from foretune.kernels import find_measurable
from foretune.kernels.grouped_gemm.group_sizes import drawn_sizes
from foretune.kernels.grouped_gemm.workload import (
    EXPERT_PARALLEL,
    PERMUTATION,
    _affordable,
    _invented_shape,
    _layers,
    _split,
)
from foretune.kernels.learning import datasets_merged
from foretune.kernels.matmul.space import ACTIVATIONS, BIAS
from foretune.kernels.workloads import load_models
from foretune.model import LightGBMRanker, TrainingSet, geomean
from foretune.model.calibration.conformal import diversified_places
from foretune.model.cross_validation import _Split
from foretune.model.metrics import top_k_regret
from foretune.runtime.shortlist import make_shortlist
from memory_bound import KS, parsers, problems_of

FAMILIES = ("grouped_gemm_fwd", "grouped_gemm_dx", "grouped_gemm_dw")
ROWS = (8192, 16384, 32768, 65536, 65536, 131072)
#: TFLOP of one problem; the least is the default for dense products.
LEAST_TFLOP, MOST_TFLOP = 0.05, 1.6
#: Data of dense products that were measured exhaustively, by family.
EXHAUSTIVE = {"matmul": "h200_matmul", "scaled_gemm": "h200_scaled_gemm"}
#: How many configs are tried on a dense product: those that are often the fastest there, and those ranked first.
OFTEN, RANKED_FIRST = 32, 8
#: Products of fewer rows have configs of their own.
FEW = 128
_WIDE = {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64}
_PLAIN = {"CONSUMERS": 0, "PROGRAMS_PER_SM": 1, "TMA_X": 1, "TMA_W": 1}
#: The knobs of configs that were often within 3 % of the fastest on training problems of `h200` and `h100`.
WINNERS: list[dict[str, int]] = [
    {"BLOCK_M": 128, "BLOCK_N": 128, "CONSUMERS": 2, "PINGPONG": 1},
    {**_WIDE, "CONSUMERS": 2, "PINGPONG": 0},
    *({**_WIDE, **_PLAIN, "TMA_Y": y, "num_warps": 8, "num_stages": s} for s, y in ((3, 0), (3, 1), (4, 0))),
    *({**_WIDE, **_PLAIN, "BLOCK_N": 128, "TMA_Y": y, "num_warps": 4, "num_stages": 5} for y in (0, 1)),
    {**_WIDE, **_PLAIN, "BLOCK_M": 64, "TMA_Y": 0, "num_warps": 4, "num_stages": 5},
    *({**_WIDE, **_PLAIN, "BLOCK_N": 128, "BLOCK_K": 128, "TMA_Y": y, "num_stages": 3} for y in (0, 1)),
]
#: The same of dW: all specialized configs.
DW_WINNERS = [{"CONSUMERS": 2}]


def drawn(family: str, seed: int, counts: Sequence[int] = ROWS, tflop: Sequence[float] = (0, MOST_TFLOP)) -> list[Case]:
    """Draw layers, with three or four routings each, some in fp16 or with the layer's permutation fused."""
    rng, cases, layers = np.random.default_rng(seed), [], list(_layers(load_models()).items())
    for turn in range(40):
        for place in rng.permutation(len(layers)):
            (experts, n, k), layer = layers[place]
            degrees = [one for one in EXPERT_PARALLEL if experts % one == 0 and experts // one >= 8] or [1]
            groups, sources = experts // int(rng.choice(degrees)), layer.sources
            if rng.uniform() < 0.25:
                groups, n, k, source = _invented_shape(rng)
                sources = (source,)
            else:
                n, k = _split(n, k, sources[0], layer.inter, rng)
            rows = int(rng.choice(counts))
            if not _affordable(groups, rows, n, k, tflop[1]) or _affordable(groups, rows, n, k, tflop[0]):
                continue
            dtype = "fp16" if rng.uniform() < 0.1 else "bf16"
            flags = (PERMUTATION[sources[0].rsplit("/", 1)[1]],) if rng.uniform() < 0.1 else ()
            for routing in ("balanced", "uniform", "hot", "zipf") if turn % 2 else ("balanced", "zipf", "hot"):
                sizes = {"rows": drawn_sizes(routing, rows, groups, rng)}
                dims = {"groups": groups, "rows": rows, "n": n, "k": k}
                cases.append(Case(Problem.of(family, dtype=dtype, flags=flags, ragged=sizes, **dims), sources, routing))
    return cases


def drawn_dense(family: Measurable, seed: int, counts: Sequence[int], tflop: Sequence[float]) -> list[Case]:
    """Draw products of dense layers, without epilogues, in random order."""
    cases = family.draw(None, tflop[1], tokens=sorted(set(counts)), per_layer=6, random=200, seed=seed)
    kept = [case for case in cases if is_drawn(family, case.problem, tflop)]
    return [kept[place] for place in np.random.default_rng(seed).permutation(len(kept))]


def is_drawn(family: Measurable, problem: Problem, tflop: Sequence[float]) -> bool:
    """Return whether a dense product is in bf16 or fp8, has no epilogue, and has a number of TFLOP within `tflop`."""
    is_plain = problem.dtype in ("bf16", "fp8e4m3") and not {BIAS, *ACTIVATIONS} & set(problem.flags)
    return is_plain and tflop[0] <= family.flops(problem) / 1e12 <= tflop[1]


def often_fastest(family: Measurable, tflop: Sequence[float], *, is_few: bool = False) -> tuple[KernelConfig, ...]:
    """Return OFTEN configs whose fastest is close to the best config on all such problems of the exhaustive data.

    With `is_few`, the problems are those of fewer than FEW rows; otherwise those of more.
    """
    grid = load(EXHAUSTIVE[family.name]).grid(family)
    rows = [
        row
        for row, case in enumerate(grid.cases)
        if (case.problem["m"] < FEW) == is_few and is_drawn(family, case.problem, tflop)
    ]
    if not rows:
        raise SystemExit(f"{EXHAUSTIVE[family.name]} has no problems of {tflop[0]} to {tflop[1]} TFLOP: change --tflop")
    times = np.nan_to_num(grid.first_us[rows], nan=np.inf)
    slower = np.log(np.minimum(times / times.min(axis=1, keepdims=True), 10))
    least, found = np.full(len(rows), np.inf), []
    for _ in range(OFTEN):
        found.append(int(np.minimum(least[:, None], slower).mean(axis=0).argmin()))
        least = np.minimum(least, slower[:, found[-1]])
    return tuple(grid.configs[place] for place in found)


def matching(often: Sequence[dict[str, int]], family: Measurable, _: Problem, device: DeviceSpec) -> list[KernelConfig]:
    """Return the configs of the space that have all knobs of one of `often`."""
    space = [(config, config.to_json().items()) for config in family.space(device)]
    return [config for config, knobs in space if any(one.items() <= knobs for one in often)]


def and_ranked(
    often: Callable[[Measurable, Problem, DeviceSpec], Sequence[KernelConfig]],
    family: Measurable,
    problem: Problem,
    device: DeviceSpec,
) -> list[KernelConfig]:
    """Return the configs that are often the fastest on such problems, and those that the bundle ranks first."""
    return [*often(family, problem, device), *make_shortlist(family, problem, device, k=RANKED_FIRST).configs]


def collect(
    out: Path, names: list[str], seconds: float, share: float, seed: int, counts: list[int], tflop: list[float] | None
) -> None:
    for name in names:  # a run measures one family after the other, and the last one would get no time
        family = find_measurable(name)
        usual = type(family).usual
        if name in FAMILIES:
            cases = drawn(name, seed, counts, tflop or (0.0, MOST_TFLOP))
            of_rows = partial(and_ranked, partial(matching, WINNERS))
            winners = partial(matching, DW_WINNERS) if name.endswith("dw") else of_rows
        else:
            least_and_most = tflop or (LEAST_TFLOP, MOST_TFLOP)
            cases = drawn_dense(family, seed, counts, least_and_most)

            @cache
            def often(is_few: bool, family=family, tflop=least_and_most) -> tuple[KernelConfig, ...]:
                return often_fastest(family, tflop, is_few=is_few)

            winners = partial(and_ranked, lambda _family, problem, _device, often=often: often(problem["m"] < FEW))

        def with_winners(self, problem, device, usual=usual, winners=winners):
            return [*usual(self, problem, device), *winners(self, problem, device)]

        with patch.object(type(family), "usual", with_winners):
            options = {"plan": "thin", "share": share, "budget_s": seconds}
            rich.print(collect_dataset(family, out=out / name, cases=cases, **options))


class Held(_Split):
    """A split that can leave problems out of what is learned."""

    left_out: np.ndarray | None = None

    def learned_from(self, number):
        rows = super().learned_from(number)
        return rows if self.left_out is None else rows[~self.left_out[rows]]


def regret(names: list[str], data: list[str], extra: str) -> None:
    rows = []
    for name in names:
        family = find_measurable(name)
        added = set(problems_of(extra, family))
        split = Held(TrainingSet.of(datasets_merged([*data, extra]), family), family, KS, 5, 2)
        grid = split.data.grid
        devices, cases = [device.name for device in grid.devices], grid.cases
        is_extra = np.array([(device, case.problem) in added for device, case in zip(devices, cases, strict=True)])
        split.rows = np.union1d(split.rows, np.flatnonzero(is_extra))
        kinds = defaultdict(list)
        for row in split.rows:
            sizes = dict(cases[row].problem.dims)
            if "groups" in sizes:
                size, is_large = "256 rows or more per group", sizes["rows"] >= max(8192, 256 * sizes["groups"])
            else:
                size = f"{LEAST_TFLOP} TFLOP or more"
                is_large = family.flops(cases[row].problem) >= 1e12 * LEAST_TFLOP
            kind = f"--extra, {cases[row].scenario}" if is_extra[row] else "--data"
            kinds[devices[row], f"{kind}, {size if is_large else 'others'}"].append(row)
        for learned, left_out in (("--data", is_extra), ("with --extra", None)):
            split.left_out = left_out
            scores = np.where(split.data.judged, split.held_out(LightGBMRanker), np.nan)
            places = [np.where(split.data.judged, diversified_places(view, grid.configs), np.nan) for view in scores]
            for (device, kind), here in sorted(kinds.items()):
                times = grid.first_us[here], grid.second_us[here]
                slower = [[100 * (geomean(top_k_regret(view[here], *times, k)) - 1) for k in KS] for view in places]
                texts = (" / ".join(f"{one:.1f}" for one in view) for view in slower)
                rows.append([name, learned, device, f"{kind} ({len(here)})", *texts])
                rich.print(*rows[-1])
    columns = ("family", "learned from", "device", "problems", "as measured", "as at a call")
    title = f"Percent by which the best of the first {' / '.join(map(str, KS))} is slower, on models not learned from"
    rich.print(table(title, columns, rows))


def main() -> None:
    parser, collecting, regretting = parsers(__doc__, FAMILIES)
    collecting.add_argument(
        "--share", type=float, default=0.012, help="of the space that is tried at random or by the prior"
    )
    collecting.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    collecting.add_argument("--tflop", type=float, nargs=2, help="of one problem, least and most")
    collecting.set_defaults(seed=3)
    regretting.add_argument("--extra", default="h100_h200_training")
    regretting.set_defaults(data=["h200", "h200_wide", "h100", "h100_memory_bound"])
    o = parser.parse_args()
    if o.what == "collect":
        collect(o.out, o.families, o.seconds, o.share, o.seed, o.rows, o.tflop)
    else:
        regret(o.families, o.data, o.extra)


if __name__ == "__main__":
    main()
