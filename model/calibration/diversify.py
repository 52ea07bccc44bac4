"""`diversified_order`: diversify a short list of configs, so that one prediction error does not affect all of them.

Similar configs share prediction errors: if the first choice is wrong, the second one, which often differs in only one
knob, is often wrong too. So the list is chosen greedily, as in maximal marginal relevance (Carbonell and Goldstein,
SIGIR 1998): each config has a penalty for each similar config before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...datasets import KernelConfig
from ...datasets.config import remembered

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

#: The penalty, in log slowdown, for an equal config earlier in the list. It is halved for each knob that differs
#: between the two configs. model/NOTES.md has the figures behind it.
_LIKENESS = 0.08
#: The number of configs that are chosen so, and the number of first configs in the ranking that they are chosen from.
#: The others follow in predicted order, because a long list needs near-equal configs to contain the very best one.
_CHOSEN, AMONG = 16, 32


@remembered(maxsize=64)
def knob_table(configs: tuple[KernelConfig, ...]) -> NDArray[np.float32]:
    """Return a one-hot table of knob values, (n_configs, n_values).

    The dot product of two rows is the number of knobs on which the configs agree.

    >>> table = knob_table((KernelConfig.of(BLOCK=16), KernelConfig.of(BLOCK=32), KernelConfig.of(BLOCK=32)))
    >>> (table @ table.T)[:, 1].tolist() == [table[1].sum() - 1, table[1].sum(), table[1].sum()]
    True
    """
    knobs = [config.to_json() for config in configs]
    names = sorted({name for one in knobs for name in one})
    columns: dict[object, int] = {}
    taken = [[columns.setdefault((name, one.get(name)), len(columns)) for name in names] for one in knobs]
    table = np.zeros((len(configs), len(columns)), np.float32)
    for row, places in zip(table, taken, strict=True):
        row[places] = 1.0
    return table


def diversified_order(logs: ArrayLike, table: NDArray[np.float32]) -> NDArray[np.intp]:
    """Return the positions of configs in the order of trying them, (n_configs,).

    The first is the config that is predicted fastest; ties go to the earlier one.

    Args:
        logs: Predicted log slowdowns, (n_configs,).
        table: The configs' rows of a `knob_table`, (n_configs, n_values).

    >>> configs = [KernelConfig.of(BLOCK=b, GROUP=g, num_stages=s) for b, g, s in ((64, 1, 3), (64, 1, 4), (128, 8, 4))]
    >>> diversified_order([0.0, 0.01, 0.02], knob_table(tuple(configs))).tolist()
    [0, 2, 1]
    """
    logs = np.asarray(logs, np.float64)
    order = np.argsort(logs, kind="stable")
    among = order[:AMONG]
    rows = table[among]
    agreement = rows @ rows.T
    penalties = np.ldexp(_LIKENESS, (agreement - agreement.diagonal()[:, None]).astype(np.int32))
    penalized = logs[among]
    chosen = []
    for _ in range(min(_CHOSEN, len(among))):
        place = int(penalized.argmin())
        chosen.append(place)
        penalized += penalties[place]
        penalized[place] = np.inf
    rest = np.ones(len(order), np.bool_)
    rest[chosen] = False
    return np.concatenate([among[chosen], order[rest]])


def diversified_places(scores: NDArray[np.float64], configs: Sequence[KernelConfig]) -> NDArray[np.float64]:
    """Return each config's position in its problem's diversified order, from 0, (n_problems, n_configs).

    Args:
        scores: Predicted slowdowns, (n_problems, n_configs). NaN marks a config that is no candidate, and its position
            is NaN.
        configs: The configs, (n_configs,).

    >>> configs = [KernelConfig.of(BLOCK=size) for size in (16, 32, 64)]
    >>> diversified_places(np.array([[1.3, np.nan, 1.0]]), configs).tolist()
    [[1.0, nan, 0.0]]
    """
    table = knob_table(tuple(configs))
    places = np.full(scores.shape, np.nan)
    for row, row_places in zip(scores, places, strict=True):
        candidates = np.flatnonzero(~np.isnan(row))
        with np.errstate(divide="ignore"):  # a baseline may score its first choice as 0
            logs = np.log(row[candidates])
        row_places[candidates[diversified_order(logs, table[candidates])]] = np.arange(len(candidates))
    return places
