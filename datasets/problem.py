"""`Problem`: the shape of one kernel call, as a value."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

from .errors import MOST_NAMES, ForetuneError, check_integer, check_word, check_words, shown

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

#: What operands may consist of: name -> (bits of one element, what torch calls it, None where torch has no such type).
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
DTYPES = tuple(_DTYPES)
#: One dtype for all operands, or (operand, dtype) of each, sorted by operand.
Dtype: TypeAlias = str | tuple[tuple[str, str], ...]
#: Family, dtypes, flags.
Signature: TypeAlias = tuple[str, Dtype, tuple[str, ...]]
#: Every token count is a new problem, and neighbours want the same config: predictions are made on a grid of this many
#: points an octave (steps of 9 %, so no size is more than 4.5 % from the one that stands for it).
POINTS_PER_OCTAVE = 8
#: More elements than any GPU has bytes of memory. (2**31 of them are not rare: a family whose kernel counts in 32 bits
#: says so in `Family.largest`.)
MOST_SIZE = 2**40
#: More segments than any ragged work has.
MOST_SEGMENTS = 1 << 20


def dtype_to_json(dtype: Dtype) -> str | dict[str, str]:
    """The JSON value of `Problem.dtype`."""
    return dtype if isinstance(dtype, str) else dict(dtype)


def dtype_from_json(value: Any) -> Dtype:
    """The inverse of `dtype_to_json`. Operands that are all alike have the short form.

    Raises `ForetuneError` for what is neither a dtype nor a mapping from operands to dtypes.

    >>> dtype_from_json({"x": "bf16", "w": "int4"}), dtype_from_json({"x": "bf16", "w": "bf16"})
    ((('w', 'int4'), ('x', 'bf16')), 'bf16')
    """
    given = value.values() if isinstance(value, Mapping) else (value,)
    for dtype in given:
        _check_dtype("dtype", dtype)
    if not isinstance(value, Mapping):
        return str(value)
    if not value:
        raise ForetuneError(f"dtype must name the operands, at least one, but is {value!r}")
    check_words("dtype's operands", value)
    return next(iter(given)) if len(set(given)) == 1 else tuple(sorted(value.items()))


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of one of `DTYPES`. Raises `ForetuneError` for one that torch does not have.

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
    if not isinstance(value, str) or value not in _DTYPES:
        raise ForetuneError(f"{name} must be one of {', '.join(DTYPES)} but got {shown(value)}")


def dtype_of_tensor(name: str, tensor: Any) -> str:
    """The name in `DTYPES` of a tensor's element type; `name` is what an error calls the tensor. Takes a mock too.

    Raises `ForetuneError` for what is no tensor, and for a dtype that has no name here.
    """
    dtype = str(getattr(tensor, "dtype", None)).removeprefix("torch.")
    if dtype not in _THEIR_NAMES:
        raise ForetuneError(f"{name} must be a tensor of {', '.join(DTYPES)} but its dtype is {dtype}")
    return _THEIR_NAMES[dtype]


#: What Triton calls them: its own names where they are not ours.
_TRITON_NAMES = {name: name for name in DTYPES} | {"fp8e4nv": "fp8e4m3", "fp8e5": "fp8e5m2"}
_TRITON_NAMES |= {"fp8e4b8": "fp8e4m3fnuz", "fp8e5b16": "fp8e5m2fnuz"}
#: What torch or Triton calls them -> our name.
_THEIR_NAMES = {theirs: ours for ours, (_, theirs) in _DTYPES.items() if theirs} | _TRITON_NAMES


@dataclass(frozen=True)
class Ragged:
    """The sizes that one dimension of a problem falls into: the segments of ragged work.

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
        if {*map(type, sizes)} != {int} or not 0 <= min(sizes) <= max(sizes) <= MOST_SIZE:  # else all are right
            what = f"each of the sizes along {self.dim}"
            sizes = [check_integer(what, size, 0, MOST_SIZE) for size in sizes]
        object.__setattr__(self, "sizes", tuple(sizes))
        check_integer(f"the sum of the sizes along {self.dim}", self.total, 0, MOST_SIZE)

    @cached_property
    def total(self) -> int:
        return sum(self.sizes)

    @cached_property
    def active(self) -> int:
        """How many segments are not empty."""
        return sum(size > 0 for size in self.sizes)

    @property
    def mean(self) -> float:
        return self.total / max(len(self.sizes), 1)

    @cached_property
    def max(self) -> int:
        return max(self.sizes, default=0)

    @cached_property
    def array(self) -> NDArray[np.int64]:
        """The sizes, (n_segments,), read-only."""
        import numpy as np

        array = np.array(self.sizes, np.int64)
        array.flags.writeable = False
        return array

    @property
    def skew(self) -> float:
        """The largest segment over the mean one: 1.0 = all alike."""
        return self.max / self.mean if self.total else 1.0

    def to_json(self) -> dict[str, Any]:
        return {"dim": self.dim, "sizes": list(self.sizes)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Ragged:
        """The inverse of `to_json`. Raises `ForetuneError` naming what is missing, unknown or wrong."""
        if not isinstance(value, Mapping) or set(value) != {"dim", "sizes"}:
            raise ForetuneError(f"ragged must have dim and sizes but is {shown(value)}")
        return cls(value["dim"], value["sizes"])


@dataclass(frozen=True)
class Problem:
    """One call's shape: family, named dimensions, dtypes, layout flags, and for ragged work the sizes along one of the
    dimensions, where they are known.

    At call time the sizes of ragged work are on the device and are not waited for: then `ragged` is None and only
    `dims` speak. Hashable and JSON-able. `dtype` is one name for all operands, or a mapping from operand to name.

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
    dims: tuple[tuple[str, int], ...]  # (name, size), sorted by name
    dtype: Dtype = "bf16"
    flags: tuple[str, ...] = ()
    ragged: Ragged | None = None

    def __post_init__(self) -> None:
        check_word("family", self.family)
        # One way to say it, so that equal problems are equal: sorted, and short where all dtypes are alike.
        object.__setattr__(self, "dims", _sorted_dims(self.dims))
        object.__setattr__(self, "dtype", dtype_from_json(_as_mapping(self.dtype)))
        object.__setattr__(self, "flags", tuple(sorted(set(check_words("flags", self.flags)))))
        self._check_ragged()

    def _check_ragged(self) -> None:
        if not isinstance(self.ragged, (Ragged, type(None))):
            raise ForetuneError(f"ragged must be a Ragged but is {shown(self.ragged)}")
        if self.ragged is not None:
            along = dict(self.dims).get(self.ragged.dim)
            if along is None:
                names = ", ".join(name for name, _ in self.dims)
                raise ForetuneError(f"ragged sizes along {self.ragged.dim!r}, but the dimensions are {names}")
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
        """A problem from keyword dimensions. `ragged` maps the one dimension to its sizes.

        Raises `ForetuneError` for a size that is no integer of 0 to 2**40, a dtype that does not exist, and
        sizes that do not sum up.
        """
        if isinstance(ragged, Mapping):
            if len(ragged) != 1:
                raise ForetuneError(f"ragged must name one dimension but has {', '.join(map(str, ragged)) or 'none'}")
            ((dim, sizes),) = ragged.items()
            ragged = Ragged(dim, sizes)  # type: ignore[arg-type]  # which makes a tuple of them
        return cls(family, tuple(dims.items()), dtype, flags, ragged)  # type: ignore[arg-type]  # as above

    def __getitem__(self, dim: str) -> int:
        return self._dims[dim]

    @cached_property
    def _dims(self) -> dict[str, int]:
        return dict(self.dims)

    @property
    def signature(self) -> Signature:
        """What decides a kernel's code, in addition to its config: problems of one signature differ only in sizes."""
        return (self.family, self.dtype, self.flags)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes of the operands; the one where they have the same."""
        return (self.dtype,) if isinstance(self.dtype, str) else tuple(dtype for _, dtype in self.dtype)

    @property
    def dtype_name(self) -> str:
        """The dtypes as one word: "bf16", or "w=int4,x=bf16" where operands differ."""
        return self.dtype if isinstance(self.dtype, str) else ",".join("=".join(pair) for pair in self.dtype)

    def dtype_of(self, operand: str) -> str:
        """One operand's dtype. Raises `ForetuneError` listing the operands that have one."""
        if isinstance(self.dtype, str):
            return self.dtype
        dtypes = dict(self.dtype)
        if operand not in dtypes:
            raise ForetuneError(f"the problem has no operand {operand!r}; it has {', '.join(dtypes)}")
        return dtypes[operand]

    def itemsize_of(self, operand: str) -> float:
        """Bytes of one element of an operand; half a byte for a 4-bit type. Raises as `dtype_of` does."""
        return _DTYPES[self.dtype_of(operand)][0] / 8

    @property
    def itemsize(self) -> int:
        """Bytes that one element alone takes, a whole number. Raises `ForetuneError` where operands differ: ask
        `itemsize_of` there."""
        if not isinstance(self.dtype, str):
            raise ForetuneError(f"the operands have different dtypes ({self.dtype_name}): name one")
        return math.ceil(_DTYPES[self.dtype][0] / 8)

    def without_sizes(self) -> Problem:
        """The same call as the host sees it at call time: the sizes of ragged work unknown."""
        return self if self.ragged is None else self._with(ragged=None)

    def with_sizes(self, ragged: Ragged) -> Problem:
        """The same call with known sizes of ragged work. Raises `ForetuneError` for sizes that do not sum up.

        >>> Problem.of("segment_sum", rows=64, columns=128).with_sizes(Ragged("rows", (0, 32, 32))).ragged.skew
        1.5
        """
        return self._with(ragged=ragged)

    def rounded(self, *dims: str) -> Problem:
        """The problem that stands for all near it: these dimensions, where it has them, on the grid of
        `POINTS_PER_OCTAVE`. Powers of two and numbers up to 11 stand for themselves.

        >>> p = Problem.of("linear", m=1100, n=96)
        >>> p.rounded("m")["m"], p.rounded("m", "n")["n"], Problem.of("linear", m=4096, n=96).rounded("m")["m"]
        (1117, 99, 4096)
        """
        if not dims:
            return self
        sizes = {name: _on_grid(size) if name in dims else size for name, size in self.dims}
        return self._with(dims=tuple(sizes.items()), _dims=sizes)

    def _with(self, **changed: Any) -> Problem:
        """The same call but for what is right by itself: all else has been checked."""
        result = object.__new__(type(self))
        vars(result).update(vars(self), **changed)
        result._check_ragged()
        return result

    def to_json(self) -> dict[str, Any]:
        return {
            "family": self.family,
            "dims": dict(self.dims),
            "dtype": dtype_to_json(self.dtype),
            "flags": list(self.flags),
            "ragged": None if self.ragged is None else self.ragged.to_json(),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Problem:
        """The inverse of `to_json`. Raises `ForetuneError` naming what is missing, unknown or wrong."""
        keys = ("family", "dims", "dtype", "flags", "ragged")
        if not isinstance(value, Mapping) or set(value) != set(keys) or not isinstance(value["dims"], Mapping):
            raise ForetuneError(f"not a problem, which has {', '.join(keys)}: {shown(value, most=200)}")
        try:
            ragged = None if value["ragged"] is None else Ragged.from_json(value["ragged"])
            return cls(value["family"], tuple(value["dims"].items()), value["dtype"], value["flags"], ragged)
        except ForetuneError as error:
            raise ForetuneError(f"not a problem: {error}") from None

    def __str__(self) -> str:
        dims = " ".join(f"{name}={size}" for name, size in self.dims)
        return f"{self.family} {dims} {self.dtype_name}" + "".join(f" {flag}" for flag in self.flags)


def _on_grid(size: int) -> int:
    if size < 1:
        return size
    return min(round(2 ** (round(math.log2(size) * POINTS_PER_OCTAVE) / POINTS_PER_OCTAVE)), MOST_SIZE)


def _sorted_dims(dims: Any) -> tuple[tuple[str, int], ...]:
    if not isinstance(dims, (tuple, list)) or len(dims) > MOST_NAMES:
        raise ForetuneError(f"dims must be at most {MOST_NAMES} pairs of a name and a size but is {shown(dims)}")
    for pair in dims:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise ForetuneError(f"each of dims must be a pair of a name and a size but one is {shown(pair)}")
        check_word("each dimension's name", pair[0])
    checked = sorted((str(name), check_integer(f"dimension {name}", size, 0, MOST_SIZE)) for name, size in dims)
    for one, other in itertools.pairwise(checked):
        if one[0] == other[0]:
            raise ForetuneError(f"dimension {one[0]} must be given once but is both {one[1]} and {other[1]}")
    return tuple(checked)


def _as_mapping(dtype: Any) -> Any:
    """A dtype as `dtype_from_json` takes it: the pairs of a `Dtype` by name."""
    if not isinstance(dtype, tuple):
        return dtype
    if not all(isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in dtype):
        raise ForetuneError(f"dtype must be pairs of an operand and its dtype but is {shown(dtype)}")
    named = dict(dtype)
    if len(named) < len(dtype):
        raise ForetuneError(f"dtype must name each operand once but is {shown(dtype)}")
    return named
