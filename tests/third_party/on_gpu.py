"""Both families for real, on the GPU that is here: `python on_gpu.py OUT [--budget 100] [--deadline 540]`.

Collects each family for `budget` seconds, judges a ranker on shapes that it never saw, trains a bundle on everything
and then makes the first call of the package's own autotuned kernels on other shapes yet, from cold caches, with the
prune callback and without; none is begun after `deadline` seconds. After every step OUT has all that is known so far:
third_party.json and dataset.tar.gz. `--pretend` does it all without a GPU, with times of a model.

Needs Foretune and this folder on the path, and pandas, pyarrow, scikit-learn, joblib, lightgbm, rich.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tarfile
import time
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory, mkdtemp

import foretune
import torch
import triton
from foretune.datasets import Case, DeviceSpec, KernelConfig, Problem, load
from foretune.kernels import find_family
from foretune.model.cross_validation import cross_validate
from foretune.model.train import train_bundle

FAMILIES = ("rowwise_kernels.softmax:RowSoftmax", "rowwise_kernels.layer_norm:LayerNorm")
#: Rows, columns and dtypes of the first calls; none of them is in the data.
UNSEEN = ((5000, 1280, "fp16"), (700, 6144, "fp32"), (40000, 300, "fp16"))
ROUNDS = 5


class Card:
    """The GPU that is here."""

    def __init__(self) -> None:
        self.device, self.where = DeviceSpec.live(), "cuda"

    def collect(self, family, cases, out, budget_s):
        return foretune.collect_dataset(family, out=out, cases=cases, budget_s=budget_s)

    def wait(self) -> None:
        torch.cuda.synchronize()

    def times_us(self, family, problem, configs):
        """The median time of each config, all of them interleaved: a dict for choosing, and another for reporting."""
        from foretune.runtime import Timer

        timer, inputs = Timer(), family.inputs(problem, self.device)
        samples = {config: [] for config in configs}
        for _ in range(2 * ROUNDS):
            for config, times in samples.items():
                times.append(median(timer.sample(lambda config=config: family.launch(inputs, config), 5)))
        return tuple({config: median(times[at::2]) for config, times in samples.items()} for at in (0, 1))


class Pretended:
    """No GPU: a stub driver compiles, and a model says the times."""

    def __init__(self) -> None:
        self.device, self.where = DeviceSpec.named("h200"), "cpu"
        DeviceSpec.live = classmethod(lambda cls, index=None: self.device)
        sys.path.append(str(Path(__file__).parents[1]))
        self.driver = foretune.runtime.use_stub_driver(self.device)
        self.driver.__enter__()

    def collect(self, family, cases, out, budget_s):
        import replayed

        return replayed.run(cases, out, replayed.CheckingRunner(small=0), families={family.name: family})

    def wait(self) -> None:
        pass

    def times_us(self, family, problem, configs):
        import replayed

        return tuple({config: replayed.model_us(family, problem, config, at) for config in configs} for at in (2, 3))


class Report:
    """What is known so far, on the disk after every step."""

    def __init__(self, out: Path) -> None:
        self.out, self.began = out, time.monotonic()
        self.known = {"torch": torch.__version__, "triton": triton.__version__, "families": {}}
        out.mkdir(parents=True, exist_ok=True)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def add(self, family: str, what: str, value: object) -> None:
        self.known["families"].setdefault(family, {})[what] = value
        self.known["seconds"] = round(self.seconds, 1)
        whole = self.out / "third_party.json.new"
        whole.write_text(json.dumps(self.known, indent=1))
        whole.replace(self.out / "third_party.json")
        print(f"{self.seconds:.0f} s: {family}: {what}", file=sys.stderr, flush=True)

    def keep(self, data: Path) -> None:
        whole = self.out / "dataset.tar.gz.new"
        with tarfile.open(whole, "w:gz") as tar:
            tar.add(data, arcname="third_party")
        whole.replace(self.out / "dataset.tar.gz")

    def __str__(self) -> str:
        lines = ["family        problems  regret@1  regret@8  noise  static@8  random@8"]
        for name, known in self.known["families"].items():
            if judged := known.get("evaluation"):
                figures = [judged["regret"][k] for k in ("1", "8")]
                figures += [judged["baselines"][baseline]["8"] for baseline in ("static", "random")]
                one, eight, static, chance = (f"{100 * (figure['geomean'] - 1):7.2f}%" for figure in figures)
                noise = f"{100 * (judged['noise_floor'] - 1):.2f}%"
                lines.append(f"{name:12}  {judged['problems']:8}  {one}  {eight}  {noise}  {static}  {chance}")
        lines.append(
            "first call                               all configs        k=4             chosen / best: all, k=4"
        )
        for name, known in self.known["families"].items():
            for call in known.get("first_calls", ()):
                ways = [f"{call[way]['benchmarked']:3} in {call[way]['seconds']:5.1f} s" for way in ("all", "k=4")]
                slow = [f"{call[way]['over_best']:.3f}" for way in ("all", "k=4")]
                lines.append(f"{name:12} {call['problem']:27} {'   '.join(ways)}   {' / '.join(slow)}")
        return "\n".join(lines)


@contextmanager
def cold(tuner, mode):
    """An autotuner as in a new process with empty caches, in this mode of Foretune."""
    tuner.cache.clear()
    tuner.fn.device_caches.clear()
    os.environ["FORETUNE_MODE"] = mode
    with TemporaryDirectory() as cache, triton.knobs.cache.scope():
        triton.knobs.cache.dir = cache
        yield
    del os.environ["FORETUNE_MODE"]


def first_calls(machine, family, problem, tuner, call):
    """What the first call costs and chooses, over all supported configs and over the shortlist."""
    arguments = family.arguments(problem, machine.where)
    found = {"problem": str(problem).removeprefix(f"{family.name} ")}
    for way, mode in (("k=4", "shortlist"), ("all", "off")):
        with cold(tuner, mode):
            machine.wait()
            began = time.perf_counter()
            call(arguments)
            machine.wait()
            seconds = time.perf_counter() - began
        chosen = KernelConfig.from_triton(tuner.best_config)
        benchmarked = len(tuner.configs_timings)
        found[way] = {"benchmarked": benchmarked, "seconds": round(seconds, 3), "config": chosen.to_json()}
    configs = [c for c in family.space() if family.supports(c, problem, machine.device) is None]
    chosen_by, reported = machine.times_us(family, problem, configs)
    best_us = reported[min(chosen_by, key=chosen_by.get)]
    for way in ("k=4", "all"):
        time_us = reported[KernelConfig.from_json(found[way]["config"])]
        found[way] |= {"time_us": round(time_us, 2), "over_best": round(time_us / best_us, 4)}
    return found | {"best_us": round(best_us, 2)}


def tuned(family):
    """The package's autotuner of a family, and a call of it. To be asked when there is a bundle."""
    from rowwise_kernels import ops

    if family.name == "row_softmax":
        return ops.tuned_softmax, lambda given: ops.softmax(given["x_ptr"])
    return ops.tuned_layer_norm, lambda given: ops.layer_norm(given["x_ptr"], given["weight_ptr"], given["bias_ptr"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--budget", type=float, default=100.0, help="seconds of collecting, for each family")
    parser.add_argument("--deadline", type=float, default=540.0, help="seconds after which no first call is begun")
    parser.add_argument("--problems", type=int, default=64, help="of each family, at most")
    parser.add_argument("--pretend", action="store_true", help="without a GPU")
    options = parser.parse_args()

    machine = Pretended() if options.pretend else Card()
    report, data = Report(options.out), Path(mkdtemp()) / "third_party"
    report.known["device"] = machine.device.name
    families = {family.name: family for family in map(find_family, FAMILIES)}
    unseen = {
        name: [Problem.of(name, rows=rows, columns=columns, dtype=dtype) for rows, columns, dtype in UNSEEN]
        for name in families
    }
    for name, family in families.items():
        shapes = {problem.dims for problem in unseen[name]}
        cases: list[Case] = [case for case in family.cases(random=options.problems) if case.problem.dims not in shapes]
        report.add(name, "collected", asdict(machine.collect(family, cases, data, options.budget)))
        report.keep(data)
        report.add(name, "evaluation", cross_validate(load(data), family).to_json())

    bundle = data.with_name("bundle")
    train_bundle(load(data), families).save(bundle)
    os.environ["ROWWISE_BUNDLE"] = str(bundle)
    for place in range(len(UNSEEN)):
        for name, family in families.items():
            if report.seconds > options.deadline:
                break
            tuner, call = tuned(family)
            if place == 0:  # a rehearsal: the compiler is loaded, and the device is awake
                family.compile(family.space()[0], unseen[name][0])
            calls = report.known["families"][name].get("first_calls", [])
            calls = [*calls, first_calls(machine, family, unseen[name][place], tuner, call)]
            report.add(name, "first_calls", calls)
    print(report)


if __name__ == "__main__":
    main()
