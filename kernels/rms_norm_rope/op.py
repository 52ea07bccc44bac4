"""`rms_norm_rope`: the differentiable op, for eager mode and `torch.compile`."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from ...datasets import KernelConfig, Problem
from ...datasets.errors import check_flag, shown
from ..op import Op
from ..op_calls import DTYPES, Call, ConfiguredLaunch, Operand, are_placed, check_operands, require
from .family import MOST_HEADS, MOST_TOKENS, wrong_heads
from .launches import Rotation, prepare_backward, prepare_forward

if TYPE_CHECKING:
    from ...datasets import DeviceSpec
    from ..op_calls import Launch

_OPERANDS = (
    Operand("q", dtypes=tuple(DTYPES), floating=True),
    Operand("k", dtypes=tuple(DTYPES), floating=True, alike=True),
    Operand("cos", floating=True),
    Operand("sin", floating=True),
    Operand("q_weight", floating=True, needed=False),
    Operand("k_weight", floating=True, needed=False),
)


def rms_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    interleaved: bool = False,
    weight_offset: float = 0.0,
    config: KernelConfig | None = None,
    config_backward: KernelConfig | None = None,
    mode: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalize each query and key head by itself (RMSNorm) and rotate it by its token's angles, in one launch.

    A head x becomes n = x / sqrt(mean(x**2) + eps) * (weight + weight_offset), and each pair (a, b) of n becomes
    (a cos - b sin, b cos + a sin). (RMSNorm: Zhang and Sennrich, 2019, arXiv:1910.07467; rotary embedding: Su et al.,
    2021, arXiv:2104.09864.) The op is differentiable in q, k and both weights, but not in the angles. It does not
    support a norm over all heads together (OLMo-2), or heads that rotate only partly.

    Args:
        q: (..., q_heads, head_dim), bfloat16, float16 or float32. head_dim must be a multiple of 16, up to 512. Views
            are not copied if the heads of a token are contiguous, as in the output of one projection.
        k: (..., kv_heads, head_dim); like q except for the number of heads.
        cos: (..., head_dim / 2), the cosines of the angles. All dimensions except the last are flattened to rows, and
            token i uses row i % rows, so the number of rows must divide the number of tokens. For q of (batch,
            sequence, ...), that can be one row per position or one per token. Unless `interleaved`, (..., head_dim)
            with equal halves also works, as transformers has it.
        sin: The sines of the angles, with the shape and dtype of `cos`.
        q_weight: (head_dim,), of any floating dtype. None, for both weights, rotates without a norm.
        k_weight: (head_dim,), like `q_weight`.
        eps: Added to the mean of squares.
        interleaved: If true, pairs are elements 2 i and 2 i + 1 (GPT-J's layout); if false, i and i + head_dim / 2
            (NeoX's layout, which Llama, Qwen and Gemma use in transformers).
        weight_offset: Added to the weights. Gemma stores its weights minus 1, and needs 1.0 here.
        config: The forward kernel's config, which may name only some knobs, as in `foretune.grouped_gemm`. If None,
            `mode` decides. Without a norm, the backward pass runs the forward kernel and uses this config too.
        config_backward: The backward kernel's config, in the same way.
        mode: How configs are chosen. "predict" runs the config that is predicted to be fastest; "shortlist" times the 8
            best on the first call with about this number of tokens; "off" runs the family's default. If None, the
            environment variable FORETUNE_MODE decides, and without it "predict".

    Returns:
        The new q and k, contiguous, with the shapes and dtype of the inputs. They are computed in float32 and rounded
        once. Results and gradients are bitwise equal in all runs with the same configs.

    Raises:
        ForetuneError: If shapes, dtypes, devices or options are wrong, or the config cannot run the problem. The
        message
            names the argument.

    >>> import torch, foretune
    >>> q, k = torch.empty(2, 5, 4, 64, device="meta"), torch.empty(2, 5, 1, 64, device="meta")
    >>> cos, sin = torch.empty(5, 32, device="meta"), torch.empty(5, 32, device="meta")
    >>> [tuple(x.shape) for x in foretune.rms_norm_rope(q, k, cos, sin)]
    [(2, 5, 4, 64), (2, 5, 1, 64)]
    >>> if torch.cuda.is_available():
    ...     q, k = (torch.randn(2, 5, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 1))
    ...     angles = torch.arange(5, device="cuda")[:, None] * 1e4 ** -torch.linspace(0, 1, 32, device="cuda")
    ...     weight = torch.ones(64, device="cuda", dtype=torch.bfloat16)
    ...     q, k = foretune.rms_norm_rope(q, k, angles.cos(), angles.sin(), weight, weight)
    ...     assert q.shape == (2, 5, 4, 64) and k.shape == (2, 5, 1, 64)
    """
    if type(interleaved) is not bool or type(eps) is not float or type(weight_offset) is not float:
        # Checked before the cache lookup, whose keys do not distinguish True from 1.0.
        check_options(eps, weight_offset, interleaved)
    made: tuple[torch.Tensor, torch.Tensor] = OP.call(
        q, k, cos, sin, q_weight, k_weight, eps, weight_offset, interleaved, config, config_backward, mode
    )
    return made


def check_call(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    interleaved: bool,
) -> None:
    """Check the arguments of a call without waiting for the device.

    Raises:
        ForetuneError: An argument is wrong; the message names it.
    """
    check_operands(_OPERANDS, (q, k, cos, sin, q_weight, k_weight))
    for name, x in (("q", q), ("k", k)):
        require(x.dim() >= 3, f"{name} must be (..., tokens, heads, head_dim) but is {tuple(x.shape)}")
    head_dim, tokens = q.shape[-1], q.shape[:-2]
    require(
        (k.shape[:-2], k.shape[-1]) == (tokens, head_dim),
        f"q {tuple(q.shape)} and k {tuple(k.shape)} must have the same shape except for the heads, dimension -2",
    )
    reason = wrong_heads(q.shape[-2], k.shape[-2], head_dim)
    require(reason is None, str(reason))
    most = max(q.shape[-2], k.shape[-2])
    require(most <= MOST_HEADS, f"q and k must have at most {MOST_HEADS} heads but one has {most}")
    count = prod(tokens)  # not numel(), which would specialize a compiler's symbolic size
    require(count <= MOST_TOKENS, f"q must have at most {MOST_TOKENS} tokens but has {count}")
    _check_angles(cos, sin, count, head_dim, interleaved)
    require((q_weight is None) == (k_weight is None), "q_weight and k_weight must both be tensors or both be None")
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None:
            given = tuple(weight.shape)
            require(
                given == (head_dim,),
                f"{name} must have shape ({head_dim},), one weight per element of a head, but has {given}. (A norm "
                "over all heads together, as in OLMo-2, is not supported.)",
            )
    check_options(eps, weight_offset, interleaved)


def check_options(eps: Any, weight_offset: Any, interleaved: Any) -> None:
    """Raise `ForetuneError` if an option has a wrong type or value; the message names it."""
    check_flag("interleaved", interleaved)
    for name, number in (("eps", eps), ("weight_offset", weight_offset)):
        is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
        require(is_number and 0 <= number < 1e30, f"{name} must be a finite number >= 0 but is {shown(number)}")


def _check_angles(cos: torch.Tensor, sin: torch.Tensor, tokens: int, head_dim: int, interleaved: bool) -> None:
    """Check the shapes and dtypes of cos and sin."""
    require(
        (cos.shape, cos.dtype) == (sin.shape, sin.dtype),
        f"cos {tuple(cos.shape)} {cos.dtype} and sin {tuple(sin.shape)} {sin.dtype} must have the same shape and dtype",
    )
    require(cos.dim() >= 2, f"cos must be (positions, head_dim / 2) but is {tuple(cos.shape)}")
    columns, positions = cos.shape[-1], prod(cos.shape[:-1])
    if interleaved:
        require(
            columns == head_dim // 2,
            f"cos must have head_dim / 2 = {head_dim // 2} columns, one per pair, but has {columns}. If each angle "
            "is repeated for both neighbors, pass cos[..., ::2]; if both halves are equal, pass the first half",
        )
    else:
        require(
            columns in (head_dim // 2, head_dim),
            f"cos must have head_dim / 2 = {head_dim // 2} columns, or {head_dim} with equal halves, but has "
            f"{columns}. (Heads that rotate only partly are not supported.)",
        )
    require(
        positions > 0 and tokens % positions == 0,
        f"cos has {positions} rows, which must divide the {tokens} tokens: token i uses row i % {positions}",
    )
    for name, table in (("cos", cos), ("sin", sin)):
        require(
            not table.requires_grad,
            f"{name} requires a gradient, but rms_norm_rope computes none for it: pass {name}.detach()",
        )


def _find(place: int, *arguments: Any) -> Call[None]:
    """Check a forward call and prepare its launch; the result is cached for equal calls."""
    check_call(*arguments[:9])
    return _call(place, arguments[:6], *arguments[6:])


def _find_backward(place: int, *arguments: Any) -> Call[None]:
    """Prepare a backward launch; the forward pass already checked the arguments."""
    return _call(place, _read_backward(arguments[:8]), *arguments[8:], is_backward=True)


def _call(
    place: int,
    tensors: Sequence[Any],
    eps: float,
    weight_offset: float,
    interleaved: bool,
    config: KernelConfig | None,
    config_backward: KernelConfig | None,
    mode: str | None,
    *,
    is_backward: bool = False,
) -> Call[None]:
    """Prepare a launch, forward or backward.

    `tensors` are q and k, in a backward pass after their gradients, then cos, sin, and both weights or None. Without a
    norm the gradient is the inverse rotation, which the forward kernel computes.
    """
    q, k = (_tokens(x) for x in tensors[-6:-4])
    copies = not all(_are_readable(tensors))
    if copies or not q.numel():
        return Call(None, copies=copies)
    unnormed = tensors[-1] is None
    runs_backward, inverse = is_backward and not unnormed, is_backward and unnormed

    def prepare(config: KernelConfig, device: DeviceSpec, tensors: Sequence[Any]) -> Launch:
        cos, sin, q_weight, k_weight = tensors[-4:]
        numbers = float(eps), float(weight_offset)
        rotation = Rotation(_rows(cos), _rows(sin), q_weight, k_weight, *numbers, interleaved)
        if runs_backward:
            dq, dk, q, k = map(_tokens, tensors[:4])
            return prepare_backward(dq, dk, q, k, rotation, config)
        q, k = map(_tokens, tensors[:2])
        return prepare_forward(q, k, rotation, config, inverse=inverse)

    flags = ("interleaved",) * interleaved + ("unnormed",) * unnormed
    tokens, q_heads, head_dim = q.shape
    dims = {"tokens": tokens, "q_heads": q_heads, "kv_heads": k.shape[1], "head_dim": head_dim}
    family = "rms_norm_rope_bwd" if runs_backward else "rms_norm_rope_fwd"
    problem = Problem.of(family, dtype=DTYPES[q.dtype], flags=flags, ragged=None, **dims)
    chosen = config_backward if runs_backward else config
    return Call(None, ConfiguredLaunch(problem, place, chosen, mode, prepare, "q"))


def _run(call: Call[None], *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a checked forward call; returns the new q and k, contiguous."""
    tensors = arguments[:6]
    if call.copies or not are_placed(tensors):
        return OP.direct(*_readable(tensors), *arguments[6:])  # type: ignore[no-any-return]
    q, k, *tables = tensors
    q_out, k_out = _contiguous_like(q), _contiguous_like(k)
    if call.launch is not None:
        call.launch((q, k, q_out, k_out, *tables))
    return q_out, k_out


def _run_backward(call: Call[None], *arguments: Any) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of q, k, q_weight and k_weight; None for both weights if there is no norm."""
    given = _read_backward(arguments[:8])
    if call.copies or not are_placed(given):
        dq, dk, *others = _readable(given)
        tensors = (dq, dk, *arguments[2:4], *others) if len(given) < 8 else (dq, dk, *others)
        return GRADIENT.direct(*tensors, *arguments[8:])  # type: ignore[no-any-return]
    *heads, cos, sin, q_weight, k_weight = given
    q_grad, k_grad = map(_contiguous_like, heads[-2:])
    if q_weight is None:
        if call.launch is not None:
            call.launch((*heads, q_grad, k_grad, cos, sin, None, None))
        return q_grad, k_grad, None, None
    if call.launch is None:
        return q_grad, k_grad, torch.zeros_like(q_weight), torch.zeros_like(k_weight)
    grads = q_grad, k_grad, torch.empty_like(q_weight), torch.empty_like(k_weight)
    call.launch((*heads, *grads, cos, sin, q_weight, k_weight))
    return grads


def _read_backward(tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the tensors that a backward pass reads; without a norm these exclude q and k."""
    return (*tensors[:2], *tensors[4:]) if tensors[-1] is None else tensors


def _backward(ctx: Any, dq: torch.Tensor, dk: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of all inputs; cos and sin have none."""
    q, k, q_weight, k_weight = GRADIENT.within(ctx)(dq, dk, *ctx.saved_tensors, *ctx.options)
    return q, k, None, None, q_weight, k_weight


def _fake(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs without data, for tracing by `torch.compile`."""
    check_call(*arguments[:9])
    q, k = arguments[:2]
    return q.new_empty(q.shape), k.new_empty(k.shape)


def _fake_backward(*arguments: Any) -> tuple[torch.Tensor, ...]:
    """Return gradients without data, for tracing by `torch.compile`."""
    q, k = arguments[2:4]
    weights = (q.new_empty(0) if weight is None else torch.empty_like(weight) for weight in arguments[6:8])
    return q.new_empty(q.shape), k.new_empty(k.shape), *weights


def _readable(tensors: Sequence[Any]) -> list[Any]:
    """Return the tensors, with contiguous copies of those that the kernels cannot read."""
    return [
        x if x is None or (is_readable and are_placed([x])) else x.clone(memory_format=torch.contiguous_format)
        for x, is_readable in zip(tensors, _are_readable(tensors), strict=True)
    ]


def _are_readable(tensors: Sequence[Any]) -> list[bool]:
    """Return for each tensor of a call whether the kernels can read it in its layout.

    The heads of a token must be contiguous, and tokens multiples of 8 elements apart. The rows of cos and sin must also
    be multiples of 8 elements apart, with equal strides.
    """
    *heads, cos, sin, q_weight, k_weight = tensors
    alike = _rows(cos).stride(0) == _rows(sin).stride(0)
    return [
        *map(_has_ready_heads, heads),
        *(alike and _has_ready_rows(table) for table in (cos, sin)),
        *(weight is None or weight.is_contiguous() for weight in (q_weight, k_weight)),
    ]


def _has_ready_heads(x: torch.Tensor) -> bool:
    """Return whether the kernels can read q, k or a gradient of them in its layout."""
    viewed = _tokens(x)
    tokens, heads, head_dim = viewed.shape
    side_by_side = viewed.stride(2) == 1 and (heads == 1 or viewed.stride(1) == head_dim)
    return side_by_side and (tokens == 1 or viewed.stride(0) % 8 == 0) and viewed.data_ptr() == x.data_ptr()


def _has_ready_rows(table: torch.Tensor) -> bool:
    """Return whether the kernels can read cos or sin in its layout."""
    viewed = _rows(table)
    return viewed.stride(1) == 1 and viewed.stride(0) % 8 == 0 and viewed.data_ptr() == table.data_ptr()


def _contiguous_like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _tokens(x: torch.Tensor) -> torch.Tensor:
    """Return x as (tokens, heads, head_dim)."""
    return x.reshape(-1, *x.shape[-2:]) if x.dim() > 3 else x


def _rows(table: torch.Tensor) -> torch.Tensor:
    """Return cos or sin as (positions, columns)."""
    return table.reshape(-1, table.shape[-1])


_TENSORS = "Tensor q, Tensor k, Tensor cos, Tensor sin, Tensor? q_weight, Tensor? k_weight"
_OPTIONS = "float eps, float weight_offset, bool interleaved, str? config, str? config_backward, str? mode"
OP = Op(
    f"rms_norm_rope({_TENSORS}, {_OPTIONS}) -> (Tensor, Tensor)",
    find=_find,
    run=_run,
    fake=_fake,
    backward=_backward,
)
GRADIENT = Op(
    f"rms_norm_rope_backward(Tensor dq, Tensor dk, {_TENSORS}, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
    find=_find_backward,
    run=_run_backward,
    fake=_fake_backward,
)
