"""`imported_op`: what an op's name stands for, imported when it is first asked for.

Whoever asks is about to call it, so what its first call waits for begins here.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


def imported_op(module: str, package: str, name: str) -> Any:
    """The attribute of that name, of a module named relatively to a package. Needs torch and triton.

    >>> imported_op(".op.op", "foretune.kernels.grouped_gemm", "grouped_gemm").__name__
    'grouped_gemm'
    """
    from triton import knobs

    # Here, because every family's module imports this one, and who only predicts has no use for threads.
    from ..runtime.launching.collector import collecting_later
    from ..runtime.launching.triton_hash import hash_triton_ahead

    if not knobs.runtime.interpret:  # which compiles nothing
        hash_triton_ahead()
    with collecting_later():
        return getattr(import_module(module, package), name)
