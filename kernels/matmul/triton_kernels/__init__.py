"""The Triton kernels of the dense GEMM, and what launches them. Needs torch and triton."""
