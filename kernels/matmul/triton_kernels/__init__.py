"""The Triton kernels of the dense GEMM, and their launchers. Needs torch and triton."""
