"""Dense GEMM: y = activation(a @ b + bias) of one matrix or a batch, in every layout.

Importing this imports neither torch nor triton: a prediction needs neither.
"""

from .measurable import Matmul

__all__ = ["Matmul"]
