"""`diversified_order`: the order to try configs in, so that those on a short list are not all wrong for one reason.

A ranker's errors are shared: configs that differ in one knob are misjudged together, and what is second behind a wrong
first choice is often wrong as well. So the list is chosen greedily, as in maximal marginal relevance (Carbonell and
Goldstein, SIGIR 1998): each config counts as so much slower for each one before it as they are alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...datasets import KernelConfig
from ..configs_memo import remembered

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

#: In log slowdown: what a config counts as slower for an equal one before it, and half of that for each knob in which
#: they differ. README.md has the figures that decided.
_LIKENESS = 0.08
#: So many are chosen so, among the first of the ranking; the others follow as they are predicted, because to have the
#: very best on a long list takes near-equals too.
_CHOSEN, AMONG = 16, 32


@remembered(maxsize=64)
def knob_table(configs: tuple[KernelConfig, ...]) -> NDArray[np.float32]:
    """One column for each value of each knob, (n_configs, n_values), with 1.0 where a config has it: the product of two
    rows is in how many knobs they agree.

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
    """The places of configs in the order in which to try them, (n_configs,), from the logs of their predicted
    slowdowns, (n_configs,), and their rows of a `knob_table`. The first is the one that is predicted fastest, the
    earlier one of equals.

    >>> configs = [KernelConfig.of(BLOCK=b, GROUP=g, num_stages=s) for b, g, s in ((64, 1, 3), (64, 1, 4), (128, 8, 4))]
    >>> diversified_order([0.0, 0.01, 0.02], knob_table(tuple(configs))).tolist()
    [0, 2, 1]
    """
    logs = np.asarray(logs, np.float64)
    order = np.argsort(logs, kind="stable")
    among = order[:AMONG]
    rows = table[among]
    alike = rows @ rows.T
    counted = np.ldexp(_LIKENESS, (alike - alike.diagonal()[:, None]).astype(np.int32))
    left = logs[among]
    chosen = []
    for _ in range(min(_CHOSEN, len(among))):
        place = int(left.argmin())
        chosen.append(place)
        left += counted[place]
        left[place] = np.inf
    rest = np.ones(len(order), np.bool_)
    rest[chosen] = False
    return np.concatenate([among[chosen], order[rest]])


def diversified_places(scores: NDArray[np.float64], configs: Sequence[KernelConfig]) -> NDArray[np.float64]:
    """Where on the list each config stands, first 0, from predicted slowdowns; (n_problems, n_configs) both, NaN = no
    candidate.

    >>> configs = [KernelConfig.of(BLOCK=size) for size in (16, 32, 64)]
    >>> diversified_places(np.array([[1.3, np.nan, 1.0]]), configs).tolist()
    [[1.0, nan, 0.0]]
    """
    table = knob_table(tuple(configs))
    places = np.full(scores.shape, np.nan)
    for row, of_it in zip(scores, places, strict=True):
        there = np.flatnonzero(~np.isnan(row))
        with np.errstate(divide="ignore"):  # a baseline may say 0 of its favourite
            logs = np.log(row[there])
        of_it[there[diversified_order(logs, table[there])]] = np.arange(len(there))
    return places
