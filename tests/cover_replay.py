"""`python tests/cover_replay.py`: what `foretune.cover(..., measure=True)` would choose, where what it times is looked
up in h200_cover: of two layers all configs, in two passes (each is looked up twice), at every 64 sizes. A row for each
number of candidates; losses are against the best of the space, which lost two of these configs since."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
from foretune.datasets import DeviceSpec, Problem, load
from foretune.kernels import find_measurable
from foretune.runtime.covering import Cover, cover, losses, make_cover
from foretune.runtime.covering.losses import measured_losses

#: Family -> (its dynamic dimension, the others).
LAYERS = {
    "matmul": ("m", {"batch": 1, "n": 4096, "k": 4096}),
    "grouped_gemm_fwd": ("rows", {"groups": 8, "n": 4096, "k": 4096}),
}
H200 = DeviceSpec.named("h200")


@cache
def measured(name):
    """Return a measured layer: family, data, problem, losses by size and config, the space, and times.

    The space is the family's, as far as it was measured. Times are (first, second), by size and config.
    """
    dynamic, others = LAYERS[name]
    family, data = find_measurable(name), load("h200_cover")
    problem = Problem.of(name, dtype="bf16", **others, **{dynamic: 64})
    grid = data.grid(name)
    rows = {case.problem[dynamic]: row for row, case in enumerate(grid.cases)}
    times = {
        (size, config): (grid.first_us[row, column], grid.second_us[row, column])
        for size, row in rows.items()
        for column, config in enumerate(grid.configs)
    }
    known = measured_losses(family, problem, dynamic, 64, 4096, H200, data)
    recorded = {config for _, config in times}
    space = tuple(config for config in family.space(H200) if config in recorded)
    return family, data, problem, known, space, times


@dataclass
class Replay:
    """A measured layer, and how often what was looked up."""

    name: str

    def __post_init__(self):
        self.dynamic = LAYERS[self.name][0]
        self.family, self.data, self.problem, self.known, self.space, self._times = measured(self.name)
        self.broken: set[object] = set()  # configs that cannot be launched
        self.disturbed: set[object] = set()  # configs that take twice as long when they are first timed at a size
        self.compiled: list[object] = []
        self.timed: list[tuple[int, object]] = []
        self._often = Counter[tuple[int, object]]()

    def cover(self, **options) -> Cover:
        """By `make_cover` with `measure`."""

        def launch(inputs, config):
            if config in self.broken or not np.isfinite(self._times[inputs[self.dynamic], config][0]):
                raise RuntimeError("out of resource: shared memory")
            return inputs[self.dynamic], config

        def time(launched):
            size, config = launched()
            before = self._often[size, config]
            self._often[size, config] += 1
            self.timed.append((size, config))
            slower = 2 if before == 0 and config in self.disturbed else 1
            return SimpleNamespace(time_us=slower * self._times[size, config][before % 2])

        with (
            patch.object(type(self.family), "space", lambda family, device=None: self.space),
            patch.object(type(self.family), "inputs", lambda family, problem, device: problem),
            patch.object(type(self.family), "launch", lambda family, inputs, config: launch(inputs, config)),
            patch.object(type(self.family), "compile", lambda family, config, problem: self.compiled.append(config)),
            patch.object(losses, "Timer", lambda: SimpleNamespace(time=time)),
            patch.object(cover, "device_here", lambda: H200),
        ):
            span = (64, 4096)
            sizes = self.known.sizes
            return make_cover(
                self.family, self.problem, self.dynamic, span, None, H200, sizes=sizes, measure=True, **options
            )

    def losses(self, found: Cover) -> np.ndarray:
        """Return what the cover loses at each size against the best of the space, in the second pass: (n_sizes,)."""
        column_of = {config: column for column, config in enumerate(self.known.configs)}
        columns = [column_of[found.config_for(size)] for size in self.known.sizes]
        best = np.nanmin(self.known.second[:, [column_of[config] for config in self.space]], axis=1)
        return np.expm1(self.known.second[np.arange(len(columns)), columns] - best)


def main() -> None:
    print(f"{'':18} within of each size: configs timed   chosen  ranges    mean   worst  sizes within 2 %")
    for name in LAYERS:
        for each in (1, 2, 3, 4, 8):
            for options in ({}, {"within": 0.02}, {"within": 0.015}):
                replay = Replay(name)
                with patch.object(losses, "CANDIDATES", each):
                    found = replay.cover(**options)
                lost = replay.losses(found)
                timed = len({config for _, config in replay.timed})
                print(
                    f"{name:18} {options.get('within', ''):6} {each:12} {timed:14} "
                    f"{len(found.configs):8} {len(found.choices):7} "
                    f"{100 * lost.mean():7.2f} {100 * lost.max():7.1f} {(lost <= 0.02).sum():8}"
                )


if __name__ == "__main__":
    main()
