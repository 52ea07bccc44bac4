"""Device functions for CUDA's programmatic dependent launch, in PTX (sm_90 and later).

The second of two kernels starts while the first one ends: the first kernel calls `let_next_begin`, the second one calls
`wait_for_earlier` and is launched with Triton's option `launch_pdl=True`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def let_next_begin():
    """Allow the next kernel to start on free SM resources once all programs of this kernel have called this."""
    tl.inline_asm_elementwise("griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], tl.int32, False, 1)


@triton.jit
def wait_for_earlier():
    """Wait until the previous kernel has ended and its stores are visible."""
    tl.inline_asm_elementwise("griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], tl.int32, False, 1)
