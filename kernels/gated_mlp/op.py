"""`gated_mlp`: the op that people call, with gradients, in eager mode and under `torch.compile`.

The products of the backward pass are `foretune.matmul`'s, so that a compiler sees them, and schedules them, one by one.
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
    """act(x @ gate.T) * (x @ up.T): both up projections of a gated MLP and its activation, in one GEMM. Differentiable.

    SwiGLU with "silu", GeGLU with "gelu" or "gelu_tanh" (Shazeer, 2020). The down projection is a plain product.

    Args:
        x: (..., K), bfloat16, float16 or, for reference work, float32, whose config is always the family's default.
        w_gate_up: (2 N, K) of the same dtype, gate's rows first, as serving engines and many checkpoints store it.
            N and K are any multiples of 8.
        activation: "silu", "gelu" (by the error function) or "gelu_tanh" (its approximation, as Gemma has it).
        recompute: keeps only x and the weight for the backward pass, which then multiplies again; else gate and up,
            (rows, 2 N), are kept.
        config: the kernel's config. It may name some knobs only, as those of `foretune.grouped_gemm` may. Chosen as
            `mode` says where left out. The products of the backward pass are `foretune.matmul`'s (float32's, which that
            multiplies as tf32, PyTorch's), their configs chosen as `mode` says.
        mode: "predict" (the default, or the environment variable FORETUNE_MODE) runs the config that is predicted to be
            the fastest; "shortlist" times the 8 best on the first call of about that many rows, and "off" runs the
            family's default.

    Returns:
        h, (..., N), of x's dtype: sums, activation and product in float32, rounded once. The same to the bit in every
        run with the same config.

    Raises:
        ForetuneError: for what the host can see to be wrong (shapes, dtypes, devices, options, a config that cannot run
            this), naming it.

    >>> if torch.cuda.is_available():
    ...     x = torch.randn(6, 64, device="cuda", dtype=torch.bfloat16)
    ...     w = torch.randn(2 * 32, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ...     gated_mlp(x, w).sum().backward()
    ...     assert w.grad.shape == w.shape
    """
    if type(recompute) is not bool:
        check_flag("recompute", recompute)
    saves = not recompute and needs_gradient((x, w_gate_up))
    h: torch.Tensor = OP.call(x, w_gate_up, activation, saves, config, mode)
    return h


def check_call(x: torch.Tensor, w: torch.Tensor, activation: str) -> None:
    """Raise `ForetuneError` naming what is wrong with a call, of what the host knows without waiting for the device."""
    check_operands(_OPERANDS, (x, w))
    if activation not in ACTIVATIONS:
        raise ForetuneError(f"activation must be one of {', '.join(ACTIVATIONS)} but is {activation!r}")
    require(w.dim() == 2, f"w_gate_up must be (2 N, K) but is {tuple(w.shape)}")
    require(x.dim() >= 1, "x must be (..., K) but is a number")
    rows, k = w.shape
    require(x.shape[-1] == k, f"x has {x.shape[-1]} columns but w_gate_up {tuple(w.shape)}, (2 N, K), has K = {k}")
    require(rows % 2 == 0, f"w_gate_up must have 2 N rows, gate's first, but has {rows}")
    reason = wrong_widths(rows // 2, k)
    require(reason is None, str(reason))
    require(max(rows, k) <= MOST_COLUMNS, f"N and K must be at most {MOST_COLUMNS} but w_gate_up is {tuple(w.shape)}")
    count = prod(x.shape[:-1])  # numel() would make a number of a size that a compiler leaves open
    require(count <= MOST_ROWS, f"x must have at most {MOST_ROWS} rows but has {count}")


def _shapes(x: torch.Tensor, w: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, int]]:
    """Of h, (..., N), and of what is saved of it, gate and up: (M, 2 N)."""
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
    chosen = resolve_mode(mode, default=Mode.PREDICT)
    if x.dtype == torch.float32:  # which runs without tensor cores: the space has no config for it
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
    if call.copies or not are_placed((x, w)):
        made: tuple[torch.Tensor, torch.Tensor | None] = OP.direct(ready(x), ready(w), activation, saves, *options)
        return made  # a call like any other
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
    """The gradient of gate and up, (M, 2 N); they are computed again where they were not saved."""
    if saved is None or saved.dim() != 2:
        saved = _product(x.reshape(-1, w.shape[1]), w.t(), mode)
    grad = torch.empty_like(saved)
    with on_device_of(dh):
        launch_backward(ready(dh.reshape(-1, w.shape[0] // 2)), saved, grad, activation)
    return grad


def _product(a: torch.Tensor, b: torch.Tensor, mode: str | None) -> torch.Tensor:
    """a @ b of the backward pass, by the dense GEMM. That multiplies float32 as tf32: here it is exact, so torch's."""
    return torch.mm(a, b) if a.dtype == torch.float32 else matmul(a, b, mode=mode)


def _flops(x: Any, w: Any, *_: Any, **__: Any) -> Any:
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
    flops=lambda dh, x, w, saved, *_, **__: 0 if len(saved) == 2 else _flops(x, w),  # which are computed again
)
