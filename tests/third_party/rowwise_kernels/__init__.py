"""Kernels over the rows of a matrix."""
