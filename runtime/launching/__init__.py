"""Launching kernels: quickly, with scratch memory, and without a GPU; and what their sources say."""
