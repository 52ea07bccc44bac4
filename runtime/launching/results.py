"""The outputs of a launch: filled before it, and compared with the reference after it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from ...datasets.errors import shown

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
#: What a launch or its reference returns: its output, or a tuple of several.
Outputs: TypeAlias = "torch.Tensor | tuple[torch.Tensor, ...]"

#: The largest relative error that counts as correct, by the dtype of a float output: a few roundings of that dtype. For
#: fp32 it is a few roundings of TF32, the default precision of `tl.dot`.
TOLERANCES = {"fp64": 1e-12, "fp32": 2e-3, "fp16": 2e-3, "bf16": 1e-2, "fp8e4m3": 8e-2, "fp8e5m2": 0.15}
#: What an error is relative to if the reference is all zeros.
_LEAST_NORM = 1e-12


def outputs_of(result: Any) -> tuple[Any, ...]:
    """Return the outputs of a launch or of its reference as a tuple, also if there is only one."""
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def one_or_all(values: tuple[T, ...]) -> T | tuple[T, ...]:
    """Return the only value of a tuple, or the tuple if it has several; the inverse of `outputs_of`."""
    return values[0] if len(values) == 1 else values


def described(result: Any) -> str:
    """Return the number and the shapes of outputs as text: outputs with equal texts can be compared.

    >>> import torch
    >>> described((torch.zeros(2, 3), None))
    'a tensor of shape (2, 3) and None'
    """
    import torch

    texts = (
        f"a tensor of shape {tuple(one.shape)}" if isinstance(one, torch.Tensor) else shown(one)
        for one in outputs_of(result)
    )
    return " and ".join(texts)


def poison(output: torch.Tensor) -> torch.Tensor:
    """Fill an output with a value that hardly any result has, before a kernel writes it; return the tensor.

    It is NaN, the least signed or the greatest unsigned integer, or for booleans a byte that is neither 0 nor 1. A
    kernel that does not write all of its output then fails the check of its result.

    >>> import torch
    >>> poison(torch.zeros(2)).tolist(), poison(torch.zeros(1, dtype=torch.int8)).tolist()
    ([nan, nan], [-128])
    """
    import torch

    if output.dtype == torch.bool:
        poison(output.view(torch.uint8))
        return output
    return output.fill_(float("nan") if output.is_floating_point() else _unlikely(output.dtype))


def _unlikely(dtype: torch.dtype) -> int:
    """Return the integer that `poison` fills an output with."""
    import torch

    limits = torch.iinfo(dtype)
    return limits.min or limits.max


def why_wrong(result: Outputs, reference: Outputs, tolerance: float | tuple[float, ...]) -> str | None:
    """Return None if all outputs of a launch are correct, else how the first wrong one differs from the reference.

    The reason names the two usual causes of a value that was there before the launch: a kernel that does not write all
    of its output, and one that updates its output in place without a declaration of that.

    Args:
        result: What a launch returned. Its outputs were filled before the launch (see `poison`).
        reference: The correct result: as many tensors, of the same shapes.
        tolerance: The largest ||output - reference|| / ||reference|| that counts as correct, for all outputs or for
            each. With 0, integers and booleans must be equal.

    >>> import torch
    >>> why_wrong(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.001]), 1e-2) is None
    True
    >>> why_wrong(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]), 1e-2)
    'relative error 0.49, more than the tolerance 0.01'
    >>> why_wrong((torch.tensor([1.0]), torch.tensor([3, 4])), (torch.tensor([1.0]), torch.tensor([3, 5])), (1e-2, 0.0))
    'output 2 of 2: 1 of 2 elements differ: the first is 4 instead of 5'
    >>> why_wrong(torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 4.0]), 1e-2)  # doctest: +ELLIPSIS
    '1 of 2 elements are NaN, as the output is before a launch: the kernel does not write them, or ...
    """
    results = outputs_of(result)
    tolerances = tolerance if isinstance(tolerance, tuple) else (tolerance,) * len(results)
    for place, compared in enumerate(zip(results, outputs_of(reference), tolerances, strict=True), 1):
        if (wrong := _why_output_is_wrong(*compared)) is not None:
            return wrong if len(results) == 1 else f"output {place} of {len(results)}: {wrong}"
    return None


def _why_output_is_wrong(result: torch.Tensor, reference: torch.Tensor, tolerance: float) -> str | None:
    """Return what `why_wrong` does, for one output."""
    import torch

    if result.dtype == torch.bool:
        result, reference = result.view(torch.uint8), reference.bool().view(torch.uint8)
    is_float = result.is_floating_point()
    if is_float:
        result = result.float()
    elif not (result != reference).any():
        return None
    is_exact = not is_float and tolerance == 0
    if not is_exact:
        expected = reference.float()
        error = float((result.float() - expected).norm() / expected.norm().clamp_min(_LEAST_NORM))
        if error <= tolerance:  # never true of NaN
            return None
    if in_reference := int(reference.isnan().sum()):
        return (
            f"{in_reference} of {reference.numel()} elements of the reference are NaN: perhaps it is computed from the "
            "output, which is filled with NaN before a launch (list what a kernel updates in TritonFamily.in_place)"
        )
    differing = (result != reference).flatten()
    name, left = ("NaN", result.isnan()) if is_float else (filled := _unlikely(result.dtype), result == filled)
    if n_left := int((differing & left.flatten()).sum()):
        return (
            f"{n_left} of {result.numel()} elements are {name}, as the output is before a launch: the kernel does "
            "not write them, or it reads its output (list what it updates in TritonFamily.in_place)"
        )
    if not is_exact:
        return f"relative error {error:.2g}, more than the tolerance {tolerance:.2g}"
    first = int(differing.nonzero()[0])
    got, wanted = (one.flatten()[first].item() for one in (result, reference))
    return f"{int(differing.sum())} of {result.numel()} elements differ: the first is {got} instead of {wanted}"
