"""`learn_rules`: learn a short list of if-rules that choose a config by dimensions, dtype and device."""

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

#: Slowdowns that stand for an unknown time, and for a config that failed or cannot run.
UNKNOWN, FAILED = 2.0, 100.0
#: The least gain of a rule, in mean log slowdown over all examples, that justifies a line.
_LEAST_GAIN = 5e-4


@dataclass(frozen=True)
class Example:
    """A training example: each config's slowdown over the best one, for one problem and device; inf if it failed."""

    problem: Problem
    device: str
    slowdowns: Mapping[KernelConfig, float]


@dataclass(frozen=True)
class Rule:
    """A config and the conditions for it. The first rule of a list whose conditions hold applies; the last has none."""

    conditions: tuple[str, ...]  # Python source in terms of `dims`, `dtype`, `flags`, `device`
    config: KernelConfig


def learn_rules(examples: Sequence[Example], most: int = 32) -> tuple[Rule, ...]:
    """Return at most `most` rules whose configs are nearly as fast as each example's best; the last has no condition.

    A decision tree is split where that reduces the mean log slowdown most, and is then written as a list: because rules
    are tried in order, the second branch of a split needs no condition. The same examples give the same rules.

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
        widest = max(leaves, key=lambda leaf: leaf.gain)  # the first of equal ones
        if widest.gain < max(least, 1e-9):
            break
        leaves.remove(widest)
        leaves += widest.split()
    return tuple(_rules(root, configs))


def _cost(example: Example, config: KernelConfig) -> float:
    """Return the log slowdown of a config on an example."""
    slowdown = example.slowdowns.get(config)
    if slowdown is None:
        return math.log(UNKNOWN)
    return math.log(min(max(slowdown, 1e-6), FAILED))


class _Column(NamedTuple):
    """A feature to split on: numbers with thresholds, or the presence of a word (dtype, flag or device)."""

    values: NDArray[np.float64]  # (n_examples,)
    left: str  # the left side of a comparison; for a word, the whole condition
    factor: str | None = None  # source that multiplies the threshold; None for a word

    def at_most(self, threshold: float) -> str:
        """Return the Python source of the condition that the feature is at most a threshold."""
        if self.factor is None:
            return self.left
        number = f"{threshold:.0f}" if threshold == int(threshold) else f"{threshold:.6g}"
        return f"{self.left} <= {number}{self.factor}"


def _columns(examples: Sequence[Example]) -> list[_Column]:
    """Return the features that rules can test: dtypes, flags and devices first, then dimensions and their ratios."""
    import numpy as np

    found = []
    for test, words in (
        ("device == {!r}", [{example.device} for example in examples]),
        ("dtype == {!r}", [{example.problem.dtype_name} for example in examples]),
        ("{!r} in flags", [set(example.problem.flags) for example in examples]),
    ):
        # An example with the word has 0, so the condition is that the column is at most one half.
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
    """A node of the decision tree: its examples, the config that is best for them together, and the best split."""

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
                self.gain, self.condition = float(gains[at]), (number, threshold)  # column <= threshold
                self._parts = members[values <= threshold], members[values > threshold]

    def split(self) -> tuple[_Leaf, ...]:
        """Split the node's examples in two at its best condition, and return the two branches."""
        self.branches = tuple(_Leaf(part, self._costs, self.columns) for part in self._parts)
        return self.branches


def _between(low: float, high: float) -> float:
    """Return a threshold t, low <= t < high, with few digits: near the geometric mean if possible."""
    middle = math.sqrt(low * high) if low > 0 else (low + high) / 2
    for digits in range(1, 17):
        rounded = float(f"{middle:.{digits}g}")
        if low <= rounded < high and (digits >= 2 or rounded == middle):
            return float(math.floor(rounded)) if low <= math.floor(rounded) else rounded
    return low


def _rules(tree: _Leaf, configs: Sequence[KernelConfig], given: tuple[tuple[int, float], ...] = ()) -> Iterator[Rule]:
    """Yield the rules of a tree, its leaves from left to right.

    `given` has the conditions on the way to the tree, as (number of the column, threshold).
    """
    if not tree.branches:
        tightest = {number: min(most for one, most in given if one == number) for number, _ in given}
        conditions = (tree.columns[number].at_most(threshold) for number, threshold in tightest.items())
        yield Rule(tuple(conditions), configs[tree.config])
        return
    one, other = tree.branches
    yield from _rules(one, configs, (*given, tree.condition))
    yield from _rules(other, configs, given)
