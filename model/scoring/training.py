"""Train a `Forest` with LightGBM and a `Network` with torch, on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ...datasets.progress import advance
from .network import Network
from .trees import Forest

if TYPE_CHECKING:
    import lightgbm
    from numpy.typing import NDArray
    from torch.nn import Linear

    from ..rows import TrainingRows

#: Upper bounds of log slowdown for lambdarank's relevance grades: the best configs (within the noise) have grade 9.
_GRADE_EDGES = np.log([1.01, 1.02, 1.04, 1.07, 1.12, 1.2, 1.35, 1.7, 3.0])
#: The most rows of a query that LightGBM ranks.
MOST_ROWS = 10_000
_LAMBDARANK = {
    "objective": "lambdarank",
    "label_gain": [float(2**grade - 1) for grade in range(len(_GRADE_EDGES) + 1)],
    "lambdarank_truncation_level": 20,
}
_ALWAYS = {
    "bagging_freq": 1,
    "use_missing": False,  # features are finite; every split is then a plain x <= threshold
    "deterministic": True,
    "force_row_wise": True,
    "num_threads": 1,  # see `LightGBMRanker.fit`
    "verbosity": -1,
}


def dealt(query_sizes: NDArray[np.int64]) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
    """Split each query that is too long for LightGBM into several of nearly equal size, assigning its rows in turn.

    Neighboring configs are similar, so that every piece gets a sample of all of them.

    Args:
        query_sizes: The number of rows of each query, which are consecutive, (n_queries,).

    Returns:
        The order of the rows, (n_rows,), and the sizes of the resulting queries, (n_pieces,).
    """
    order, sizes, start = [], [], 0
    for size in query_sizes.tolist():
        pieces = -(-size // MOST_ROWS) or 1
        order += [np.arange(start + first, start + size, pieces) for first in range(pieces)]
        sizes += [len(range(first, size, pieces)) for first in range(pieces)]
        start += size
    return np.concatenate(order), np.array(sizes)


class TreeTraining:
    """Trains forests with different objectives on one table, also concurrently in threads.

    The features are binned once for all forests, which takes a tenth of a forest's training time. The same rows,
    parameters and number of trees give the same trees.

    Args:
        rows: The training rows.
        target: The clipped log slowdown of each row, (n_rows,).
        parameters: LightGBM parameters that do not depend on the objective.
    """

    def __init__(self, rows: TrainingRows, target: NDArray[np.float64], parameters: Mapping[str, Any]) -> None:
        import lightgbm

        self._order, self._pieces = dealt(rows.query_sizes)
        if len(self._pieces) > len(rows.query_sizes):
            features, weights = rows.features[self._order], None if rows.weights is None else rows.weights[self._order]
            rows, target = replace(rows, features=features, weights=weights), target[self._order]
        self._rows, self._target, self._parameters = rows, target, {**_ALWAYS, **parameters}
        self._binned = lightgbm.Dataset(rows.features, params=self._parameters).construct()

    def regression(self, trees: int, *, emphasis: float, share: float) -> Forest:
        """Train a forest with least squares on log slowdowns and a row weight of slowdown ** -emphasis.

        Args:
            trees: The number of trees.
            emphasis: See `LightGBMRanker`.
            share: The share of the current task's progress that this training is.
        """
        weight = np.exp(-emphasis * self._target) if emphasis else None
        if self._rows.weights is not None:
            weight = self._rows.weights if weight is None else weight * self._rows.weights
        booster = self._train({"objective": "regression"}, trees, share, self._target, weight)
        return Forest.from_lightgbm(booster.dump_model())

    def lambdarank(
        self, trees: int, *, share: float, known: NDArray[np.float64] | None = None
    ) -> tuple[Forest, float, float]:
        """Train trees that order the configs of each problem.

        Args:
            trees: The number of trees.
            share: The share of the current task's progress that this training is.
            known: Scores that training starts from, (n_rows,); 0 if left out.

        Returns:
            The forest, and the slope and offset that convert its scores plus the known ones to log slowdowns.
        """
        rows, target = self._rows, self._target
        grade = len(_GRADE_EDGES) - np.searchsorted(_GRADE_EDGES, target)
        known = None if known is None else known[self._order]
        booster = self._train(_LAMBDARANK, trees, share, grade, rows.weights, self._pieces, known)
        # Ranking scores have no scale or zero point. A line fitted to log slowdowns within problems determines both.
        score = _scores(booster)
        query = np.repeat(np.arange(len(rows.query_sizes)), rows.query_sizes)
        centred = score - (np.bincount(query, score) / rows.query_sizes)[query]
        slope = float(centred @ target) / max(float(centred @ centred), 1e-12)
        return Forest.from_lightgbm(booster.dump_model()), slope, float(target.mean() - slope * score.mean())

    def _train(
        self,
        objective: Mapping[str, Any],
        trees: int,
        share: float,
        label: NDArray[Any],
        weight: NDArray[np.float64] | None,
        group: NDArray[np.int64] | None = None,
        init_score: NDArray[np.float64] | None = None,
    ) -> lightgbm.Booster:
        """Train a booster of `trees` trees with the parameters in `objective`, on the shared bins.

        See LightGBM for `label`, `weight`, `group` and `init_score`. `share` is the part of the current task's progress
        that this training makes up.
        """
        import lightgbm

        # A copy with labels of its own, because another objective may be trained at the same time.
        data = self._binned.subset(list(range(len(label)))).construct()
        data.set_label(label).set_weight(weight).set_group(group).set_init_score(init_score)
        callbacks = [lambda _: advance(share / trees)]
        parameters = {**objective, **self._parameters}
        return lightgbm.train(parameters, data, num_boost_round=trees, callbacks=callbacks, keep_training_booster=True)


def _scores(booster: lightgbm.Booster) -> NDArray[np.float64]:
    """Return a booster's scores of its training rows, (n_rows,), including the known scores.

    LightGBM has computed them already, but gives them only to a metric.
    """
    scores_seen: list[NDArray[np.float64]] = []

    def metric(scores: NDArray[np.float64], _: lightgbm.Dataset) -> tuple[str, float, bool]:
        scores_seen.append(scores.copy())
        return "none", 0.0, True

    booster.eval_train(metric)
    return scores_seen[0]


# The network.

#: Units of the hidden layers. 96 and 48, or 192 and 96, were no better (model/NOTES.md).
HIDDEN = (64, 32)
#: A feature with at most this many distinct values in the data also gets an indicator input for each value.
MOST_VALUES = 12
#: Queries in a batch, and passes over the data.
BATCH, EPOCHS = 24, 24
#: The temperature of the list loss, in log slowdown: the weight of a config falls by e for each such step.
TEMPERATURE = 0.04
#: The weight of the list loss relative to the row errors; a row error has the weight slowdown ** -EMPHASIS.
LIST_SHARE, EMPHASIS = 0.15, 1.5
#: The peak learning rate of the one-cycle schedule; the standard deviation of input noise; the last passes without it.
RATE, NOISE, QUIET = 4e-3, 0.03, 4
#: The number of offsets in the noise array at which a step's noise may start.
NOISE_PLACES = 1 << 20
#: Log slowdowns are clipped at this value, a slowdown of 4.
MOST_LOG = float(np.log(4.0))


def train_network(rows: TrainingRows, *, seed: int, epochs: int = EPOCHS, share: float = 1.0) -> Network:
    """Train a network to predict log slowdowns and their order within each query.

    The loss is that of ListNet (Cao et al., 2007), with targets softmax(-log slowdown / TEMPERATURE), plus the absolute
    error of each row. Its gradient with respect to a prediction is a difference of two softmaxes plus a sign and is
    computed in NumPy; torch differentiates only the layers. Training uses one thread. The same rows and seed give the
    same network on the same machine.

    Args:
        rows: The training rows.
        seed: The random seed.
        epochs: The number of passes over the data.
        share: The share of the current task's progress that this training is.
    """
    import torch

    threads = torch.get_num_threads()  # the setting of this Python thread
    torch.set_num_threads(1)  # several fits run concurrently
    try:
        return _trained(rows, seed, epochs, share)
    finally:
        torch.set_num_threads(threads)


def _trained(rows: TrainingRows, seed: int, epochs: int, share: float) -> Network:
    """Train the network as `train_network` does, with torch's current number of threads."""
    import torch
    from torch import nn

    empty = _encoding(rows)
    inputs = torch.from_numpy(_inputs(empty, rows.features))
    starts = _starts(rows.query_sizes)
    targets = np.minimum(rows.log_slowdown, MOST_LOG).astype(np.float32)
    row_weights = np.exp(-EMPHASIS * targets) * (1 if rows.weights is None else rows.weights.astype(np.float32))
    known = np.stack([targets, row_weights, softmax_of(targets, rows.query_sizes)])
    lists = [slice(start, start + size) for start, size in zip(starts.tolist(), rows.query_sizes.tolist(), strict=True)]
    spans = [span for span in lists if span.stop - span.start > 1]
    random = np.random.default_rng(seed)
    layers = [_layer(*shape, random) for shape in ((inputs.shape[1], HIDDEN[0]), HIDDEN, (HIDDEN[1], 1))]
    net = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
    optimiser = torch.optim.AdamW(net.parameters(), lr=RATE / 2, weight_decay=1e-3, fused=True)
    batch = min(BATCH, max(len(spans), 1))
    steps = len(spans) // batch
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, RATE, total_steps=max(epochs * steps, 1) + 1)
    # Drawn once and used from a random offset in each step: drawing it anew would take half of the training time.
    most = int(np.sort(rows.query_sizes)[-batch:].sum()) * inputs.shape[1]
    noise = torch.from_numpy(NOISE * random.standard_normal(most + NOISE_PLACES, np.float32))
    for epoch in range(epochs):
        order = random.permutation(len(spans))
        for start in range(0, steps * batch, batch):
            chosen = [spans[place] for place in order[start : start + batch]]
            sizes = np.array([span.stop - span.start for span in chosen])
            x = torch.cat([inputs[span] for span in chosen])
            target, weight, wanted = np.concatenate([known[:, span] for span in chosen], axis=1)
            if epoch < epochs - QUIET:
                place = int(random.integers(NOISE_PLACES))
                x += noise[place : place + x.numel()].view_as(x)
            predicted = net(x)[:, 0]
            gradient = gradient_of(predicted.detach().numpy(), target, weight, wanted, sizes)
            optimiser.zero_grad()
            predicted.backward(torch.from_numpy(gradient))
            optimiser.step()
            schedule.step()
        advance(share / epochs)
    trained = [array.detach().numpy().copy() for layer in layers for array in (layer.weight.T, layer.bias)]
    trained[4] = trained[4][:, 0]
    return Network(empty.mean, empty.scale, empty.which, empty.value, *map(np.ascontiguousarray, trained))


def _layer(inputs: int, outputs: int, random: np.random.Generator) -> Linear:
    """Return a linear layer with torch's default distribution of initial weights, drawn from `random`."""
    import torch

    layer: Linear = torch.nn.utils.skip_init(torch.nn.Linear, inputs, outputs)  # type: ignore[no-untyped-call]
    bound = 1 / max(inputs, 1) ** 0.5
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.from_numpy(random.uniform(-bound, bound, tuple(parameter.shape))))
    return layer


def gradient_of(
    predicted: NDArray[np.float32],
    target: NDArray[np.float32],
    weight: NDArray[np.float32],
    wanted: NDArray[np.float32],
    sizes: NDArray[np.int64],
) -> NDArray[np.float32]:
    """Return the gradient of the loss with respect to each prediction, (n_rows,).

    The loss is LIST_SHARE times the queries' mean cross-entropy plus the rows' mean weighted absolute error.

    Args:
        predicted: Predicted log slowdowns, (n_rows,).
        target: True log slowdowns, (n_rows,).
        weight: The weight of each row's error, (n_rows,).
        wanted: `softmax_of` the targets, (n_rows,).
        sizes: The number of rows of each query, which are consecutive, (n_queries,).
    """
    of_lists = (wanted - softmax_of(predicted, sizes)) * (LIST_SHARE / TEMPERATURE / len(sizes))
    of_rows = weight * np.sign(predicted - target) / np.float32(len(predicted))
    result: NDArray[np.float32] = of_lists + of_rows
    return result


def softmax_of(logs: NDArray[np.float32], sizes: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the softmax of -log slowdown / TEMPERATURE within each query, (n_rows,).

    Args:
        logs: Log slowdowns, (n_rows,).
        sizes: The number of rows of each query, which are consecutive, (n_queries,).
    """
    values, starts = logs / np.float32(-TEMPERATURE), _starts(sizes)
    powers = np.exp(values - np.repeat(np.maximum.reduceat(values, starts), sizes))
    result: NDArray[np.float32] = powers / np.repeat(np.add.reduceat(powers, starts), sizes)
    return result


def _starts(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the first row of each query, (n_queries,), from the sizes of consecutive queries."""
    return np.cumsum(sizes) - sizes


def _inputs(network: Network, features: NDArray[np.float32], size: int = 4096) -> NDArray[np.float32]:
    """Return `Network.inputs` of a long table in float32, computed in blocks of `size` rows."""
    table = np.empty((len(features), len(network.mean) + len(network.which)), np.float32)
    for start in range(0, len(features), size):
        table[start : start + size] = network.inputs(features[start : start + size])
    return table


def _encoding(rows: TrainingRows) -> Network:
    """Return a network without trained layers, whose `inputs` standardizes features and adds indicators of values."""
    table = rows.features
    mean, scale = table.mean(axis=0, dtype=np.float64), table.std(axis=0, dtype=np.float64)
    starts = _starts(rows.query_sizes)
    # Features that are equal for all configs of a problem get no indicators: new problems and devices have new values.
    varies = (np.maximum.reduceat(table, starts) > np.minimum.reduceat(table, starts)).any(axis=0)
    which, value = [], []
    for column in np.flatnonzero(varies).tolist():
        values = np.unique(table[:, column])
        if 2 < len(values) <= MOST_VALUES:
            which += [column] * len(values)
            value += values.tolist()
    inputs = table.shape[1] + len(which)
    empty = [np.zeros(shape, np.float32) for shape in ((inputs, 0), (0,), (0, 0), (0,), (0,), (1,))]
    return Network(
        mean.astype(np.float32),
        np.maximum(scale, 1e-3).astype(np.float32),
        np.array(which, np.int32),
        np.array(value, np.float32),
        *empty,
    )
