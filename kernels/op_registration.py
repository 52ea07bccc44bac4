"""How the operators of all ops are registered with PyTorch: shapes without memory, gradients (also under autocast and
function transforms), FLOPs.

Needs torch and triton.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.utils import flop_counter

from ..datasets import ForetuneError
from .op_calls import flop_formulas, is_transformed, needs_gradient

Pass = TypeVar("Pass", bound=Callable[..., Any])


def register_fake(operator: str, fake: Callable[..., Any], library: Any) -> None:
    """`torch.library.register_fake`, which has `inspect` find the line that calls it: unless that is told which module
    this file is, it looks at every module that is loaded, 30 ms with torch."""
    vars(inspect).get("modulesbyfile", {})[__file__] = __name__
    torch.library.register_fake(operator, fake, lib=library)


def outside_autocast(backward: Pass) -> Pass:
    """Decorate a backward pass, `backward(ctx, *gradients)`, to run with autocast off.

    An op computes in the dtype of its tensors. PyTorch's own products in a backward pass would be recast if the pass
    ran inside autocast, whether or not the forward pass did.
    """

    @wraps(backward)
    def run(ctx: Any, *gradients: Any) -> Any:
        kinds = {gradient.device.type for gradient in gradients if gradient is not None} - {"meta"}
        kind = kinds.pop() if kinds else None
        if kind is None or not torch.is_autocast_enabled(kind):
            return backward(ctx, *gradients)
        with torch.autocast(kind, enabled=False):
            return backward(ctx, *gradients)

    return run  # type: ignore[return-value]


def differentiable(
    name: str, setup_context: Callable[..., None], backward: Callable[..., Any], library: Any
) -> Callable[..., Any]:
    """Register the gradient of the operator `foretune::name`, and return what calls the operator.

    The operator's own autograd registration does not support PyTorch's function transforms. While one is active, the
    call goes through an `autograd.Function` that does: `grad`, `vjp` and `jacrev` nest, `vmap` runs the operator once
    for each example, and forward-mode AD is refused.

    Args:
        name: The operator's name, without its namespace.
        setup_context: `setup_context(ctx, inputs, output)`, as `torch.library.register_autograd` takes it.
        backward: `backward(ctx, *gradients)`, likewise. It must call operators by what this function returned.
        library: The `torch.library.Library` that defines the operator.
    """
    operator, backward = getattr(torch.ops.foretune, name), outside_autocast(backward)
    guarded: Any = _GuardedLibrary(library)
    torch.library.register_autograd(f"foretune::{name}", backward, setup_context=setup_context, lib=guarded)

    class Transformed(torch.autograd.Function):
        """The operator under function transforms."""

        @staticmethod
        def forward(*arguments: Any) -> Any:
            below = call if peek_interpreter_stack() is not None else operator  # the innermost transform
            return below(*arguments)

        @staticmethod
        def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
            if not info.batch_size:
                raise ForetuneError(f"foretune.{name} cannot be mapped over no examples at all")
            mapped = [isinstance(dim, int) for dim in in_dims]
            made = [
                call(
                    *[
                        one.select(dim, i).contiguous() if is_mapped else one
                        for one, dim, is_mapped in zip(arguments, in_dims, mapped, strict=True)
                    ]
                )
                for i in range(info.batch_size)
            ]
            if isinstance(made[0], tuple):
                return tuple(map(torch.stack, zip(*made, strict=True))), (0,) * len(made[0])
            return torch.stack(made), 0

        @staticmethod
        def jvp(ctx: Any, *_: Any) -> Any:
            raise ForetuneError(_no_forward_mode(name))

    Transformed.setup_context = staticmethod(setup_context)  # type: ignore[method-assign]
    Transformed.backward = staticmethod(backward)  # type: ignore[method-assign]

    def call(*arguments: Any) -> Any:
        if torch.compiler.is_compiling() or not is_transformed():
            return operator(*arguments)
        return Transformed.apply(*arguments)  # type: ignore[no-untyped-call]

    return call


def not_differentiable(name: str, library: Any) -> Callable[..., Any]:
    """As `differentiable`, for an operator that computes a gradient: differentiating it again is refused."""

    def refuse(ctx: Any, *_: Any) -> Any:
        raise ForetuneError(
            f"foretune.{name.removesuffix('_backward')} has no second derivative: its gradient cannot be differentiated"
        )

    return differentiable(name, lambda ctx, inputs, output: None, refuse, library)


def register_flops(name: str, formula: Callable[..., Any]) -> None:
    """Tell PyTorch's `FlopCounterMode` how many FLOPs the operator `foretune::name` makes: those of its products.

    Args:
        name: The operator's name, without its namespace.
        formula: `formula(*arguments, **_)` of the operator's arguments, with the shapes of tensors in their place.
    """
    operator = getattr(torch.ops.foretune, name)
    flop_counter.register_flop_formula(operator)(formula)
    flop_formulas[operator] = flop_counter.flop_registry[operator]


def has_tangent(value: Any) -> bool:
    """Return whether forward-mode AD is active and has a tangent of this value."""
    if forward_ad._current_level < 0 or not isinstance(value, torch.Tensor):
        return False
    return forward_ad.unpack_dual(value).tangent is not None  # type: ignore[no-untyped-call]


class _GuardedLibrary:
    """A library whose gradients refuse what PyTorch's registration would get wrong: the tangents of forward-mode AD,
    which it drops, and torch.func's transforms of the operator itself, which torch.compile makes of those of an op."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def impl(self, name: str, kernel: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        def guarded(keyset: Any, *inputs: Any, **keywords: Any) -> Any:
            if forward_ad._current_level >= 0 and any(map(has_tangent, inputs)):
                raise ForetuneError(_no_forward_mode(name))
            if torch._C._are_functorch_transforms_active() and needs_gradient(inputs):
                raise ForetuneError(
                    f"torch.ops.foretune.{name} cannot be differentiated by torch.func, which is what torch.compile "
                    f"tries: call foretune.{name}, and the transform outside of what is compiled"
                )
            return kernel(keyset, *inputs, **keywords)

        self._library.impl(name, guarded, *arguments, **options)


def _no_forward_mode(name: str) -> str:
    return (
        f"foretune.{name} has no forward-mode derivative (jvp, jacfwd, hessian): use reverse mode (grad, vjp, jacrev)"
    )
