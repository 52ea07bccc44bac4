"""Which rows an engine's files for a layer should have: predicted, and measured where the card is there."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ...datasets import DeviceSpec, Family, ForetuneError, ForetuneWarning, KernelConfig, Measurable, Problem
from ...datasets.errors import check_integer
from .engines import BATCH_SIZES, SGLANG, Layer, check_engine, engine_version, installed
from .measurable import FusedMoeDown, FusedMoeUp
from .tuned_files import DEFAULT, OURS, SHIPPED, Pair, Row, TunedFiles, TunedRow, default_pair, row_for, table_in_force

if TYPE_CHECKING:
    from ...model import Bundle
    from ...runtime.timing.timer import Timer

#: Other pairs to time beside ours, by name, for a number of tokens.
Others: TypeAlias = Callable[[int], Mapping[str, Pair]]
CompileAhead: TypeAlias = Callable[[Measurable, Sequence[tuple[KernelConfig, Problem]], DeviceSpec], None]
#: A row that gains less than this over what runs anyway is pinned to that: the noise of what was measured; what the
#: first choice of a learned ranker may be off; what it is predicted to gain, in nine of ten problems at most, over the
#: config that is the fastest of all, as one in a file that the engine tuned may be; and what a choice may be off that
#: nothing has confirmed. Such are those of the analytic estimate, and of what is so many octaves from the data (another
#: engine's kernel, and another card, count as one). `pytest -m slow tests/kernels/test_fused_moe_tuning.py` finds the
#: third in h200_fused_moe.
_NOISE, _LEARNED, OVER_TUNED, _UNCONFIRMED = 1.01, 1.03, 1.1, 1.15
_FAR_OCTAVES = 1.0
#: So many configs of each product are timed for a row (`tests/kernels/searched_replay.py` says what more would find).
CANDIDATES = 8
_ROUNDS, _SAMPLES = 4, 5


@dataclass(frozen=True)
class _Predicted:
    """One product's configs and their predicted times in microseconds, (n_configs,)."""

    configs: tuple[KernelConfig, ...]
    times_us: np.ndarray[Any, np.dtype[np.float64]]
    reason: str
    confirmed: bool  # whether anything like it was measured

    @property
    def by_config(self) -> dict[KernelConfig, float]:
        return dict(zip(self.configs, self.times_us.tolist(), strict=True))


class _Product:
    """One of the two products, of one engine's kernel on one layer."""

    def __init__(self, family: Measurable, engine: str, layer: Layer, device: DeviceSpec) -> None:
        self.family, self._engine, self._layer, self._device = family, engine, layer, device

    def problem(self, tokens: int) -> Problem:
        return self._layer.problem(self.family.name, self._engine, tokens)

    def supports(self, config: KernelConfig, tokens: int) -> bool:
        return self.family.supports(config, self.problem(tokens), self._device) is None

    def configs(self, more: Iterable[KernelConfig], tokens: int) -> tuple[KernelConfig, ...]:
        """The whole space, and `more`, as far as they run: whatever the number of tokens."""
        wanted = dict.fromkeys((*self.family.space(self._device), *more))
        return tuple(config for config in wanted if self.supports(config, tokens))


def predicted(
    family: Family, problem: Problem, device: DeviceSpec, configs: tuple[KernelConfig, ...], bundle: Bundle | None
) -> _Predicted:
    """Times of configs: slowdowns of the bundle's ranker times the analytic estimate of the fastest; the estimate alone
    where the bundle has nothing on the family, which the reason says."""
    from ...runtime.shortlist import bundle_in_force, make_shortlist

    estimate = family.estimate_us(problem, device, configs)
    with warnings.catch_warnings():  # that nothing is learned is in the reason
        warnings.simplefilter("ignore", ForetuneWarning)
        chosen = make_shortlist(family, problem, device, k=len(configs), configs=configs, bundle=bundle)
    if not chosen.predicted:
        return _Predicted(
            configs, estimate, f"by the analytic estimate alone, which nothing has confirmed ({chosen.reason})", False
        )
    times = np.full(len(configs), np.inf)
    scale = float(estimate[chosen.positions[0]])
    times[list(chosen.positions)] = scale * np.asarray(chosen.predicted_slowdown)
    distance = bundle_in_force(bundle).distance(family.name, problem, device)
    return _Predicted(configs, times, chosen.reason, distance.octaves < _FAR_OCTAVES)


def tune_layer(
    engine: str,
    layer: Layer,
    device: DeviceSpec,
    *,
    bundle: Bundle | None = None,
    measure: bool = False,
    batches: Sequence[int] = BATCH_SIZES,
    candidates: int = CANDIDATES,
    compile_ahead: CompileAhead | None = None,
    others: Others | None = None,
    out: Path | str | None = None,
    on_row: Callable[[Row], None] = lambda row: None,
) -> TunedFiles:
    """The rows of an engine's files for a layer on one rank.

    With `measure` the `candidates` predicted fastest of each product are timed on the current device, with what the
    engine runs by default or by the file that it reads now (see `table_in_force`, which looks into `out` first). Ours,
    the best of these, is timed once more, in turn with both of them and `others`, which have no part in the choice;
    this takes the engine's kernel. Without, all of that is predicted. A row that gains nothing is pinned to what the
    engine runs anyway. So is one for which the engine reads a row now that cannot be ranked: it is copied as it stands.

    Raises `ForetuneError` for an engine, a layer or batches that cannot be, and for `measure` without the engine.

    >>> files = tune_layer("vllm", Layer(64, 8, 2048, 1024), DeviceSpec.named("h200"), batches=[1, 4096])
    >>> list(files.tables())
    ['E=64,N=1024,device_name=NVIDIA_H200.json']
    """
    check_engine(engine)
    check_integer("candidates", candidates, 1, 10_000)
    batches = sorted({check_integer("each batch", batch, 1, 2**24) for batch in batches})
    if not batches:
        raise ForetuneError("there must be at least one batch size")
    if measure and engine not in installed():
        raise ForetuneError(
            f"measuring takes {engine}'s kernel: pip install {engine}, or --no-deps {engine} for its Python files alone"
        )
    products = [_Product(family, engine, layer, device) for family in (FusedMoeUp(), FusedMoeDown())]
    triton = triton_version()
    now = table_in_force(engine, layer, device, triton, out)
    in_force: dict[int, TunedRow | None] = {
        tokens: row_for(now.rows, tokens) if now.rows else None for tokens in batches
    }
    contenders = {tokens: _contenders(engine, layer, tokens, in_force[tokens], products) for tokens in batches}
    pairs = [pair for named in contenders.values() for pair in named.values()]
    firsts = products[0].configs((pair.up for pair in pairs), batches[0])
    seconds = products[1].configs((pair.down for pair in pairs), batches[0])
    guesses = {
        tokens: (
            predicted(products[0].family, products[0].problem(tokens), device, firsts, bundle),
            predicted(products[1].family, products[1].problem(tokens), device, seconds, bundle),
        )
        for tokens in batches
    }
    if measure:
        runs = {tokens: _to_time(engine, *guesses[tokens], contenders[tokens], candidates) for tokens in batches}
        if others is not None:
            contenders = {
                tokens: of_engine | _able(others(tokens), products, tokens) for tokens, of_engine in contenders.items()
            }
        if compile_ahead is not None:
            for place, product in enumerate(products):
                raced = {
                    tokens: [(pair.up, pair.down)[place] for pair in contenders[tokens].values()] for tokens in batches
                }
                calls = [
                    (config, product.problem(tokens))
                    for tokens in batches
                    for config in dict.fromkeys((*runs[tokens][place], *raced[tokens]))
                ]
                compile_ahead(product.family, calls, device)
    confirmed = all(one.confirmed for both in guesses.values() for one in both)
    least = _NOISE if measure else _UNCONFIRMED if not confirmed else OVER_TUNED if now.rows else _LEARNED
    rows = []
    for tokens in batches:
        if measure:
            best, times = _measured_times(engine, tokens, runs[tokens], contenders[tokens], products, device)
        else:
            best, times = _predicted_times(engine, *guesses[tokens], contenders[tokens])
        row = _row(tokens, best, contenders[tokens][DEFAULT], in_force[tokens], times, least)
        rows.append(row)
        on_row(row)
    what = guesses[batches[-1]][0].reason
    if measure:
        what = f"the {candidates} best of each product were timed, {what}; {engine} {engine_version(engine)}"
    elif engine not in installed() and now.file is None:
        what += f"; {engine} is not installed here, so a file that it ships is not compared with"
    return TunedFiles(engine, layer, device, triton, tuple(rows), measure, least, what, now)


def best_pairs(
    engine: str,
    up: Mapping[KernelConfig, float],
    down: Mapping[KernelConfig, float],
) -> list[tuple[float, Pair]]:
    """What runs both products in the least time, first: vLLM's one config for both, and of SGLang's the best of each
    for every BLOCK_SIZE_M. Times by config, in microseconds, of each product.

    Raises `ForetuneError` where no two configs go together.
    """
    if engine == SGLANG:
        found = []
        for block in sorted({config["BLOCK_SIZE_M"] for config in up}):
            firsts = [config for config in up if config["BLOCK_SIZE_M"] == block]
            seconds = [config for config in down if config["BLOCK_SIZE_M"] == block]
            if firsts and seconds:
                pair = Pair(min(firsts, key=up.__getitem__), min(seconds, key=down.__getitem__))
                found.append((up[pair.up] + down[pair.down], pair))
    else:
        both = (Pair.alike(config) for config in up)
        found = [(up[pair.up] + down[pair.down], pair) for pair in both if pair.down in down]
    if not found:
        raise ForetuneError("no two configs of the products share BLOCK_SIZE_M")
    return sorted(found, key=itemgetter(0))


def _contenders(
    engine: str, layer: Layer, tokens: int, in_force: TunedRow | None, products: Sequence[_Product]
) -> dict[str, Pair]:
    """What the engine could run so many tokens with, by name."""
    pairs = {DEFAULT: default_pair(engine, layer, tokens)}
    if in_force is not None and in_force.pair is not None:
        pairs[SHIPPED] = in_force.pair
    able = _able(pairs, products, tokens)
    if DEFAULT not in able:
        raise ForetuneError(f"{engine}'s default config cannot run {tokens} tokens of {layer} here")
    return able


def _able(pairs: Mapping[str, Pair], products: Sequence[_Product], tokens: int) -> dict[str, Pair]:
    return {
        name: pair
        for name, pair in pairs.items()
        if products[0].supports(pair.up, tokens) and products[1].supports(pair.down, tokens)
    }


def _predicted_times(
    engine: str, up: _Predicted, down: _Predicted, contenders: Mapping[str, Pair]
) -> tuple[Pair, dict[str, float]]:
    """Return our pair, and the times of it and of the contenders by name."""
    times_up, times_down = up.by_config, down.by_config
    best_us, best = best_pairs(engine, times_up, times_down)[0]
    return best, {OURS: best_us} | {name: times_up[p.up] + times_down[p.down] for name, p in contenders.items()}


def _row(
    tokens: int, best: Pair, default: Pair, in_force: TunedRow | None, times: Mapping[str, float], least: float
) -> Row:
    """Return our row, or what the engine runs now where ours gains less than `least` or nothing tells what it gains."""
    if in_force is None:
        now, words = DEFAULT, default.words
    else:
        now, words = SHIPPED, in_force.words
    if now in times and times[now] >= least * times[OURS]:
        return Row(tokens, best.words, "", times)
    return Row(tokens, words, now, times)


def _to_time(
    engine: str, up: _Predicted, down: _Predicted, contenders: Mapping[str, Pair], candidates: int
) -> tuple[list[KernelConfig], list[KernelConfig]]:
    """The configs of each product to choose from: of the pairs predicted fastest, and of what the engine has."""
    firsts: dict[KernelConfig, None] = {}
    seconds: dict[KernelConfig, None] = {}
    ranked = best_pairs(engine, up.by_config, down.by_config)
    if engine == SGLANG:  # of the best BLOCK_SIZE_M half of the candidates, of the next two a quarter each
        shares = (candidates - candidates // 4 * 2, candidates // 4, candidates // 4)
        for found, times in ((firsts, up.by_config), (seconds, down.by_config)):
            order = sorted(times, key=times.__getitem__)
            for share, (_, pair) in zip(shares, ranked, strict=False):
                block = pair.up["BLOCK_SIZE_M"]
                found |= dict.fromkeys([config for config in order if config["BLOCK_SIZE_M"] == block][:share])
    else:
        for _, pair in ranked[:candidates]:
            firsts[pair.up] = seconds[pair.down] = None
    for pair in contenders.values():
        firsts[pair.up] = seconds[pair.down] = None
    return list(firsts), list(seconds)


def _measured_times(
    engine: str,
    tokens: int,
    configs: tuple[list[KernelConfig], list[KernelConfig]],
    contenders: Mapping[str, Pair],
    products: Sequence[_Product],
    device: DeviceSpec,
) -> tuple[Pair, dict[str, float]]:
    """Return our pair, chosen in one pass over the candidates, and the times of it and of the contenders by name, from
    another pass in which they take turns."""
    from ...runtime.timing.timer import Timer, time_configs

    timer = Timer()
    inputs = [product.family.inputs(product.problem(tokens), device) for product in products]
    passes = [
        time_configs(timer, product.family, product.problem(tokens), given, some)
        for product, given, some in zip(products, inputs, configs, strict=True)
    ]
    best = next(
        pair
        for _, pair in best_pairs(engine, *passes)
        if all(
            _is_right(product, tokens, config, device)
            for product, config in zip(products, (pair.up, pair.down), strict=True)
        )
    )
    raced = {OURS: best} | {
        name: pair
        for name, pair in contenders.items()
        if all(
            _runs(product.family, given, config)
            for product, given, config in zip(products, inputs, (pair.up, pair.down), strict=True)
        )
    }
    times = dict.fromkeys(raced, 0.0)
    for place, (product, given) in enumerate(zip(products, inputs, strict=True)):
        runs = {name: (pair.up, pair.down)[place] for name, pair in raced.items()}
        for name, us in _in_turn(timer, product.family, given, runs).items():
            times[name] += us
    return best, times


def _runs(family: Measurable, inputs: Any, config: KernelConfig) -> bool:
    """Whether a config compiles and launches, which `supports` cannot know."""
    try:
        family.launch(inputs, config)
    except Exception:  # noqa: BLE001 - whatever it is, nobody can run it
        return False
    return True


def _is_right(product: _Product, tokens: int, config: KernelConfig, device: DeviceSpec) -> bool:
    """Whether a config computes what the reference does."""
    family = product.family
    problem = family.check_problem(config, product.problem(tokens))
    inputs = family.inputs(problem, device, seed=1)
    expected = family.reference(inputs)
    error = (family.launch(inputs, config).float() - expected).norm() / expected.norm()
    return float(error) <= family.tolerance(problem)


def _in_turn(timer: Timer, family: Measurable, inputs: Any, runs: Mapping[str, KernelConfig]) -> dict[str, float]:
    """The median time of each, equal configs once."""
    from ...runtime.timing.compare import time_side_by_side

    launches = {str(config): (lambda config=config: family.launch(inputs, config)) for config in runs.values()}
    us = time_side_by_side(launches, timer, rounds=_ROUNDS, samples=_SAMPLES)
    return {name: us[str(config)] for name, config in runs.items()}


def triton_version() -> str:
    """Return the version of the installed Triton, without importing it. Raises `ForetuneError` where there is none."""
    try:
        return version("triton")
    except PackageNotFoundError:
        raise ForetuneError("the files are for a version of triton, and none is installed") from None
