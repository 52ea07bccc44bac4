"""What the interpreter of kernels computes with, and what it finds: `Block`, `Guess`, `Facts`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

#: What a number loaded from memory is taken for. Each later one is larger, so that "from the start of a group to its
#: end" is a range.
LOADED = 512
#: Loads and stores of less than this many contiguous bytes are scattered: a sector of the L2 cache has 32.
SECTOR_BYTES = 32
#: More contiguous bytes than this make no difference.
_LONGEST_PIECE = 512


@dataclass(frozen=True)
class Guess:
    """A number that only the GPU knows, with the value that it is taken for."""

    value: float


@dataclass(frozen=True)
class Dtype:
    """The dtype of a tensor; `pointed` is as in `Block`."""

    itemsize: int
    pointed: int = 0


@dataclass(frozen=True)
class Block:
    """A tensor of a program, of numbers or of pointers.

    Attributes:
        shape: The shape; () for a single pointer.
        itemsize: The bytes of an element.
        strides: By how much the value grows along each axis, if it is an address or an index.
        pointed: The bytes of what a pointer points to; 0 for numbers.
        name: The parameter that a pointer comes from.
    """

    shape: tuple[int, ...]
    itemsize: int = 4
    strides: tuple[float, ...] = ()
    pointed: int = 0
    name: str = ""

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def moved_bytes(self) -> int:
        """The bytes that a load or store through these pointers moves."""
        return self.size * self.pointed

    def reshaped(self, shape: tuple[int, ...]) -> Block:
        """Return it with another shape; its strides are kept if the rank is the same."""
        return replace(self, shape=shape, strides=self.strides if len(shape) == len(self.shape) else ())

    def transposed(self) -> Block:
        """Return it with the last two axes exchanged."""
        if len(self.shape) < 2:
            return self
        strides = (*self.strides[:-2], *self.strides[-1:], *self.strides[-2:-1])
        return replace(self, shape=(*self.shape[:-2], self.shape[-1], self.shape[-2]), strides=strides)

    def with_axis(self, axis: int) -> Block:
        """Return it with a new axis of size 1."""
        shape, strides = list(self.shape), list(self.strides or (0.0,) * len(self.shape))
        axis = axis if axis >= 0 else len(shape) + 1 + axis
        shape.insert(axis, 1)
        strides.insert(axis, 0.0)
        return replace(self, shape=tuple(shape), strides=tuple(strides))

    def reduced(self, axis: Any) -> Block | Guess:
        """Return what a reduction leaves: of all axes if `axis` is None."""
        if not isinstance(axis, int) or len(self.shape) < 2:
            return Guess(1)
        axis %= len(self.shape)
        return Block(self.shape[:axis] + self.shape[axis + 1 :], self.itemsize)


@dataclass
class Loop:
    """A loop of the kernel. The bytes and operations are those of one iteration, without inner loops."""

    trips: float
    load_bytes: float = 0.0
    dot_flops: float = 0.0
    carried_bytes: float = 0.0  # of tensors that an iteration takes over from the one before


@dataclass
class Facts:
    """What one program of a launch does. Bytes, operations and elements are totals over its loops.

    Attributes:
        scattered_bytes: Loaded or stored in pieces of less than 32 contiguous bytes.
        piece_bytes: The sum over loaded and stored bytes of how many bytes are contiguous there.
        dot_shape: (M, N, K) of the dot with the most operations.
        operations: Elements computed by arithmetic.
        special: Elements computed by exp and the like.
        reduced: Elements that reductions read.
        scanned: Elements of scans, sorts and the like.
        largest_bytes: Of the largest tensor in registers.
        stored: Elements stored, by the parameter of the pointer.
    """

    load_bytes: float = 0.0
    store_bytes: float = 0.0
    atomic_bytes: float = 0.0
    scattered_bytes: float = 0.0
    piece_bytes: float = 0.0
    dot_flops: float = 0.0
    dot_shape: tuple[int, int, int] = (0, 0, 0)
    dot_itemsize: int = 0
    operations: float = 0.0
    special: float = 0.0
    reduced: float = 0.0
    scanned: float = 0.0
    largest_bytes: float = 0.0
    loops: list[Loop] = field(default_factory=list)
    stored: dict[str, float] = field(default_factory=dict)

    def moved(self, pointers: Block, times: float) -> None:
        """Count the contiguous bytes of a load or store."""
        each = [size for size, stride in zip(pointers.shape, pointers.strides, strict=False) if abs(stride) == 1]
        piece, moved = pointers.pointed * max(each, default=1), times * pointers.moved_bytes
        self.scattered_bytes += moved if piece < SECTOR_BYTES else 0.0
        self.piece_bytes += moved * min(piece, _LONGEST_PIECE)

    def in_registers(self, block: Block) -> None:
        """Note a tensor in registers."""
        self.largest_bytes = max(self.largest_bytes, float(block.size * block.itemsize))


def value_of(one: Any) -> Any:
    """Return the number that is known or guessed."""
    return one.value if isinstance(one, Guess) else LOADED if isinstance(one, Block) else one


def is_number(one: Any) -> bool:
    """Return whether arithmetic with a value gives a number; None counts as 0."""
    return one is None or isinstance(one, (int, float, Guess))


def plain(value: Any) -> Any:
    """Return the value of a `tl.constexpr`, and other values unchanged."""
    return value.value if type(value).__name__ == "constexpr" else value


def itemsize_of(dtype: Any) -> int:
    """Return the bytes of an element of a dtype of torch or Triton, or of its name.

    >>> [itemsize_of(name) for name in ("torch.bfloat16", "fp32", "float8e4nv", "int1")]
    [2, 4, 1, 1]
    """
    if isinstance(dtype, Dtype):
        return dtype.itemsize
    text = str(dtype).lower()
    if "float8" in text or "fp8" in text or "bool" in text or text == "int1":
        return 1
    return next((size for bits, size in (("64", 8), ("32", 4), ("16", 2), ("8", 1)) if bits in text), 4)


def shape_of(sizes: Any) -> tuple[int, ...]:
    """Return the shape that a kernel's source gives, as a tuple; unknown sizes count as 1."""
    many = sizes if isinstance(sizes, (tuple, list)) else (sizes,)
    return tuple(max(int(value_of(plain(one)) or 1), 1) if is_number(plain(one)) else 1 for one in many)
