"""`gated_mlp`: the differentiable op, for eager mode and `torch.compile`.

The products of the backward pass are separate calls of `foretune.matmul`, so that a compiler can schedule each of them.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import torch

from ...datasets import ForetuneError, KernelConfig, Problem
from ...datasets.errors import check_flag
from ...runtime import Mode, resolve_mode
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
from .family import MOST_COLUMNS, MOST_ROWS, wrong_widths
from .launches import launch_backward, prepare_gated
from .space import ACTIVATIONS, flags_of

if TYPE_CHECKING:
    from ...datasets import DeviceSpec
    from ..op_calls import Launch

_OPERANDS = (Operand("x", dtypes=tuple(DTYPES)), Operand("w_gate_up", dtypes=tuple(DTYPES), alike=True))


def gated_mlp(
    x: torch.Tensor,
    w_gate_up: torch.Tensor,
    activation: str = "silu",
    *,
    recompute: bool = False,
    config: KernelConfig | None = None,
    mode: str | None = None,
) -> torch.Tensor:
    """Compute a gated MLP's up projections and activation, act(x @ gate.T) * (x @ up.T), in one GEMM.

    This is SwiGLU with "silu", and GeGLU with "gelu" or "gelu_tanh" (Shazeer, 2020, arXiv:2002.05202). The op is
    differentiable in `x` and `w_gate_up`. The down projection is not included: it is a plain product.

    Args:
        x: (..., K), bfloat16, float16 or float32. float32 is for reference work and always runs the family's default
            config.
        w_gate_up: (2 N, K), of x's dtype. The N rows of gate come first, as serving engines and many checkpoints do.
            N and K must be multiples of 8.
        activation: "silu", "gelu" (exact, with the error function) or "gelu_tanh" (the tanh approximation that Gemma
            uses).
        recompute: If true, only x and the weight are kept for the backward pass, which computes gate and up again. If
            false, gate and up, (rows, 2 N), are kept.
        config: The kernel's config, which may name only some knobs, as in `foretune.grouped_gemm`. If None, `mode`
            decides. The backward pass does not use it. Its products are `foretune.matmul` with configs chosen by
            `mode`, or for float32 `torch.mm`, because `foretune.matmul` multiplies float32 as tf32.
        mode: How configs are chosen. "predict" runs the config that is predicted to be fastest; "shortlist" times the
            8 best on the first call with about this number of rows; "off" runs the family's default. If None, the
            environment variable FORETUNE_MODE decides, and without it "predict".

    Returns:
        h, (..., N), of x's dtype. Sums, activation and product are computed in float32 and rounded once. Results are
        bitwise equal in all runs with the same config.

    Raises:
        ForetuneError: If shapes, dtypes, devices or options are wrong, or the config cannot run the problem. The
            message names the argument.

    >>> import torch, foretune
    >>> x, w = torch.empty(6, 64, device="meta"), torch.empty(2 * 32, 64, device="meta")
    >>> foretune.gated_mlp(x, w, "gelu_tanh").shape
    torch.Size([6, 32])
    >>> if torch.cuda.is_available():
    ...     x = torch.randn(6, 64, device="cuda", dtype=torch.bfloat16)
    ...     w = torch.randn(2 * 32, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ...     foretune.gated_mlp(x, w).sum().backward()
    ...     assert w.grad.shape == w.shape
    """
    if type(recompute) is not bool:
        check_flag("recompute", recompute)
    saves = not recompute and needs_gradient((x, w_gate_up))
    h: torch.Tensor = OP.call(x, w_gate_up, activation, saves, config, mode)
    return h


def check_call(x: torch.Tensor, w: torch.Tensor, activation: str) -> None:
    """Check the arguments of a call without waiting for the device.

    Raises:
        ForetuneError: An argument is wrong; the message names it.
    """
    check_operands(_OPERANDS, (x, w))
    if activation not in ACTIVATIONS:
        raise ForetuneError(f"activation must be one of {', '.join(ACTIVATIONS)} but is {activation!r}")
    require(w.dim() == 2, f"w_gate_up must be (2 N, K) but is {tuple(w.shape)}")
    require(x.dim() >= 1, "x must be (..., K) but has no dimensions")
    rows, k = w.shape
    require(x.shape[-1] == k, f"x has {x.shape[-1]} columns but w_gate_up, (2 N, K) = {tuple(w.shape)}, has K = {k}")
    require(rows % 2 == 0, f"w_gate_up must have an even number of rows, 2 N with those of gate first, but has {rows}")
    reason = wrong_widths(rows // 2, k)
    require(reason is None, str(reason))
    require(max(rows, k) <= MOST_COLUMNS, f"N and K must be at most {MOST_COLUMNS} but w_gate_up is {tuple(w.shape)}")
    count = prod(x.shape[:-1])  # not numel(), which would specialize a compiler's symbolic size
    require(count <= MOST_ROWS, f"x must have at most {MOST_ROWS} rows but has {count}")


def _shapes(x: torch.Tensor, w: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, int]]:
    """Return the shapes of h, (..., N), and of the saved gate and up, (M, 2 N)."""
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
    """Check a call and prepare its launch; the result is cached for equal calls."""
    check_call(x, w, activation)
    shapes, copies = _shapes(x, w), not (x.is_contiguous() and w.is_contiguous())
    m, n, k = shapes[1][0], w.shape[0] // 2, w.shape[1]
    if copies or m == 0:
        return Call(shapes, copies=copies)

    def prepare(config: KernelConfig, device: DeviceSpec, _: Any) -> Launch:
        return prepare_gated(m, n, k, config, device.sm_count, activation)

    problem = Problem.of("gated_mlp", dtype=DTYPES[x.dtype], flags=flags_of(activation, saves), m=m, n=n, k=k)
    chosen = resolve_mode(mode, default=Mode.PREDICT)
    if x.dtype == torch.float32:  # runs without tensor cores, and the space has no config for it
        chosen = Mode.OFF
    return Call(shapes, ConfiguredLaunch(problem, place, config, chosen, prepare))


def _run(
    call: Call[tuple[tuple[int, ...], tuple[int, int]]],
    x: torch.Tensor,
    w: torch.Tensor,
    activation: str,
    saves: bool,
    *options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run a checked call; returns h and, if they are saved, gate and up."""
    if call.copies or not are_placed((x, w)):  # call again with tensors that the kernel can read
        made: tuple[torch.Tensor, torch.Tensor | None] = OP.direct(ready(x), ready(w), activation, saves, *options)
        return made
    of_h, of_saved = call.seen
    h = x.new_empty(*of_h)
    saved = x.new_empty(*of_saved) if saves else None
    if call.launch is not None:
        call.launch((x, w, h, saved))
    return h, saved


def _fake(x: torch.Tensor, w: torch.Tensor, activation: str, saves: bool, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs without data, for tracing by `torch.compile`; saved is empty if not saved."""
    check_call(x, w, activation)
    of_h, of_saved = _shapes(x, w)
    return x.new_empty(of_h), x.new_empty(of_saved if saves else (0,))


def _save(ctx: Any, arguments: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor | None]) -> None:
    """Save x, w and, if the op stored them, gate and up for the backward pass."""
    ctx.save_for_backward(arguments[0], arguments[1], output[1])


def _backward(ctx: Any, dh: torch.Tensor | None, *_: Any) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of x and w."""
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
    """Return the gradient of gate and up, (M, 2 N); compute gate and up again if they were not saved."""
    if saved is None or saved.dim() != 2:
        saved = _product(x.reshape(-1, w.shape[1]), w.t(), mode)
    grad = torch.empty_like(saved)
    with on_device_of(dh):
        launch_backward(ready(dh.reshape(-1, w.shape[0] // 2)), saved, grad, activation)
    return grad


def _product(a: torch.Tensor, b: torch.Tensor, mode: str | None) -> torch.Tensor:
    """Return a @ b: by `matmul`, or for float32 by `torch.mm`, because `matmul` multiplies float32 as tf32."""
    return torch.mm(a, b) if a.dtype == torch.float32 else matmul(a, b, mode=mode)


def _flops(x: Any, w: Any, *_: Any, **__: Any) -> Any:
    """Return the floating-point operations of a call, from the shapes of x and w."""
    return 2 * prod(x) * w[0]


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
