"""`learn_rules`: configs that were chosen for problems, as a short list of rules over dimensions, dtypes and device."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ....datasets import KernelConfig, Problem

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

#: What a config counts as where nobody knows its time, and where it failed or cannot run: slowdowns.
UNKNOWN, FAILED = 2.0, 100.0
#: A rule that makes the choices no better than this, in the mean over all examples, is not worth its line.
_LEAST_GAIN = 5e-4


@dataclass(frozen=True)
class Example:
    """What is known of one problem on one device: each config's time over the best one's, infinite where it failed."""

    problem: Problem
    device: str
    slowdowns: Mapping[KernelConfig, float]


@dataclass(frozen=True)
class Rule:
    """A config, and what must hold for it; the first rule that does counts, and the last one always does."""

    conditions: tuple[str, ...]  # Python source, of `dims`, `dtype`, `flags` and `device`
    config: KernelConfig


def learn_rules(examples: Sequence[Example], most: int = 32) -> tuple[Rule, ...]:
    """At most so many rules that choose nearly as well as was known of the examples, the last without a condition.

    A tree, grown where it gains most, by the mean logarithm of the slowdown; written as a list, in which the other
    branch of a condition needs no word. The same examples give the same rules.

    >>> slow, fast = KernelConfig.of(BLOCK=16), KernelConfig.of(BLOCK=64)
    >>> of = lambda rows, best: Example(Problem.of("f", rows=rows), "d", {slow: 1.0, fast: 1.0, best: 0.5})
    >>> for rule in learn_rules([of(8, slow), of(16, slow), of(64, fast), of(128, fast)]):
    ...     print(rule.conditions, rule.config["BLOCK"])
    ("dims['rows'] <= 32",) 16
    () 64
    """
    import numpy as np

    configs = tuple(dict.fromkeys(config for example in examples for config in example.slowdowns))
    costs = np.array([[_cost(example, config) for config in configs] for example in examples])
    columns = _columns(examples)
    root = _Leaf(np.arange(len(examples)), costs, columns)
    leaves = [root]
    least = _LEAST_GAIN * len(examples)
    while len(leaves) < most:
        widest = max(leaves, key=lambda leaf: leaf.gain)  # of equal ones the first
        if widest.gain < max(least, 1e-9):
            break
        leaves.remove(widest)
        leaves += widest.split()
    return tuple(_rules(root, configs))


def _cost(example: Example, config: KernelConfig) -> float:
    slowdown = example.slowdowns.get(config)
    if slowdown is None:
        return math.log(UNKNOWN)
    return math.log(min(max(slowdown, 1e-6), FAILED))


class _Column(NamedTuple):
    """Something to compare: numbers with thresholds, or whether a word is there."""

    values: NDArray[np.float64]  # (n_examples,)
    left: str  # of a comparison with a number; of a word, the whole condition
    factor: str | None = None  # what the number is multiplied by, if not by 1

    def at_most(self, threshold: float) -> str:
        if self.factor is None:
            return self.left
        number = f"{threshold:.0f}" if threshold == int(threshold) else f"{threshold:.6g}"
        return f"{self.left} <= {number}{self.factor}"


def _columns(examples: Sequence[Example]) -> list[_Column]:
    """Words first, then dimensions, then their quotients (rows a segment, say, which no dimension is)."""
    import numpy as np

    found = []
    for test, words in (
        ("device == {!r}", [{example.device} for example in examples]),
        ("dtype == {!r}", [{example.problem.dtype_name} for example in examples]),
        ("{!r} in flags", [set(example.problem.flags) for example in examples]),
    ):
        # An example with the word has 0, which is at most one half.
        found += [
            _Column(np.array([0.0 if word in one else 1.0 for one in words]), test.format(word))
            for word in sorted(set().union(*words))
        ]
    names = sorted(set.intersection(*(set(dict(example.problem.dims)) for example in examples)))
    sizes = {name: np.array([float(example.problem[name]) for example in examples]) for name in names}
    found += [_Column(sizes[name], f"dims[{name!r}]", "") for name in names]
    found += [
        _Column(sizes[one] / sizes[other], f"dims[{one!r}]", f" * dims[{other!r}]")
        for one, other in itertools.combinations(names, 2)
        if (sizes[other] > 0).all()
    ]
    return found


class _Leaf:
    """Examples that share a config, until it is split in two."""

    def __init__(
        self,
        members: NDArray[np.intp],
        costs: NDArray[np.float64],  # (n_examples, n_configs)
        columns: Sequence[_Column],
    ) -> None:
        import numpy as np

        self.columns, self.gain, self.branches = columns, 0.0, tuple[_Leaf, ...]()
        self._costs, mine = costs, costs[members]
        total = mine.sum(axis=0)
        self.config = int(np.argmin(total))
        for number, column in enumerate(columns):
            values = column.values[members]
            order = np.argsort(values, kind="stable")
            ends = np.flatnonzero(np.diff(values[order]) > 0)  # where one value ends and the next begins
            if not len(ends):
                continue
            running = np.cumsum(mine[order], axis=0)[ends]
            gains = total.min() - running.min(axis=1) - (total - running).min(axis=1)
            at = int(np.argmax(gains))
            if gains[at] > self.gain + 1e-9:
                threshold = _between(*values[order[ends[at] : ends[at] + 2]])
                self.gain, self.condition = float(gains[at]), (number, threshold)  # that a column is at most so much
                self._parts = members[values <= threshold], members[values > threshold]

    def split(self) -> tuple[_Leaf, ...]:
        self.branches = tuple(_Leaf(part, self._costs, self.columns) for part in self._parts)
        return self.branches


def _between(low: float, high: float) -> float:
    """A number to compare with, low <= it < high: the middle, by ratio where there is one, in few digits."""
    middle = math.sqrt(low * high) if low > 0 else (low + high) / 2
    for digits in range(1, 17):
        rounded = float(f"{middle:.{digits}g}")
        if low <= rounded < high and (digits >= 2 or rounded == middle):
            return float(math.floor(rounded)) if low <= math.floor(rounded) else rounded
    return low


def _rules(tree: _Leaf, configs: Sequence[KernelConfig], given: tuple[tuple[int, float], ...] = ()) -> Iterator[Rule]:
    if not tree.branches:
        tightest = {number: min(most for one, most in given if one == number) for number, _ in given}
        conditions = (tree.columns[number].at_most(threshold) for number, threshold in tightest.items())
        yield Rule(tuple(conditions), configs[tree.config])
        return
    one, other = tree.branches
    yield from _rules(one, configs, (*given, tree.condition))
    yield from _rules(other, configs, given)
