"""The values of the abstract interpreter of kernels (`Block`, `Guess`), and Triton's functions on them."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
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
    """A scalar whose value only the GPU knows; `value` is the number that the interpreter assumes for it."""

    value: float


@dataclass(frozen=True)
class Dtype:
    """The dtype of a `Block`: the bytes of an element, and for pointers the bytes of an element that they point to."""

    itemsize: int
    pointed: int = 0


@dataclass(frozen=True)
class Block:
    """A tensor in the kernel, of numbers or pointers, with its shape and layout but without its contents.

    Attributes:
        shape: The shape; () for a single pointer.
        itemsize: The bytes of an element.
        strides: The increase of the value per step along each axis, if the values are addresses or indices.
        pointed: The bytes of the element that a pointer points to; 0 for numbers.
        name: The kernel parameter that a pointer is computed from.
    """

    shape: tuple[int, ...]
    itemsize: int = 4
    strides: tuple[float, ...] = ()
    pointed: int = 0
    name: str = ""

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    @property
    def moved_bytes(self) -> int:
        """Return the number of bytes that one load or store through these pointers moves; 0 for numbers."""
        return self.size * self.pointed

    def reshaped(self, shape: tuple[int, ...]) -> Block:
        """Return this block with another shape; strides are dropped if the number of axes changes."""
        return replace(self, shape=shape, strides=self.strides if len(shape) == len(self.shape) else ())

    def transposed(self) -> Block:
        """Return this block with the last two axes exchanged."""
        if len(self.shape) < 2:
            return self
        strides = (*self.strides[:-2], *self.strides[-1:], *self.strides[-2:-1])
        return replace(self, shape=(*self.shape[:-2], self.shape[-1], self.shape[-2]), strides=strides)

    def with_axis(self, axis: int) -> Block:
        """Return this block with a new axis of size 1 at position `axis`."""
        shape, strides = list(self.shape), list(self.strides or (0.0,) * len(self.shape))
        axis = axis if axis >= 0 else len(shape) + 1 + axis
        shape.insert(axis, 1)
        strides.insert(axis, 0.0)
        return replace(self, shape=tuple(shape), strides=tuple(strides))

    def reduced(self, axis: Any) -> Block | Guess:
        """Return the result of a reduction: a block without `axis`, or a number if all axes are reduced."""
        if not isinstance(axis, int) or len(self.shape) < 2:
            return Guess(1)
        axis %= len(self.shape)
        return Block(self.shape[:axis] + self.shape[axis + 1 :], self.itemsize)


@dataclass
class Loop:
    """A loop of the kernel: its number of iterations (`trips`), and the bytes and operations of one iteration.

    Inner loops are not included.
    """

    trips: float
    load_bytes: float = 0.0
    dot_flops: float = 0.0
    carried_bytes: float = 0.0  # of tensors that an iteration takes over from the one before


@dataclass
class Facts:
    """The work of one program of a launch. Bytes, operations and elements are summed over all iterations of its loops.

    Attributes:
        scattered_bytes: Bytes that are loaded or stored in contiguous pieces of less than 32 bytes.
        piece_bytes: The bytes of each load or store times the length of its contiguous pieces, summed.
        dot_shape: (M, N, K) of the dot with the most operations.
        operations: The number of elements computed by arithmetic.
        special: The number of elements computed by exp and similar functions.
        reduced: The number of elements that reductions read.
        scanned: The number of elements that scans, sorts and similar functions read.
        largest_bytes: The bytes of the largest tensor in registers.
        stored: The number of elements stored through the pointers of each parameter, by its name.
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
        """Add a load or store through `pointers`, which runs `times` times, to `scattered_bytes` and `piece_bytes`."""
        each = [size for size, stride in zip(pointers.shape, pointers.strides, strict=False) if abs(stride) == 1]
        piece, moved = pointers.pointed * max(each, default=1), times * pointers.moved_bytes
        self.scattered_bytes += moved if piece < SECTOR_BYTES else 0.0
        self.piece_bytes += moved * min(piece, _LONGEST_PIECE)

    def in_registers(self, block: Block) -> None:
        """Raise `largest_bytes` to the bytes of this block if it is larger."""
        self.largest_bytes = max(self.largest_bytes, float(block.size * block.itemsize))


def value_of(one: Any) -> Any:
    """Return a scalar's known or assumed number; for a tensor, an assumed element (`LOADED`)."""
    return one.value if isinstance(one, Guess) else LOADED if isinstance(one, Block) else one


def is_number(one: Any) -> bool:
    """Return whether a value is a scalar: an int, a float, a `Guess`, or None, which counts as 0."""
    return one is None or isinstance(one, (int, float, Guess))


def plain(value: Any) -> Any:
    """Return the value of a `tl.constexpr`, and other values unchanged."""
    return value.value if type(value).__name__ == "constexpr" else value


def itemsize_of(dtype: Any) -> int:
    """Return the bytes of one element of a dtype, which is one of torch or Triton, or the name of one.

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
    """Return a shape in a kernel's source as a tuple of integers; sizes that are not numbers count as 1."""
    many = sizes if isinstance(sizes, (tuple, list)) else (sizes,)
    return tuple(max(int(value_of(plain(one)) or 1), 1) if is_number(plain(one)) else 1 for one in many)


_SPECIAL = {"exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "tanh", "erf", "pow", "div_rn", "sigmoid"}
_REDUCTIONS = {"sum", "max", "min", "reduce", "argmax", "argmin", "xor_sum", "reduce_or"}
_SCANS = {"cumsum", "cumprod", "associative_scan", "sort", "histogram", "flip", "topk"}


class Range(tuple[Any, Any, Any, bool]):
    """The bounds of a loop, as a tuple (start, stop, step, is_unrolled)."""


class Functions:
    """The interpreter's versions of the functions of `triton.language`, as methods `do_NAME(args, keywords)`.

    Each returns an abstract value of the result (shape and layout) and adds its work to `facts`.

    Attributes:
        facts: The work that was found so far.
        times: How often the current statement runs.
        loops: The loops around it, innermost last.
    """

    def __init__(self, position: int, programs: int) -> None:
        self.facts, self._position, self._programs = Facts(), position, programs
        self.times, self.loops, self._loads = 1.0, list[Loop](), 0

    def called(self, name: str, args: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        """Return the value of a call of Triton's function `name`, and count its work.

        A function without a `do_` method counts as a reduction, a scan or a special function if its name is known as
        one, else as elementwise.
        """
        if (function := getattr(self, f"do_{name}", None)) is not None:
            return function(args, keywords)
        blocks = [one for one in (*args, *keywords.values()) if isinstance(one, Block)]
        if name in ("min", "max", "minimum", "maximum") and not blocks:
            numbers = [value_of(one) for one in args if isinstance(one, (int, float, Guess))]
            result = (min if name.startswith("min") else max)(numbers, default=0)
            return Guess(result) if any(isinstance(one, Guess) for one in args) else result
        if not blocks:
            return Guess(next((value_of(one) for one in args if isinstance(one, (int, float, Guess))), 0))
        if name in _REDUCTIONS:
            self.facts.reduced += self.times * blocks[0].size
            return blocks[0].reduced(keywords.get("axis", args[1] if len(args) > 1 else None))
        if name in _SCANS:
            self.facts.scanned += self.times * blocks[0].size
            return blocks[0]
        if name in _SPECIAL or name.startswith("fast_"):
            self.facts.special += self.times * blocks[0].size
        return replace(self.elementwise(None, *blocks), strides=blocks[0].strides)

    def elementwise(self, op: Callable[[Any, Any], Any] | None, *values: Any) -> Block:
        """Return the broadcast result of an operation on tensors and numbers, and count its elements as computed.

        Sums and differences add the strides of their operands, products with a number scale them, and other operations
        keep those of the first tensor.
        """
        blocks = [one for one in values if isinstance(one, Block)]
        rank = max(len(one.shape) for one in blocks)
        shape, strides = [1] * rank, [0.0] * rank
        for one in blocks:
            for axis, size in enumerate(one.shape, rank - len(one.shape)):
                shape[axis] = max(shape[axis], size)
            if one is blocks[0] or op in (operator.add, operator.sub):
                for axis, stride in enumerate(one.strides, rank - len(one.shape)):
                    strides[axis] += stride
        if op is operator.mul:
            factor = next((float(value_of(one) or 0) for one in values if is_number(one)), 0.0)
            strides = [factor * stride for stride in strides]
        if pointer := next((one for one in blocks if one.pointed), None):
            return replace(pointer, shape=tuple(shape), strides=tuple(strides))
        result = Block(tuple(shape), max(one.itemsize for one in blocks), tuple(strides))
        self.facts.operations += self.times * result.size
        self.facts.in_registers(result)
        return result

    # Numbers of the launch.

    def do_program_id(self, args: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        """Return the assumed position of the program in the grid, as a guess."""
        return Guess(self._position)

    def do_num_programs(self, args: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        """Return the assumed size of the grid, as a guess."""
        return Guess(self._programs)

    def do_range(self, args: Sequence[Any], keywords: Mapping[str, Any]) -> Range:
        """Return the bounds of a loop over `range` or `tl.range`, which is not unrolled."""
        given = [*args, *(keywords.get(name) for name in ("arg1", "arg2", "step")[len(args) :])]
        start, stop = (0, given[0]) if given[1] is None else given[:2]
        return Range((start, stop, 1 if given[2] is None else given[2], False))

    def do_static_range(self, args: Sequence[Any], keywords: Mapping[str, Any]) -> Range:
        """Return the bounds of a loop over `tl.static_range`, which is unrolled."""
        return Range((*self.do_range(args, keywords)[:3], True))

    def do_cdiv(self, args: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        """Return the quotient rounded up; a guess if an operand is not known."""
        size, by = value_of(args[0]) or 0, value_of(args[-1]) or 1
        is_guess = isinstance(args[0], (Guess, Block)) or isinstance(args[-1], (Guess, Block))
        return Guess(-(-size // by)) if is_guess else -(-size // by)

    def do_next_power_of_2(self, args: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        """Return the smallest power of two that is not less than the argument."""
        return 1 << max(int(value_of(args[0]) or 1) - 1, 0).bit_length()

    def do_len(self, args: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        """Return the length of a tuple or text; a guess of 1 for anything else."""
        return len(args[0]) if isinstance(args[0], (tuple, list, str)) else Guess(1)

    def do_int(self, args: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        """Convert a known number to an integer; return other values unchanged."""
        return int(args[0]) if isinstance(args[0], (int, float)) else args[0]

    do_bool = do_int

    # New tensors.

    def do_arange(self, args: Sequence[Any], keywords: Mapping[str, Any]) -> Block:
        """Return a one-dimensional tensor of indices, with a stride of 1."""
        start, stop = (value_of(one) or 0 for one in (*args, *keywords.values())[:2])
        return Block((max(int(stop - start), 1),), 4, (1.0,))

    def do_zeros(self, args: Sequence[Any], keywords: Mapping[str, Any]) -> Block:
        """Return a new tensor (`zeros`, `full` or `empty`) of the given shape and dtype, which is the last argument."""
        shape = keywords.get("shape", args[0] if args else ())
        block = Block(shape_of(shape), itemsize_of(keywords.get("dtype", args[-1] if len(args) > 1 else "32")))
        self.facts.in_registers(block)
        return block

    do_full = do_empty = do_zeros

    # Memory.

    def do_load(self, args: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        """Count the bytes of a load, and return the loaded tensor.

        A single number loaded from memory is a guess. Block pointers and tensor descriptors are loaded in the same way.
        """
        pointer = args[0] if args else keywords.get("pointer")
        if not isinstance(pointer, Block) or not pointer.pointed:
            return Guess(0)
        if not pointer.shape:
            self._loads += 1
            return Guess(LOADED * self._loads)
        self.facts.moved(pointer, self.times)
        self.facts.load_bytes += self.times * pointer.moved_bytes
        if self.loops:
            self.loops[-1].load_bytes += pointer.moved_bytes
        return Block(pointer.shape, pointer.pointed)

    do_load_tensor_descriptor = do_gather = do_load

    def do_store(self, args: Sequence[Any], keywords: Mapping[str, Any]) -> None:
        """Count the bytes and elements of a store through pointers, a block pointer or a tensor descriptor."""
        pointer = args[0] if args else keywords.get("pointer")
        if not isinstance(pointer, Block) or not pointer.pointed:
            return
        self.facts.moved(pointer, self.times)
        self.facts.store_bytes += self.times * pointer.moved_bytes
        stored = self.facts.stored
        stored[pointer.name] = stored.get(pointer.name, 0.0) + self.times * pointer.size

    do_store_tensor_descriptor = do_scatter = do_store

    def do_atomic_add(self, args: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        """Count the bytes of an atomic operation of any kind, and return a tensor of the old values."""
        pointer = args[0] if args else keywords.get("pointer")
        if not isinstance(pointer, Block):
            return Guess(0)
        self.facts.atomic_bytes += self.times * pointer.moved_bytes
        return Block(pointer.shape, pointer.pointed) if pointer.shape else Guess(LOADED)

    do_atomic_max = do_atomic_min = do_atomic_cas = do_atomic_xchg = do_atomic_or = do_atomic_and = do_atomic_add

    def do_make_block_ptr(self, args: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        """Return the pointers of a block pointer: `base` with the block's shape and the given strides."""
        names = ("base", "shape", "strides", "offsets", "block_shape", "order")
        given = dict(zip(names, args, strict=False)) | dict(keywords)
        base = given["base"]
        if not isinstance(base, Block):
            return Guess(0)
        strides = tuple(float(value_of(one) or 0) for one in given.get("strides", ()))
        return replace(base, shape=shape_of(given.get("block_shape", ())), strides=strides)

    def do_make_tensor_descriptor(self, args: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        """Return the pointers of a tensor descriptor (TMA), as `do_make_block_ptr` does for a block pointer."""
        given = dict(zip(("base", "shape", "strides", "block_shape"), args, strict=False))
        return self.do_make_block_ptr((), given | dict(keywords))

    do__experimental_make_tensor_descriptor = do_make_tensor_descriptor

    # Dots.

    def do_dot(self, args: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        """Return the product of two matrices, and count its operations."""
        given = dict(zip(("input", "other"), args, strict=False)) | dict(keywords)
        return self._multiplied(given.get("input"), given.get("other"))

    def do_dot_scaled(self, args: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        """Return the product of two matrices with scales, and count its operations as those of `do_dot`."""
        return self._multiplied(args[0], args[3] if len(args) > 3 else keywords.get("rhs"))

    def _multiplied(self, a: Any, b: Any) -> Any:
        if not isinstance(a, Block) or not isinstance(b, Block) or min(len(a.shape), len(b.shape)) < 2:
            return a
        facts, (*batch, m, k), n = self.facts, a.shape, b.shape[-1]
        flops = 2.0 * m * n * k * math.prod(batch)
        if m * n * k >= math.prod(facts.dot_shape):
            facts.dot_shape, facts.dot_itemsize = (m, n, k), min(a.itemsize, b.itemsize)
        facts.dot_flops += self.times * flops
        if self.loops:
            self.loops[-1].dot_flops += flops
        result = Block((*batch, m, n), 4)
        facts.in_registers(result)
        return result

    # Shapes.

    def do_to(self, args: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        """Return a tensor converted to another dtype; an address converted to a pointer type becomes a pointer."""
        dtype = keywords.get("dtype", args[1] if len(args) > 1 else "32")
        if not isinstance(args[0], Block) or args[0].pointed:
            return Block((), 8, (), itemsize_of(dtype)) if type(dtype).__name__ == "pointer_type" else args[0]
        return replace(args[0], itemsize=itemsize_of(dtype))

    do_cast = do_to

    def do_trans(self, args: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        """Return a tensor with its last two axes exchanged, whatever order of axes is requested."""
        return args[0].transposed() if isinstance(args[0], Block) else args[0]

    do_permute = do_trans

    def do_reshape(self, args: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        """Return a tensor with the shape given as a tuple or as integers, also for `view` and `broadcast_to`."""
        rest = [plain(one) for one in args[1:]]
        shape = keywords.get("shape", rest[0] if rest and isinstance(rest[0], (tuple, list)) else rest)
        return args[0].reshaped(shape_of(shape)) if isinstance(args[0], Block) and shape else args[0]

    do_view = do_broadcast_to = do_reshape

    def do_expand_dims(self, args: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        """Return a tensor with a new axis of size 1."""
        axis = keywords.get("axis", args[1] if len(args) > 1 else 0)
        return args[0].with_axis(axis) if isinstance(args[0], Block) and isinstance(axis, int) else args[0]

    def do_join(self, args: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        """Return two tensors joined along a new last axis of size 2."""
        return args[0].reshaped((*args[0].shape, 2)) if isinstance(args[0], Block) else args[0]

    def do_interleave(self, args: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        """Return two tensors interleaved or concatenated along the last axis, whose size doubles."""
        of = args[0]
        return of.reshaped((*of.shape[:-1], 2 * of.shape[-1])) if isinstance(of, Block) and of.shape else of

    do_cat = do_interleave

    def do_split(self, args: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        """Return the two halves of a tensor whose last axis has size 2, without this axis."""
        half = args[0].reshaped(args[0].shape[:-1]) if isinstance(args[0], Block) else args[0]
        return half, half

    def do_advance(self, args: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        """Return the first argument; also for hints, assertions, printing and functions such as `zeros_like`."""
        return args[0] if args else next(iter(keywords.values()), None)

    do_multiple_of = do_max_contiguous = do_max_constancy = do_assume = do_static_assert = do_debug_barrier = do_advance
    do_device_print = do_static_print = do_device_assert = do_constexpr = do_ravel = do_advance
    do_zeros_like = do_full_like = do_advance
