"""`Op`: declare a PyTorch operator once, with its schema, computation, gradient and FLOPs.

In eager mode an op calls its code directly, through an `autograd.Function` if a gradient is needed, because PyTorch's
dispatcher would cost more than the launch. Where PyTorch must see an operator (`torch.compile`, fake tensors, dispatch
modes, function transforms), the op calls `torch.ops.foretune.<name>`.

Needs torch and triton.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

import torch
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable
from torch.utils import flop_counter

from ..datasets import ForetuneError
from ..runtime.launching.collector import collecting_later
from .op_calls import Call, Memo, decode, encode, flop_formulas, is_transformed, key_of, needs_gradient, needs_operator

#: Operators are defined here instead of with the `custom_op` decorator, which adds about 20 us to each call.
_library: Any = torch.library.Library("foretune", "FRAGMENT")  # type: ignore[no-untyped-call]
Pass = TypeVar("Pass", bound=Callable[..., Any])


class Op:
    """An operator `torch.ops.foretune.<name>` that bypasses PyTorch's dispatcher in eager mode.

    Arguments are always positional: first tensors, then options, in the order of the schema. An option whose name
    begins with `config` is a `KernelConfig`; the operator takes it as text (`encode`), so that Dynamo can trace a call.

    Args:
        schema: The operator's schema in PyTorch's notation.
        run: `run(call, *arguments)` computes the result, for tensors that have memory. Returned tensors that nobody
            needs may be None; the operator replaces them with empty ones.
        fake: `fake(*arguments)` returns tensors with the metadata of `run`'s result, and raises the errors of `find`.
        find: `find(place, *arguments)` computes what all similar calls on the GPU with this index share, and raises
            errors for invalid arguments. Without it, `call` is None.
        backward: `backward(ctx, *gradients)` returns a gradient for each tensor, at least for those of
            `ctx.needs_input_grad`. `ctx` has `saved_tensors`, `options` and `call`, which is None if the operator ran
            the forward pass. Without it, the op itself computes a gradient and is not differentiable.
        save: `save(ctx, arguments, output)` calls `ctx.save_for_backward`. By default all tensors are saved.
        flops: The formula for `_register_flops`.
        compile_step: `compile_step(call, needs, *arguments)` compiles everything that calls with these gradients
            launch. It runs once per combination of gradients, at its first call in eager mode.
        intermediate: Whether the operator returns a tuple whose items after the first are only for the backward pass; a
            call then returns the first item.
    """

    def __init__(
        self,
        schema: str,
        *,
        run: Callable[..., Any],
        fake: Callable[..., Any],
        find: Callable[..., Call[Any]] | None = None,
        backward: Callable[..., Any] | None = None,
        save: Callable[..., None] | None = None,
        flops: Callable[..., Any] | None = None,
        compile_step: Callable[..., None] | None = None,
        intermediate: bool = False,
    ) -> None:
        self.name, _, parameters = schema.partition("(")
        kinds, names = zip(*[one.split(" ") for one in parameters.partition(")")[0].split(", ")], strict=True)
        self._tensors = sum(kind.startswith("Tensor") for kind in kinds)
        self._configs = [place for place, name in enumerate(names) if name.startswith("config")]
        self._first = names[0]
        defaults = [name.partition("=")[2] for name in names if "=" in name]
        self._defaults = tuple(value == "True" for value in defaults)  # of the last options, which are flags
        self._run, self._find, self._save, self._compile_step = run, find, save or self._save_all, compile_step
        self._count, self._intermediate = len(names), intermediate
        self.calls: Memo[Call[Any]] = Memo()
        _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        _library.impl(self.name, self._of_operator, "CompositeExplicitAutograd")
        _register_fake(f"foretune::{self.name}", fake)
        self._apply: Callable[..., Any] | None = None
        if backward is None:
            self.operator = _differentiable(self.name, lambda ctx, inputs, output: None, self._refuse)
        else:
            padded = outside_autocast(_padded(backward))
            self.operator = _differentiable(self.name, self._setup_context, padded)
            self._apply = _eager_function(self, padded).apply
        if flops is not None:
            _register_flops(self.name, flops)
        #: Calls the op on tensors and options; configs are `KernelConfig`s.
        self.call = _call_function(self)

    def direct(self, *arguments: Any) -> Any:
        """Return the result of `run` without recording anything for a gradient."""
        if self._find is None:
            return self._run(None, *arguments)
        return self._run(self.call_of(arguments), *arguments)

    def within(self, ctx: Any) -> Callable[..., Any]:
        """Return the function that computes this op in the backward pass of `ctx`.

        This is the operator if the operator ran the forward pass (configs in the options are then texts), else
        `direct`.
        """
        return self.operator if ctx.call is None else self.direct

    def call_of(self, arguments: tuple[Any, ...]) -> Call[Any]:
        """Return the `Call` for these arguments, which is computed once for all calls with equal `key_of`."""
        key = key_of(arguments[: self._tensors], arguments[self._tensors :], self._first)
        return self.calls.found(key) or self._compute_call(key, arguments)

    def _compute_call(self, key: tuple[Any, ...], arguments: tuple[Any, ...]) -> Call[Any]:
        assert self._find is not None
        call = self._find(key[0], *arguments)
        call.is_differentiable = any(one is not None and one.requires_grad for one in arguments[: self._tensors])
        return self.calls.add(key, call)

    def _compile(self, call: Call[Any], needs: tuple[bool, ...], arguments: Sequence[Any]) -> None:
        """Compile everything that the first call launches, for the gradients in `needs` (whether each is needed)."""
        assert self._compile_step is not None
        call.compiled.add(needs)
        with collecting_later():
            self._compile_step(call, needs, *arguments)

    def _of_operator(self, *arguments: Any) -> Any:
        """Run the op on real tensors with the arguments of the PyTorch operator, and return its results."""
        options = [tuple(value) if isinstance(value, list) else value for value in arguments]
        if missing := self._count - len(options):  # PyTorch omits trailing default values
            options += self._defaults[-missing:]
        for place in self._configs:
            options[place] = decode(options[place])
        made = self.direct(*options)
        if not isinstance(made, tuple):
            return made
        return tuple(arguments[0].new_empty(0) if one is None else one for one in made)

    def _setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.call, ctx.options = None, inputs[self._tensors :]
        ctx.set_materialize_grads(not self._intermediate)
        self._save(ctx, inputs, output)

    def _save_all(self, ctx: Any, arguments: tuple[Any, ...], _: Any) -> None:
        ctx.save_for_backward(*arguments[: self._tensors])

    def _refuse(self, ctx: Any, *_: Any) -> Any:
        raise ForetuneError(
            f"foretune.{self.name.removesuffix('_backward')} has no second derivative: its gradient cannot be "
            "differentiated"
        )


def _call_function(op: Op) -> Callable[..., Any]:
    """Return the function `Op.call` of an op, written as one flat function to save host time."""
    count, first, run, intermediate = op._tensors, op._first, op._run, op._intermediate
    no_needs, has_steps, apply = (False,) * count, op._compile_step is not None, op._apply

    def call(*arguments: Any) -> Any:
        tensors = arguments[:count]
        if needs_operator(tensors):
            made = op.operator(*[encode(one) if i in op._configs else one for i, one in enumerate(arguments)])
            return made[0] if intermediate else made
        known = op.calls.found(key := key_of(tensors, arguments[count:], first)) or op._compute_call(key, arguments)
        if known.is_differentiable and apply is not None and torch.is_grad_enabled():
            return apply(*tensors, arguments, known)
        if has_steps and no_needs not in known.compiled:
            op._compile(known, no_needs, arguments)
        made = run(known, *arguments)
        return made[0] if intermediate else made

    return call


def _eager_function(op: Op, backward: Callable[..., Any]) -> Any:
    """Return the `autograd.Function` of an op in eager mode.

    Its arguments are the tensors, which PyTorch must see, then all arguments as one tuple, which is faster to pass than
    single arguments, and the `Call`.
    """
    count, run, save, intermediate = op._tensors, op._run, op._save, op._intermediate
    has_steps = op._compile_step is not None

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Any:
            given, call = arguments[-2:]
            ctx.call, ctx.options = call, given[count:]
            if has_steps and (needs := ctx.needs_input_grad[:count]) not in call.compiled:
                op._compile(call, needs, given)
            made = run(call, *given)
            save(ctx, given, made)
            return made[0] if intermediate else made

    Eager.backward = staticmethod(once_differentiable(backward))  # type: ignore[assignment]
    return Eager


def _padded(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `backward` and adds None for each argument that has no gradient."""

    def run(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        made = backward(ctx, *gradients)
        if ctx.call is not None:
            return *made, None, None  # PyTorch accepts a gradient that is not needed
        needs = ctx.needs_input_grad  # the operator returns empty tensors instead of None
        made = [one if needed else None for one, needed in zip(made, needs, strict=False)]
        return *made, *[None] * (len(needs) - len(made))

    return run


def _register_fake(operator: str, fake: Callable[..., Any]) -> None:
    """Call `torch.library.register_fake` without its slow search for the calling module.

    It uses `inspect`, which looks at every loaded module (30 ms with torch) unless it knows this file's module.
    """
    vars(inspect).get("modulesbyfile", {})[__file__] = __name__
    torch.library.register_fake(operator, fake, lib=_library)


def outside_autocast(backward: Pass) -> Pass:
    """Decorate a backward pass, `backward(ctx, *gradients)`, to run with autocast off.

    An op computes in the dtype of its tensors. If a backward pass ran inside autocast, PyTorch would cast the operands
    of its own products, whether or not the forward pass ran inside autocast.
    """

    @wraps(backward)
    def run(ctx: Any, *gradients: Any) -> Any:
        for gradient in gradients:
            if gradient is not None and not gradient.is_meta:
                device_type = gradient.device.type
                if not torch.is_autocast_enabled(device_type):
                    break
                with torch.autocast(device_type, enabled=False):
                    return backward(ctx, *gradients)
        return backward(ctx, *gradients)

    return run  # type: ignore[return-value]


def _differentiable(name: str, setup_context: Callable[..., None], backward: Callable[..., Any]) -> Callable[..., Any]:
    """Register the gradient of the operator `foretune::name`, and return a function that calls the operator.

    The operator's own autograd registration does not support PyTorch's function transforms. While one is active, the
    call goes through an `autograd.Function` that does: `grad`, `vjp` and `jacrev` nest, `vmap` runs the operator once
    for each example, and forward-mode AD raises an error.

    Args:
        name: The operator's name, without its namespace.
        setup_context: `setup_context(ctx, inputs, output)`, as for `torch.library.register_autograd`.
        backward: `backward(ctx, *gradients)`, as for `torch.library.register_autograd`. It must call operators through
            the functions that `_differentiable` returned for them.
    """
    operator, guarded = getattr(torch.ops.foretune, name), _GuardedLibrary()
    torch.library.register_autograd(f"foretune::{name}", backward, setup_context=setup_context, lib=guarded)

    class Transformed(torch.autograd.Function):
        """The autograd function that torch.func's transforms (`grad`, `vmap`, ...) differentiate and batch."""

        @staticmethod
        def forward(*arguments: Any) -> Any:
            below = call if peek_interpreter_stack() is not None else operator  # the innermost transform
            return below(*arguments)

        @staticmethod
        def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
            if not info.batch_size:
                raise ForetuneError(f"foretune.{name} cannot be mapped over zero examples")
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


def _register_flops(name: str, formula: Callable[..., Any]) -> None:
    """Register how many FLOPs the operator `foretune::name` counts in PyTorch's `FlopCounterMode`.

    Args:
        name: The operator's name, without its namespace.
        formula: `formula(*arguments, **_)` of the operator's arguments, with shapes in place of tensors.
    """
    operator = getattr(torch.ops.foretune, name)
    flop_counter.register_flop_formula(operator)(formula)
    flop_formulas[operator] = flop_counter.flop_registry[operator]


def has_tangent(value: Any) -> bool:
    """Return whether forward-mode AD is active and this value has a tangent."""
    if forward_ad._current_level < 0 or not isinstance(value, torch.Tensor):
        return False
    return forward_ad.unpack_dual(value).tangent is not None  # type: ignore[no-untyped-call]


class _GuardedLibrary:
    """Stands in for a `torch.library.Library`: gradients registered with it raise errors instead of being wrong.

    PyTorch's own registration gives wrong results in two cases. It drops the tangents of forward-mode AD, and it
    misapplies torch.func's transforms to the registered operator, which `torch.compile` calls when code transforms an
    `Op`.
    """

    def impl(self, name: str, kernel: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        def guarded(keyset: Any, *inputs: Any, **keywords: Any) -> Any:
            if forward_ad._current_level >= 0 and any(map(has_tangent, inputs)):
                raise ForetuneError(_no_forward_mode(name))
            if torch._C._are_functorch_transforms_active() and needs_gradient(inputs):
                raise ForetuneError(
                    f"torch.ops.foretune.{name} cannot be differentiated by torch.func inside torch.compile: "
                    f"call foretune.{name}, and apply the transform outside the compiled function"
                )
            return kernel(keyset, *inputs, **keywords)

        _library.impl(name, guarded, *arguments, **options)


def _no_forward_mode(name: str) -> str:
    return (
        f"foretune.{name} has no forward-mode derivative (jvp, jacfwd, hessian): use reverse mode (grad, vjp, jacrev)"
    )
