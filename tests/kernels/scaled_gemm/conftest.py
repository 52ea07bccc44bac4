"""Fixtures of the tests of the scaled GEMMs."""

from __future__ import annotations

import pytest


@pytest.fixture
def right_fp8(monkeypatch):
    """Convert bf16 to float32 and float32 to fp8 in Triton's interpreter as the hardware does.

    The interpreter (3.6 to 3.9) drops the carry into the exponent, so that 1.97 becomes 1 in fp8 instead of 2, and
    shifts subnormal numbers.
    """
    import numpy as np
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float
    rounded = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}

    def converted(data, source, target, mode):
        if source == tl.bfloat16 and target == tl.float32:
            return (np.asarray(data).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        if source != tl.float32 or target not in rounded:
            return convert(data, source, target, mode)
        numbers = torch.from_numpy(np.ascontiguousarray(data).view(np.float32).copy())
        return numbers.to(rounded[target]).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", converted)
