"""Compile layers with reductions with and without learned configs: `python generated_layers_on_gpu.py BUNDLE`.

For each layer of generated_layers.py: the seconds of the first call with empty caches, and the time of a call in a CUDA
graph, for Inductor's default mode, and with `foretune.use("inductor")` for k=1 and k="auto". All results must agree
with eager mode. The bundle should not have learned these models: generated_kernels_dataset.py --without MODELS.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import traceback
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import foretune
import torch
from generated_layers import LAYERS, Layer, softmax
from models_on_gpu import captured, interleaved, relative_error

#: Layers of these models, unless others are named.
MODELS = ("DiT-XL", "Qwen3-4B", "SDXL", "Llama-1B", "Gemma-2B")
#: Layers whose kernels reduce.
REDUCING = ("norm", "softmax", "cross_entropy", "rotate", "quantize", "square_sum", "logsumexp", "mse")
MODES: dict[str, int | str | None] = {"default": None, "k=1": 1, "auto": "auto"}
MOST_OFF = 2e-2


def inputs(layer: Layer) -> list[torch.Tensor]:
    """Return random inputs of a layer."""
    found = []
    for shape, dtype in layer.inputs:
        if dtype.is_floating_point:
            found.append(torch.randn(shape, device="cuda").to(dtype).requires_grad_(layer.trains))
        else:
            found.append(torch.randint(0, layer.bound, shape, device="cuda", dtype=dtype))
    return found


def step(function: Any, layer: Layer, given: list[torch.Tensor], tangents: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the outputs of a call, and the gradients of its inputs if the layer trains; `tangents` are kept."""
    # New leaves: CUDA graphs cannot capture gradients that accumulate in leaves of another stream.
    given = [one.detach().requires_grad_(one.requires_grad) for one in given]
    out = function(*given)
    outs = [one for one in (out if isinstance(out, tuple) else (out,)) if isinstance(one, torch.Tensor)]
    if not layer.trains:
        return outs
    differentiable = [one for one in outs if one.requires_grad]
    if not tangents:
        tangents += [torch.randn_like(one) for one in differentiable]
    wanted = [one for one in given if one.requires_grad]
    return [*outs, *torch.autograd.grad(differentiable, wanted, tangents)]


def measure(layer: Layer, bundle: str) -> dict[str, Any]:
    """Return the times of a layer by mode."""
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.utils import fresh_cache

    given, tangents = inputs(layer), []
    expected = step(layer.function, layer, given, tangents)
    found: dict[str, Any] = {"layer": layer.name, "first_s": {}, "off": {}}
    graphs = {}
    for mode, k in MODES.items():
        torch.compiler.reset()

        def backend(*graph_and_inputs: Any) -> Any:  # not "inductor", which Dynamo would take for the same
            return compile_fx(*graph_and_inputs)

        with (
            foretune.use("inductor", k=k, bundle=bundle) if k is not None else nullcontext(),
            fresh_cache(delete=False),
        ):
            compiled = torch.compile(layer.function, backend=backend, dynamic=False)
            began = time.perf_counter()
            result = step(compiled, layer, given, tangents)
            torch.cuda.synchronize()
            found["first_s"][mode] = time.perf_counter() - began
            pairs = zip(result, expected, strict=True)
            found["off"][mode] = max(relative_error(one, other) for one, other in pairs if other.float().norm() > 0)
            graphs[mode] = [captured(partial(step, compiled, layer, given, tangents))]
    if max(found["off"].values()) > max(MOST_OFF, 2 * found["off"]["default"]):
        raise AssertionError(f"{layer.name} differs from eager mode: {found['off']}")
    found["us"] = {mode: us[0] for mode, us in interleaved(graphs, "cuda").items()}
    return found


def show(rows: list[dict[str, Any]]) -> None:
    """Print the times, and the geometric means of the ratios to the default mode."""
    print(
        f"{'layer':46}" + "".join(f"{f'{mode} us':>12}" for mode in MODES) + "".join(f"{f'{m} s':>11}" for m in MODES)
    )
    for row in rows:
        us, first = ([row[what][mode] for mode in MODES] for what in ("us", "first_s"))
        print(
            f"{row['layer'][:46]:46}" + "".join(f"{one:12.1f}" for one in us) + "".join(f"{one:11.2f}" for one in first)
        )
    for mode in list(MODES)[1:] if rows else ():
        for what in ("us", "first_s"):
            ratios = [row[what][mode] / row[what]["default"] for row in rows]
            total = sum(row[what][mode] for row in rows) / sum(row[what]["default"] for row in rows)
            mean, worst = statistics.geometric_mean(ratios), max(ratios)
            print(f"{mode} / default, {what}: geomean {mean:.3f}, worst {worst:.3f}, of the sums {total:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("bundle", help="The bundle that predicts.")
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--seconds", type=float, default=60.0, help="Start no layer after this time.")
    parser.add_argument("--out", type=Path, default=Path("generated_layers.jsonl"))
    given = parser.parse_args()
    end, rows = time.monotonic() + given.seconds, []
    of_models = [
        layer for layer in LAYERS if layer.model in given.models and any(word in layer.name for word in REDUCING)
    ]
    chosen = sorted(of_models, key=lambda layer: (not layer.trains, sum(map(ord, layer.name)) % 97))
    measure(Layer("first", "", softmax, (((64, 256), torch.bfloat16),), trains=True), given.bundle)  # imports a lot
    for layer in chosen:
        if time.monotonic() > end:
            break
        try:
            rows.append(measure(layer, given.bundle))
        except Exception:  # noqa: BLE001 - the other layers go on
            traceback.print_exc()
            continue
        with open(given.out, "a") as file:
            file.write(json.dumps({**rows[-1], "device": torch.cuda.get_device_name()}) + "\n")
        torch.cuda.empty_cache()
    show(rows)


if __name__ == "__main__":
    main()
