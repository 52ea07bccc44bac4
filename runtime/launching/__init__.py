"""Launching kernels: fast, with scratch memory, and without a GPU; and hashes of their sources."""
