"""Generate and compile the pointwise and reduction kernels that Inductor makes of layers, without a GPU.

For generated_kernels_on_gpu.py. A layer is traced by AOTAutograd, and its forward and backward graphs are lowered by
Inductor for a device that need not be present. `listed` and `wide` return the configs of a kernel, and `compiled` fills
Triton's cache, from which a process with a GPU launches them. Private names of torch are used; 2.11 and 2.13 have them.
"""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import itertools
import json
import math
import os
import random
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

KINDS = ("pointwise", "reduction", "persistent_reduction")
KERNEL = re.compile(r"async_compile\.triton\('(\w+)', r?'''(.*?)''', device_str='cuda'\)", re.DOTALL)
#: About how many configs a kernel's wide list has.
MOST = 40
MAX_TUNED = {"max_autotune": True, "max_autotune_pointwise": True}
Config = dict[str, int]


@contextmanager
def absent_gpu(device: str) -> Iterator[None]:
    """Make Inductor and Triton compile for a device that this process does not see."""
    from foretune.datasets import DeviceSpec
    from foretune.kernels.inductor.generated import import_lowerings, properties_of
    from foretune.runtime import use_stub_driver
    from torch._dynamo import device_interface
    from torch._inductor.runtime import triton_helpers
    from torch.utils._triton import has_triton

    import_lowerings()
    spec = DeviceSpec.named(device)
    with ExitStack() as stack:
        stack.enter_context(use_stub_driver(spec))
        properties = stack.enter_context(properties_of(spec))
        stack.enter_context(patch.dict(device_interface.caching_worker_device_properties, {"cuda": [properties]}))
        stack.enter_context(patch.object(triton_helpers, "set_driver_to_gpu", lambda: None))
        stack.callback(has_triton.cache_clear)
        has_triton.cache_clear()
        yield


def traced(layer: Any) -> list[tuple[str, Any, list[torch.Tensor]]]:
    """Return (pass, graph, inputs) of a layer's forward and backward passes, as AOTAutograd partitions them."""
    from functorch.compile import make_boxed_func
    from torch._functorch.aot_autograd import aot_function
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    found = []

    def keep(label: str, graph: Any, inputs: list[Any]) -> Any:
        found.append((label, copy.deepcopy(graph), list(inputs)))
        return make_boxed_func(graph.forward)

    given = [
        torch.empty(shape, dtype=dtype, requires_grad=layer.trains and dtype.is_floating_point)
        for shape, dtype in layer.inputs
    ]
    compiled = aot_function(
        layer.function,
        fw_compiler=partial(keep, "forward"),
        bw_compiler=partial(keep, "backward"),
        partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"),
        decompositions=select_decomp_table(),
        keep_inference_input_mutations=True,
    )
    out = compiled(*given)
    if layer.trains:
        outs = [one for one in (out if isinstance(out, (tuple, list)) else (out,)) if one.requires_grad]
        torch.autograd.grad(outs, [one for one in given if one.requires_grad], [torch.ones_like(one) for one in outs])
    return found


def lowered(graph_module: Any, inputs: list[Any], label: str, mode: Any) -> str:
    """Return the Python code that Inductor generates for a graph that was traced on the CPU, on the GPU."""
    from torch._inductor import config
    from torch._inductor.debug import DebugContext
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch.utils._pytree import tree_map

    def moved(one: Any) -> Any:
        if not isinstance(one, torch.Tensor):
            return one
        return torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device="cuda:0")

    for node in graph_module.graph.nodes:
        node.meta = {**node.meta, "val": tree_map(moved, node.meta.get("val"))}
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": torch.device("cuda", 0)}
    graph_module.recompile()
    there = [moved(one) for one in inputs]
    with config.patch({"benchmark_kernel": True, "triton.unique_kernel_names": True, "compile_threads": 1}):
        graph = GraphLowering(
            graph_module,
            example_inputs=there,
            shape_env=mode.shape_env,
            is_backward=label == "backward",
            is_inference=label == "forward",
        )
        with V.set_graph_handler(graph), V.set_fake_mode(mode), DebugContext():
            graph.run(*there)
            code = graph.codegen()[0]
    return str(getattr(code, "value", code))


def captured(place: int, device: str, folder: str) -> list[dict[str, Any]]:
    """Return the kernels of a layer: their facts, and their configs by label. Their sources go to files in `folder`."""
    from generated_layers import LAYERS
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    layer, found = LAYERS[place], []
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        graphs = traced(layer)
    with mode, absent_gpu(device):
        for label, graph, inputs in graphs:
            for name, source in KERNEL.findall(lowered(graph, inputs, label, mode)):
                source = re.sub(r"\nfrom torch\._C import .*", "", source.replace(name, "triton_kernel"))
                name_hash = hashlib.sha256(source.encode()).hexdigest()[:16]
                path = Path(folder) / f"{name_hash}.py"
                temporary = path.with_suffix(f".{os.getpid()}")
                temporary.write_text(source)
                temporary.replace(path)
                kernel = loaded(str(path))
                if kernel is None:
                    continue
                facts = facts_of(kernel, source)
                one = {"kernel": name_hash, "name": name, "layer": layer.name, "model": layer.model, "pass": label}
                found.append({**one, "bound": layer.bound, **facts})
    return found


@lru_cache(maxsize=4)
def loaded(path: str) -> Any:
    """Return a kernel's module, autotuner and the arguments of its heuristic; None for another heuristic."""
    from torch._inductor.runtime import triton_heuristics

    calls: list[tuple[str, dict[str, Any]]] = []

    def recording(kind: str, theirs: Callable[..., Any]) -> Callable[..., Any]:
        def heuristic(**given: Any) -> Any:
            calls.append((kind, copy.deepcopy(given)))
            return theirs(**given)

        return heuristic

    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    with ExitStack() as stack:
        for kind in KINDS:
            theirs = getattr(triton_heuristics, kind)
            stack.enter_context(patch.object(triton_heuristics, kind, recording(kind, theirs)))
        spec.loader.exec_module(module)  # type: ignore[union-attr]
    if len(calls) != 1:
        return None
    return SimpleNamespace(module=module, tuner=module.triton_kernel, kind=calls[0][0], given=calls[0][1])


def listed(kernel: Any, **meta: Any) -> list[Config]:
    """Return the configs that Inductor's heuristic lists, with other options."""
    from torch._inductor.runtime import triton_heuristics

    given = copy.deepcopy(kernel.given)
    given["inductor_meta"] |= meta
    tuner = getattr(triton_heuristics, kernel.kind)(**given)(kernel.tuner.fn)
    return [{**one.kwargs, "num_warps": one.num_warps, "num_stages": one.num_stages} for one in tuner.configs]


def facts_of(kernel: Any, source: str) -> dict[str, Any]:
    """Return the facts of a kernel that need no compilation, and the configs to time."""
    sizes, meta = dict(kernel.tuner.size_hints), kernel.tuner.inductor_meta
    kernel.module.rand_strided = lambda size, stride, device=None, dtype=None, **_: torch.empty_strided(
        size, stride, dtype=dtype, device="cuda:0"
    )
    arguments = kernel.module.get_args()
    tensors = [one for one in arguments if isinstance(one, torch.Tensor)]
    body = source[source.index("def triton_kernel") :].split("\ndef get_args")[0]
    default = listed(kernel)
    lists = {"default": default, "list": listed(kernel, **MAX_TUNED)}
    if kernel.kind == "reduction":
        halved = [_halved(one) for one in default]
        lists["scaled"] = [one for one in halved if one is not None]
    lists["wide"] = wide(kernel.kind, sizes, default[0], meta)
    hint = kernel.given.get("reduction_hint")
    return {
        "kind": kernel.kind,
        "size_hints": sizes,
        "reduction_hint": getattr(hint, "name", None),
        "tile_hint": getattr(kernel.given.get("tile_hint"), "name", None),
        "sizes": [one for one in arguments if not isinstance(one, torch.Tensor)],
        "tensors": [[str(one.dtype)[6:], list(one.shape), list(one.stride())] for one in tensors],
        "bytes": sum(one.untyped_storage().nbytes() for one in tensors),
        "num_gb": meta.get("kernel_num_gb"),
        "counts": {op: len(re.findall(rf"\b{op}\(", body)) for op in ("tl.load", "tl.store", "tl.atomic_add")}
        | {"reductions": len(re.findall(r"\b(?:tl\.sum|triton_helpers\.\w+2|tl\.reduce|welford)\(", body))}
        | {
            "heavy": len(
                re.findall(r"\b(?:libdevice|tl_math|tl)\.(?:exp|log|erf|tanh|rsqrt|sqrt|sigmoid|sin|cos)\w*\(", body)
            )
        }
        | {"lines": body.count("\n"), "loops": len(re.findall(r"\n    for ", body)), "where": body.count("tl.where(")},
        "meta": {key: value for key, value in meta.items() if isinstance(value, (int, float, str, bool, dict))},
        "lists": lists,
    }


def _halved(config: Config) -> Config | None:
    """Return what Inductor adds for kernels that need many registers: the largest reduction block halved."""
    blocks = [name for name in config if re.fullmatch(r"R\d_BLOCK", name)]
    if math.prod(config[name] for name in blocks) <= 64:
        return None
    largest = max(blocks, key=config.__getitem__)
    return {**config, largest: config[largest] // 2}


def wide(kind: str, sizes: dict[str, int], default: Config, meta: dict[str, Any]) -> list[Config]:
    """Return many configs of powers of two with 1 to 64 elements for each thread: about `MOST`.

    Those that differ from the first default config in one knob come first, which coordinate descent tries. The number
    of stages is the default's: it changes no PTX, because Triton pipelines only loops with matrix products.
    """
    from torch._inductor.runtime.hints import TRITON_MAX_BLOCK

    limits = {name: min(size, TRITON_MAX_BLOCK[name.upper()]) for name, size in sizes.items()}
    loops = [name for name in sizes if name.startswith("r") and f"{name.upper()}BLOCK" in default]
    tiled = [name for name in sizes if not name.startswith("r") and f"{name.upper()}BLOCK" in default]
    kept = math.prod(size for name, size in sizes.items() if name not in loops + tiled)  # of a persistent reduction
    least = min(64 if math.prod(sizes.values()) <= 1 << 17 else 256, math.prod(sizes.values()))
    found = []
    blocks = [[2**i for i in range(limits[name].bit_length())] for name in (*tiled, *loops)]
    for choice in itertools.product(*blocks):
        block = dict(zip((*tiled, *loops), choice, strict=True))
        tile = kept * math.prod(choice)
        if not least <= tile <= max(16384, kept):
            continue
        if "RSPLIT_SIZE" in default and block["x"] > min(default["RSPLIT_SIZE"], 32):
            continue
        for warps in (1, 2, 4, 8, 16, 32):
            each = tile / (32 * warps)
            most = 64 if kind != "pointwise" else 32
            if not (1 <= each <= most or (each < 1 and warps == 1) or (each > most and warps == 32)):
                continue
            if kind == "pointwise" and (warps == 32 or (len(tiled) > 1 and each < 4)):
                continue
            one = {f"{name.upper()}BLOCK": size for name, size in block.items()}
            for stages in (1, 2, 3) if "NUM_STAGES" in default else (0,):
                staged = {"RSPLIT_SIZE": default["RSPLIT_SIZE"], "NUM_STAGES": stages} if stages else {}
                found.append({**one, **staged, "num_warps": warps, "num_stages": default["num_stages"]})
    near = [one for one in found if sum(one[name] != default[name] for name in one) <= 1]
    others = [one for one in found if one not in near]
    drawn = random.Random(repr(sorted(sizes.items())))
    return near + drawn.sample(others, max(min(len(others), MOST - len(near)), 0))


def key_of(config: Config) -> str:
    return json.dumps(config, sort_keys=True)


def compile_result(kernel: Any, config: Config) -> Any:
    """Compile a config as Inductor does."""
    import triton

    knobs = dict(config)
    warps, stages = knobs.pop("num_warps"), knobs.pop("num_stages")
    return kernel.tuner._precompile_config(triton.Config(knobs, num_warps=warps, num_stages=stages))


def compiled(path: str, configs: list[Config], device: str) -> list[str | None]:
    """Compile configs of a kernel into Triton's cache; return the reason for each that fails, else None."""
    found: list[str | None] = []
    with absent_gpu(device):
        kernel = loaded(path)
        for config in configs:
            try:
                compile_result(kernel, config)
                found.append(None)
            except Exception as error:  # noqa: BLE001, PERF203 - the other configs go on
                found.append(f"{type(error).__name__}: {error}"[:200])
    return found
