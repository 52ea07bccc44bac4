"""`rms_norm_rope`: the op that people call, with gradients, in eager mode and under `torch.compile`."""

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
    """Query and key heads, each normed by itself (RMSNorm over the elements of a head) and then rotated by its token's
    angles, in one launch. Differentiable, but for the angles.

    A head x becomes n = x / sqrt(mean(x**2) + eps) * (weight + weight_offset), and each pair (a, b) of n becomes
    (a cos - b sin, b cos + a sin). (RMSNorm: Zhang and Sennrich, 2019; rotary embedding: Su et al., 2021.)

    Args:
        q: (..., q_heads, head_dim), bfloat16, float16 or float32; head_dim is any multiple of 16 up to 512. Views are
            fine where heads lie side by side, as in the output of one projection: nothing is copied then.
        k: (..., kv_heads, head_dim), as q but for the number of heads.
        cos, sin: (..., head_dim / 2), whose rows (all dimensions but the last, one after another) divide the tokens:
            token i takes row i % rows. For q of (batch, sequence, ...) that may be one row a position, or one a token.
            Not interleaved, also (..., head_dim) of which the halves are alike, as transformers has it.
        q_weight, k_weight: (head_dim,), of any floating dtype. Without them there is no norm, just the rotation.
        eps: what is added to the mean of squares.
        interleaved: pairs are the elements 2 i and 2 i + 1 (GPT-J's layout), and not i and i + head_dim / 2 (NeoX's,
            which Llama, Qwen and Gemma have in transformers).
        weight_offset: what is added to the weights; Gemma's are stored less 1.
        config, config_backward: the kernel's config, forward and backward; it may name some knobs only, as those
            of `foretune.grouped_gemm` may. Chosen as `mode` says where left out. (The gradient of a rotation alone is
            one, and runs `config`.)
        mode: "predict" (the default, or the environment variable FORETUNE_MODE) runs the config that is predicted to be
            the fastest; "shortlist" times the 8 best on the first call of about that many tokens, and "off" runs the
            family's default.

    Returns:
        q and k, contiguous in their shapes and dtype. Computed in float32 and rounded once. Results and gradients are
        the same, to the bit, in every run with the same configs.

    Raises:
        ForetuneError: for what the host can see to be wrong (shapes, dtypes, devices, options, a config that cannot run
            this), naming it.

    A norm over all heads together (OLMo-2) and heads of which only a part rotates are not taken.

    >>> if torch.cuda.is_available():
    ...     q, k = (torch.randn(2, 5, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 1))
    ...     angles = torch.arange(5, device="cuda")[:, None] * 1e4 ** -torch.linspace(0, 1, 32, device="cuda")
    ...     weight = torch.ones(64, device="cuda", dtype=torch.bfloat16)
    ...     q, k = rms_norm_rope(q, k, angles.cos(), angles.sin(), weight, weight)
    ...     assert q.shape == (2, 5, 4, 64) and k.shape == (2, 5, 1, 64)
    """
    if type(interleaved) is not bool or type(eps) is not float or type(weight_offset) is not float:
        # Here, because calls that are alike are looked up by their options, and True is equal to 1.0.
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
    """Raise `ForetuneError` naming what is wrong with a call, of what the host knows without waiting for the device."""
    check_operands(_OPERANDS, (q, k, cos, sin, q_weight, k_weight))
    for name, x in (("q", q), ("k", k)):
        require(x.dim() >= 3, f"{name} must be (tokens, heads, head_dim), or more before, but is {tuple(x.shape)}")
    head_dim, tokens = q.shape[-1], q.shape[:-2]
    require(
        (k.shape[:-2], k.shape[-1]) == (tokens, head_dim),
        f"q {tuple(q.shape)} and k {tuple(k.shape)} must be alike but for the heads, which are the last but one",
    )
    reason = wrong_heads(q.shape[-2], k.shape[-2], head_dim)
    require(reason is None, str(reason))
    most = max(q.shape[-2], k.shape[-2])
    require(most <= MOST_HEADS, f"there must be at most {MOST_HEADS} heads but there are {most}")
    count = prod(tokens)  # numel() would make a number of a size that a compiler leaves open
    require(count <= MOST_TOKENS, f"there must be at most {MOST_TOKENS} tokens but there are {count}")
    _check_angles(cos, sin, count, head_dim, interleaved)
    require((q_weight is None) == (k_weight is None), "q_weight and k_weight must be given both, or neither")
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None:
            given = tuple(weight.shape)
            require(
                given == (head_dim,),
                f"{name} must be ({head_dim},), one for each element of a head, but is {given}. (A norm over all heads "
                "together, as OLMo-2 has it, is another one)",
            )
    check_options(eps, weight_offset, interleaved)


def check_options(eps: Any, weight_offset: Any, interleaved: Any) -> None:
    """Raise `ForetuneError` naming the option that is not in order."""
    check_flag("interleaved", interleaved)
    for name, number in (("eps", eps), ("weight_offset", weight_offset)):
        is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
        require(is_number and 0 <= number < 1e30, f"{name} must be a number from 0 but is {shown(number)}")


def _check_angles(cos: torch.Tensor, sin: torch.Tensor, tokens: int, head_dim: int, interleaved: bool) -> None:
    require(
        (cos.shape, cos.dtype) == (sin.shape, sin.dtype),
        f"cos {tuple(cos.shape)} {cos.dtype} and sin {tuple(sin.shape)} {sin.dtype} must be alike",
    )
    require(cos.dim() >= 2, f"cos must be (positions, head_dim / 2) but is {tuple(cos.shape)}")
    columns, positions = cos.shape[-1], prod(cos.shape[:-1])
    if interleaved:
        require(
            columns == head_dim // 2,
            f"cos must have head_dim / 2 = {head_dim // 2} columns, one for each pair, but has {columns}: of angles "
            "that are repeated for neighbours take [..., ::2], of those that are repeated by halves the first half",
        )
    else:
        require(
            columns in (head_dim // 2, head_dim),
            f"cos must have head_dim / 2 = {head_dim // 2} columns, or {head_dim} whose halves are alike, but has "
            f"{columns}. (Heads of which only a part rotates are not taken)",
        )
    require(
        positions > 0 and tokens % positions == 0,
        f"cos has {positions} rows, which must divide the {tokens} tokens: token i takes row i % {positions}",
    )
    for name, table in (("cos", cos), ("sin", sin)):
        require(not table.requires_grad, f"{name} requires a gradient, which it has none of here: call {name}.detach()")


def _find(place: int, *arguments: Any) -> Call[None]:
    check_call(*arguments[:9])
    return _call(place, arguments[:6], *arguments[6:])


def _find_backward(place: int, *arguments: Any) -> Call[None]:
    """The forward pass found the tensors in order."""
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
    """All passes in one direction: of pairs of heads, the last of which are q and k, then cos, sin, and both weights or
    None. The gradient of a rotation alone is the rotation back, which the forward kernel computes."""
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
    """q and k normed and rotated, contiguous in their shapes."""
    tensors = arguments[:6]
    if call.copies or not are_placed(tensors):
        return OP.direct(*_readable(tensors), *arguments[6:])  # type: ignore[no-any-return] # a call like any other
    q, k, *tables = tensors
    q_out, k_out = _contiguous_like(q), _contiguous_like(k)
    if call.launch is not None:
        call.launch((q, k, q_out, k_out, *tables))
    return q_out, k_out


def _run_backward(call: Call[None], *arguments: Any) -> tuple[torch.Tensor | None, ...]:
    """The gradients of q, k, q_weight and k_weight; None for both weights where there is no norm."""
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
    """What a backward pass reads of (dq, dk, q, k, cos, sin, q_weight, k_weight): without a norm neither q nor k."""
    return (*tensors[:2], *tensors[4:]) if tensors[-1] is None else tensors


def _backward(ctx: Any, dq: torch.Tensor, dk: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    q, k, q_weight, k_weight = GRADIENT.within(ctx)(dq, dk, *ctx.saved_tensors, *ctx.options)
    return q, k, None, None, q_weight, k_weight


def _fake(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    check_call(*arguments[:9])
    q, k = arguments[:2]
    return q.new_empty(q.shape), k.new_empty(k.shape)


def _fake_backward(*arguments: Any) -> tuple[torch.Tensor, ...]:
    q, k = arguments[2:4]
    weights = (q.new_empty(0) if weight is None else torch.empty_like(weight) for weight in arguments[6:8])
    return q.new_empty(q.shape), k.new_empty(k.shape), *weights


def _readable(tensors: Sequence[Any]) -> list[Any]:
    """The tensors, or contiguous copies where the kernels could not read them."""
    return [
        x if x is None or (lies_well and are_placed([x])) else x.clone(memory_format=torch.contiguous_format)
        for x, lies_well in zip(tensors, _lie_well(tensors), strict=True)
    ]


def _lie_well(tensors: Sequence[Any]) -> list[bool]:
    """Which of a call's tensors the kernels can read as they lie, wherever they begin: heads side by side, tokens at
    multiples of 8 elements, and rows of cos and sin as well, as far apart in both."""
    *heads, cos, sin, q_weight, k_weight = tensors
    alike = _rows(cos).stride(0) == _rows(sin).stride(0)
    return [
        *map(_has_ready_heads, heads),
        *(alike and _has_ready_rows(table) for table in (cos, sin)),
        *(weight is None or weight.is_contiguous() for weight in (q_weight, k_weight)),
    ]


def _has_ready_heads(x: torch.Tensor) -> bool:
    viewed = _tokens(x)
    tokens, heads, head_dim = viewed.shape
    side_by_side = viewed.stride(2) == 1 and (heads == 1 or viewed.stride(1) == head_dim)
    return side_by_side and (tokens == 1 or viewed.stride(0) % 8 == 0) and viewed.data_ptr() == x.data_ptr()


def _has_ready_rows(table: torch.Tensor) -> bool:
    viewed = _rows(table)
    return viewed.stride(1) == 1 and viewed.stride(0) % 8 == 0 and viewed.data_ptr() == table.data_ptr()


def _contiguous_like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _tokens(x: torch.Tensor) -> torch.Tensor:
    """As (tokens, heads, head_dim)."""
    return x.reshape(-1, *x.shape[-2:]) if x.dim() > 3 else x


def _rows(table: torch.Tensor) -> torch.Tensor:
    """cos or sin as (positions, columns)."""
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
