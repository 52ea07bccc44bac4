"""The kernels of the scaled GEMMs, and their launchers. Needs torch and triton."""
