"""`poison`: an output that no kernel has written yet, so that one which writes too little is found out."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def poison(output: torch.Tensor) -> torch.Tensor:
    """Fills a tensor with NaN, or with the least integer where it has no NaN, and returns it.

    >>> import torch
    >>> poison(torch.zeros(2)).tolist(), poison(torch.zeros(1, dtype=torch.int8)).tolist()
    ([nan, nan], [-128])
    """
    import torch

    if output.is_floating_point():
        return output.fill_(float("nan"))
    return output.fill_(torch.iinfo(output.dtype).min)
