"""`Problem`: the sizes, dtypes and flags of one kernel call, as an immutable value."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

from .errors import MOST_NAMES, ForetuneError, check_integer, check_word, check_words, did_you_mean, shown

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

#: Element types: name -> (bits of one element, torch's name or None if torch has no such type).
_DTYPES: dict[str, tuple[int, str | None]] = {
    "bf16": (16, "bfloat16"),
    "fp16": (16, "float16"),
    "fp32": (32, "float32"),
    "fp64": (64, "float64"),
    "fp8e4m3": (8, "float8_e4m3fn"),
    "fp8e5m2": (8, "float8_e5m2"),
    "fp8e4m3fnuz": (8, "float8_e4m3fnuz"),
    "fp8e5m2fnuz": (8, "float8_e5m2fnuz"),
    "int4": (4, None),
    "int8": (8, "int8"),
    "int16": (16, "int16"),
    "int32": (32, "int32"),
    "int64": (64, "int64"),
    "uint8": (8, "uint8"),
}
#: The names of all element types.
DTYPES = tuple(_DTYPES)
#: One dtype for all operands, or a pair (operand, dtype) for each, sorted by operand.
Dtype: TypeAlias = str | tuple[tuple[str, str], ...]
#: (family, dtype, flags): what decides a kernel's code in addition to its config.
Signature: TypeAlias = tuple[str, Dtype, tuple[str, ...]]
#: Points per octave of the grid that `Problem.rounded` rounds up to, evenly spaced, so a size grows by at most 12.5 %.
#: Token counts differ at every call, and problems of nearly the same size want the same config.
POINTS_PER_OCTAVE = 8
#: The largest size of a dimension: more elements than any GPU has bytes of memory. Sizes above 2**31 do occur; a family
#: whose kernel counts in 32 bits declares that in `Family.largest`.
MOST_SIZE = 2**40
#: The most segments of a ragged dimension: more than any real problem has.
MOST_SEGMENTS = 1 << 20


def dtype_to_json(dtype: Dtype) -> str | dict[str, str]:
    """Return the JSON form of `Problem.dtype`: a name, or a mapping from operand to name."""
    return dtype if isinstance(dtype, str) else dict(dtype)


def dtype_from_json(value: Any) -> Dtype:
    """Return the `Dtype` of a name or of a mapping from operand to name.

    A mapping that gives all operands one dtype becomes that dtype's name, so that equal problems compare equal.

    Raises:
        ForetuneError: The value is neither a known dtype nor a mapping from operands to known dtypes.

    >>> dtype_from_json({"x": "bf16", "w": "int4"}), dtype_from_json({"x": "bf16", "w": "bf16"})
    ((('w', 'int4'), ('x', 'bf16')), 'bf16')
    """
    given = value.values() if isinstance(value, Mapping) else (value,)
    for dtype in given:
        _check_dtype("dtype", dtype)
    if not isinstance(value, Mapping):
        return str(value)
    if not value:
        raise ForetuneError(f"dtype must map at least one operand to its dtype but is {value!r}")
    check_words("dtype's operands", value)
    return next(iter(given)) if len(set(given)) == 1 else tuple(sorted(value.items()))


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a name in `DTYPES`; raise `ForetuneError` if torch has none.

    >>> torch_dtype("bf16")
    torch.bfloat16
    """
    import torch

    _check_dtype("dtype", name)
    known = _DTYPES[name][1]
    if known is None:
        raise ForetuneError(f"torch has no dtype {name!r}; it has {', '.join(n for n, (_, t) in _DTYPES.items() if t)}")
    dtype: torch.dtype = getattr(torch, known)
    return dtype


def _check_dtype(name: str, value: Any) -> None:
    """Raise `ForetuneError` unless the value is one of `DTYPES`; `name` is what the message calls it."""
    if not isinstance(value, str) or value not in _DTYPES:
        word = (value if isinstance(value, str) else shown(value)).removeprefix("torch.")
        hint = similar_dtype(word, DTYPES) if isinstance(value, str) or word in _THEIR_NAMES else ""
        raise ForetuneError(f"{name} must be one of {', '.join(DTYPES)} but got {shown(value)}{hint}")


def similar_dtype(word: str, known: Collection[str]) -> str:
    """Return " (did you mean 'x'?)" for a misspelt dtype, or torch's or Triton's name of one; "" if none is similar.

    >>> similar_dtype("float16", ("bf16", "fp16"))
    " (did you mean 'fp16'?)"
    """
    return did_you_mean(_THEIR_NAMES.get(word, word), known)


def dtype_of_tensor(name: str, tensor: Any) -> str:
    """Return the name in `DTYPES` of a tensor's element type.

    Args:
        name: What the error message calls the tensor.
        tensor: Any object with a `dtype` of torch's or Triton's name, so mock tensors work too.

    Raises:
        ForetuneError: The object has no `dtype`, or one that is not in `DTYPES`.

    >>> import torch
    >>> dtype_of_tensor("x", torch.empty(2, dtype=torch.float8_e4m3fn))
    'fp8e4m3'
    """
    dtype = str(getattr(tensor, "dtype", None)).removeprefix("torch.")
    if dtype not in _THEIR_NAMES:
        raise ForetuneError(f"{name} must be a tensor of {', '.join(DTYPES)} but its dtype is {dtype}")
    return _THEIR_NAMES[dtype]


#: Triton's name -> the name in `DTYPES`.
_TRITON_NAMES = {name: name for name in DTYPES} | {"fp8e4nv": "fp8e4m3", "fp8e5": "fp8e5m2"}
_TRITON_NAMES |= {"fp8e4b8": "fp8e4m3fnuz", "fp8e5b16": "fp8e5m2fnuz"}
#: The name that torch or Triton uses -> the name in `DTYPES`.
_THEIR_NAMES = {theirs: ours for ours, (_, theirs) in _DTYPES.items() if theirs} | _TRITON_NAMES


@dataclass(frozen=True)
class Ragged:
    """The segment sizes of a ragged dimension, for example the number of tokens of each group.

    Attributes:
        dim: The dimension's name.
        sizes: The size of each segment. Their sum is the dimension's size.

    >>> ragged = Ragged("tokens", (0, 32, 16, 16))
    >>> ragged.active, ragged.max, ragged.skew
    (3, 32, 2.0)
    """

    dim: str
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        check_word("the ragged dimension", self.dim)
        sizes: Collection[int] = self.sizes
        unordered = isinstance(sizes, (str, bytes, Mapping, Set)) or not isinstance(sizes, Collection)
        if unordered or len(sizes) > MOST_SEGMENTS:
            raise ForetuneError(
                f"sizes along {self.dim} must be a list of at most {MOST_SEGMENTS} integers but is {shown(sizes)}"
            )
        if {*map(type, sizes)} != {int} or not 0 <= min(sizes) <= max(sizes) <= MOST_SIZE:
            what = f"each of the sizes along {self.dim}"
            sizes = [check_integer(what, size, 0, MOST_SIZE) for size in sizes]
        object.__setattr__(self, "sizes", tuple(sizes))
        check_integer(f"the sum of the sizes along {self.dim}", self.total, 0, MOST_SIZE)

    @cached_property
    def total(self) -> int:
        """The sum of the sizes."""
        return sum(self.sizes)

    @cached_property
    def active(self) -> int:
        """The number of segments that are not empty."""
        return sum(size > 0 for size in self.sizes)

    @property
    def mean(self) -> float:
        """The mean size, empty segments included."""
        return self.total / max(len(self.sizes), 1)

    @cached_property
    def max(self) -> int:
        """The largest size; 0 if there are no segments."""
        return max(self.sizes, default=0)

    @cached_property
    def array(self) -> NDArray[np.int64]:
        """The sizes as a read-only array, (n_segments,)."""
        import numpy as np

        array = np.array(self.sizes, np.int64)
        array.flags.writeable = False
        return array

    @property
    def skew(self) -> float:
        """The largest size divided by the mean size; 1.0 if all segments are equal."""
        return self.max / self.mean if self.total else 1.0

    def to_json(self) -> dict[str, Any]:
        """Return the attributes as a dict for `json.dumps`."""
        return {"dim": self.dim, "sizes": list(self.sizes)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Ragged:
        """Return the `Ragged` in a dict from `to_json`; raise `ForetuneError` for missing, unknown or wrong fields."""
        if not isinstance(value, Mapping) or set(value) != {"dim", "sizes"}:
            raise ForetuneError(f"ragged must be a mapping with the keys dim and sizes but is {shown(value)}")
        return cls(value["dim"], value["sizes"])


@dataclass(frozen=True)
class Problem:
    """The sizes, dtypes and flags of one kernel call. Hashable, and convertible to and from JSON.

    `Problem.of` builds one from keywords.

    Attributes:
        family: The name of the kernel's family.
        dims: The dimensions as (name, size), sorted by name.
        dtype: One name of `DTYPES` for all operands, or a pair (operand, name) for each.
        flags: The layout flags that are set, sorted.
        ragged: The segment sizes of the ragged dimension; None if the problem has none or they are unknown. At call
            time they are unknown, because they are on the device and Foretune does not synchronize to read them.

    Raises:
        ForetuneError: A value is wrong, e.g. a size that is not an integer from 0 to 2**40. The message names it.

    >>> p = Problem.of("segment_sum", rows=64, columns=128, ragged={"rows": (0, 32, 16, 16)})
    >>> p["columns"], p.dtype, p.ragged.skew
    (128, 'bf16', 2.0)
    >>> q = Problem.of("linear", m=64, n=128, k=256, dtype={"x": "fp8e4m3", "w": "fp8e4m3", "y": "bf16"})
    >>> q.dtype_of("y"), q.itemsize_of("w")
    ('bf16', 1.0)
    >>> Problem.from_json(p.to_json()) == p, Problem.from_json(q.to_json()) == q
    (True, True)
    """

    family: str
    dims: tuple[tuple[str, int], ...]
    dtype: Dtype = "bf16"
    flags: tuple[str, ...] = ()
    ragged: Ragged | None = None

    def __post_init__(self) -> None:
        check_word("family", self.family)
        # Normalized (sorted; one name if all dtypes are equal), so that equal problems compare equal.
        object.__setattr__(self, "dims", _sorted_dims(self.dims))
        object.__setattr__(self, "dtype", dtype_from_json(_as_mapping(self.dtype)))
        object.__setattr__(self, "flags", tuple(sorted(set(check_words("flags", self.flags)))))
        self._check_ragged()

    def _check_ragged(self) -> None:
        """Raise `ForetuneError` unless the segment sizes are along one of `dims` and sum to its size."""
        if not isinstance(self.ragged, (Ragged, type(None))):
            raise ForetuneError(f"ragged must be a Ragged but is {shown(self.ragged)}")
        if self.ragged is not None:
            along = dict(self.dims).get(self.ragged.dim)
            if along is None:
                names = ", ".join(name for name, _ in self.dims)
                raise ForetuneError(
                    f"ragged sizes are given along {self.ragged.dim!r}, which is not one of the dimensions {names}"
                )
            if self.ragged.total != along:
                raise ForetuneError(
                    f"sizes along {self.ragged.dim} sum to {self.ragged.total} but {self.ragged.dim}={along}"
                )

    @classmethod
    def of(
        cls,
        family: str,
        *,
        dtype: str | Mapping[str, str] = "bf16",
        flags: tuple[str, ...] = (),
        ragged: Ragged | Mapping[str, Sequence[int]] | None = None,
        **dims: int,
    ) -> Problem:
        """Return a problem from keywords.

        Args:
            family: The name of the kernel's family.
            dtype: One name of `DTYPES` for all operands, or a mapping from operand to name; "bf16" if left out.
            flags: The flags that are set, as in `("b_kn", "bias")`; the family names them.
            ragged: The segment sizes of the ragged dimension, as `{dimension: sizes}` or a `Ragged`.
            **dims: The size of each dimension.

        Raises:
            ForetuneError: A size is not an integer from 0 to 2**40, a dtype does not exist, or the segment sizes do
                not sum to the size of their dimension.

        >>> str(Problem.of("matmul", batch=1, m=64, n=1024, k=1024, dtype="fp16", flags=("b_kn",)))
        'matmul batch=1 k=1024 m=64 n=1024 fp16 b_kn'
        """
        for dim, size in dims.items():
            if isinstance(size, bool):
                expected = f"dimension {dim} must be an integer between 0 and {MOST_SIZE} but got {size}"
                raise ForetuneError(f"{expected}; a flag is given as flags=({dim!r},)")
        if isinstance(ragged, Mapping):
            if len(ragged) != 1:
                names = ", ".join(map(str, ragged)) or "none"
                raise ForetuneError(f"ragged must name exactly one dimension but has {names}")
            ragged = Ragged(*next(iter(ragged.items())))  # type: ignore[arg-type]  # converted by the constructor
        return cls(family, tuple(dims.items()), dtype, flags, ragged)  # type: ignore[arg-type]

    def __getitem__(self, dim: str) -> int:
        """Return the size of a dimension."""
        return self._dims[dim]

    @cached_property
    def _dims(self) -> dict[str, int]:
        return dict(self.dims)

    @property
    def signature(self) -> Signature:
        """(family, dtype, flags). Problems of one signature differ only in sizes and share the binary of a config."""
        return (self.family, self.dtype, self.flags)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtype of each operand; a single one if all operands have the same."""
        return (self.dtype,) if isinstance(self.dtype, str) else tuple(dtype for _, dtype in self.dtype)

    @property
    def dtype_name(self) -> str:
        """The dtypes as text: "bf16", or "w=int4,x=bf16" if operands differ."""
        return self.dtype if isinstance(self.dtype, str) else ",".join("=".join(pair) for pair in self.dtype)

    def dtype_of(self, operand: str) -> str:
        """Return an operand's dtype; raise `ForetuneError` that lists the operands for an unknown one."""
        if isinstance(self.dtype, str):
            return self.dtype
        dtypes = dict(self.dtype)
        if operand not in dtypes:
            raise ForetuneError(f"the problem has no operand {operand!r}; it has {', '.join(dtypes)}")
        return dtypes[operand]

    def itemsize_of(self, operand: str) -> float:
        """Return the bytes of one element of an operand, 0.5 for a 4-bit type; raises as `dtype_of` does."""
        return _DTYPES[self.dtype_of(operand)][0] / 8

    @property
    def itemsize(self) -> int:
        """The bytes of one element, rounded up to an integer.

        Raises:
            ForetuneError: The operands have different dtypes; use `itemsize_of` then.
        """
        if not isinstance(self.dtype, str):
            raise ForetuneError(f"the operands have different dtypes ({self.dtype_name}): use itemsize_of(operand)")
        return math.ceil(_DTYPES[self.dtype][0] / 8)

    def without_sizes(self) -> Problem:
        """Return the problem with unknown segment sizes, as the host knows it at call time."""
        return self if self.ragged is None else self._with(ragged=None)

    def with_sizes(self, ragged: Ragged) -> Problem:
        """Return the problem with these segment sizes; raise `ForetuneError` if they do not sum to the dimension.

        >>> Problem.of("segment_sum", rows=64, columns=128).with_sizes(Ragged("rows", (0, 32, 32))).ragged.skew
        1.5
        """
        return self._with(ragged=ragged)

    def rounded(self, *dims: str) -> Problem:
        """Return the problem with these dimensions rounded up to the grid of `POINTS_PER_OCTAVE` points per octave.

        Problems of similar size share one prediction this way. Sizes up to 16 and those with few significant bits, such
        as 640 and 1536, do not change. Other sizes keep their number of tiles if a tile's size is a power of two and at
        least the grid's step. Dimensions that the problem lacks are ignored.

        >>> p = Problem.of("linear", m=1100, n=96)
        >>> p.rounded("m")["m"], p.rounded("m", "n")["n"], Problem.of("linear", m=1536, n=96).rounded("m")["m"]
        (1152, 96, 1536)
        """
        if not dims:
            return self
        sizes = {name: on_grid(size) if name in dims else size for name, size in self.dims}
        return self._with(dims=tuple(sizes.items()), _dims=sizes)

    def _with(self, **changed: Any) -> Problem:
        """Return a copy with changed attributes. Only the ragged sizes are checked again."""
        result = object.__new__(type(self))
        vars(result).update(vars(self), **changed)
        result._check_ragged()
        return result

    def to_json(self) -> dict[str, Any]:
        """Return the attributes as a dict for `json.dumps`."""
        return {
            "family": self.family,
            "dims": dict(self.dims),
            "dtype": dtype_to_json(self.dtype),
            "flags": list(self.flags),
            "ragged": None if self.ragged is None else self.ragged.to_json(),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Problem:
        """Return the problem in a dict from `to_json`; raise `ForetuneError` for missing, unknown or wrong fields."""
        keys = ("family", "dims", "dtype", "flags", "ragged")
        if not isinstance(value, Mapping) or set(value) != set(keys) or not isinstance(value["dims"], Mapping):
            raise ForetuneError(
                f"not a problem: it must have exactly the fields {', '.join(keys)}, but is {shown(value, most=200)}"
            )
        try:
            ragged = None if value["ragged"] is None else Ragged.from_json(value["ragged"])
            return cls(value["family"], tuple(value["dims"].items()), value["dtype"], value["flags"], ragged)
        except ForetuneError as error:
            raise ForetuneError(f"not a problem: {error}") from None

    def __str__(self) -> str:
        dims = " ".join(f"{name}={size}" for name, size in self.dims)
        return f"{self.family} {dims} {self.dtype_name}" + "".join(f" {flag}" for flag in self.flags)


def on_grid(size: int) -> int:
    """Return the smallest size of at least `size` on a grid that divides each octave into `POINTS_PER_OCTAVE` steps."""
    step = max((1 << size.bit_length()) // (2 * POINTS_PER_OCTAVE), 1)
    return -(-size // step) * step


def _sorted_dims(dims: Any) -> tuple[tuple[str, int], ...]:
    """Check dimensions and return them sorted by name."""
    if not isinstance(dims, (tuple, list)) or len(dims) > MOST_NAMES:
        raise ForetuneError(f"dims must be at most {MOST_NAMES} pairs (name, size) but is {shown(dims)}")
    for pair in dims:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise ForetuneError(f"each of dims must be a pair (name, size) but one is {shown(pair)}")
        check_word("each dimension's name", pair[0])
    checked = sorted((str(name), check_integer(f"dimension {name}", size, 0, MOST_SIZE)) for name, size in dims)
    for one, other in itertools.pairwise(checked):
        if one[0] == other[0]:
            raise ForetuneError(f"dimension {one[0]} must be given once but is given as {one[1]} and as {other[1]}")
    return tuple(checked)


def _as_mapping(dtype: Any) -> Any:
    """Return a `Dtype` in the form that `dtype_from_json` takes: pairs become a mapping."""
    if not isinstance(dtype, tuple):
        return dtype
    if not all(isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in dtype):
        raise ForetuneError(f"dtype must be a name or pairs (operand, dtype) but is {shown(dtype)}")
    named = dict(dtype)
    if len(named) < len(dtype):
        raise ForetuneError(f"dtype must name each operand once but is {shown(dtype)}")
    return named
