"""Comparison of what a launch computed with the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

#: What an error is relative to if the reference is all zeros.
_LEAST_NORM = 1e-12


def why_wrong(result: torch.Tensor, reference: torch.Tensor, tolerance: float) -> str | None:
    """Return None if a result is correct, else how it differs from the reference.

    The reason names the two usual causes of NaN: a kernel that does not write all of its output, and one that updates
    its output in place without a declaration of that.

    Args:
        result: What a launch returned. Its output was filled with NaN before the launch (see `poison`).
        reference: The correct result in float32, of the same shape.
        tolerance: The largest ||result - reference|| / ||reference|| that counts as correct.

    >>> import torch
    >>> why_wrong(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.001]), 1e-2) is None
    True
    >>> why_wrong(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]), 1e-2)
    'relative error 0.49, more than the tolerance 0.01'
    >>> why_wrong(torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 4.0]), 1e-2)  # doctest: +ELLIPSIS
    '1 of 2 elements are NaN, as the output is before a launch: the kernel does not write them, or ...
    """
    result = result.float()
    error = float((result - reference).norm() / reference.norm().clamp_min(_LEAST_NORM))
    if error <= tolerance:  # never true of NaN
        return None
    if in_reference := int(reference.isnan().sum()):
        return (
            f"{in_reference} of {reference.numel()} elements of the reference are NaN: perhaps it is computed from the "
            "output, which is filled with NaN before a launch (list what a kernel updates in TritonFamily.in_place)"
        )
    if in_result := int(result.isnan().sum()):
        return (
            f"{in_result} of {result.numel()} elements are NaN, as the output is before a launch: the kernel does "
            "not write them, or it reads its output (list what it updates in TritonFamily.in_place)"
        )
    return f"relative error {error:.2g}, more than the tolerance {tolerance:.2g}"
