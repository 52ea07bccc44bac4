"""What a project's tensors need to become operands of the op."""

from __future__ import annotations

import torch

from ...runtime.arguments import warn_once


def sizes_between(ends: torch.Tensor) -> torch.Tensor:
    """Group sizes (groups,), int32, from where each group ends; on the device, nothing waits.

    >>> sizes_between(torch.tensor([4, 4, 6])).tolist()
    [4, 0, 2]
    """
    return ends.to(torch.int32).diff(prepend=ends.new_zeros(1, dtype=torch.int32))


def stored_as_n_k(w: torch.Tensor, owner: str) -> torch.Tensor:
    """Weights (groups, N, K) that the op can read: themselves, unless they are a view of what is stored as
    (groups, K, N). Then they are copied, which is said once for each owner.

    >>> stored = torch.zeros(2, 8, 16)
    >>> stored_as_n_k(stored, "an example") is stored
    True
    """
    if w.is_contiguous():
        return w
    if not torch.compiler.is_compiling():  # Dynamo cannot trace a warning
        warn_once(
            f"{owner}: the weights are stored as (experts, K, N) but Foretune reads (experts, N, K)",
            ": each call copies them. Store them transposed, or keep the project's own implementation",
        )
    return w.contiguous()
