"""Check a launch: `poison` fills its outputs, `why_wrong` compares them afterwards, `Redzones` find stray writes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from ...datasets.errors import shown

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
#: What a launch or its reference returns: its output, or a tuple of several.
Outputs: TypeAlias = "torch.Tensor | tuple[torch.Tensor, ...]"

#: The largest relative error that counts as correct, by the dtype of a float output: a few roundings of that dtype. For
#: fp32 it is a few roundings of TF32, the default precision of `tl.dot`.
TOLERANCES = {"fp64": 1e-12, "fp32": 2e-3, "fp16": 2e-3, "bf16": 1e-2, "fp8e4m3": 8e-2, "fp8e5m2": 0.15}
#: What an error is relative to if the reference is all zeros.
_LEAST_NORM = 1e-12


def outputs_of(result: Any) -> tuple[Any, ...]:
    """Return the outputs of a launch or of its reference as a tuple, also if there is only one."""
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def one_or_all(values: tuple[T, ...]) -> T | tuple[T, ...]:
    """Return the only value of a tuple, or the tuple if it has several; the inverse of `outputs_of`."""
    return values[0] if len(values) == 1 else values


def described(result: Any) -> str:
    """Return the number and the shapes of outputs as text: outputs with equal texts can be compared.

    >>> import torch
    >>> described((torch.zeros(2, 3), None))
    'a tensor of shape (2, 3) and None'
    """
    import torch

    texts = (
        f"a tensor of shape {tuple(one.shape)}" if isinstance(one, torch.Tensor) else shown(one)
        for one in outputs_of(result)
    )
    return " and ".join(texts)


def poison(output: torch.Tensor) -> torch.Tensor:
    """Fill an output with a value that hardly any result has, before a kernel writes it; return the tensor.

    It is NaN, the least signed or the greatest unsigned integer, or for booleans a byte that is neither 0 nor 1. A
    kernel that does not write all of its output then fails the check of its result.

    >>> import torch
    >>> poison(torch.zeros(2)).tolist(), poison(torch.zeros(1, dtype=torch.int8)).tolist()
    ([nan, nan], [-128])
    """
    import torch

    if output.dtype == torch.bool:
        poison(output.view(torch.uint8))
        return output
    return output.fill_(float("nan") if output.is_floating_point() else _unlikely(output.dtype))


def _unlikely(dtype: torch.dtype) -> int:
    """Return the integer that `poison` fills an output of this dtype with: the least, or if unsigned the greatest."""
    import torch

    limits = torch.iinfo(dtype)
    return limits.min or limits.max


def why_wrong(result: Outputs, reference: Outputs, tolerance: float | tuple[float, ...]) -> str | None:
    """Return None if all outputs of a launch are correct, else how the first wrong one differs from the reference.

    If an output has values that it had before the launch, the text names the two usual causes: the kernel does not
    write all of its output, or it updates the output in place and does not declare that.

    Args:
        result: What a launch returned. Its outputs were filled before the launch (see `poison`).
        reference: The correct result: as many tensors, of the same shapes.
        tolerance: The largest ||output - reference|| / ||reference|| that counts as correct, for all outputs or for
            each. With 0, integers and booleans must be equal.

    >>> import torch
    >>> why_wrong(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.001]), 1e-2) is None
    True
    >>> why_wrong(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]), 1e-2)
    'relative error 0.49, more than the tolerance 0.01'
    >>> why_wrong((torch.tensor([1.0]), torch.tensor([3, 4])), (torch.tensor([1.0]), torch.tensor([3, 5])), (1e-2, 0.0))
    'output 2 of 2: 1 of 2 elements differ: the first is 4 instead of 5'
    >>> why_wrong(torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 4.0]), 1e-2)  # doctest: +ELLIPSIS
    '1 of 2 elements are NaN, as the output is before a launch: the kernel does not write them, or ...
    """
    results = outputs_of(result)
    tolerances = tolerance if isinstance(tolerance, tuple) else (tolerance,) * len(results)
    for place, compared in enumerate(zip(results, outputs_of(reference), tolerances, strict=True), 1):
        if (wrong := _why_output_is_wrong(*compared)) is not None:
            return wrong if len(results) == 1 else f"output {place} of {len(results)}: {wrong}"
    return None


def _why_output_is_wrong(result: torch.Tensor, reference: torch.Tensor, tolerance: float) -> str | None:
    """Return None if one output of a launch is correct, else how it differs from the reference; see `why_wrong`."""
    import torch

    if result.dtype == torch.bool:
        result, reference = result.view(torch.uint8), reference.bool().view(torch.uint8)
    is_float = result.is_floating_point()
    if is_float:
        result = result.float()
    elif not (result != reference).any():
        return None
    is_exact = not is_float and tolerance == 0
    if not is_exact:
        expected = reference.float()
        error = float((result.float() - expected).norm() / expected.norm().clamp_min(_LEAST_NORM))
        if error <= tolerance:  # never true of NaN
            return None
    if in_reference := int(reference.isnan().sum()):
        return (
            f"{in_reference} of {reference.numel()} elements of the reference are NaN: perhaps it is computed from the "
            "output, which is filled with NaN before a launch (list what a kernel updates in TritonFamily.in_place)"
        )
    differing = (result != reference).flatten()
    name, left = ("NaN", result.isnan()) if is_float else (filled := _unlikely(result.dtype), result == filled)
    if n_left := int((differing & left.flatten()).sum()):
        return (
            f"{n_left} of {result.numel()} elements are {name}, as the output is before a launch: the kernel does "
            "not write them, or it reads its output (list what it updates in TritonFamily.in_place)"
        )
    if not is_exact:
        return f"relative error {error:.2g}, more than the tolerance {tolerance:.2g}"
    first = int(differing.nonzero()[0])
    got, wanted = (one.flatten()[first].item() for one in (result, reference))
    return f"{int(differing.sum())} of {result.numel()} elements differ: the first is {got} instead of {wanted}"


#: Bytes before and after each storage: those of the largest tile of fp32 that Triton allows, 2**20 elements. It is a
#: multiple of the alignment of every allocation, so tensors stay as aligned as they were.
REDZONE_BYTES = 4 << 20


class Redzones:
    """Places each tensor of a launch's inputs between two redzones (unused bytes), to find writes outside of tensors.

    Tensors that share memory still do afterwards. The redzones have random bytes, so that a kernel that wrongly uses
    values from a redzone computes a wrong result, and writes of almost any value are noticed.

    Args:
        inputs: What `Measurable.inputs` returned: tensors in dataclasses, mappings, lists and tuples.

    >>> import torch
    >>> inputs = {"x": torch.zeros(4), "y": torch.zeros(4)}
    >>> redzones = Redzones(inputs)
    >>> inputs["y"].fill_(1.0).tolist(), redzones.overwritten()
    ([1.0, 1.0, 1.0, 1.0], None)
    >>> _ = inputs["y"].as_strided((6,), (1,)).fill_(1.0)
    >>> redzones.overwritten()
    '8 bytes outside of y, starting 0 bytes after its end'
    """

    def __init__(self, inputs: Any) -> None:
        by_storage: dict[int, dict[str, torch.Tensor]] = {}
        for name, tensor in _tensors(inputs, "inputs", set()):
            place = tensor.untyped_storage().data_ptr() or id(tensor)  # empty storages have no address
            by_storage.setdefault(place, {}).setdefault(name, tensor)
        self._buffers = [_Buffer(tensors, seed) for seed, tensors in enumerate(by_storage.values())]

    def restore(self) -> None:
        """Restore the tensors and the redzones to the contents that they had when this object was created."""
        for buffer in self._buffers:
            buffer.now.copy_(buffer.before)

    def overwritten(self) -> str | None:
        """Return None if no byte outside of the tensors was changed, else how many and where."""
        return next(filter(None, (buffer.overwritten() for buffer in self._buffers)), None)

    def changed(self, written: Collection[torch.Tensor]) -> str | None:
        """Return None if no tensors but the `written` ones were changed, else the names of tensors that may have been.

        Bytes that a tensor shares with a written one may change. Call this only if `overwritten` found nothing.
        """
        return next(filter(None, (buffer.changed(written) for buffer in self._buffers)), None)


class _Buffer:
    """The memory of tensors that share a storage, with a redzone on both sides."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], seed: int) -> None:
        import torch

        self.tensors = tensors
        first = next(iter(tensors.values()))
        held = torch.empty(0, dtype=torch.uint8, device=first.device).set_(first.untyped_storage())
        random = torch.Generator(first.device).manual_seed(seed)
        words = (2 * REDZONE_BYTES + len(held) + 7) // 8
        drawn = torch.randint(-(2**63), 2**63 - 1, (words,), generator=random, dtype=torch.int64, device=first.device)
        self.before = drawn.view(torch.uint8)
        self.before[REDZONE_BYTES : REDZONE_BYTES + len(held)] = held
        self.now = self.before.clone()
        for tensor in tensors.values():
            start = REDZONE_BYTES // tensor.element_size() + tensor.storage_offset()
            tensor.set_(self.now.untyped_storage(), start, tensor.size(), tensor.stride())

    def overwritten(self) -> str | None:
        changed = self._changed_outside(self.tensors.values())
        if not len(changed):
            return None
        starts = [tensor.storage_offset() * tensor.element_size() for tensor in self.tensors.values()]
        ends = [start + _bytes_of(tensor) for start, tensor in zip(starts, self.tensors.values(), strict=True)]
        low, high, start, end = int(changed[0]), int(changed[-1]), min(starts), max(ends)
        if low >= end:
            where = f"starting {low - end} bytes after its end"
        elif high < start:
            where = f"ending {start - high - 1} bytes before its start"
        else:
            where = "around it or between its rows"
        return f"{len(changed)} bytes outside of {' and '.join(self.tensors)}, {where}"

    def changed(self, written: Collection[torch.Tensor]) -> str | None:
        allowed = {name for name, tensor in self.tensors.items() if any(tensor is one for one in written)}
        others = [name for name in self.tensors if name not in allowed]
        if not others or not len(self._changed_outside([self.tensors[name] for name in allowed])):
            return None
        return " or ".join(others)

    def _changed_outside(self, tensors: Iterable[torch.Tensor]) -> torch.Tensor:
        """Return the position of each byte that was changed and is not one of these tensors'."""
        after = self.now.clone()
        for tensor in tensors:
            _same_part(after, tensor).copy_(_same_part(self.before, tensor))
        return (after != self.before).nonzero().flatten()


def _same_part(buffer: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of `buffer` with the offset, sizes and strides that `tensor` has in its own storage.

    Expanded dimensions (stride 0) have one element. Booleans are viewed as bytes, because a copy of booleans would make
    every byte 0 or 1.
    """
    import torch

    sizes = [size if stride else min(size, 1) for size, stride in zip(tensor.size(), tensor.stride(), strict=True)]
    view = tensor.new_empty(0, dtype=torch.uint8 if tensor.dtype == torch.bool else tensor.dtype)
    return view.set_(buffer.untyped_storage(), tensor.storage_offset(), sizes, tensor.stride())


def _bytes_of(tensor: torch.Tensor) -> int:
    """Return the bytes from the first element of a tensor to the end of its last one in memory."""
    if not tensor.numel():
        return 0
    steps = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size()


def _tensors(value: Any, name: str, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) for each tensor in a value once; the name is the attribute, key or index that holds it.

    `name` is that of the value itself, and `seen` has the ids of objects that were visited.
    """
    import torch

    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield name, value
        return
    parts: Iterator[tuple[Any, Any]] = iter(())
    if isinstance(value, Mapping):
        parts = iter(value.items())
    elif is_dataclass(value):
        parts = ((field.name, getattr(value, field.name)) for field in fields(value))
    elif isinstance(value, (list, tuple)):
        names = getattr(value, "_fields", None) or [f"{name}[{place}]" for place in range(len(value))]
        parts = zip(names, value, strict=True)
    for part_name, part in parts:
        yield from _tensors(part, str(part_name), seen)
