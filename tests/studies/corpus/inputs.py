"""Inputs for the recipes: random tensors on the GPU, never zeros."""

from __future__ import annotations

from functools import partial


def rand(*shape, dtype="bfloat16", grad=False):
    """Return normally distributed values."""
    import torch

    return torch.randn(*shape, device="cuda", dtype=getattr(torch, dtype)).requires_grad_(grad)


def integers(high: int, *shape, dtype="int32"):
    """Return integers from 0 to high - 1."""
    import torch

    return torch.randint(high, shape, device="cuda", dtype=getattr(torch, dtype))


def backward(out) -> None:
    """Run the backward pass of all outputs of a call that have one, with random gradients."""
    import torch

    outputs = out if isinstance(out, (tuple, list)) else [out]
    outputs = [one for one in outputs if isinstance(one, torch.Tensor) and one.requires_grad]
    torch.autograd.backward(outputs, [torch.randn_like(one) for one in outputs])


def calls_of(function, ops, shapes) -> dict:
    """Return for each op the functions that call `function(op, shape)`, one for each shape."""
    return {op: [partial(function, op, shape) for shape in shapes] for op in ops}


def batches(call: partial) -> list[partial]:
    """Return a call, and two with other values of its first size, on which few binaries depend.

    A first size of 1 becomes 2, since Triton compiles integers of 1 as constants.
    """
    op, (first, *rest) = call.args
    least = max(first, 2)
    sizes = (first, first // 2, first // 4) if first >= 8 else (least, 2 * least, 3 * least)
    return [partial(call.func, op, (size, *rest)) for size in sizes]
