"""Sort rows by the groups that they chose, on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from ....runtime.launching.launcher import Launcher
from ..space import cdiv
from .tiles import prepared_map, sizes_of

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

_LANES = 1024
_MOST_ALONE = 4096  # a program for each group reads so many rows; of more, it sorts one part
_PROGRAMS = 2048  # for all groups and parts; each program also reads all their counts


@triton.jit(do_not_specialize=["rows", "groups", "part_rows"])
def count_kernel(choice_ptr, counts_ptr, rows, groups, part_rows, LANES: tl.constexpr):
    """Write to counts (groups + 1, parts) how many rows of part p chose group g, in program (g, p)."""
    group, part = tl.program_id(0), tl.program_id(1)
    count = tl.zeros((LANES,), tl.int32)
    for start in range(part * part_rows, tl.minimum((part + 1) * part_rows, rows), LANES):
        count += (load_choice(choice_ptr, start + tl.arange(0, LANES), rows, groups) == group).to(tl.int32)
    tl.store(counts_ptr + group * tl.num_programs(1) + part, tl.sum(count))


@triton.jit(do_not_specialize=["rows", "groups", "part_rows"])
def route_kernel(
    choice_ptr,  # (rows,)
    counts_ptr,  # (groups + 1, parts) int32, or None if there is one part
    order_ptr,  # (rows,) int32
    sizes_ptr,  # (groups,) int32
    rows,
    groups,
    part_rows,
    LANES: tl.constexpr,
):
    """Write the size of group g, and the rows of part p that chose it in ascending order, in program (g, p).

    Programs of group `groups` write the rows that chose no existing group, last.
    """
    group, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    lanes = tl.arange(0, LANES)
    at = tl.zeros((), tl.int32)
    size = tl.zeros((), tl.int32)
    if counts_ptr is None:
        for start in range(0, rows, LANES):
            choice = load_choice(choice_ptr, start + lanes, rows, groups)
            at += tl.sum((choice < group).to(tl.int32))
            size += tl.sum((choice == group).to(tl.int32))
    else:
        first = group * parts
        for start in range(0, first + parts, LANES):
            i = start + lanes
            count = tl.load(counts_ptr + i, i < first + parts, other=0)
            at += tl.sum(tl.where(i < first + part, count, 0))
            size += tl.sum(tl.where(i >= first, count, 0))
    if (group < groups) & (part == 0):
        tl.store(sizes_ptr + group, size)
    for start in range(part * part_rows, tl.minimum((part + 1) * part_rows, rows), LANES):
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


_count, _route = Launcher(count_kernel), Launcher(route_kernel)


def prepare_route(rows: int, groups: int) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]:
    """Return a function that launches `route_kernel` and then the kernel that builds the tile map.

    Its arguments are (choice (rows,), order (rows,), a routing, see `routing_shape`).
    """
    parts = 1 if rows <= _MOST_ALONE else min(cdiv(rows, _LANES), max(_PROGRAMS // (groups + 1), 1))
    part_rows = cdiv(rows, parts * _LANES) * _LANES
    grid, integers = (groups + 1, parts, 1), (rows, groups, part_rows)
    count, sort = (kernel.prepare(grid, integers, LANES=_LANES, num_warps=4) for kernel in (_count, _route))
    _, build = prepared_map(rows, groups, max(rows, 1))

    def launch(choice: torch.Tensor, order: torch.Tensor, routing: torch.Tensor) -> None:
        sizes, counts = sizes_of(routing), None
        if parts > 1:
            counts = order.new_empty((groups + 1) * parts)
            count((choice, counts))
        sort((choice, counts, order, sizes))
        build((sizes, routing))

    return launch
