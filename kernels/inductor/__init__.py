"""A family for each op that Inductor has Triton templates for; its configs are the choices that Inductor lists.

There are two more for the reductions that Inductor generates without a template (`reduction.py`), whose data come from
tests/studies/generated_kernels_on_gpu.py. All others can be collected: `inductor:mm` (mm, addmm, bmm, baddbmm and
scaled_mm), `inductor:grouped_mm`, `inductor:convolution` and `inductor:flex_attention`, `inductor:flex_backward` and
`inductor:flex_decoding`. Importing this imports neither torch nor triton. `foretune.use("inductor")` (integrations/)
applies the predictions in Inductor.
"""

from __future__ import annotations

from .attention import InductorFlexAttention, InductorFlexBackward, InductorFlexDecoding
from .convolution import InductorConvolution
from .grouped_mm import InductorGroupedMM
from .measurable import InductorMM
from .reduction import InductorPersistentReduction, InductorReduction

__all__ = [
    "InductorConvolution",
    "InductorFlexAttention",
    "InductorFlexBackward",
    "InductorFlexDecoding",
    "InductorGroupedMM",
    "InductorMM",
    "InductorPersistentReduction",
    "InductorReduction",
]
