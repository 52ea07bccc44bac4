"""`generate`: all configs of a space that is written as a dictionary."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ...datasets import ForetuneError, KernelConfig
from ...datasets.errors import check_word, shown

#: More than anybody measures.
MOST_CONFIGS = 1_000_000


def generate(
    space: Mapping[str, Iterable[Any]], *, keep: Callable[[KernelConfig], bool] | None = None
) -> tuple[KernelConfig, ...]:
    """All combinations of a {knob: values} dictionary, each once, the last knob running fastest; with `keep` only those
    for which it is true. num_warps, num_stages and num_ctas are knobs like all others.

    Raises `ForetuneError` naming a knob whose values are no list, and for a space with no config or more than a
    million.

    >>> space = {"BLOCK_M": [64, 128], "num_warps": [4, 8]}
    >>> len(generate(space)), [str(one) for one in generate(space, keep=lambda c: c["BLOCK_M"] // c.num_warps == 8)]
    (4, ['BLOCK_M=64 num_warps=8 num_stages=3'])
    """
    knobs = {check_word("a space's knob", knob): checked_values(knob, values) for knob, values in _items(space)}
    if (count := math.prod(map(len, knobs.values()))) > MOST_CONFIGS:
        raise ForetuneError(f"a space must have at most {MOST_CONFIGS} configs but has {count}")
    combinations = itertools.product(*knobs.values())
    configs = dict.fromkeys(KernelConfig.of(**dict(zip(knobs, one, strict=True))) for one in combinations)
    kept = tuple(configs) if keep is None else tuple(config for config in configs if keep(config))
    if not kept:
        raise ForetuneError(f"keep must let a config of the space through but refuses all {len(configs)}")
    return kept


def checked_values(knob: str, values: Any) -> list[Any]:
    """The values of one knob. Raises `ForetuneError` naming it where they are no list, or none."""
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise ForetuneError(f"a space must have a list of values for {knob} but has {shown(values)}")
    if not (found := list(itertools.islice(values, MOST_CONFIGS + 1))):
        raise ForetuneError(f"a space must have at least one value for {knob} but has none")
    return found


def _items(space: Any) -> Iterable[tuple[str, Any]]:
    if not isinstance(space, Mapping) or not space:
        raise ForetuneError(f"a space must be a dictionary of knobs, each with its values, but is {shown(space)}")
    return space.items()
