"""`python tests/studies/generated_kernels_dataset.py MEASURED OUT`: the reductions that were measured, as a dataset.

MEASURED is the folder that generated_kernels_on_gpu.py wrote, with its kernels unpacked. Kernels of equal problems are
one problem: the first that was measured.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from pathlib import Path
from typing import Any

from foretune.datasets import Case, DeviceSpec, KernelConfig, Measurement, Problem, Status
from foretune.datasets.store import Writer, seal_dataset
from foretune.kernels.inductor.reduction import ReductionSource
from foretune.runtime.launching.source_hash import digest_of
from generated_kernels_on_gpu import lines


def measurement(one: dict[str, Any], problem: Problem, device: str) -> Measurement:
    """Return a line of the first or the final pass as a measurement."""
    config = KernelConfig.of(**one["config"])
    times = one.get("rounds") or one.get("hot") or []
    us = one.get("us") or one.get("hot_us")
    if us is None:
        return Measurement(problem, device, config, Status.COMPILE_ERROR, error=one["failure"])
    quarters = statistics.quantiles(times, n=4) if len(times) > 1 else [us] * 3
    return Measurement(
        problem,
        device,
        config,
        Status.OK,
        time_us=us,
        spread=(quarters[2] - quarters[0]) / us,
        samples=max(len(times), 1),
        timing_pass=2 if one["step"] == "final" else 1,
        registers=one.get("n_regs"),
        spills=one.get("n_spills"),
        smem_bytes=one.get("shared"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("measured", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="h200")
    parser.add_argument("--without", nargs="*", default=(), help="Models whose problems are left out.")
    parser.add_argument("--date", required=True, help="Of the run, as 20261126-195700.")
    given = parser.parse_args()
    device, rows = DeviceSpec.named(given.device), lines(given.measured / "measured.jsonl")
    ran = next(one for one in rows if one["step"] == "run")
    facts = {"device": device.name, "torch": ran["torch"], "timed": "warm", "plan": "thin"}
    parts, writers = given.out.with_name(f"{given.out.name}_parts"), {}
    for number, name in enumerate(("inductor_reduction", "inductor_persistent_reduction")):
        run = {"family": name, "kernel_source": digest_of([name, ran["torch"]]), **facts}
        writers[name] = Writer(parts, given.out.name, [device], run, run_id=f"{given.date}-000{number}")
    found: dict[Problem, list[dict[str, Any]]] = {}
    for one in lines(given.measured / "kernels.jsonl"):
        source = (given.measured / "kernels" / f"{one['kernel']}.py").read_text()
        kernel = ReductionSource.read(source, partial(round, 1e9 * one["num_gb"]))
        if kernel is not None:
            found.setdefault(kernel.problem, []).append(one)
    for problem, kernels in found.items():
        if any(one["model"] in given.without for one in kernels):
            continue
        sources = tuple(dict.fromkeys(f"{one['model']}/{one['layer'].split()[1]}_{one['pass']}" for one in kernels))
        mine = [row for row in rows if row.get("kernel") == kernels[0]["kernel"] and row["step"] in ("first", "final")]
        writers[problem.family].append(Case(problem, sources), [measurement(row, problem, device.name) for row in mine])
    sealed = seal_dataset(parts, given.out, name=given.out.name)
    print(sealed.describe()["families"])  # noqa: T201


if __name__ == "__main__":
    main()
