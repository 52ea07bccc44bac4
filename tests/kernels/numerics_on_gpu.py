"""Verify the numerics classes on the GPU that is here: `python numerics_on_gpu.py OUT [FAMILY ...] [--seconds 540]`.

Two parts; each family and each op is kept in OUT when it is done, so that running the program again goes on with the
others, and ends at once where all are done:

- `families`: hashes the output of every config of the space on up to 20 problems of each family. Configs of one class
  must give identical bits; classes that agreed on every problem are printed, because they could be merged.
- `rows`: every op under `invariant`: rows alone, and in batches of 1 to 16,384, must give identical bits.

Ends with status 1 if anything differed. Binaries are compiled in processes, one for each core. A family that is out of
time is not kept as done; its binaries are, in Triton's cache. For fused_moe, put an engine on the path as
serving_on_gpu.py says; without it, that family is left out.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import foretune
import torch
from foretune.collect.compiling import compile_ahead
from foretune.datasets import DeviceSpec, ForetuneError, Measurable, Problem
from foretune.kernels import families, find_family

PROBLEMS, SEED = 20, 0
#: The largest problem: all configs of all problems must run within minutes, also the slow ones.
MOST_TFLOP, MOST_ELEMENTS = 0.05, 1 << 24
BATCHES = (1, 2, 3, 17, 64, 100, 129, 1000, 4096, 16384)
K, N, GROUPS = 2048, 1536, 8


def problems_of(family: Measurable, device: DeviceSpec, signatures: int = 1) -> list[Problem]:
    """Up to 20 small problems of the most common signatures (dtype and flags), which each have their own binaries."""
    cases = family.cases(random=100, per_layer=1, max_tflop=MOST_TFLOP, seed=SEED)
    by_signature: dict[object, list[Problem]] = defaultdict(list)
    for case in cases:
        problem = case.problem
        able = any(family.supports(config, problem, device) is None for config in family.space(device))
        if able and family.bytes(problem) < 2 * MOST_ELEMENTS:
            by_signature[problem.signature].append(problem)
    common = sorted(by_signature.values(), key=len, reverse=True)[:signatures]
    return [problem for one in common for problem in one[: PROBLEMS // len(common)]]


def bits_of(tensor: torch.Tensor, weights: dict[int, torch.Tensor]) -> torch.Tensor:
    """A hash of a tensor's bits, on the device: a sum of its integers times random odd numbers, modulo 2^64."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
    words = tensor.contiguous().view(integers).flatten().long()
    if len(words) not in weights:
        generator = torch.Generator("cuda").manual_seed(SEED)
        weights.clear()
        weights[len(words)] = torch.randint(1 << 62, (len(words),), generator=generator, device="cuda") * 2 + 1
    return (words * weights[len(words)]).sum()


def of_family(family: Measurable, device: DeviceSpec, deadline: float, signatures: int) -> tuple[list[str], bool]:
    """Compare all configs of a family; return what differed, and whether all problems were done."""
    wrong: list[str] = []
    #: Whether two classes had equal bits, by problem.
    agreed: dict[tuple[str, str], list[bool]] = defaultdict(list)
    problems, n_classes, n_hashes = problems_of(family, device, signatures), [], 0
    for done, problem in enumerate(problems):
        configs = [config for config in family.space(device) if family.supports(config, problem, device) is None]
        if time.monotonic() > deadline:
            print(f"{family.name}: out of time after {done} of {len(problems)} problems")
            return wrong, False
        compile_ahead(family, [(config, problem) for config in configs], device)
        inputs, weights = family.inputs(problem, device, seed=SEED), dict[int, torch.Tensor]()
        ran, hashes = [], []
        for config in configs:
            try:
                family.reset(inputs)
                hashes.append(bits_of(family.launch(inputs, config), weights))
                ran.append(config)
            except Exception as error:  # noqa: BLE001, PERF203 - a config that fails has no bits
                print(f"{family.name}: {config} on {problem}: {type(error).__name__}: {str(error)[:100]}")
        found: dict[str, dict[int, str]] = defaultdict(dict)
        for config, value in zip(ran, torch.stack(hashes).tolist(), strict=True):
            found[str(family.numerics(config, problem))].setdefault(value, str(config))
        for name, by_bits in found.items():
            if len(by_bits) > 1:
                wrong.append(f"{family.name}: class {name} on {problem} has other bits: {list(by_bits.values())[:4]}")
        one = {name: next(iter(by_bits)) for name, by_bits in found.items()}
        kinds = {name: kind_of(name) for name in one}
        for name in one:
            for other in one:
                if kinds[name] < kinds[other] and len(one) < 64:
                    agreed[kinds[name], kinds[other]].append(one[name] == one[other])
        n_classes.append(len(found))
        n_hashes += len(ran)
        del inputs
    print(f"{family.name}: {n_hashes} outputs, {len(problems)} problems, {min(n_classes)}-{max(n_classes)} classes")
    for pair, equal in sorted(agreed.items()):
        if all(equal):
            print(f"{family.name}: {pair[0]} and {pair[1]} had equal bits on {len(equal)} problems: could be merged")
    return wrong, True


def kind_of(name: str) -> str:
    """A class without the lengths that depend on the problem, to compare classes across problems."""
    return re.sub(r"\d+", "#", name)


def rows_of(x: torch.Tensor, w: torch.Tensor) -> dict[str, Callable[[int, int], torch.Tensor]]:
    """The ops: each returns its result for rows `first` to `end` of one batch."""
    grouped = torch.randn(GROUPS, N, K, device="cuda", dtype=torch.bfloat16) / math.sqrt(K)
    groups = torch.randint(GROUPS, (len(x),), device="cuda").sort().values
    heads = x.view(len(x), -1, 128)
    angles = torch.rand(len(x), 64, device="cuda")
    norm = torch.rand(128, device="cuda", dtype=torch.bfloat16)

    def sizes(first: int, end: int) -> torch.Tensor:
        return torch.bincount(groups[first:end], minlength=GROUPS).int()

    def normed(first: int, end: int) -> torch.Tensor:
        q, k = heads[first:end, :12].contiguous(), heads[first:end, 12:].contiguous()
        both = foretune.rms_norm_rope(q, k, angles[first:end], angles[first:end], norm, norm, invariant="m")
        return torch.cat(both, 1)

    return {
        "matmul": lambda a, b: foretune.matmul(x[a:b], w.T, invariant="m"),
        "matmul, float32, w along N": lambda a, b: foretune.matmul(
            x[a:b].float(), w.T.float().contiguous(), invariant="m"
        ),
        "gated_mlp": lambda a, b: foretune.gated_mlp(x[a:b], w, invariant="m"),
        "scaled_gemm, blockwise": lambda a, b: foretune.scaled_gemm(x[a:b], w, invariant="m"),
        "scaled_gemm, rowwise": lambda a, b: foretune.scaled_gemm(x[a:b], w, scales="rowwise", invariant="m"),
        "grouped_gemm": lambda a, b: foretune.grouped_gemm(x[a:b], grouped, sizes(a, b), invariant="rows"),
        "scaled_grouped_gemm": lambda a, b: foretune.scaled_grouped_gemm(
            x[a:b], grouped, sizes(a, b), invariant="rows"
        ),
        "rms_norm_rope": normed,
    }


def of_rows(run: Callable[[int, int], torch.Tensor], count: int) -> Iterator[str]:
    """Yield each batch whose rows differ from those of the largest one, and each row that differs alone."""
    whole = run(0, count)
    integers = torch.int16 if whole.element_size() == 2 else torch.int32
    for size in BATCHES[:-1]:
        for first in (0, count // 3, count - size):
            part = run(first, first + size)
            if not torch.equal(part.view(integers), whole[first : first + size].view(integers)):
                rows = (part.view(integers) != whole[first : first + size].view(integers)).flatten(1).any(1)
                yield f"{int(rows.sum())} of {size} rows from {first} differ from those in a batch of {count}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder with a file for each family and op that is done")
    parser.add_argument("families", nargs="*", help="only these families")
    parser.add_argument("--part", choices=("families", "rows"), help="only this part")
    parser.add_argument("--signatures", type=int, default=1, help="dtypes and flags to try of each family")
    parser.add_argument("--seconds", type=float, default=540.0, help="begin no problem after this time")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    device, deadline, wrong = DeviceSpec.live(), time.monotonic() + given.seconds, []

    def keep(name: str, found: list[str]) -> None:
        (given.out / f"{device.card} {name}.json".replace(" ", "_")).write_text(json.dumps(found, indent=1))

    def is_done(name: str) -> bool:
        path = given.out / f"{device.card} {name}.json".replace(" ", "_")
        if path.exists():
            wrong.extend(json.loads(path.read_text()))
        return path.exists()

    if given.part != "families":
        x = torch.randn(BATCHES[-1], K, device="cuda", dtype=torch.bfloat16)
        w = torch.randn(2 * N, K, device="cuda", dtype=torch.bfloat16) / math.sqrt(K)
        for name, run in rows_of(x, w).items():
            if not is_done(f"rows of {name}"):
                found = [f"{name}: {text}" for text in of_rows(run, len(x))]
                print(f"{name}: {'rows differ' if found else 'rows are the same alone and in batches'}", flush=True)
                keep(f"rows of {name}", found)
                wrong += found
    for name in given.families or families() if given.part != "rows" else ():
        family = find_family(name)
        if not isinstance(family, Measurable) or name.startswith("inductor") or is_done(name):
            continue
        try:
            found, is_complete = of_family(family, device, deadline, given.signatures)
        except ForetuneError as error:  # for example, no engine for fused_moe
            print(f"{name}: left out: {error}")
            continue
        wrong += found
        if is_complete:
            keep(name, found)
    print("\n".join(wrong) or "no class had two kinds of bits")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
