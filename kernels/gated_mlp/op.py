"""`foretune.gated_mlp`: the differentiable op, for eager mode and `torch.compile`.

The backward pass calls `foretune.matmul` for its products, so that a compiler sees each of them as an op of its own and
can schedule it.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import torch

from ...datasets import ForetuneError, KernelConfig, Problem
from ...datasets.errors import check_flag
from ...runtime import Mode
from ...runtime.launching.descriptors import Descriptor
from ...runtime.launching.launcher import Launcher, launch_nothing
from ..launchers import programs_of
from ..matmul.op import matmul
from ..op import Op
from ..op_calls import (
    DTYPES,
    Call,
    ConfiguredLaunch,
    Operand,
    are_placed,
    check_operands,
    needs_gradient,
    on_device_of,
    ready,
    require,
)
from ..op_choice import HowChosen, how_chosen
from .family import MOST_COLUMNS, MOST_ROWS, wrong_widths
from .space import ACTIVATIONS, flags_of
from .triton_kernels import gated_backward_kernel, gated_mlp_kernel

if TYPE_CHECKING:
    from ...datasets import DeviceSpec
    from ..launchers import Launch

_launch = Launcher(gated_mlp_kernel)
_launch_backward = Launcher(gated_backward_kernel)
#: Columns that one program of the activation's backward kernel takes, and its warps: 8 elements per thread of 32-thread
#: warps.
_BACKWARD_BLOCK, _BACKWARD_WARPS = 1024, 4
_OPERANDS = (Operand("x", dtypes=tuple(DTYPES)), Operand("w_gate_up", dtypes=tuple(DTYPES), alike=True))


def gated_mlp(
    x: torch.Tensor,
    w_gate_up: torch.Tensor,
    activation: str = "silu",
    *,
    recompute: bool = False,
    config: KernelConfig | None = None,
    mode: str | None = None,
    same_bits: bool | None = None,
    invariant: str | None = None,
) -> torch.Tensor:
    """Compute act(x @ gate.T) * (x @ up.T), the gate and up projections of a gated MLP and its activation, in one GEMM.

    This is SwiGLU with "silu", and GeGLU with "gelu" or "gelu_tanh" (Shazeer, 2020: "GLU Variants Improve
    Transformer"). The MLP's down projection is not included. The function is differentiable in x and w_gate_up.

    Args:
        x: (..., K), bfloat16, float16 or float32. float32 is meant for reference results: it runs without tensor cores
            and, unless `config` is given, always with the family's default config.
        w_gate_up: (2 N, K) of the same dtype, with gate's rows first, as serving engines and many checkpoints store it.
            N and K must be multiples of 8.
        activation: "silu", "gelu" (with the error function) or "gelu_tanh" (its tanh approximation, which Gemma uses).
        recompute: If True, the backward pass keeps only x and the weight, and computes gate and up again. If False,
            gate and up, (rows, 2 N), are kept for it.
        config: The config of the forward kernel. It may name only some of the knobs, as configs of
            `foretune.grouped_gemm` may. If None, `mode` decides how it is chosen. The products of the backward pass
            run in `foretune.matmul`, which chooses its configs by `mode`; those of float32 run in PyTorch, because
            `foretune.matmul` would round their operands to tf32.
        mode: "predict" runs the config with the least predicted time. "shortlist" times the 8 most promising configs on
            the first call with about this number of rows, and runs the fastest. "refine" finds the fastest with the
            calls themselves. "off" runs the family's default config. If None, the environment variable
            FORETUNE_MODE decides; if that is not set, "predict".
        same_bits: Run only configs whose results have the same bits as those of the family's default config, so that no
            tuning changes a result. If None, FORETUNE_SAME_BITS=1 requests it. A given config is not restricted.
        invariant: "m": Run only configs that compute a row with the same bits for every number of rows, so that a row
            of the result does not depend on the other rows of the call.

    Returns:
        h, (..., N), of x's dtype. Sums, activation and product are computed in float32 and rounded once. The result is
        bitwise reproducible for the same config.

    Raises:
        ForetuneError: An argument is not valid (shape, dtype, device, option), or `config` cannot run this problem. The
            message names the bad value.

    >>> import foretune, torch
    >>> foretune.gated_mlp(torch.ones(3, 64, device="meta"), torch.ones(2 * 32, 64, device="meta")).shape
    torch.Size([3, 32])
    >>> if torch.cuda.is_available():
    ...     x = torch.randn(6, 64, device="cuda", dtype=torch.bfloat16)
    ...     w = torch.randn(2 * 32, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ...     gated_mlp(x, w).sum().backward()
    ...     assert w.grad.shape == w.shape
    """
    if type(recompute) is not bool:
        check_flag("recompute", recompute)
    saves = not recompute and needs_gradient((x, w_gate_up))
    h: torch.Tensor = OP.call(x, w_gate_up, activation, saves, config, how_chosen(mode, same_bits, invariant))
    return h


def check_call(x: torch.Tensor, w: torch.Tensor, activation: str) -> None:
    """Check all arguments of `gated_mlp` that the host can check without waiting for the device.

    Raises:
        ForetuneError: An argument is not valid. The message names it and the valid values.
    """
    check_operands(_OPERANDS, (x, w))
    if activation not in ACTIVATIONS:
        raise ForetuneError(f"activation must be one of {', '.join(ACTIVATIONS)} but is {activation!r}")
    require(w.dim() == 2, f"w_gate_up must be (2 N, K) but is {tuple(w.shape)}")
    require(x.dim() >= 1, "x must be (..., K) but has no dimensions")
    rows, k = w.shape
    require(x.shape[-1] == k, f"x has {x.shape[-1]} columns but w_gate_up, (2 N, K) = {tuple(w.shape)}, has K = {k}")
    require(rows % 2 == 0, f"w_gate_up must have 2 N rows, an even number, but has {rows}")
    reason = wrong_widths(rows // 2, k)
    require(reason is None, str(reason))
    require(max(rows, k) <= MOST_COLUMNS, f"N and K must be at most {MOST_COLUMNS} but w_gate_up is {tuple(w.shape)}")
    count = prod(x.shape[:-1])  # under torch.compile, numel() would specialize a dynamic size to a number
    require(count <= MOST_ROWS, f"x must have at most {MOST_ROWS} rows but has {count}")


def _shapes(x: torch.Tensor, w: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, int]]:
    """Return the shape of h, (..., N), and that of the saved gate and up, (M, 2 N)."""
    return (*x.shape[:-1], w.shape[0] // 2), (prod(x.shape[:-1]), w.shape[0])


def _find(
    place: int,
    x: torch.Tensor,
    w: torch.Tensor,
    activation: str,
    saves: bool,
    config: KernelConfig | None,
    mode: str | None,
) -> Call[tuple[tuple[int, ...], tuple[int, int]]]:
    check_call(x, w, activation)
    shapes, copies = _shapes(x, w), not (x.is_contiguous() and w.is_contiguous())
    m, n, k = shapes[1][0], w.shape[0] // 2, w.shape[1]
    if copies or m == 0:
        return Call(shapes, copies=copies)

    def prepare(config: KernelConfig, device: DeviceSpec, _: Any) -> Launch:
        return prepare_gated(m, n, k, config, device.sm_count, activation)

    problem = Problem.of("gated_mlp", dtype=DTYPES[x.dtype], flags=flags_of(activation, saves), m=m, n=n, k=k)
    chosen = HowChosen.of(mode)
    if x.dtype == torch.float32:  # the space has no config that runs float32; only the default does
        chosen = chosen._replace(mode=Mode.OFF)
    return Call(shapes, ConfiguredLaunch(problem, place, config, chosen, prepare))


def _run(
    call: Call[tuple[tuple[int, ...], tuple[int, int]]],
    x: torch.Tensor,
    w: torch.Tensor,
    activation: str,
    saves: bool,
    *options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if call.copies or not are_placed((x, w)):
        made: tuple[torch.Tensor, torch.Tensor | None] = OP.direct(ready(x), ready(w), activation, saves, *options)
        return made
    of_h, of_saved = call.seen
    h = x.new_empty(*of_h)
    saved = x.new_empty(*of_saved) if saves else None
    if call.launch is not None:
        call.launch((x, w, h, saved))
    return h, saved


def _fake(x: torch.Tensor, w: torch.Tensor, activation: str, saves: bool, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    check_call(x, w, activation)
    of_h, of_saved = _shapes(x, w)
    return x.new_empty(of_h), x.new_empty(of_saved if saves else (0,))


def _save(ctx: Any, arguments: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor | None]) -> None:
    ctx.save_for_backward(arguments[0], arguments[1], output[1])


def _backward(ctx: Any, dh: torch.Tensor | None, *_: Any) -> tuple[torch.Tensor | None, ...]:
    if dh is None:
        return None, None
    x, w, saved = ctx.saved_tensors
    activation, _, _, mode = ctx.options
    grad = GRADIENT.within(ctx)(dh, x, w, saved, activation, mode)
    needs_x, needs_w = ctx.needs_input_grad[:2]
    dx = _product(grad, w, mode).view(x.shape) if needs_x else None
    return dx, _product(grad.t(), x.reshape(-1, x.shape[-1]), mode) if needs_w else None


def _run_gradient(
    _: None,
    dh: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    saved: torch.Tensor | None,
    activation: str,
    mode: str | None,
) -> torch.Tensor:
    """Return the gradient of gate and up, (M, 2 N), for the gradient `dh` of the result.

    Gate and up are computed again from x and w if they were not saved.
    """
    if saved is None or saved.dim() != 2:
        saved = _product(x.reshape(-1, w.shape[1]), w.t(), mode)
    grad = torch.empty_like(saved)
    with on_device_of(dh):
        launch_backward(ready(dh.reshape(-1, w.shape[0] // 2)), saved, grad, activation)
    return grad


def _product(a: torch.Tensor, b: torch.Tensor, mode: str | None) -> torch.Tensor:
    """Return a @ b with `foretune.matmul`, or with PyTorch for float32, which `matmul` would round to tf32."""
    return torch.mm(a, b) if a.dtype == torch.float32 else matmul(a, b, mode=mode)


def _flops(x: Any, w: Any, *_: Any, **__: Any) -> Any:
    return 2 * prod(x) * w[0]


def prepare_gated(m: int, n: int, k: int, config: KernelConfig, sm_count: int, activation: str) -> Launch:
    """Return a function that launches h = act(x @ gate.T) * (x @ up.T) on (x, w, h, saved) of these sizes.

    It does not wait for the result. Tensors must be contiguous, and of one dtype on one CUDA or HIP device: x (M, K),
    w (2 N, K), gate's rows first, h (M, N), and saved, None or (M, 2 N), which gets gate and up, side by side.

    Args:
        m: The number of rows.
        n: The number of columns of h.
        k: The number of columns of x.
        config: A config of the family `gated_mlp`.
        sm_count: The number of SMs of the device, which bounds the grid if the config is persistent.
        activation: "silu", "gelu" or "gelu_tanh".
    """
    if m == 0:
        return launch_nothing
    tiles = -(-m // int(config["BLOCK_M"])) * -(-n // int(config["BLOCK_N"]))
    launch: Launch = _launch.prepare(
        (programs_of(tiles, config, sm_count), 1, 1),
        (m, n // 8, k // 8),
        config,
        _descriptors(m, n, k, config),
        ACTIVATION=activation,
    )
    return launch


def compile_gated(element: torch.dtype, saves: bool, config: KernelConfig, activation: str) -> Any:
    """Compile what `prepare_gated` launches for such tensors, into Triton's cache, and return the binary."""
    types = element, element, element, element if saves else None
    return _launch.compile(types, 3, config, _descriptors(64, 64, 64, config), ACTIVATION=activation)


def _descriptors(m: int, n: int, k: int, config: KernelConfig) -> tuple[Descriptor | None, ...]:
    """Return the TMA descriptors of x and w that a config's kernel takes.

    That of w has three dimensions, so that a box past gate's last row reads zeros, not rows of up.
    """
    if not config["TMA"]:
        return None, None
    rows, columns, step = (config[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
    x = Descriptor(0, (m, k), (k, 1), (rows, step))
    return x, Descriptor(1, (2, n, k), (n * k, k, 1), (2, columns, step))


def launch_backward(dh: torch.Tensor, saved: torch.Tensor, grad: torch.Tensor, activation: str) -> None:
    """Compute the gradients of gate and up from the output's gradient, without waiting for them.

    All tensors must be contiguous.

    Args:
        dh: The gradient of h, (M, N).
        saved: Gate and up before the activation, (M, 2 N).
        grad: The result, (M, 2 N): the gradients of gate and up; overwritten.
        activation: "silu", "gelu" or "gelu_tanh".
    """
    m, n = dh.shape
    if m == 0:
        return
    constants = {"ACTIVATION": activation, "BLOCK": _BACKWARD_BLOCK, "num_warps": _BACKWARD_WARPS}
    _launch_backward((m * -(-n // _BACKWARD_BLOCK), 1, 1), (dh, saved, grad), (m, n // 8), None, **constants)


OP = Op(
    "gated_mlp(Tensor x, Tensor w, str activation, bool saves, str? config, str? mode) -> (Tensor, Tensor)",
    find=_find,
    run=_run,
    fake=_fake,
    save=_save,
    backward=_backward,
    flops=_flops,
    intermediate=True,
)
GRADIENT = Op(
    "gated_mlp_backward(Tensor dh, Tensor x, Tensor w, Tensor saved, str activation, str? mode) -> Tensor",
    run=_run_gradient,
    fake=lambda dh, x, w, *_: x.new_empty(_shapes(x, w)[1]),
    flops=lambda dh, x, w, saved, *_, **__: 0 if len(saved) == 2 else _flops(x, w),  # gate and up are computed again
)
