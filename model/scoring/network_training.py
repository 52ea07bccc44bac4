"""Training of a `Network`, with torch on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ...datasets.progress import advance
from .network import Network

if TYPE_CHECKING:
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
#: Slowdowns are cut here: 4x.
MOST_LOG = float(np.log(4.0))


def train_network(rows: TrainingRows, *, seed: int, epochs: int = EPOCHS, share: float = 1.0) -> Network:
    """A network for log slowdowns and their order within each query; `share` is its part of the current task.

    The loss is that of ListNet (Cao et al., 2007), with targets softmax(-log slowdown / TEMPERATURE), plus the absolute
    error of each row. One thread, and the same rows and seed give the same network on the same machine.
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
    inputs = torch.from_numpy(empty.inputs(rows.features).astype(np.float32))
    targets = torch.from_numpy(np.minimum(rows.log_slowdown, MOST_LOG).astype(np.float32))
    weights = torch.ones_like(targets) if rows.weights is None else torch.from_numpy(rows.weights.astype(np.float32))
    ends = np.cumsum(rows.query_sizes)
    spans = [slice(int(end - size), int(end)) for end, size in zip(ends, rows.query_sizes, strict=True) if size > 1]
    random = np.random.default_rng(seed)
    # Not torch's own generator: fits that run side by side share it.
    noise = torch.Generator().manual_seed(seed)
    layers = [_layer(*shape, random) for shape in ((inputs.shape[1], HIDDEN[0]), HIDDEN, (HIDDEN[1], 1))]
    net = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
    optimiser = torch.optim.AdamW(net.parameters(), lr=RATE / 2, weight_decay=1e-3)
    batch = min(BATCH, max(len(spans), 1))
    steps = len(spans) // batch
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, RATE, total_steps=max(epochs * steps, 1) + 1)
    for epoch in range(epochs):
        order = random.permutation(len(spans))
        for start in range(0, steps * batch, batch):
            chosen = [spans[place] for place in order[start : start + batch]]
            x, y, weight = (torch.cat([table[span] for span in chosen]) for table in (inputs, targets, weights))
            if epoch < epochs - QUIET:
                x = x + NOISE * torch.empty_like(x).normal_(generator=noise)
            predicted = net(x)[:, 0]
            sizes = [span.stop - span.start for span in chosen]
            lists = [
                -(torch.softmax(-one / TEMPERATURE, 0) * torch.log_softmax(-guess / TEMPERATURE, 0)).sum()
                for one, guess in zip(torch.split(y, sizes), torch.split(predicted, sizes), strict=True)
            ]
            near = weight * torch.exp(-EMPHASIS * y)
            loss = LIST_SHARE * torch.stack(lists).mean() + (near * (predicted - y).abs()).mean()
            optimiser.zero_grad()
            loss.backward()
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


def _encoding(rows: TrainingRows) -> Network:
    """A network that knows how features become inputs, and has no units yet."""
    table = rows.features
    mean, scale = table.mean(axis=0, dtype=np.float64), table.std(axis=0, dtype=np.float64)
    starts = np.concatenate([[0], np.cumsum(rows.query_sizes)[:-1]])
    which, value = [], []
    for column in range(table.shape[1]):
        values = np.unique(table[:, column])
        # Not of what is the same for all configs of a problem, as a device's SMs: another device has another value.
        varies = (np.maximum.reduceat(table[:, column], starts) > np.minimum.reduceat(table[:, column], starts)).any()
        if varies and 2 < len(values) <= MOST_VALUES:
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
