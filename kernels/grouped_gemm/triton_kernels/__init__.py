"""The Triton kernels of the grouped GEMMs, and their launchers. Needs torch and triton."""
