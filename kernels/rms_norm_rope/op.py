"""Define `foretune.rms_norm_rope`: the public op, differentiable, in eager mode and under `torch.compile`."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from ...datasets import KernelConfig, Problem
from ...datasets.errors import check_flag, shown
from ..op import Op
from ..op_calls import DTYPES, Call, ConfiguredLaunch, Operand, are_placed, check_operands, require
from ..op_choice import how_chosen
from .family import MOST_HEADS, MOST_TOKENS, wrong_heads
from .launches import Rotation, prepare_backward, prepare_forward

if TYPE_CHECKING:
    from ...datasets import DeviceSpec
    from ..launchers import Launch

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
    same_bits: bool | None = None,
    invariant: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalize each query and key head (RMSNorm), and rotate it by its token's angles, in one launch. Differentiable.

    A head x becomes n = x / sqrt(mean(x**2) + eps) * (weight + weight_offset), and each pair (a, b) of n becomes (a cos
    - b sin, b cos + a sin). (RMSNorm: Zhang and Sennrich, 2019; rotary embedding: Su et al., 2021.) The angles get no
    gradient. A norm over all heads together (OLMo-2), and heads that rotate only in part, are not supported.

    Args:
        q: (..., q_heads, head_dim), bfloat16, float16 or float32; head_dim is a multiple of 16 up to 512. Views whose
            heads are adjacent, as in the output of one projection, are not copied.
        k: (..., kv_heads, head_dim), with the other dimensions and the dtype of q.
        cos: (..., head_dim / 2). The number of its rows (the product of all dimensions but the last) must divide the
            number of tokens: token i uses row i % rows. For q of shape (batch, sequence, ...), that can be one row per
            position, or one per token. Unless `interleaved`, cos may also be (..., head_dim) with equal halves, as in
            transformers.
        sin: As cos.
        q_weight: (head_dim,), floating point, the weight of the norm of q. Without both weights, heads are only
            rotated.
        k_weight: The same for k.
        eps: The constant that is added to the mean of squares.
        interleaved: Rotate the pairs of elements 2 i and 2 i + 1 (GPT-J's layout), instead of i and i + head_dim / 2
            (NeoX's, which Llama, Qwen and Gemma have in transformers).
        weight_offset: A constant that is added to the weights; Gemma's weights are stored minus 1.
        config: The kernel config of the forward pass. It may name a subset of the knobs, as for
            `foretune.grouped_gemm`. If omitted, `mode` decides. It is also used for the gradient of a rotation without
            norm, which is a rotation.
        config_backward: The same for the backward pass.
        mode: "predict" (the default, unless the environment variable FORETUNE_MODE says otherwise) runs the config that
            is predicted to be fastest; "shortlist" times the 8 most promising configs on the first call with about this
            many tokens and keeps the fastest; "refine" runs the predicted config at first and then others in turn,
            until the calls themselves show which is the fastest; "off" runs the family's default config.
        same_bits: Run only the config that the family keeps for this problem (`same_bits_config`), so that no tuning
            changes a result. If None, FORETUNE_SAME_BITS=1 requests it. A given config is not restricted.
        invariant: "tokens" (or "m"): Run only configs that compute a token with the same bits for every number of
            tokens, so that the result of a token does not depend on the other tokens of the call.

    Returns:
        q and k, contiguous, with their shapes and dtype. They are computed in float32 and rounded once. Results and
        gradients are bitwise reproducible for the same configs.

    Raises:
        ForetuneError: An argument is invalid in a way that the host can see (shape, dtype, device, option, or a config
            that cannot run this problem). The message names the argument.

    >>> if torch.cuda.is_available():
    ...     q, k = (torch.randn(2, 5, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 1))
    ...     angles = torch.arange(5, device="cuda")[:, None] * 1e4 ** -torch.linspace(0, 1, 32, device="cuda")
    ...     weight = torch.ones(64, device="cuda", dtype=torch.bfloat16)
    ...     q, k = rms_norm_rope(q, k, angles.cos(), angles.sin(), weight, weight)
    ...     assert q.shape == (2, 5, 4, 64) and k.shape == (2, 5, 1, 64)
    """
    if type(interleaved) is not bool or type(eps) is not float or type(weight_offset) is not float:
        # Checked here because the cache of calls compares options by equality, and True == 1.0.
        check_options(eps, weight_offset, interleaved)
    how = how_chosen(mode, same_bits, invariant)
    made: tuple[torch.Tensor, torch.Tensor] = OP.call(
        q, k, cos, sin, q_weight, k_weight, eps, weight_offset, interleaved, config, config_backward, how
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
    """Check all arguments of `rms_norm_rope` that the host can check without waiting for the device.

    Raises:
        ForetuneError: An argument is invalid; the message names it.
    """
    check_operands(_OPERANDS, (q, k, cos, sin, q_weight, k_weight))
    for name, x in (("q", q), ("k", k)):
        require(
            x.dim() >= 3,
            f"{name} must have shape (..., heads, head_dim), 3 dimensions or more, but has {tuple(x.shape)}",
        )
    head_dim, tokens = q.shape[-1], q.shape[:-2]
    require(
        (k.shape[:-2], k.shape[-1]) == (tokens, head_dim),
        "q and k must have the same shape except for the number of heads (dimension -2) but have "
        f"{tuple(q.shape)} and {tuple(k.shape)}",
    )
    reason = wrong_heads(q.shape[-2], k.shape[-2], head_dim)
    require(reason is None, str(reason))
    most = max(q.shape[-2], k.shape[-2])
    require(most <= MOST_HEADS, f"q and k must have at most {MOST_HEADS} heads but have {most}")
    count = prod(tokens)  # numel() would specialize a size that a compiler leaves dynamic
    require(count <= MOST_TOKENS, f"q must have at most {MOST_TOKENS} tokens but has {count}")
    _check_angles(cos, sin, count, head_dim, interleaved)
    require((q_weight is None) == (k_weight is None), "q_weight and k_weight must both be given, or both be None")
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None:
            given = tuple(weight.shape)
            require(
                given == (head_dim,),
                f"{name} must have shape ({head_dim},), one entry per element of a head, but has {given} (a norm over "
                "all heads together, as in OLMo-2, is not supported)",
            )
    check_options(eps, weight_offset, interleaved)


def check_options(eps: Any, weight_offset: Any, interleaved: Any) -> None:
    """Check the numeric options and the flag `interleaved` of `rms_norm_rope`.

    Raises:
        ForetuneError: An option is invalid; the message names it.
    """
    check_flag("interleaved", interleaved)
    for name, number in (("eps", eps), ("weight_offset", weight_offset)):
        is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
        require(is_number and 0 <= number < 1e30, f"{name} must be a number >= 0 but is {shown(number)}")


def _check_angles(cos: torch.Tensor, sin: torch.Tensor, tokens: int, head_dim: int, interleaved: bool) -> None:
    """Raise `ForetuneError` unless cos and sin suit the number of tokens, the size of a head, and `interleaved`."""
    require(
        (cos.shape, cos.dtype) == (sin.shape, sin.dtype),
        f"cos and sin must have the same shape and dtype but are {tuple(cos.shape)} {cos.dtype} and "
        f"{tuple(sin.shape)} {sin.dtype}",
    )
    require(cos.dim() >= 2, f"cos must have shape (..., positions, head_dim / 2) but has {tuple(cos.shape)}")
    columns, positions = cos.shape[-1], prod(cos.shape[:-1])
    if interleaved:
        require(
            columns == head_dim // 2,
            f"cos must have head_dim / 2 = {head_dim // 2} columns, one per pair, but has {columns}: pass "
            "cos[..., ::2] if adjacent angles are equal, or the first half if both halves are equal",
        )
    else:
        require(
            columns in (head_dim // 2, head_dim),
            f"cos must have head_dim / 2 = {head_dim // 2} columns, or {head_dim} with equal halves, but has {columns} "
            "(heads that rotate only in part are not supported)",
        )
    require(
        positions > 0 and tokens % positions == 0,
        f"the number of rows of cos must divide the {tokens} tokens, because token i uses row i % rows, but is "
        f"{positions}",
    )
    for name, table in (("cos", cos), ("sin", sin)):
        require(not table.requires_grad, f"{name} requires a gradient, but angles get none: pass {name}.detach()")


def _find(place: int, *arguments: Any) -> Call[None]:
    """Check a call's arguments, and return what similar calls share: sizes, and a function that launches the kernel.

    Nothing is launched. The function is None if there is nothing to compute. `place` is the index of the GPU.
    """
    check_call(*arguments[:9])
    return _call(place, arguments[:6], *arguments[6:])


def _find_backward(place: int, *arguments: Any) -> Call[None]:
    """Return the `Call` of a backward pass on GPU `place`, unchecked, because the forward pass was checked."""
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
    """Return the `Call` of a forward or backward pass, with a launch unless it needs copies or computes nothing.

    `tensors` are the heads, (q, k) or (dq, dk, q, k), then cos, sin, and both weights or None. The gradient of a
    rotation without norm is the opposite rotation, which the forward kernel computes. `place` is the index of the GPU;
    the other arguments are those of `rms_norm_rope`.
    """
    q, k = (_tokens(x) for x in tensors[-6:-4])
    copies = not all(_lie_well(tensors))
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
    """Return q and k, normalized and rotated, contiguous in their shapes."""
    tensors = arguments[:6]
    if call.copies or not are_placed(tensors):
        return OP.direct(*_readable(tensors), *arguments[6:])  # type: ignore[no-any-return] # a call like any other
    q, k, *tables = tensors
    q_out, k_out = _contiguous_like(q), _contiguous_like(k)
    if call.launch is not None:
        call.launch((q, k, q_out, k_out, *tables))
    return q_out, k_out


def _run_backward(call: Call[None], *arguments: Any) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of q, k, q_weight and k_weight; None for both weights without a norm."""
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
    """Return the tensors of (dq, dk, q, k, cos, sin, q_weight, k_weight) that a backward pass reads.

    Without a norm it reads neither q nor k.
    """
    return (*tensors[:2], *tensors[4:]) if tensors[-1] is None else tensors


def _backward(ctx: Any, dq: torch.Tensor, dk: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients for `dq` and `dk`: one per tensor argument of the op, None where there is none."""
    q, k, q_weight, k_weight = GRADIENT.within(ctx)(dq, dk, *ctx.saved_tensors, *ctx.options)
    return q, k, None, None, q_weight, k_weight


def _fake(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return uninitialized outputs, after checking the arguments."""
    check_call(*arguments[:9])
    q, k = arguments[:2]
    return q.new_empty(q.shape), k.new_empty(k.shape)


def _fake_backward(*arguments: Any) -> tuple[torch.Tensor, ...]:
    """Return uninitialized gradients; empty tensors in place of weights that do not exist."""
    q, k = arguments[2:4]
    weights = (q.new_empty(0) if weight is None else torch.empty_like(weight) for weight in arguments[6:8])
    return q.new_empty(q.shape), k.new_empty(k.shape), *weights


def _readable(tensors: Sequence[Any]) -> list[Any]:
    """Return the tensors, with contiguous copies of those that the kernels cannot read."""
    return [
        x if x is None or (lies_well and are_placed([x])) else x.clone(memory_format=torch.contiguous_format)
        for x, lies_well in zip(tensors, _lie_well(tensors), strict=True)
    ]


def _lie_well(tensors: Sequence[Any]) -> list[bool]:
    """Return for each tensor of a call whether the kernels can read it in place, regardless of where it begins.

    The heads of a token must be adjacent. Tokens, and rows of cos and sin, must be multiples of 8 elements apart, and
    cos and sin must have the same stride.
    """
    *heads, cos, sin, q_weight, k_weight = tensors
    alike = _rows(cos).stride(0) == _rows(sin).stride(0)
    return [
        *map(_has_ready_heads, heads),
        *(alike and _has_ready_rows(table) for table in (cos, sin)),
        *(weight is None or weight.is_contiguous() for weight in (q_weight, k_weight)),
    ]


def _has_ready_heads(x: torch.Tensor) -> bool:
    """Return whether the kernels can read q or k in place."""
    viewed = _tokens(x)
    tokens, heads, head_dim = viewed.shape
    side_by_side = viewed.stride(2) == 1 and (heads == 1 or viewed.stride(1) == head_dim)
    return side_by_side and (tokens == 1 or viewed.stride(0) % 8 == 0) and viewed.data_ptr() == x.data_ptr()


def _has_ready_rows(table: torch.Tensor) -> bool:
    """Return whether the kernels can read cos or sin in place."""
    viewed = _rows(table)
    return viewed.stride(1) == 1 and viewed.stride(0) % 8 == 0 and viewed.data_ptr() == table.data_ptr()


def _contiguous_like(x: torch.Tensor) -> torch.Tensor:
    """Return a new contiguous tensor of the same shape and dtype."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _tokens(x: torch.Tensor) -> torch.Tensor:
    """Return q or k as (tokens, heads, head_dim)."""
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
