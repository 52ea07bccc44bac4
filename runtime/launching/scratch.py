"""Device memory for the tensor descriptors that a kernel with TMA loads makes for itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import triton
from triton.runtime import _allocation

if TYPE_CHECKING:
    import torch


def _scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    import torch

    # From PyTorch's caching allocator: stream-ordered, and part of the pool while a CUDA graph is captured.
    return torch.empty(size, dtype=torch.int8, device="cuda")


def ensure_allocator() -> None:
    """Gives Triton an allocator in this context (it keeps one a thread) unless the caller has set one."""
    if isinstance(_allocation._allocator.get(), _allocation.NullAllocator):
        triton.set_allocator(_scratch)


def with_scratch(
    prepared: Callable[[Sequence[torch.Tensor | None]], None],
) -> Callable[[Sequence[torch.Tensor | None]], None]:
    """The same launches, with an allocator in the context that each of them finds."""

    def launch(tensors: Sequence[torch.Tensor | None]) -> None:
        ensure_allocator()
        prepared(tensors)

    return launch
