"""A training step of a 4-layer MoE model of transformers, with its own experts ("grouped_mm") and with Foretune's:
`python moe_step_on_gpu.py`. Layers of Qwen3-30B-A3B, 8192 tokens, bfloat16, forward and backward; about three minutes.

Steady steps are interleaved and their median is shown, of the model and of its experts alone. The first step is that of
a new process in which torch has started (a step with "grouped_mm" came before): with an empty Triton cache, with what
its binaries took to compile; the same with nothing compiled ahead; and with all of them cached.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings

import torch
from moe_models import made

import foretune  # isort: skip - after moe_models, which mends the path
from foretune.kernels.grouped_gemm import op

IMPLEMENTATIONS = ("grouped_mm", "foretune")
LAYER = {
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
TOKENS, ROUNDS, WARM = (2, 4096), 15, 3
TINY_TOKENS, TINY_ROUNDS = (2, 8), 1


class Steps:
    """Training steps of one model on fixed tokens."""

    def __init__(self, tiny: bool) -> None:
        self.where = "cuda" if torch.cuda.is_available() else "cpu"
        layers = {"num_hidden_layers": 4, "num_experts": 4} if tiny else {"num_hidden_layers": 4, **LAYER}
        with torch.device(self.where):
            self.model = made("Qwen3Moe", **layers).to(torch.bfloat16 if self.where == "cuda" else torch.float32)
            self.tokens = torch.randint(0, 64, TINY_TOKENS if tiny else TOKENS)
            config = self.model.config
            self.experts = [layer.mlp.experts for layer in self.model.model.layers]
            dtype = next(self.model.parameters()).dtype
            self.rows = torch.randn(self.tokens.numel(), config.hidden_size, dtype=dtype, requires_grad=True)
            logits = torch.randn(self.tokens.numel(), config.num_experts)
            weights, self.chosen = logits.softmax(-1).topk(config.num_experts_per_tok)
            self.weights = weights.to(dtype).requires_grad_()

    def model_step(self) -> None:
        self.model(input_ids=self.tokens, labels=self.tokens).loss.backward()

    def experts_step(self) -> None:
        for experts in self.experts:
            experts(self.rows, self.chosen, self.weights).sum().backward()

    def time_ms(self, step, implementation: str) -> float:
        """One step, from an idle device until it is idle again."""
        self.model.set_experts_implementation(implementation)
        self.model.zero_grad()
        self.rows.grad = self.weights.grad = None
        self._wait()
        start = time.perf_counter()
        step()
        self._wait()
        return (time.perf_counter() - start) * 1e3

    def _wait(self) -> None:
        if self.where == "cuda":
            torch.cuda.synchronize()


def first_step(tiny: bool) -> dict[str, float]:
    """Of this process: milliseconds of the first and of a steady step, and what was compiled in the first."""
    import triton

    steps, compiled = Steps(tiny), []
    steps.time_ms(steps.model_step, "grouped_mm")
    triton.knobs.compilation.listener = lambda times, cache_hit, **_: cache_hit or compiled.append(times.total / 1e3)
    first = steps.time_ms(steps.model_step, "foretune")
    found = {"binaries": len(compiled), "compiling": sum(compiled), "longest": max(compiled, default=0.0)}
    steady = statistics.median(steps.time_ms(steps.model_step, "foretune") for _ in range(1 if tiny else 5))
    return {"first": first, "steady": steady, **found}


def in_new_process(tiny: bool, cache: str, *options: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--first", *(["--tiny"] if tiny else []), *options]
    output = subprocess.run(
        command, env=os.environ | {"TRITON_CACHE_DIR": cache}, stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    return json.loads(output.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", action="store_true", help="only the first step, of this process, as JSON")
    parser.add_argument("--one-by-one", action="store_true", help="with --first, and nothing compiled ahead")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, also on a CPU with TRITON_INTERPRET=1")
    asked = parser.parse_args()
    warnings.simplefilter("default", foretune.ForetuneWarning)
    foretune.use("transformers")
    if asked.one_by_one:
        op.OP._compile_step = None
    if asked.first:
        print(json.dumps(first_step(asked.tiny)))
        return
    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryDirectory() as other_cache:
        cold, cached = (in_new_process(asked.tiny, cache) for _ in range(2))
        one_by_one = in_new_process(asked.tiny, other_cache, "--one-by-one")
    steps, lines = Steps(asked.tiny), []
    for what, step in (("model", steps.model_step), ("experts alone", steps.experts_step)):
        times: dict[str, list[float]] = {name: [] for name in IMPLEMENTATIONS}
        for turn in range(TINY_ROUNDS if asked.tiny else WARM + ROUNDS):
            for name in IMPLEMENTATIONS:
                took = steps.time_ms(step, name)
                if turn >= WARM or asked.tiny:
                    times[name].append(took)
        theirs, ours = (statistics.median(times[name]) for name in IMPLEMENTATIONS)
        lines.append(f"| {what} | {theirs:.2f} | {ours:.2f} | {theirs / ours:.3f} |")
    device = torch.cuda.get_device_name() if steps.where == "cuda" else "CPU"
    print(f"\n{device}, torch {torch.__version__}, {steps.tokens.numel()} tokens, 4 layers, forward and backward, ms")
    print("| step | grouped_mm | foretune | grouped_mm / foretune |\n| --- | --- | --- | --- |", *lines, sep="\n")
    print("\n| foretune's first step, ms | first | steady | first - steady | binaries | compiling, sum | longest |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    rows = {"nothing cached": cold, "... compiled one by one": one_by_one, "binaries cached": cached}
    for name, found in rows.items():
        values = (found["first"], found["steady"], found["first"] - found["steady"])
        compiling = f"{found['binaries']:.0f} | {found['compiling']:.0f} | {found['longest']:.0f}"
        print(f"| {name} | {' | '.join(f'{value:.1f}' for value in values)} | {compiling} |")


if __name__ == "__main__":
    main()
