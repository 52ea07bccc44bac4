"""Generate the kernel of a problem with Inductor's templates, for one config.

The graph contains only the operands of the problem. For products, Inductor lists the choices and generates the kernel
of one through `InductorChoices.get_template_configs`; here, the only choice has the parameters of the config
(`product_kernel`). For other ops, the lowering generates each choice in a loop; here, the first one has the parameters
of the config and ends the loop (`lowered_kernel`). The source is the one that Inductor benchmarks; it is compiled and
launched like any `triton.jit` function, with its own cache key. Private names of torch are used; torch 2.11 and 2.13
have them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from ...datasets import DeviceSpec, ForetuneError, KernelConfig, Problem, torch_dtype
from ...runtime.launching.kernel import Kernel
from ...runtime.launching.stub_driver import stubbed
from .choices import ALLOW_TF32
from .matmul import TF32

if TYPE_CHECKING:
    import torch

#: (shape, strides, dtype) of an operand, without memory.
Operand = tuple[tuple[int, ...], tuple[int, ...], "torch.dtype"]
#: Cached functions of torch about the current device; not every version has all of them.
_REMEMBERED = (
    ("torch._inductor.utils", "get_max_num_sms"),
    ("torch._inductor.utils", "using_b200"),
    ("torch.utils._triton", "has_triton"),
    ("torch.utils._triton", "has_triton_tma"),
    ("torch.utils._triton", "has_triton_tma_device"),
    ("torch.utils._triton", "has_triton_stable_tma_api"),
    ("torch.utils._triton", "has_triton_experimental_host_tma"),
    ("torch.utils._triton", "has_triton_tensor_descriptor_host_tma"),
)
#: The number of problems whose kernels are kept; a collection handles problems one after the other.
_KEPT = 4


@dataclass(frozen=True)
class GeneratedKernel:
    """The Triton kernel that Inductor generated for one problem and config.

    Its arguments are the tensors with these names, and a workspace if `workspace_bytes` is not 0.
    """

    kernel: Kernel
    grid: tuple[int, ...]
    launch_options: Mapping[str, int]
    names: tuple[str, ...]
    workspace_bytes: int = 0

    def arguments(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Return the arguments of a launch on these tensors, by parameter name."""
        import torch

        given = [tensors[name] for name in self.names]
        if self.workspace_bytes:
            given.append(torch.empty(self.workspace_bytes, dtype=torch.uint8, device=given[0].device))
        return {**dict(zip(self.kernel.parameters, given, strict=True)), **self.launch_options}


_importing = threading.Lock()


def import_lowerings() -> None:
    """Import Inductor's ops, under a lock: their modules import each other in circles, which fails in two threads."""
    with _importing:
        import torch._inductor.lowering  # noqa: F401


_kernels: OrderedDict[Problem, dict[KernelConfig, GeneratedKernel]] = OrderedDict()


def cached_kernel(
    problem: Problem, config: KernelConfig, generate: Callable[[Problem, KernelConfig], GeneratedKernel]
) -> GeneratedKernel:
    """Return the kernel of a problem and config, which `generate` makes unless it is cached from an earlier call.

    It is generated for the current device, or that of an active stub driver. The cache holds the last few problems.

    Raises:
        ForetuneError: Inductor generates no kernel for them.
    """
    import_lowerings()
    while problem not in _kernels and len(_kernels) >= _KEPT:
        _kernels.popitem(last=False)
    known = _kernels.setdefault(problem, {})
    if config not in known:
        known[config] = generate(problem, config)
    return known[config]


def operands_of(problem: Problem) -> dict[str, Operand]:
    """Return (shape, strides, dtype) of each operand by name, in the order of Inductor's op, and of the output "y"."""
    import torch

    batch, m, n, k = (problem[dim] for dim in ("batch", "m", "n", "k"))
    dtype = torch_dtype(problem.dtype_name)
    scaled = problem.dtype == "fp8e4m3"
    out = torch.bfloat16 if scaled else dtype

    def matrix(rows: int, columns: int, flag: str) -> Operand:
        strides = (1, rows) if flag in problem.flags else (columns, 1)
        if batch == 1:
            return (rows, columns), strides, dtype
        return (batch, rows, columns), (rows * columns, *strides), dtype

    operands = {"a": matrix(m, k, "a_transposed"), "b": matrix(k, n, "b_transposed")}
    y: Operand = ((m, n), (n, 1), out) if batch == 1 else ((batch, m, n), (m * n, n, 1), out)
    if scaled:
        operands |= {
            "scale_a": ((m, 1), (1, 1), torch.float32),
            "scale_b": ((1, n), (n, 1), torch.float32),
        }
    elif "bias" in problem.flags:
        operands = {"bias": (y[0], (0,) * (len(y[0]) - 1) + (1,), out), **operands}
    return {**operands, "y": y}


@contextmanager
def graph_of(operands: Mapping[str, Operand]) -> Iterator[dict[str, Any]]:
    """Yield the nodes of an Inductor graph that contains only these operands, by name; the graph is active meanwhile.

    The device is the current one, or the one of an active stub driver.
    """
    import torch
    from torch._inductor import config as inductor_config
    from torch._inductor import ir
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    empty = torch.fx.Graph()
    empty.output(())
    graph = GraphLowering(torch.fx.GraphModule({}, empty))
    with ExitStack() as stack:
        stack.enter_context(V.set_graph_handler(graph))
        stack.enter_context(inductor_config.patch(max_autotune=True, max_autotune_gemm_search_space="DEFAULT"))
        stub = stubbed()
        stack.enter_context(properties_of(stub.device) if stub else nullcontext())
        nodes = {}
        for name, (shape, strides, dtype) in operands.items():
            layout = ir.FixedLayout(torch.device("cuda", 0), dtype, list(shape), list(strides))
            buffer = ir.InputBuffer(name=name, layout=layout)
            graph.graph_inputs[name] = nodes[name] = ir.TensorBox.create(buffer)
            graph.graph_input_names.append(name)
            graph.name_to_buffer[name] = buffer
        yield nodes


def product_kernel(problem: Problem, config: KernelConfig) -> GeneratedKernel:
    """Generate Inductor's kernel for a product and a config.

    Raises:
        ForetuneError: Inductor generates no kernel for this config.
    """
    from torch._inductor.choices import InductorChoices
    from torch._inductor.kernel_inputs import MMKernelInputs

    class OneChoice(InductorChoices):
        def _finalize_template_configs(self, template_choices: Any, *_: Any, **__: Any) -> list[Any]:
            listed = next((choice for choices in template_choices.values() for choice in choices), None)
            if listed is None:
                return []
            filled, more = listed.params.to_kwargs() | _filled(problem, config), dict(listed.extra_kwargs)
            for given in (filled, more):  # its place depends on torch's version
                if ALLOW_TF32 in given:
                    given[ALLOW_TF32] = TF32 in problem.flags
            listed.params, listed.extra_kwargs = type(listed.params)(filled), more
            return [listed]

    operands = operands_of(problem)
    out = operands.pop("y")
    template, op, overrides = _template(problem, config)
    matrices: dict[str, Any] = {"mat1_idx": 0, "mat2_idx": 1} if "scale_a" in operands else {}
    scalars: dict[str, float | int] | None = {"alpha": 1, "beta": 1} if "bias" in operands else None
    with graph_of(operands) as nodes:
        inputs = MMKernelInputs(list(nodes.values()), scalars=scalars, out_dtype=out[2], **matrices)
        callers: list[Any] = OneChoice().get_template_configs(
            inputs, [template], op, kwarg_overrides={template.uid: overrides}
        )
        if not callers:
            raise ForetuneError(f"Inductor generates no kernel for {config} and {problem}")
        return _kernel_of(callers[0], config, (*operands, "y"))


def lowered_kernel(
    operands: Mapping[str, Operand], lower: Callable[[Mapping[str, Any]], Any], config: KernelConfig
) -> GeneratedKernel:
    """Generate Inductor's kernel for a config and an op whose lowering generates the code of its choices itself.

    Args:
        operands: The kernel's tensors, by the name that the template has for them, and its output "y". Those that the
            op does not take as inputs are allocated by the lowering.
        lower: Runs the op's lowering on the graph's nodes by name.
        config: The config, whose knobs are the template's parameters.

    Raises:
        ForetuneError: Inductor generates no kernel for this config, or one with another output.
    """
    from torch._inductor.select_algorithm import TritonTemplate

    knobs = {knob: value for knob, value in config.to_json().items() if knob != "num_ctas"}

    def append(template: TritonTemplate, choices: list[Any], **given: Any) -> None:
        raise _Generated(template.generate(generate_with_caching=False, **{**given, **knobs}))

    shape, strides, dtype = operands["y"]
    with (
        graph_of({name: operand for name, operand in operands.items() if name != "y"}) as nodes,
        patch.object(TritonTemplate, "maybe_append_choice", append),
    ):
        caller = None
        try:
            lower(nodes)
        except _Generated as generated:
            caller = generated.caller
        except NotImplementedError as error:
            raise ForetuneError(f"Inductor generates no kernel for {config}: {error}") from error
        if caller is None:
            raise ForetuneError(f"Inductor lists no Triton template for {config}")
        made = caller.layout
        if (tuple(made.size), tuple(made.stride), made.dtype) != (shape, strides, dtype):
            raise ForetuneError(f"Inductor's output is {made} but must be {operands['y']}")
        kernel = _kernel_of(caller, config, ())
        *inputs, _ = kernel.kernel.parameters
        return replace(kernel, names=(*(name.removeprefix("arg_") for name in inputs), "y"))


class _Generated(Exception):  # noqa: N818 - not an error: it ends a lowering
    """Raised to end a lowering after the first choice that it generates, which is `caller`."""

    def __init__(self, caller: Any) -> None:
        super().__init__()
        self.caller = caller


def _kernel_of(caller: Any, config: KernelConfig, names: tuple[str, ...]) -> GeneratedKernel:
    """Return the kernel of a `TritonTemplateCaller`; `names` are those of its tensors."""
    from torch._inductor.codecache import PyCodeCache

    request, workspace = caller.bmreq, caller.workspace_arg
    module = PyCodeCache.load_by_key_path(request.module_cache_key, request.module_path)
    *_, grid_x, grid_y, grid_z = request.extra_args
    return GeneratedKernel(
        kernel=Kernel(getattr(module, request.kernel_name).fn),
        grid=(int(grid_x), int(grid_y), int(grid_z)),
        launch_options={"num_warps": config.num_warps, "num_stages": config.num_stages},
        names=names,
        workspace_bytes=0 if workspace is None else int(workspace.count),
    )


def _filled(problem: Problem, config: KernelConfig) -> dict[str, Any]:
    """Return the template's parameters that follow from a config (and EVEN_K, which also depends on the problem)."""
    knobs = {knob: value for knob, value in config.to_json().items() if knob not in ("PERSISTENT_TMA", "num_ctas")}
    return {**knobs, "EVEN_K": problem["k"] % config["BLOCK_K"] == 0}


def _template(problem: Problem, config: KernelConfig) -> tuple[Any, str, dict[str, Any]]:
    """Return (the template of a config, the name of the op, template parameters that the op's lowering overrides)."""
    from torch._inductor.kernel import bmm, mm

    persistent = bool(config["PERSISTENT_TMA"])
    if problem.dtype == "fp8e4m3":
        scaling: dict[str, Any] = {"USE_FAST_ACCUM": False}
        if not persistent:
            return mm.mm_template, "scaled_mm", scaling
        from torch.nn.functional import ScalingType

        scaling |= dict.fromkeys(("SCALE_RECIPE_A", "SCALE_RECIPE_B"), ScalingType.RowWise.value)
        return mm.scaled_mm_device_tma_epilogue_scaling_template, "scaled_mm", scaling
    bias = "bias" in problem.flags
    if problem["batch"] > 1:
        return bmm.bmm_template, "baddbmm" if bias else "bmm", {}
    return mm.persistent_tma_mm_template if persistent else mm.mm_template, "addmm" if bias else "mm", {}


@contextmanager
def properties_of(device: DeviceSpec) -> Iterator[SimpleNamespace]:
    """Make torch report the properties of `device`, which may be absent, while the context manager is active."""
    import torch
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.runtime.hints import DeviceProperties

    major, minor = int(device.arch[3:-1]), int(device.arch[-1])
    limits = {
        "multi_processor_count": device.sm_count,
        "major": major,
        "regs_per_multiprocessor": device.registers_per_sm,
        "max_threads_per_multi_processor": 2048,
        "max_threads_per_block": 1024,
        "warp_size": device.warp_size,
    }
    known: dict[str, Any] = {"type": device.backend, "index": 0, "cc": 10 * major + minor, **limits}
    hint = DeviceProperties(**{field: known[field] for field in DeviceProperties._fields})
    properties = SimpleNamespace(minor=minor, shared_memory_per_block_optin=device.smem_per_block_bytes, **limits)
    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "get_device_properties": lambda *_: properties,
        "get_device_capability": lambda *_: (major, minor),
        "is_tf32_supported": lambda: True,
    }
    with (
        patch.multiple(torch.cuda, **dict[str, Any](answers)),
        patch.object(CudaInterface.Worker, "get_device_properties", staticmethod(lambda *_: properties)),
        patch.object(DeviceProperties, "create", lambda _: hint),
    ):
        _forget()
        try:
            yield properties
        finally:
            _forget()


def _forget() -> None:
    """Clear what torch has cached about the current device."""
    for module, name in _REMEMBERED:
        function: Any = getattr(import_module(module), name, None)
        if hasattr(function, "cache_clear"):
            function.cache_clear()
