"""What three hints lose over a dynamic dimension, and what a cover of three configs does: `python cover_on_gpu.py`.

For a grouped GEMM (and `matmul`, where that family is there) the whole space is measured, every 64 sizes up to 4096, on
all GPUs, into `--out`: run again after an end of any kind, it goes on. Sizes come from coarse to fine, so that what was
measured by then is shown, last, as one table a family: per cent lost against the best single config of each size by the
config that is fastest at each hint, by the nearest hint's, and by the covers, predicted and measured. About six minutes
on four H200s. Without a GPU (`--fake`) it goes through the same with made-up times.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import foretune
import rich
from fakes import FakeFamily, fake_dataset
from foretune.datasets import Case, ForetuneError, Problem, load
from foretune.kernels import find_family
from foretune.runtime.covering import make_hint_matrix, measured_cover
from foretune.runtime.covering.losses import at_size

HINTS, STEP, MOST = (64, 256, 4096), 64, 4096
#: Family -> (its dynamic dimension, the others): projections of a dense model, and a layer of eight experts.
LAYERS = {
    "grouped_gemm_fwd": ("rows", {"groups": 8, "n": 4096, "k": 4096}),
    "matmul": ("m", {"batch": 1, "n": 4096, "k": 4096}),
}
FAKE = {"fake": ("rows", {"groups": 4, "n": 1024, "k": 512})}


def coarse_to_fine() -> list[int]:
    """The hints, then all sizes, each octave of steps halving the gaps."""
    order = dict.fromkeys(HINTS)
    step = MOST
    while step >= STEP:
        order |= dict.fromkeys(range(step, MOST + 1, step))
        step //= 2
    return list(order)


def measured(family, cases, out: Path, budget_s: float):
    if isinstance(family, FakeFamily):
        return fake_dataset(cases)
    summary = foretune.collect_dataset(family, out=out, cases=cases, budget_s=budget_s)
    rich.print(summary)
    return load(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("covered"), help="folder for the datasets and the tables")
    parser.add_argument("--budget", type=float, default=200.0, help="seconds of measuring for each family")
    parser.add_argument("--configs", type=int, default=3, help="how many configs a cover has")
    parser.add_argument("--bundle", type=Path, help="what predicts, if not the shipped bundle")
    parser.add_argument("--fake", action="store_true", help="with made-up times, and no GPU")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    tables = []
    for name, (dynamic, others) in (FAKE if asked.fake else LAYERS).items():
        try:
            family = FakeFamily() if asked.fake else find_family(name)
        except ForetuneError as error:
            print(f"{name} is left out: {error}")
            continue
        layer = Problem.of(name, dtype=family.dtypes[0], **others, **{dynamic: STEP})
        cases = tuple(Case(at_size(layer, dynamic, size), ("cover/layer",)) for size in coarse_to_fine())
        data = measured(family, cases, asked.out / name, asked.budget)
        place = (family, layer, dynamic, (STEP, MOST), asked.configs, data.devices[0], data)
        try:
            sizes = measured_cover(*place).sizes  # those that a cut collection got through
            made = make_hint_matrix(*place, hints=[hint for hint in HINTS if hint in sizes], bundle=asked.bundle)
        except ForetuneError as error:
            print(f"{name} has no table: {error}")
            continue
        (asked.out / f"{name}.json").write_text(json.dumps(made.to_json(), indent=1))
        tables += [made.measured, *([made.predicted] if made.predicted else []), made]
    for one in tables:
        rich.print(one)


if __name__ == "__main__":
    main()
