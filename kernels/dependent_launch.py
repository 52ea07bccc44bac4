"""A kernel that begins while the one before it ends (CUDA's programmatic dependent launch, sm_90 and later): what each
of the two says, in PTX. Who launches the second one passes `launch_pdl=True`, Triton's option."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def let_next_begin():
    """Of the first kernel: the second one's programs may take the SMs' room that is left, once all of this one's have
    begun."""
    tl.inline_asm_elementwise("griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], tl.int32, False, 1)


@triton.jit
def wait_for_earlier():
    """Of the second one: waits until the first has ended and its stores are seen."""
    tl.inline_asm_elementwise("griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], tl.int32, False, 1)
