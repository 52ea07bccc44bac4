"""`Descriptor`: a TMA descriptor that the host passes to a kernel.

A kernel can also make a descriptor itself, but then each program waits for it: about 1 us on an H100, where a whole
product of a few rows takes 6 to 20 us ("Descriptors made by the host" in kernels/NOTES.md). The host needs 1 to 2 us,
but only for the first launch on tensors at these addresses (`repeated.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cache, cached_property
from importlib import import_module
from typing import Any

#: The most bytes over which shared memory is swizzled (PTX ISA, swizzling modes).
_SWIZZLE = 128


@dataclass(frozen=True)
class Descriptor:
    """A TMA descriptor of one tensor of a launch. Through it, the kernel loads or stores boxes of the tensor.

    Attributes:
        tensor: The index of the tensor among the launch's tensors. It must begin at a multiple of 16 bytes.
        shape: The sizes of the dimensions, at least 1 each, as the kernel sees the tensor.
        strides: Their strides in elements. All but the last one, which is 1, are multiples of 16 bytes.
        block: The shape of a box.
        bits: The size of an element in bits if the kernel is written in Gluon, which wants the box's layout in shared
            memory; 0 for a Triton kernel.
    """

    tensor: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]
    bits: int = 0

    def of(self, tensors: Sequence[Any]) -> Any:
        """Return Triton's descriptor, to pass to the kernel in a launch on these tensors.

        Triton's own constructor would check the same facts at each launch (3 us).
        """
        kind, others = self._template
        made = object.__new__(kind)
        made.__dict__ = others.copy()
        made.base = tensors[self.tensor]
        return made

    @cached_property
    def _template(self) -> tuple[Any, dict[str, Any]]:
        """Triton's class of the descriptor, and all of its fields except the tensor."""
        place = "triton.experimental.gluon.nvidia.hopper" if self.bits else "triton.tools.tensor_descriptor"
        kind = import_module(place).TensorDescriptor
        found = {field.name: field.default for field in fields(kind) if field.default is not MISSING}
        found |= {"shape": self.shape, "strides": self.strides, "block_shape": list(self.block)}
        return kind, found | ({"layout": _layout(self.block, self.bits)} if self.bits else {})


@cache
def _layout(block: tuple[int, ...], bits: int) -> Any:
    """Return Gluon's layout of a box in shared memory, swizzled over a row of it, if possible."""
    from triton.experimental.gluon import language as gl

    width = min(block[-1] * bits // 8, _SWIZZLE)
    return gl.NVMMASharedLayout(swizzle_byte_width=width, element_bitwidth=bits, rank=len(block))
