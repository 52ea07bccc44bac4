"""Training of a `Network`, with torch on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ...datasets.progress import advance
from .network import Network

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch.nn import Linear

    from ..rows import TrainingRows

#: Units of the hidden layers. 96 and 48, or 192 and 96, were no better (model/README.md).
HIDDEN = (64, 32)
#: A feature with at most so many values within the data gets an input for each of them too.
MOST_VALUES = 12
#: Queries of one step, and passes over all of them.
BATCH, EPOCHS = 24, 24
#: The temperature of the list loss, in log slowdown: what is this much slower counts for e times less.
TEMPERATURE = 0.04
#: What the list loss counts for beside the error of each row, and by which power of the slowdown a row counts for less.
LIST_SHARE, EMPHASIS = 0.15, 1.5
#: The highest learning rate, of one cycle, and the noise on inputs, but for the last passes.
RATE, NOISE, QUIET = 4e-3, 0.03, 4
#: At so many places a step's noise may begin.
NOISE_PLACES = 1 << 20
#: Slowdowns are cut here: 4x.
MOST_LOG = float(np.log(4.0))


def train_network(rows: TrainingRows, *, seed: int, epochs: int = EPOCHS, share: float = 1.0) -> Network:
    """A network for log slowdowns and their order within each query; `share` is its part of the current task.

    The loss is that of ListNet (Cao et al., 2007), with targets softmax(-log slowdown / TEMPERATURE), plus the absolute
    error of each row. What both add to the gradient of a prediction is a difference of two softmaxes and a sign, so
    only the layers are left to torch. One thread, and the same rows and seed give the same network on the same machine.
    """
    import torch

    threads = torch.get_num_threads()  # of this Python thread
    torch.set_num_threads(1)  # several fits run side by side
    try:
        return _trained(rows, seed, epochs, share)
    finally:
        torch.set_num_threads(threads)


def _trained(rows: TrainingRows, seed: int, epochs: int, share: float) -> Network:
    import torch
    from torch import nn

    empty = _encoding(rows)
    inputs = torch.from_numpy(_inputs(empty, rows.features))
    starts = _starts(rows.query_sizes)
    targets = np.minimum(rows.log_slowdown, MOST_LOG).astype(np.float32)
    counts = np.exp(-EMPHASIS * targets) * (1 if rows.weights is None else rows.weights.astype(np.float32))
    known = np.stack([targets, counts, softmax_of(targets, rows.query_sizes)])
    lists = [slice(start, start + size) for start, size in zip(starts.tolist(), rows.query_sizes.tolist(), strict=True)]
    spans = [span for span in lists if span.stop - span.start > 1]
    random = np.random.default_rng(seed)
    layers = [_layer(*shape, random) for shape in ((inputs.shape[1], HIDDEN[0]), HIDDEN, (HIDDEN[1], 1))]
    net = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
    optimiser = torch.optim.AdamW(net.parameters(), lr=RATE / 2, weight_decay=1e-3, fused=True)
    batch = min(BATCH, max(len(spans), 1))
    steps = len(spans) // batch
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, RATE, total_steps=max(epochs * steps, 1) + 1)
    # Drawn once, and begun at another place in each step: to draw it anew would take half of the time.
    most = int(np.sort(rows.query_sizes)[-batch:].sum()) * inputs.shape[1]
    noise = torch.from_numpy(NOISE * random.standard_normal(most + NOISE_PLACES, np.float32))
    for epoch in range(epochs):
        order = random.permutation(len(spans))
        for start in range(0, steps * batch, batch):
            chosen = [spans[place] for place in order[start : start + batch]]
            sizes = np.array([span.stop - span.start for span in chosen])
            x = torch.cat([inputs[span] for span in chosen])
            target, count, wanted = np.concatenate([known[:, span] for span in chosen], axis=1)
            if epoch < epochs - QUIET:
                place = int(random.integers(NOISE_PLACES))
                x += noise[place : place + x.numel()].view_as(x)
            predicted = net(x)[:, 0]
            gradient = gradient_of(predicted.detach().numpy(), target, count, wanted, sizes)
            optimiser.zero_grad()
            predicted.backward(torch.from_numpy(gradient))
            optimiser.step()
            schedule.step()
        advance(share / epochs)
    trained = [array.detach().numpy().copy() for layer in layers for array in (layer.weight.T, layer.bias)]
    trained[4] = trained[4][:, 0]
    return Network(empty.mean, empty.scale, empty.which, empty.value, *map(np.ascontiguousarray, trained))


def _layer(inputs: int, outputs: int, random: np.random.Generator) -> Linear:
    """With torch's usual initial weights, drawn from `random`."""
    import torch

    layer: Linear = torch.nn.utils.skip_init(torch.nn.Linear, inputs, outputs)  # type: ignore[no-untyped-call]
    bound = 1 / max(inputs, 1) ** 0.5
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.from_numpy(random.uniform(-bound, bound, tuple(parameter.shape))))
    return layer


def gradient_of(
    predicted: NDArray[np.float32],  # (n_rows,) log slowdowns, as the targets
    target: NDArray[np.float32],
    count: NDArray[np.float32],  # what each row's error counts for
    wanted: NDArray[np.float32],  # `softmax_of` the targets
    sizes: NDArray[np.int64],  # (n_queries,) rows of each
) -> NDArray[np.float32]:
    """Of the loss: LIST_SHARE x the lists' mean cross-entropy + the rows' mean counted error, by each prediction."""
    of_lists = (wanted - softmax_of(predicted, sizes)) * (LIST_SHARE / TEMPERATURE / len(sizes))
    of_rows = count * np.sign(predicted - target) / np.float32(len(predicted))
    result: NDArray[np.float32] = of_lists + of_rows
    return result


def softmax_of(logs: NDArray[np.float32], sizes: NDArray[np.int64]) -> NDArray[np.float32]:
    """What share of its list each row gets that has this log slowdown, (n_rows,); lists of such sizes lie one behind
    the other."""
    values, starts = logs / np.float32(-TEMPERATURE), _starts(sizes)
    powers = np.exp(values - np.repeat(np.maximum.reduceat(values, starts), sizes))
    result: NDArray[np.float32] = powers / np.repeat(np.add.reduceat(powers, starts), sizes)
    return result


def _starts(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where lists of such sizes begin that lie one behind the other."""
    return np.cumsum(sizes) - sizes


def _inputs(network: Network, features: NDArray[np.float32], size: int = 4096) -> NDArray[np.float32]:
    """`Network.inputs` in float32, of a long table."""
    table = np.empty((len(features), len(network.mean) + len(network.which)), np.float32)
    for start in range(0, len(features), size):
        table[start : start + size] = network.inputs(features[start : start + size])
    return table


def _encoding(rows: TrainingRows) -> Network:
    """A network that knows how features become inputs, and has no units yet."""
    table = rows.features
    mean, scale = table.mean(axis=0, dtype=np.float64), table.std(axis=0, dtype=np.float64)
    starts = _starts(rows.query_sizes)
    # Not of what is the same for all configs of a problem, as a device's SMs: another device has another value.
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
