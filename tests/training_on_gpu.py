"""Time the first steps of training with and without `foretune run`: `python tests/training_on_gpu.py`.

With `--train MODEL`, this file is a training script that does not know Foretune: a GLA model of flash-linear-attention,
or a Qwen3-MoE model of transformers with Liger's kernels, with random weights, a few layers, and sequences of another
length in each step. Without it, the file runs that script three times for each model, each in a process of its own:
by `python`, by `foretune run`, and by `foretune run` again, as after a restart. Triton's cache is empty each time, and
Foretune's before the first two. `--tiny` trains a small network on the CPU instead, to try the script.

Needs flash-linear-attention, liger-kernel and transformers.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
#: Model -> the package with its kernels.
PACKAGES = {"gla": "fla", "qwen3_moe": "liger_kernel"}
#: How a script is run -> the words in front of its name.
WAYS = {"python": [], "foretune run": ["-m", "foretune", "run"], "again": ["-m", "foretune", "run"]}
VOCABULARY = 4096


def model_of(name: str) -> Any:
    """Return a causal language model of random weights: a few layers of the sizes of GLA-1.3B or Qwen3-30B-A3B."""
    if name == "gla":
        from fla.models import GLAConfig, GLAForCausalLM

        return GLAForCausalLM(GLAConfig(hidden_size=2048, num_hidden_layers=4, num_heads=4, vocab_size=VOCABULARY))
    from liger_kernel.transformers import apply_liger_kernel_to_qwen3_moe
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    apply_liger_kernel_to_qwen3_moe()
    sizes = {"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**sizes, **heads, num_experts=128, num_experts_per_tok=8, vocab_size=VOCABULARY)
    )


def train(name: str, steps: int, tiny: bool) -> None:
    """Train a model, and print the seconds and the loss of each step as JSON."""
    import torch

    torch.manual_seed(0)
    if tiny:
        layers = torch.nn.Embedding(VOCABULARY, 8), torch.nn.Linear(8, VOCABULARY)
        network = torch.nn.Sequential(*layers)

        def loss_of(tokens: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(network(tokens).flatten(0, 1), tokens.flatten())
    else:
        network = model_of(name).to("cuda", torch.bfloat16)

        def loss_of(tokens: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = network(input_ids=tokens, labels=tokens).loss
            return loss

    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4)
    lengths, seconds, losses = random.Random(0), [], []
    for _ in range(steps):
        tokens = torch.randint(0, VOCABULARY, (4, 64 * lengths.randint(1, 32)), device="cpu" if tiny else "cuda")
        began = time.perf_counter()
        loss = loss_of(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # waits for the device
        seconds.append(time.perf_counter() - began)
    device = "CPU" if tiny else torch.cuda.get_device_name()
    sys.stdout.write("\n" + json.dumps({"device": device, "seconds": seconds, "losses": losses}))


def timed(name: str, way: str, options: argparse.Namespace, choices: str) -> dict[str, Any]:
    """Return what the training of a model prints in a new process, with an empty Triton cache."""
    attach = ["--attach", "torch" if options.tiny else PACKAGES[name]] if WAYS[way] else []
    command = [sys.executable, *WAYS[way], *attach, __file__, "--train", name, "--steps", str(options.steps)]
    command += ["--tiny"] if options.tiny else []
    path = os.pathsep.join([str(ROOT.parent), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as cache:
        own = {"PYTHONPATH": path, "TRITON_CACHE_DIR": cache, "FORETUNE_CACHE_DIR": choices}
        printed = subprocess.run(command, env=os.environ | own, stdout=subprocess.PIPE, text=True, check=True).stdout
    return {"model": name, "way": way, **json.loads(printed.splitlines()[-1])}


def main() -> None:
    """Train the models each way, and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tiny", action="store_true", help="a small network on the CPU")
    parser.add_argument("--train", choices=PACKAGES, help="be the training script of this model")
    options = parser.parse_args()
    if options.train:
        train(options.train, options.steps, options.tiny)
        return
    print(
        f"{'model':10} {'run by':13} {'first step s':>12} {'all steps s':>12} {'later half, ms':>15} {'last loss':>10}"
    )
    for name in PACKAGES:
        with tempfile.TemporaryDirectory() as choices:
            for way in WAYS:
                found = timed(name, way, options, choices)
                later_ms = 1e3 * statistics.median(found["seconds"][options.steps // 2 :])
                times = f"{found['seconds'][0]:12.2f} {sum(found['seconds']):12.2f} {later_ms:15.2f}"
                print(f"{name:10} {way:13} {times} {found['losses'][-1]:10.4f}  {found['device']}", flush=True)


if __name__ == "__main__":
    main()
