"""Verify the numerics classes on the GPU that is here: `python numerics_on_gpu.py OUT [TASK ...] [--limit-s 330]`.

A task is a family, or `rows OP`; by default all of them run, except fused_moe and fused_moe_down, which need SGLang's
files on the path (see serving_on_gpu.py).

- A family's task hashes the outputs of up to `--binaries` binaries, with every config that shares one of them, on 20
  problems. The sample has every class of the space and, as far as it fits, every value of every knob within each
  class. Configs of one class must give identical bits, and a config must repeat its own.
- `rows OP` runs an op under `invariant`: rows in batches of 1 to 16,384 must have the bits of the largest batch.

Each task is a process of its own, because an illegal access ends a CUDA context; `--parallel` of them run at a time,
and each compiles ahead in `--workers` processes. A task appends a line to OUT/TASK.jsonl after each problem, and starts
again after a fault, without the config that caused it. Running the program again in the same OUT does what is missing,
and prints the table. Ends with status 1 if anything differed, failed or is missing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from foretune.collect.compiling import Binary, CompilePool
from foretune.collect.processes import Watch
from foretune.datasets import DeviceSpec, KernelConfig, Measurable, Problem
from foretune.datasets.errors import abridged
from foretune.kernels import find_measurable
from foretune.runtime.launching.ahead import cores

SEED = 0
#: How many configs run between two looks at the clock and at the device, and how often a task may start.
CHUNK, STARTS = 32, 8
#: The part of the time that compiling may take; then what is compiled runs.
COMPILE_SHARE = 0.6
#: Rows, columns and depth of the problems, smallest first. None of the latter two is a multiple of a tile.
SIZES = (
    (1, 144, 336), (7, 80, 208), (16, 144, 80), (33, 208, 592), (64, 80, 464), (100, 336, 144), (129, 272, 720),
    (200, 144, 1104), (255, 400, 848), (300, 272, 976), (31, 528, 1232), (512, 400, 1040), (65, 656, 1488),
    (777, 336, 2064), (1000, 272, 2896), (257, 784, 2000), (128, 1040, 4112), (48, 2064, 5136), (640, 528, 8208),
    (4000, 1552, 4112),
)  # fmt: skip
GROUPS = (1, 3, 8, 4)
HEADS = ((8, 2), (1, 1), (5, 1), (32, 8), (12, 4))


class Part(NamedTuple):
    """Problems of one signature: how many of `SIZES`, what is added to N and K, and the share of the binaries."""

    dtype: str
    flags: tuple[str, ...]
    problems: int
    share: float
    added: int = 8
    head_dim: int = 0


_GROUPED = (
    Part("bf16", (), 20, 0.6), Part("bf16", ("permute_x",), 6, 0.1), Part("bf16", ("permute_y",), 6, 0.1),
    Part("fp32", (), 4, 0.1), Part("fp16", (), 6, 0.1),
)  # fmt: skip
_ENGINES = (Part("bf16", (), 20, 0.6), Part("fp8e4m3", (), 20, 0.4))
_SCALED = tuple(Part("fp8e4m3", flags, 20, 1 / 3, 0) for flags in ((), ("rowwise",), ("blockwise",)))
PARTS: Mapping[str, tuple[Part, ...]] = {
    "matmul": (
        Part("bf16", (), 20, 0.4), Part("bf16", (), 6, 0.1, 1), Part("bf16", ("a_km", "b_kn"), 6, 0.16),
        Part("fp32", ("b_kn",), 6, 0.14), Part("int8", (), 6, 0.08, 0), Part("fp16", (), 6, 0.12),
    ),
    "grouped_gemm_fwd": _GROUPED,
    "scaled_gemm": _SCALED,
    "scaled_grouped_gemm_fwd": _SCALED,
    "gated_mlp": (
        Part("bf16", (), 20, 0.8), Part("bf16", ("gelu_tanh", "saves"), 6, 0.1), Part("fp16", (), 4, 0.1),
    ),
    "grouped_gemm_dx": _GROUPED,
    "grouped_gemm_dw": _GROUPED,
    "rms_norm_rope_fwd": (
        Part("bf16", (), 20, 0.6, head_dim=128), Part("bf16", ("interleaved",), 6, 0.14, head_dim=128),
        Part("fp16", (), 6, 0.14, head_dim=80), Part("bf16", (), 6, 0.12, head_dim=256),
    ),
    "rms_norm_rope_bwd": (
        Part("bf16", (), 20, 0.4, head_dim=128), Part("bf16", ("interleaved",), 6, 0.1, head_dim=80),
    ),
    "fused_moe": _ENGINES,
    "fused_moe_down": _ENGINES,
}  # fmt: skip


def problems_of(name: str, part: Part) -> list[Problem]:
    """The problems of one part."""
    found = []
    for index, (rows, n, k) in enumerate(
        SIZES[-part.problems :] if part.problems > 10 else SIZES[3 : 3 + part.problems]
    ):
        if part.head_dim:
            q, kv = HEADS[index % len(HEADS)]
            dims = {"tokens": rows, "q_heads": q, "kv_heads": kv, "head_dim": part.head_dim}
        elif name.startswith("fused_moe"):
            experts = GROUPS[index % len(GROUPS)]
            dims = {"tokens": rows, "experts": experts, "topk": min(2, experts), "hidden": k, "inter": n}
        elif "grouped" in name:
            dims = {"groups": GROUPS[index % len(GROUPS)], "rows": rows, "n": n + part.added, "k": k + part.added}
        else:
            dims = {"m": rows, "n": n + part.added, "k": k + part.added} | ({"batch": 1} if name == "matmul" else {})
        found.append(Problem.of(name, dtype=part.dtype, flags=part.flags, **dims))
    return found


class Sample(NamedTuple):
    """The configs to run on the problems of a part, each with the label of its class: the same for all problems."""

    problems: list[Problem]
    labels: dict[KernelConfig, str]
    binaries: int


def sample(family: Measurable, part: Part, device: DeviceSpec, most: int) -> Sample:
    """Choose binaries that have each class twice, and then as many values of knobs within classes as possible."""
    problems = problems_of(family.name, part)
    like = problems[-1]
    unlike = {family.supports_by(one): one for one in problems}.values()
    able = [c for c in family.space(device) if all(family.supports(c, one, device) is None for one in unlike)]
    classes = {config: tuple(family.numerics(config, problem) for problem in problems) for config in able}
    by_binary: dict[Hashable, list[KernelConfig]] = defaultdict(list)
    for config in able:
        by_binary[family.binary_key(config, like.without_sizes())].append(config)
    shown = {
        key: {(classes[config], *item) for config in configs for item in {"": 0, **config.to_json()}.items()}
        for key, configs in by_binary.items()
    }
    times, seen, chosen = Counter[Any](), set[Any](), list[Hashable]()
    left = list(by_binary)
    random.Random(SEED).shuffle(left)
    while left and len(chosen) < most:
        best = max(
            left,
            key=lambda key: (
                sum(times[one] < 2 for one in {classes[c] for c in by_binary[key]}),
                len(shown[key] - seen),
            ),
        )
        left.remove(best)
        chosen.append(best)
        seen |= shown[best]
        times.update({classes[config] for config in by_binary[best]})
    labels = labels_of(classes)
    return Sample(
        problems, {config: labels[classes[config]] for key in chosen for config in by_binary[key]}, len(chosen)
    )


def labels_of(classes: Mapping[KernelConfig, tuple[Hashable, ...]]) -> dict[tuple[Hashable, ...], str]:
    """Name each combination of a config's classes on all problems, by its texts and by the knobs that decide it."""
    values: dict[Any, dict[str, set[Any]]] = defaultdict(lambda: defaultdict(set))
    for config, one in classes.items():
        for knob, value in config.to_json().items():
            values[one][knob].add(value)
    deciding = [
        knob
        for knob in sorted({knob for one in values.values() for knob in one})
        if all(len(one[knob]) == 1 for one in values.values())
        and len({value for one in values.values() for value in one[knob]}) > 1
    ]
    found: dict[tuple[Hashable, ...], str] = {}
    for one in values:
        first = one[-1] if isinstance(one[-1], tuple) else (str(one[-1]),)
        texts = [text for text in first if isinstance(text, str)]
        knobs = [f"{knob}={next(iter(values[one][knob]))}" for knob in deciding]
        name = " ".join(texts if isinstance(one[-1], KernelConfig) else texts + knobs)
        found[one] = name if name and name not in found.values() else f"{name} {one[-1]}".strip()
    return found


def compile_ahead(
    family: Measurable, samples: Sequence[Sample], device: DeviceSpec, workers: int, until: float
) -> tuple[set[Binary], dict[Binary, str]]:
    """Compile all binaries until a time; return those that are ready, and the errors of those that failed."""
    wanted = dict.fromkeys(
        Binary.of(family, c, problem, device) for one in samples for problem in one.problems for c in one.labels
    )
    ready, failed = set[Binary](), dict[Binary, str]()

    def finished(binary: Binary, compiled: Any) -> None:
        if compiled.error is None:
            ready.add(binary)
        else:
            failed[binary] = compiled.error

    with Watch() as watch:
        pool = CompilePool({family.name: family}, watch, max(min(workers, len(wanted)), 1))
        pool.on_finished = finished
        for rank, binary in enumerate(wanted):
            pool.request(binary, rank)
        while len(ready) + len(failed) < len(wanted) and time.time() < until:
            watch.handle(0.1)
            pool.check()
    return ready, failed


class Log:
    """The lines of a task's file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.lines: list[dict[str, Any]] = []
        for line in lines:
            with suppress(ValueError):  # the last line of a process that was killed
                self.lines.append(json.loads(line))
        #: How often a problem was begun since it last had a record: so often did it end the process.
        self.begun = Counter[str]()
        for line in self.lines:
            if "problem" in line:
                self.begun.pop(line["problem"], None)
            elif "begin" in line:
                self.begun[line["begin"]] += 1
        #: Configs that ended the process, and how.
        self.faults = {line["fault"]: line["error"] for line in self.lines if "fault" in line}
        if self.lines and "trying" in self.lines[-1]:
            self.faults.setdefault(self.lines[-1]["trying"], "the process ended while it ran")
            self.add(fault=self.lines[-1]["trying"], error="the process ended while it ran")
        #: The last record of each problem.
        self.records = {line["problem"]: line for line in self.lines if "problem" in line}

    def add(self, **line: Any) -> None:
        """Append a line, at once."""
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def todo(self, problem: str) -> bool:
        """Note that a problem is begun, and return True; or False if it is done, or ended this process too often."""
        if self.records.get(problem, {}).get("complete"):
            return False
        if self.begun[problem] >= STARTS / 2:
            self.add(problem=problem, complete=True, errors=[f"the process ended {self.begun[problem]} times"])
            return False
        self.add(begin=problem)
        return True


def text_of(error: BaseException) -> str:
    """An error as one short line."""
    return abridged(f"{type(error).__name__}: {error}")[:300]


def is_fault(error: BaseException) -> bool:
    """Return whether an error has ended this process's CUDA context."""
    try:
        torch.cuda.synchronize()
    except Exception:  # noqa: BLE001 - any error means that the context is gone
        return True
    return "CUDA error" in str(error)


def integers_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor as integers."""
    return tensor.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]).flatten()


class Outputs:
    """Runs configs on one problem's inputs. The output is overwritten before, so that each must write all of it."""

    def __init__(self, family: Measurable, problem: Problem, device: DeviceSpec) -> None:
        self._family = family
        self.inputs = family.inputs(problem, device, seed=SEED)
        self._weights: torch.Tensor | None = None
        self._last: torch.Tensor | None = None

    def run(self, config: KernelConfig) -> torch.Tensor:
        """Run a config, and return its output."""
        self._family.reset(self.inputs)
        if self._last is not None:
            self._last.fill_(float("nan") if self._last.is_floating_point() else -1)
        self._last = self._family.launch(self.inputs, config)
        return self._last

    def hash(self, config: KernelConfig) -> torch.Tensor:
        """Run a config, and return a hash on the device: the sum of integers times random odd numbers, modulo 2^64."""
        words = integers_of(self.run(config)).long()
        if self._weights is None:
            generator = torch.Generator(words.device).manual_seed(SEED)
            self._weights = torch.randint(1 << 62, words.shape, generator=generator, device=words.device) * 2 + 1
        return (words * self._weights).sum()

    def difference(self, one: KernelConfig, other: KernelConfig) -> str:
        """Return the number of elements that differ between the outputs of two configs, and the largest gap."""
        first = self.run(one).clone()
        second = self.run(other)
        gap = (first.double() - second.double()).abs().nan_to_num().max().item()
        bits = integers_of(first) != integers_of(second)
        return f"{int(bits.sum())} of {len(bits)} elements differ, by {gap:.3g} at most"

    def error(self, config: KernelConfig) -> float:
        """The relative error of a config's output."""
        expected = self._family.reference(self.inputs).flatten().double()
        found = self.run(config).flatten().double()
        return ((found - expected).norm() / expected.norm()).item()


def telling(some: Sequence[KernelConfig], others: Sequence[KernelConfig]) -> str:
    """The knobs that have no value in common in two groups of configs, with the values in each."""
    values = [
        {knob: sorted({str(one.to_json().get(knob)) for one in group}) for knob in some[0].to_json()}
        for group in (some, others)
    ]
    apart = [knob for knob in values[0] if not set(values[0][knob]) & set(values[1][knob])]
    return ", ".join(f"{knob} {'/'.join(values[0][knob])} : {'/'.join(values[1][knob])}" for knob in apart)


def run_problem(
    family: Measurable, problem: Problem, labels: Mapping[KernelConfig, str], device: DeviceSpec, log: Log, until: float
) -> dict[str, Any]:
    """Hash the outputs of configs on a problem, and compare them within each class."""
    start = time.perf_counter()
    chunk = 1 if log.begun[str(problem)] else CHUNK  # the last attempt ended with a fault: find the config
    outputs, errors, bits = Outputs(family, problem, device), [], dict[KernelConfig, int]()
    slowest, again = 0.0, dict[KernelConfig, int]()

    def hash_all(configs: Sequence[KernelConfig], into: dict[KernelConfig, int]) -> None:
        nonlocal slowest
        for first in range(0, len(configs), chunk):
            if time.time() > until:
                return
            hashes: dict[KernelConfig, torch.Tensor] = {}
            for config in configs[first : first + chunk]:
                if chunk == 1:
                    log.add(trying=str(config))
                try:
                    began = time.perf_counter()
                    hashes[config] = outputs.hash(config)
                    slowest = max(slowest, time.perf_counter() - began)
                    if chunk == 1:
                        hashes[config].item()
                except Exception as error:  # a config that fails has no bits
                    hashes.pop(config, None)
                    if is_fault(error):
                        if chunk == 1:
                            log.add(fault=str(config), error=text_of(error))
                        raise
                    errors.append(f"{config}: {text_of(error)}")
            if hashes:
                into.update(zip(hashes, torch.stack(list(hashes.values())).tolist(), strict=True))

    configs = [config for config in labels if str(config) not in log.faults]
    errors += [f"{config}: {log.faults[str(config)]}" for config in labels if str(config) in log.faults]
    hash_all(configs, bits)
    by_class: dict[str, dict[int, list[KernelConfig]]] = defaultdict(lambda: defaultdict(list))
    classes: dict[str, tuple[str, int]] = {}
    for config, value in bits.items():
        own = str(family.numerics(config, problem))
        by_class[own][value].append(config)
        classes.setdefault(labels[config], (own, value))
    hash_all([next(iter(found.values()))[0] for found in by_class.values()], again)
    violations = []
    for own, found in by_class.items():
        kinds = sorted(found.values(), key=len, reverse=True)
        if len(kinds) > 1:
            pairs = sum(len(one) * len(other) for one, other in itertools.combinations(kinds, 2))
            how = outputs.difference(kinds[0][0], kinds[1][0])
            groups = [{"configs": len(kind), "examples": [str(one) for one in kind[:6]]} for kind in kinds[:6]]
            how += f"; knobs that tell the two largest groups apart: {telling(*kinds[:2]) or 'none alone'}"
            violations.append({"class": own, "pairs": pairs, "kinds": len(kinds), "how": how, "groups": groups})
    return {
        "configs": len(configs),
        "launches": len(bits) + len(again),
        "complete": len(bits) + len(errors) >= len(labels),
        "classes": classes,
        "n_classes": len(by_class),
        "alone": sum(sum(map(len, found.values())) == 1 for found in by_class.values()),
        "violations": violations,
        "unrepeatable": [str(config) for config, value in again.items() if value != bits[config]],
        "relative_error": outputs.error(next(iter(bits))) if bits else None,
        "tolerance": family.tolerance(problem),
        "errors": errors,
        "slowest_launch_s": round(slowest, 2),
        "seconds": round(time.perf_counter() - start, 1),
    }


def run_family(name: str, log: Log, device: DeviceSpec, given: argparse.Namespace) -> None:
    """Do what is missing of a family's task."""
    family = find_measurable(name)
    samples = [sample(family, part, device, max(int(given.binaries * part.share), 2)) for part in PARTS[name]]
    samples = [one._replace(problems=one.problems[: given.problems]) for one in samples]
    start = time.perf_counter()
    until = time.time() + COMPILE_SHARE * (given.until - time.time())
    ready, failed = compile_ahead(family, samples, device, given.workers, until)
    took = time.perf_counter() - start
    print(f"{len(ready)} binaries in {took:.0f} s, {len(failed)} failed", flush=True)
    log.add(
        compiled=len(ready), seconds=round(took, 1), failed=[f"{one.config}: {text}" for one, text in failed.items()]
    )
    for index, one in enumerate(samples):
        for problem in one.problems:
            if time.time() > given.until or not log.todo(str(problem)):
                continue
            binaries = {config: Binary.of(family, config, problem, device) for config in one.labels}
            able = {config: label for config, label in one.labels.items() if binaries[config] in ready}
            missing = sum(binary not in ready and binary not in failed for binary in binaries.values())
            record: dict[str, Any]
            try:
                record = run_problem(family, problem, able, device, log, given.until)
            except Exception as error:
                if is_fault(error):
                    raise
                traceback.print_exc()
                record = {"complete": True, "errors": [text_of(error)]}
            record["complete"] = record["complete"] and not missing
            log.add(problem=str(problem), part=index, not_compiled=missing, **record)


# The rows of ops.

MOST_ROWS, K, N, EXPERTS = 1 << 14, 2000, 1536, 8
BATCHES = sorted(
    {size for power in range(15) for size in (2**power - 1, 2**power, 2**power + 1) if 0 < size < MOST_ROWS}
)


def ops() -> dict[str, Callable[[], Callable[[int, int], torch.Tensor]]]:
    """The ops: each makes a function that returns its result for rows `first` to `end` of one batch."""
    import foretune

    def random_of(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=dtype)

    x, w = (lambda: random_of(MOST_ROWS, K)), (lambda n=N: random_of(n, K) / K**0.5)

    def dense(op: Callable[..., torch.Tensor], n: int = N, **options: Any) -> Callable[[int, int], torch.Tensor]:
        rows, weights = x(), w(n)
        return lambda first, end: op(rows[first:end], weights, invariant="m", **options)

    def matmul() -> Callable[[int, int], torch.Tensor]:
        rows, weights = x(), w()
        return lambda first, end: foretune.matmul(rows[first:end], weights.T, invariant="m")

    def float32() -> Callable[[int, int], torch.Tensor]:
        rows, weights = x().float(), w().float().T.contiguous()
        return lambda first, end: foretune.matmul(rows[first:end], weights, invariant="m")

    def grouped(op: Callable[..., torch.Tensor]) -> Callable[[int, int], torch.Tensor]:
        rows, weights = x(), torch.stack([w() for _ in range(EXPERTS)])
        groups = torch.randint(EXPERTS, (MOST_ROWS,), device="cuda").sort().values

        def run(first: int, end: int) -> torch.Tensor:
            sizes = torch.bincount(groups[first:end], minlength=EXPERTS).int()
            return op(rows[first:end], weights, sizes, invariant="rows")

        return run

    def norms() -> Callable[[int, int], torch.Tensor]:
        q, k, angles = random_of(MOST_ROWS, 12, 128), random_of(MOST_ROWS, 4, 128), torch.rand(MOST_ROWS, 64).cuda()
        q_weight, k_weight = random_of(128), random_of(128)

        def run(first: int, end: int) -> torch.Tensor:
            angle, cut = angles[first:end], slice(first, end)
            both = foretune.rms_norm_rope(q[cut], k[cut], angle.cos(), angle.sin(), q_weight, k_weight, invariant="m")
            return torch.cat(both, 1)

        return run

    return {
        "grouped_gemm": lambda: grouped(foretune.grouped_gemm),
        "matmul": matmul,
        "scaled_grouped_gemm": lambda: grouped(foretune.scaled_grouped_gemm),
        "scaled_gemm blockwise": lambda: dense(foretune.scaled_gemm),
        "scaled_gemm rowwise": lambda: dense(foretune.scaled_gemm, scales="rowwise"),
        "gated_mlp": lambda: dense(foretune.gated_mlp, 2 * N),
        "rms_norm_rope": norms,
        "matmul float32": float32,
    }


def firsts(size: int) -> Iterator[int]:
    """Yield the first rows of batches of a size: at both ends and between, and more places for a row alone."""
    drawn = random.Random(size)
    yield from {0, MOST_ROWS - size, *(drawn.randrange(MOST_ROWS - size + 1) for _ in range(6 if size == 1 else 1))}


def run_rows(name: str, log: Log, given: argparse.Namespace) -> None:
    """Do what is missing of an op's task."""
    from foretune.kernels import op_calls

    ran: list[str] = []
    own = op_calls.default_without_gluon

    def seen(config: KernelConfig, family: Any, problem: Problem, device: DeviceSpec) -> KernelConfig:
        found = own(config, family, problem, device)
        ran.append(str(found))
        return found

    op_calls.default_without_gluon = seen  # type: ignore[assignment]
    torch.manual_seed(SEED)
    run = ops()[name]()
    whole = run(0, MOST_ROWS).clone()
    if not whole.isfinite().all() or not whole.any():
        log.add(problem="whole", complete=True, errors=["the result of all rows is not finite, or zero"])
    print("all rows", ran, flush=True)
    for size in (MOST_ROWS, *BATCHES):
        if time.time() > given.until or not log.todo(str(size)):
            continue
        violations, errors, places, n = [], [], list(firsts(size)), len(ran)
        for first in places:
            try:
                part = run(first, first + size)
                wrong = (integers_of(part) != integers_of(whole[first : first + size])).view(size, -1).any(1)
                if count := int(wrong.sum()):
                    how = f"{count} of {size} rows from {first} differ"
                    violations.append(
                        {"class": "rows", "pairs": count, "kinds": 2, "how": how, "groups": ran[n:] or ran}
                    )
            except Exception as error:  # noqa: PERF203
                if is_fault(error):
                    raise
                traceback.print_exc()
                errors.append(f"{size} rows from {first}: {text_of(error)}")
        record = {"violations": violations, "errors": errors, "chosen": ran[n:]}
        log.add(problem=str(size), complete=True, launches=len(places), **record)


# The parent, and the table.


def start_task(task: str, given: argparse.Namespace) -> subprocess.Popen[bytes]:
    """Start the process of a task."""
    command = [sys.executable, __file__, str(given.out), task, "--child", "--until", str(given.until)]
    command += ["--workers", str(given.workers), "--binaries", str(given.binaries), "--problems", str(given.problems)]
    with (given.out / f"{task}.log").open("ab") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, start_new_session=True)


def run_tasks(tasks: Sequence[str], given: argparse.Namespace) -> None:
    """Run tasks in processes, several at a time, each again after a fault; kill what is late."""
    waiting, running, starts = list(tasks), dict[str, tuple[subprocess.Popen[bytes], float]](), Counter[str]()
    while (waiting and time.time() < given.until) or running:
        while waiting and len(running) < given.parallel and time.time() < given.until:
            task = waiting.pop(0)
            starts[task] += 1
            running[task] = start_task(task, given), time.time()
        time.sleep(0.2)
        for task, (process, began) in tuple(running.items()):
            if process.poll() is None and time.time() > given.until + given.grace:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if process.poll() is not None:
                del running[task]
                print(f"{task}: status {process.returncode} after {time.time() - began:.0f} s", flush=True)
                if process.returncode and starts[task] < STARTS:
                    waiting.insert(0, task)


def tables(out: Path, tasks: Sequence[str], problems: int) -> Iterator[tuple[bool, str]]:
    """Yield each line of the report, and whether it tells of something wrong."""
    columns = "problems launches configs classes alone pairs unrepeat. errors"
    yield False, f"{'task':26} {columns}   (alone: classes with one config only, of all problems)"
    details: list[tuple[bool, str]] = []
    for task in tasks:
        log = Log(out / f"{task}.jsonl")
        records = list(log.records.values())
        done = sum(record["complete"] for record in records)
        expected = 1 + len(BATCHES)
        if task in PARTS:
            expected = sum(min(part.problems, problems) for part in PARTS[task])
        bad = [(record["problem"], one) for record in records for one in record.get("violations", ())]
        unrepeatable = [one for record in records for one in record.get("unrepeatable", ())]
        errors = [f"{r['problem']}: {text}" for r in records for text in r["errors"]]
        errors += [text for line in log.lines for text in (*line.get("failed", ()), *line.get("fatal", ()))]
        far = [r for r in records if (r.get("relative_error") or 0) > r.get("tolerance", 1)]
        errors += [f"{r['problem']}: relative error {r['relative_error']:.2g}" for r in far]
        classes = [record["n_classes"] for record in records if "n_classes" in record] or [0]
        configs = max((record.get("configs", 0) for record in records), default=0)
        chosen = len({config for record in records for config in record.get("chosen", ())}) or configs
        counts = f"{sum(r.get('launches', 0) for r in records):8} {chosen:7} {max(classes):7}"
        counts += f" {sum(r.get('alone', 0) for r in records):5} {sum(one['pairs'] for _, one in bad):5}"
        counts += f" {len(unrepeatable):9} {len(errors):6}"
        yield bool(done < expected or bad or unrepeatable or errors), f"{task:26} {done:3}/{expected:3}  {counts}"
        slowest = max((record.get("slowest_launch_s", 0) for record in records), default=0)
        compiled = [(line["compiled"], line["seconds"]) for line in log.lines if "compiled" in line]
        late = max((record.get("not_compiled", 0) for record in records), default=0)
        times = f"compiled (binaries, s) {compiled}, {late} configs not in time, slowest launch {slowest} s"
        details.append((False, f"\n{task}: {times}, {sum(r.get('seconds', 0) for r in records):.0f} s of problems"))
        for problem, one in bad[:6]:
            details.append(
                (True, f"  DIFFERS {problem}: class {one['class']}, {one['kinds']} kinds of bits: {one['how']}")
            )
            for group in one["groups"][:3]:
                text = f"{group['configs']} as {group['examples'][0]}" if isinstance(group, dict) else group
                details.append((True, f"    {text}"))
        details += [(True, f"  UNREPEATABLE {one}") for one in unrepeatable[:4]]
        details += [(True, f"  ERROR {one}") for one in errors[:6]]
        details += [(False, f"  {line}") for line in agreements(records)]
    yield from details


def agreements(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield how often distinct classes had equal bits: mma against wgmma, and the pairs that always agreed."""
    pairs: dict[tuple[int, str, str], list[bool]] = defaultdict(list)
    #: Of mma and wgmma with the same lengths of sums: whole sums, and split ones.
    kinds: dict[tuple[int, str], list[bool]] = defaultdict(list)
    parts: dict[int, str] = {}
    for record in records:
        found: dict[str, tuple[str, int]] = record.get("classes", {})
        for (one, (own, bits)), (other, (theirs, also)) in itertools.combinations(sorted(found.items()), 2):
            if own == theirs:
                continue
            pairs[record["part"], one, other].append(bits == also)
            parts.setdefault(record["part"], record["problem"])
            if own.replace("warp_group", "warp") == theirs.replace("warp_group", "warp"):
                kinds[record["part"], "split sums" if own.count(",") > 1 else "whole sums"].append(bits == also)
    for part, like in sorted(parts.items()):
        equal_in = {(one, other): all(equal) for (its, one, other), equal in pairs.items() if its == part}
        count = f"{sum(equal_in.values())} of {len(equal_in)} pairs"
        yield f"part {part} (as {like}): {count} of classes always had equal bits"
        for (_, sums), equal in sorted(one for one in kinds.items() if one[0][0] == part):
            yield f"part {part}: MMA AGAINST WGMMA, {sums}: equal bits in {sum(equal)} of {len(equal)} comparisons"
        merged: dict[str, set[str]] = {}
        for (one, other), is_equal in equal_in.items():
            if is_equal:
                joined = {one, other} | merged.get(one, set()) | merged.get(other, set())
                merged.update(dict.fromkeys(joined, joined))
        for group in sorted({tuple(sorted(one)) for one in merged.values()})[:8]:
            more = f" and {len(group) - 12} more" if len(group) > 12 else ""
            yield f"part {part}: could be merged: {'; '.join(group[:12])}{more}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for the results; a folder for each card")
    parser.add_argument("tasks", nargs="*", help="only these families, and 'rows OP'")
    parser.add_argument("--limit-s", type=float, default=330.0, help="end after this many seconds")
    parser.add_argument("--parallel", type=int, default=4, help="tasks at a time")
    parser.add_argument(
        "--workers", type=int, help="processes of each task that compile; all cores together if not given"
    )
    parser.add_argument("--binaries", type=int, default=130, help="binaries of each family")
    parser.add_argument("--problems", type=int, default=20, help="problems of each dtype and flags at most")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    #: Children end by themselves in this time after the limit that they are given.
    given.grace = min(10.0, given.limit_s / 10)
    given.until = given.until or time.time() + given.limit_s - given.grace
    given.workers = given.workers or max(cores() // given.parallel, 1)
    # Alternately, because a family compiles in many processes, and an op in its own.
    pairs = itertools.zip_longest(PARTS, (f"rows {op}" for op in ops()))
    everything = [task for pair in pairs for task in pair if task]
    if wrong := set(given.tasks) - set(everything):
        parser.error(f"tasks must be among {', '.join(everything)} but one is {min(wrong)}")
    tasks = given.tasks or [task for task in everything if not task.startswith("fused_moe")]
    if not given.child:
        run_tasks(tasks, given)
        report = list(tables(given.out, tasks, given.problems))
        print("\n".join(text for _, text in report))
        is_wrong = any(wrong for wrong, _ in report)
        print("\nSOMETHING DIFFERED, FAILED OR IS MISSING" if is_wrong else "\nall classes and rows are verified")
        raise SystemExit(is_wrong)
    (task,) = tasks
    log = Log(given.out / f"{task}.jsonl")
    try:
        if task in PARTS:
            run_family(task, log, DeviceSpec.live(), given)
        else:
            run_rows(task.removeprefix("rows "), log, given)
    except Exception as error:
        log.add(fatal=[text_of(error)])
        raise


if __name__ == "__main__":
    main()
