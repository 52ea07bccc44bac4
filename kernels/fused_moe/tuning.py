"""Tune one layer: choose the rows of an engine's tuned files, by prediction, and by timing if the GPU is present."""

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
from ...runtime.launching.results import why_wrong
from .engines import BATCH_SIZES, SGLANG, Layer, check_engine, engine_version, installed
from .measurable import FusedMoeDown, FusedMoeUp
from .tuned_files import DEFAULT, OURS, SHIPPED, Pair, Row, TunedFiles, TunedRow, default_pair, row_for, table_in_force

if TYPE_CHECKING:
    from ...model import Bundle
    from ...runtime.timing.timer import Timer

#: Returns additional pairs to time for a number of tokens, by name.
Others: TypeAlias = Callable[[int], Mapping[str, Pair]]
CompileAhead: TypeAlias = Callable[[Measurable, Sequence[tuple[KernelConfig, Problem]], DeviceSpec], None]
#: Least gains: a row that gains less over what the engine runs without it is pinned. In order:
#: - measured: the noise of the measurement;
#: - predicted, over a default config: the error of the ranker's first choice;
#: - predicted, over a tuned file, whose row may already be the fastest config: the 90th percentile over problems of
#:   the gain that the ranker then predicts wrongly (`pytest -m slow tests/kernels/test_fused_moe_tuning.py` computes it
#:   from h200_fused_moe);
#: - unconfirmed: the error of the analytic estimate, or of a prediction `_FAR_OCTAVES` or more from the data. Another
#:   engine's kernel and another card each count as one octave.
_NOISE, _LEARNED, OVER_TUNED, _UNCONFIRMED = 1.01, 1.03, 1.1, 1.15
_FAR_OCTAVES = 1.0
#: Configs of each product to time per row (`tests/kernels/searched_replay.py` shows what more would gain).
CANDIDATES = 8
#: Rounds, and samples per round, in which the chosen pair and the contenders take turns.
_ROUNDS, _SAMPLES = 4, 5


@dataclass(frozen=True)
class _Predicted:
    """One product's configs, their predicted times in microseconds, (n_configs,), and how these were predicted."""

    configs: tuple[KernelConfig, ...]
    times_us: np.ndarray[Any, np.dtype[np.float64]]
    reason: str
    confirmed: bool  # False for the analytic estimate, and far from the measured data

    @property
    def by_config(self) -> dict[KernelConfig, float]:
        """The predicted times in microseconds by config."""
        return dict(zip(self.configs, self.times_us.tolist(), strict=True))


class _Product:
    """One of the two matrix products of an MoE layer, as one engine's kernel computes it."""

    def __init__(self, family: Measurable, engine: str, layer: Layer, device: DeviceSpec) -> None:
        self.family, self._engine, self._layer, self._device = family, engine, layer, device

    def problem(self, tokens: int) -> Problem:
        """Return the problem of this product for a number of tokens."""
        return self._layer.problem(self.family.name, self._engine, tokens)

    def supports(self, config: KernelConfig, tokens: int) -> bool:
        """Return whether a config can run this many tokens."""
        return self.family.supports(config, self.problem(tokens), self._device) is None

    def configs(self, more: Iterable[KernelConfig], tokens: int) -> tuple[KernelConfig, ...]:
        """Return the family's space and the configs in `more`, without those that cannot run."""
        wanted = dict.fromkeys((*self.family.space(self._device), *more))
        return tuple(config for config in wanted if self.supports(config, tokens))


def predicted(
    family: Family, problem: Problem, device: DeviceSpec, configs: tuple[KernelConfig, ...], bundle: Bundle | None
) -> _Predicted:
    """Predict the times of configs for a problem.

    A time is the slowdown that the bundle's ranker predicts, times the analytic estimate of the fastest config. If the
    bundle has no ranker for the family, it is the analytic estimate alone; the result's `reason` then tells that.

    Args:
        family: The family of the product.
        problem: The problem.
        device: The GPU.
        configs: The configs to predict.
        bundle: The bundle; None for the one in force.
    """
    from ...runtime.shortlist import bundle_in_force, make_shortlist

    estimate = family.estimate_us(problem, device, configs)
    with warnings.catch_warnings():  # the reason already says if nothing was learned
        warnings.simplefilter("ignore", ForetuneWarning)
        chosen = make_shortlist(family, problem, device, k=len(configs), configs=configs, bundle=bundle)
    if not chosen.predicted:
        return _Predicted(
            configs, estimate, f"by the analytic estimate alone, which no measurement confirms ({chosen.reason})", False
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
    """Return new rows of an engine's tuned files for a layer on one rank, with their times and those of alternatives.

    Without `measure`, all times are predicted. With it, the `candidates` configs predicted fastest of each product are
    timed on the current device, together with the engine's default config and the row of the file that it reads now
    (see `table_in_force`, which looks into `out` first). The fastest pair is then timed again in turn with the default,
    the current row and `others`; these `others` cannot be chosen. A row whose gain is too small to be reliable is
    pinned: it repeats what the engine runs without these files. The same holds if the engine's current row cannot be
    expressed as a config: it is copied unchanged.

    Args:
        engine: "sglang" or "vllm".
        layer: The layer on one rank.
        device: The GPU that the files are for; with `measure`, the current one.
        bundle: The bundle that predicts; None for the one in force.
        measure: Time candidates; needs the engine's package.
        batches: Numbers of tokens, one row each.
        candidates: Configs of each product to time per row.
        compile_ahead: Called with the configs to time, to compile them in parallel.
        others: Returns further pairs to time for a number of tokens, by name.
        out: The folder for new files.
        on_row: Called with each row when it is known.

    Raises:
        ForetuneError: The engine, layer or batches are invalid, or `measure` is true and the engine is not installed.

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
            f"measuring needs {engine}'s kernel: pip install {engine}, or --no-deps {engine} for only its Python files"
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
        what += f"; {engine} is not installed here, so its shipped files are not considered"
    return TunedFiles(engine, layer, device, triton, tuple(rows), measure, least, what, now)


def best_pairs(
    engine: str,
    up: Mapping[KernelConfig, float],
    down: Mapping[KernelConfig, float],
) -> list[tuple[float, Pair]]:
    """Return the pairs of configs that can run together, fastest first, with their times in microseconds.

    For vLLM, which runs one config for both products, there is a pair per config. For SGLang there is one per
    BLOCK_SIZE_M: the best config of each product.

    Args:
        engine: "sglang" or "vllm".
        up: Times of the first product's configs in microseconds.
        down: Times of the second product's configs in microseconds.

    Raises:
        ForetuneError: No config of the first product can run with one of the second.
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
        raise ForetuneError("no config of the first product can run with one of the second")
    return sorted(found, key=itemgetter(0))


def _contenders(
    engine: str, layer: Layer, tokens: int, in_force: TunedRow | None, products: Sequence[_Product]
) -> dict[str, Pair]:
    """Return the configs of both products that the engine would run without new tuning, as pairs by name.

    They are the engine's default, and those of `in_force`, a row of its tuned file; the latter is left out if a product
    cannot run its config. Raises `ForetuneError` if that is so for the default.
    """
    pairs = {DEFAULT: default_pair(engine, layer, tokens)}
    if in_force is not None and in_force.pair is not None:
        pairs[SHIPPED] = in_force.pair
    able = _able(pairs, products, tokens)
    if DEFAULT not in able:
        raise ForetuneError(f"{engine}'s default config cannot run {layer} with {tokens} tokens on this device")
    return able


def _able(pairs: Mapping[str, Pair], products: Sequence[_Product], tokens: int) -> dict[str, Pair]:
    """Return the named pairs whose configs can run both products for a number of tokens."""
    return {
        name: pair
        for name, pair in pairs.items()
        if products[0].supports(pair.up, tokens) and products[1].supports(pair.down, tokens)
    }


def _predicted_times(
    engine: str, up: _Predicted, down: _Predicted, contenders: Mapping[str, Pair]
) -> tuple[Pair, dict[str, float]]:
    """Return the pair predicted fastest, and the predicted times in microseconds of it and of the contenders by name.

    `up` and `down` are the predictions for the first and the second product.
    """
    times_up, times_down = up.by_config, down.by_config
    best_us, best = best_pairs(engine, times_up, times_down)[0]
    return best, {OURS: best_us} | {name: times_up[p.up] + times_down[p.down] for name, p in contenders.items()}


def _row(
    tokens: int, best: Pair, default: Pair, in_force: TunedRow | None, times: Mapping[str, float], least: float
) -> Row:
    """Return the row to write: the pair `best`, or the engine's current row if the gain is too small or unknown.

    The gain is the current row's time divided by the new one's; `least` is its minimum.
    """
    if in_force is None:
        now, entries = DEFAULT, default.entries
    else:
        now, entries = SHIPPED, in_force.entries
    if now in times and times[now] >= least * times[OURS]:
        return Row(tokens, best.entries, "", times)
    return Row(tokens, entries, now, times)


def _to_time(
    engine: str, up: _Predicted, down: _Predicted, contenders: Mapping[str, Pair], candidates: int
) -> tuple[list[KernelConfig], list[KernelConfig]]:
    """Return the configs of each product to time: those of the pairs predicted fastest, and the contenders'.

    `up` and `down` are the predictions for the first and the second product; at most `candidates` of each are timed,
    in addition to the contenders.
    """
    firsts: dict[KernelConfig, None] = {}
    seconds: dict[KernelConfig, None] = {}
    ranked = best_pairs(engine, up.by_config, down.by_config)
    if engine == SGLANG:  # half of the candidates have the best BLOCK_SIZE_M, a quarter each the next two
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
    """Time candidates; return the fastest correct pair, and the microseconds of it and of the contenders by name.

    The pair is chosen in a first pass. The returned times are from a second pass, in which all pairs take turns.
    `configs` has the configs of each of the two `products` to time.
    """
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
    """Return whether a config compiles and launches, which `supports` cannot predict."""
    try:
        family.launch(inputs, config)
    except Exception:  # noqa: BLE001 - any failure means that the engine cannot run it
        return False
    return True


def _is_right(product: _Product, tokens: int, config: KernelConfig, device: DeviceSpec) -> bool:
    """Return whether a config's results for a product and a number of tokens match the reference."""
    family = product.family
    problem = family.check_problem(config, product.problem(tokens))
    inputs = family.inputs(problem, device, seed=1)
    expected = family.reference(inputs)
    return why_wrong(family.launch(inputs, config), expected, family.tolerance(problem)) is None


def _in_turn(timer: Timer, family: Measurable, inputs: Any, runs: Mapping[str, KernelConfig]) -> dict[str, float]:
    """Time the configs of `runs` in turn; return their median times in microseconds, by name."""
    from ...runtime.timing.compare import time_side_by_side

    launches = {str(config): (lambda config=config: family.launch(inputs, config)) for config in runs.values()}
    us = time_side_by_side(launches, timer, rounds=_ROUNDS, samples=_SAMPLES)
    return {name: us[str(config)] for name, config in runs.items()}


def triton_version() -> str:
    """Return the version of the installed Triton without importing it.

    Raises:
        ForetuneError: Triton is not installed.
    """
    try:
        return version("triton")
    except PackageNotFoundError:
        raise ForetuneError("tuned files are for a version of triton, but triton is not installed") from None
