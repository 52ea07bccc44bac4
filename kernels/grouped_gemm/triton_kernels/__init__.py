"""The Triton kernels of the grouped GEMMs, and what launches them. Needs torch and triton."""
