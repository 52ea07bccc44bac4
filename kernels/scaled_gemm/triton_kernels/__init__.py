"""The kernels of the scaled GEMMs and what launches them. Needs torch and triton."""
