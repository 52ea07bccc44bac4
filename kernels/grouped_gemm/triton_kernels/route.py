"""Sort rows by the groups that they chose, on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from ....runtime.launching.launcher import Launcher
from .tiles import prepared_map, sizes_of

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

_LANES = 1024


@triton.jit(do_not_specialize=["rows", "groups"])
def route_kernel(
    choice_ptr,  # (rows,)
    order_ptr,  # (rows,) int32
    sizes_ptr,  # (groups,) int32
    rows,
    groups,
    LANES: tl.constexpr,
):
    """Write the size of group g, and the rows that chose it in ascending order, in program g.

    Program `groups` writes the rows that chose no existing group, last.
    """
    group = tl.program_id(0)
    lanes = tl.arange(0, LANES)
    at = tl.zeros((), tl.int32)
    size = tl.zeros((), tl.int32)
    for start in range(0, rows, LANES):
        choice = load_choice(choice_ptr, start + lanes, rows, groups)
        at += tl.sum((choice < group).to(tl.int32))
        size += tl.sum((choice == group).to(tl.int32))
    if group < groups:
        tl.store(sizes_ptr + group, size)
    for start in range(0, rows, LANES):
        mine = load_choice(choice_ptr, start + lanes, rows, groups) == group
        rank = tl.cumsum(mine.to(tl.int32), 0)
        tl.store(order_ptr + at + rank - 1, start + lanes, mine)
        at += tl.sum(mine.to(tl.int32))


@triton.jit
def load_choice(choice_ptr, row, rows, groups):
    """Load the group of each row: `groups` if the chosen group does not exist, `groups` + 1 past the last row."""
    choice = tl.load(choice_ptr + row, row < rows, other=0)
    choice = tl.where((choice >= 0) & (choice < groups), choice, groups).to(tl.int32)
    return tl.where(row < rows, choice, groups + 1)


_launch = Launcher(route_kernel)


def prepare_route(rows: int, groups: int) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]:
    """Return a function that launches `route_kernel` and then the kernel that builds the tile map.

    Its arguments are (choice (rows,), order (rows,), a routing, see `routing_shape`).
    """
    sort = _launch.prepare((groups + 1, 1, 1), (rows, groups), LANES=_LANES, num_warps=4)
    _, build = prepared_map(rows, groups, max(rows, 1))

    def launch(choice: torch.Tensor, order: torch.Tensor, routing: torch.Tensor) -> None:
        sizes = sizes_of(routing)
        sort((choice, order, sizes))
        build((sizes, routing))

    return launch
