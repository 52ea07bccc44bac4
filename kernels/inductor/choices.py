"""Convert Inductor's choices to problems and configs of families, and select the choices worth generating.

Sizes are Inductor's hints; no guards are added. There are two types of choices: a `KernelTemplateChoice` before code is
generated (mm and related ops), and a `TritonTemplateCaller` afterwards (grouped_mm, convolution, flex attention).
Functions return None for choices of no known family. Private names of torch are used; torch 2.11 and 2.13 have them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeAlias

from ...datasets import DeviceSpec, KernelConfig, Problem, torch_dtype
from ...runtime.how_many import Length
from ...runtime.shortlist import bundle_in_force, make_shortlist, supported
from .. import find_family
from .matmul import TF32, is_unaligned
from .templates import BLOCK_MASK

if TYPE_CHECKING:
    from torch._inductor.kernel_inputs import MMKernelInputs
    from torch._inductor.kernel_template_choice import KernelTemplateChoice

    from ...model import Bundle

#: A node of Inductor's graph.
Node: TypeAlias = Any

#: The templates of mm and related ops; 1 if their programs loop over tiles and load through TMA.
MM_TEMPLATES = {
    "triton::mm": 0,
    "triton::bmm": 0,
    "triton::mm_persistent_tma": 1,
    "triton::scaled_mm_device_tma_epilogue_scaling": 1,
    "triton::scaled_mm_device_tma_main_loop_scaling": 1,
    "triton::blackwell_ws_persistent_device_tma": 1,
}
#: The template parameter that rounds float32 operands to TF32.
ALLOW_TF32 = "ALLOW_TF32"
#: Prefixes of the names of ops that add an operand.
_WITH_BIAS = ("addmm", "baddbmm")
_PAIR = re.compile(r"(\w+)=([^,]+)")


def mm_problem(inputs: MMKernelInputs, op: str, tf32: bool, hint: int | None = None) -> Problem | None:
    """Return the problem of one lowering of mm or a related op, or None for an unknown dtype.

    Args:
        inputs: The operands.
        op: The op's name.
        tf32: Whether float32 is rounded to TF32.
        hint: The value of unknown sizes; Inductor's own hints if None. Inductor may list choices for several hints.
    """
    a, b = inputs.mat1mat2()
    if (dtype := _dtype_name(a.get_dtype(), "inductor_mm")) is None:
        return None
    (*batch, m, k), (*_, n) = (_hinted(node.get_size(), hint) for node in (a, b))
    flags = [flag for flag, node in (("a_transposed", a), ("b_transposed", b)) if _is_transposed(node)]
    if any(op.startswith(name) for name in _WITH_BIAS):
        flags.append("bias")
    if tf32 and dtype == "fp32":
        flags.append(TF32)
    return Problem.of("inductor_mm", dtype=dtype, flags=tuple(flags), batch=math.prod(batch), m=m, n=n, k=k)


def multiplies_as_tf32(choice: KernelTemplateChoice) -> bool:
    """Return whether the template of a choice rounds float32 to TF32."""
    return bool((choice.params.to_kwargs() | choice.extra_kwargs).get(ALLOW_TF32, False))


def mm_config(choice: KernelTemplateChoice) -> KernelConfig | None:
    """Return the config of a choice of mm or a related op; None for ATen, decompose-k and others without a tile."""
    persistent = MM_TEMPLATES.get(choice.template.uid)
    if persistent is None:
        return None
    params = choice.params.to_kwargs()
    try:
        return _mm_config_of(persistent, params.get("GROUP_M", 8), *_mm_knobs(params))
    except KeyError:
        return None


_MM_KNOBS = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_warps", "num_stages")
_mm_knobs = itemgetter(*_MM_KNOBS)


@lru_cache(8192)  # Inductor lists the same 1,400 configs for each product
def _mm_config_of(persistent: int, group_m: Any, *values: Any) -> KernelConfig:
    chosen = {knob: int(value) for knob, value in zip(_MM_KNOBS, values, strict=True)}
    return KernelConfig.of(**chosen, GROUP_M=int(group_m), PERSISTENT_TMA=persistent)


def caller_problem(caller: Any) -> Problem | None:
    """Return the problem of a `TritonTemplateCaller`; None for a template without family or an unknown dtype."""
    found = _OF_TEMPLATE.get(_template_of(caller))
    if found is None:
        return None
    family, problem_of, _ = found
    nodes: Sequence[Node] = caller.input_nodes
    if (dtype := _dtype_name(nodes[0].get_dtype(), family)) is None:
        return None
    flags, dims = problem_of(nodes, caller.layout, _parameters(caller))
    return Problem(family, tuple(sorted(dims.items())), dtype, flags)


def caller_config(caller: Any) -> KernelConfig | None:
    """Return the config of a `TritonTemplateCaller`, with its family's knobs; None for a template without family."""
    found = _OF_TEMPLATE.get(_template_of(caller))
    if found is None:
        return None
    parameters = _parameters(caller)
    knobs = (*found[2], "num_warps", "num_stages")
    if any(knob not in parameters for knob in knobs):
        return None
    return KernelConfig.of(**{knob: int(parameters[knob]) for knob in knobs})


def _template_of(caller: Any) -> str:
    """Return the name of a caller's template; the caller is named triton_NAME_NUMBER."""
    name: str = getattr(caller, "name", "")
    return name.removeprefix("triton_").rpartition("_")[0]


def _parameters(caller: Any) -> dict[str, str]:
    """Return the template's parameters from the caller's description, such as "BLOCK_M=64, ..."."""
    return {name: value.strip("'\" ") for name, value in _PAIR.findall(getattr(caller, "description", ""))}


_Parts: TypeAlias = "tuple[tuple[str, ...], dict[str, int]]"


def _grouped(nodes: Sequence[Node], layout: Any, parameters: Mapping[str, str]) -> _Parts:
    a, b = _hinted(nodes[0].get_size()), _hinted(nodes[1].get_size())
    groups = next((sizes[0] for sizes in (a, b) if len(sizes) == 3), _hinted(layout.size)[0])
    ragged = {(2, 3): "a_ragged", (3, 2): "b_ragged", (2, 2): "both_ragged"}.get((len(a), len(b)))
    flags = [] if ragged is None else [ragged]
    flags += [f"{name}_transposed" for name, node in zip("ab", nodes, strict=False) if _is_transposed(node)]
    return tuple(flags), {"groups": groups, "m": a[-2], "k": a[-1], "n": b[-1]}


def _convolution(nodes: Sequence[Node], layout: Any, parameters: Mapping[str, str]) -> _Parts:
    filters, out = _hinted(nodes[1].get_size()), _hinted(layout.size)
    groups = int(parameters.get("GROUPS", 1))
    channels = nodes[0].get_stride()[1]
    return ("channels_last",) if channels == 1 else (), {
        "groups": groups,
        "images": out[0],
        "stride": int(parameters.get("STRIDE_W", 1)),
        "m": out[0] * math.prod(out[2:]),
        "n": filters[0] // max(groups, 1),
        "k": filters[1],
        "window": math.prod(filters[2:]),
    }


def _flex(nodes: Sequence[Node], layout: Any, parameters: Mapping[str, str]) -> _Parts:
    query, key, value = (_hinted(node.get_size()) for node in nodes[:3])
    heads = max(key[1], 1)
    return _flags_of_mask(parameters), {
        "batch": query[0] * query[1],
        "groups": max(query[1] // heads, 1),
        "queries": query[-2],
        "keys": key[-2],
        "head_qk": query[-1],
        "head_v": value[-1],
    }


def _flags_of_mask(parameters: Mapping[str, str]) -> tuple[str, ...]:
    """Return the flag of a block mask if there is one; without one, torch passes a single block of 2^30 elements."""
    return (BLOCK_MASK,) if int(parameters.get("SPARSE_KV_BLOCK_SIZE", 1 << 30)) < 1 << 30 else ()


def _flex_decoding(nodes: Sequence[Node], layout: Any, parameters: Mapping[str, str]) -> _Parts:
    query, key, value = (_hinted(node.get_size()) for node in nodes[:3])
    batch = max(key[0] * key[1], 1)
    return _flags_of_mask(parameters), {
        "batch": batch,
        "groups": 1,  # queries of all heads that share keys are rows of one product
        "queries": math.prod(query) // (batch * max(query[-1], 1)),
        "keys": key[-2],
        "head_qk": query[-1],
        "head_v": value[-1],
        "splits": int(parameters.get("SPLIT_KV", 1)),
    }


_BLOCKS = ("BLOCK_M", "BLOCK_N", "BLOCK_K")
_BACKWARD_BLOCKS = ("BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2")
_ProblemOf: TypeAlias = Callable[[Sequence[Node], Any, Mapping[str, str]], _Parts]
#: For each template: its family, the function that returns flags and dimensions, and its block knobs.
_OF_TEMPLATE: dict[str, tuple[str, _ProblemOf, tuple[str, ...]]] = {
    "grouped_mm": ("inductor_grouped_mm", _grouped, _BLOCKS),
    "scaled_grouped_mm": ("inductor_grouped_mm", _grouped, _BLOCKS),
    "convolution2d": ("inductor_convolution", _convolution, _BLOCKS),
    "convolution3d": ("inductor_convolution", _convolution, _BLOCKS),
    "flex_attention": ("inductor_flex_attention", _flex, _BLOCKS[:2]),
    "flex_decoding": ("inductor_flex_decoding", _flex_decoding, _BLOCKS[:2]),
    "flex_attention_backward": ("inductor_flex_backward", _flex, _BACKWARD_BLOCKS),
}


def _hinted(sizes: Sequence[Any], override: int | None = None) -> list[int]:
    """Return sizes as numbers; symbolic sizes are `override`, or Inductor's hints."""
    from torch._inductor.virtualized import V

    if all(isinstance(size, int) or getattr(size, "is_number", False) for size in sizes):
        return [int(size) for size in sizes]
    if override is not None:
        return [int(size) if not getattr(size, "free_symbols", ()) else override for size in sizes]
    return [int(size) for size in V.graph.sizevars.optimization_hints(sizes)]


def _is_transposed(node: Node) -> bool:
    """Return whether a node's columns are contiguous, as far as known without a guard."""
    *_, row, column = node.get_stride()
    return bool(row == 1 and column != 1)


def _dtype_name(dtype: Any, family: str) -> str | None:
    """Return the family's name of a torch dtype, or None if the family does not have it."""
    return next((name for name in find_family(family).dtypes if torch_dtype(name) == dtype), None)


#: The factor on k for ops that no bundle has learned, and for products with unaligned rows, which are predicted badly:
#: the best of 8 is 2.1 % off, that of 16 1.2 % (tests/kernels/inductor/held_out.py). Inductor's default lists have
#: about 20 choices, so trying 2 * 8 is still less.
GROWTH = 2


#: With k="auto", one more choice is tried if the calibration expects it to save this share of a call or more, up to so
#: many choices.
WORTH, MOST = 0.002, 8


def one_choice(choices: Sequence[Any]) -> list[Any]:
    """Return a list of the one choice of an op that is kept if k is 1, from choices whose code is generated.

    It is the template of a product, which is only generated if it is expected to be faster than ATen. Convolution and
    grouped_mm are left to ATen if it is among the choices, because their templates were not compared with it. All
    choices are returned on a CPU, for other ops, and if there are several templates: those for several hints of a size,
    or those to try on an unknown arch.
    """
    from torch._inductor.select_algorithm import ExternKernelCaller, TritonTemplateCaller

    aten, templates = (
        [one for one in choices if isinstance(one, kind)] for kind in (ExternKernelCaller, TritonTemplateCaller)
    )
    has_others = len(aten) + len(templates) < sum("decompose_k" not in one.name for one in choices)
    if has_others or len(templates) > 1 or not choices or choices[0].layout.device.type == "cpu":
        return list(choices)
    is_product = bool(templates) and caller_config(templates[0]) is None
    return templates if templates and (is_product or not aten) else aten[:1] or list(choices)


def best_first(
    problem: Problem, configs: Sequence[KernelConfig], device: DeviceSpec, k: Length, bundle: Bundle | None = None
) -> tuple[int, ...]:
    """Return the positions of the configs to try, fastest first.

    There are `k` of them if the bundle has learned the op (more on an arch that it does not know: see
    `make_shortlist`). For products with unaligned rows, and for ops that only the family's analytic estimate can rank,
    there are `GROWTH * k` of them, but still one if `k` is 1. The result is deterministic.

    Args:
        problem: The problem.
        configs: The configs of Inductor's choices, which may repeat.
        device: The device.
        k: How many to try; "auto": as many as the calibration expects to pay, at most `MOST`.
        bundle: The bundle that predicts; the shipped one if None.

    >>> problem = Problem.of("inductor_mm", batch=1, m=4096, n=4096, k=4096)
    >>> configs, h200 = find_family("inductor_mm").space(), DeviceSpec.named("h200")
    >>> len(best_first(problem, configs, h200, k=8)), len(best_first(problem, configs, h200, k="auto"))
    (8, 3)
    >>> unaligned = Problem.of("inductor_mm", batch=1, m=4096, n=4100, k=4096)
    >>> len(best_first(unaligned, configs, h200, k=4))
    8
    """
    import numpy as np

    family = find_family(problem.family)
    distinct = tuple(dict.fromkeys(configs))
    most = MOST if k == "auto" else k
    if k != "auto" and len(configs) <= k:  # nothing to choose, except that some may be unable
        usable = {distinct[position] for position in supported(family, problem, device, distinct)}
        return tuple(position for position, config in enumerate(configs) if config in usable)
    if family.name in bundle_in_force(bundle).families:
        # One call of a second, for which trying a config costs `WORTH` seconds.
        worth = {"expected_calls": 1, "call_us": 1e6, "trial_s": WORTH} if k == "auto" else {}
        is_doubtful = family.name == "inductor_mm" and is_unaligned(problem) and k not in ("auto", 1)
        length = GROWTH * most if is_doubtful else k
        found = make_shortlist(family, problem, device, k=length, configs=list(distinct), bundle=bundle, **worth)
        chosen = found.configs[:MOST] if k == "auto" and found.predicted else found.configs
    else:
        able = [distinct[position] for position in supported(family, problem, device, distinct)]
        order = np.argsort(family.estimate_us(problem, device, able), kind="stable")
        chosen = tuple(able[position] for position in order[: most if k in ("auto", 1) else GROWTH * most].tolist())
    # Choices may differ in knobs that the family does not have, so their configs repeat. The count stays the same.
    positions = [position for config in chosen for position, one in enumerate(configs) if one == config]
    return tuple(positions[: len(chosen)])
