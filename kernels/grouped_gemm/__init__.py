"""Grouped GEMM: one matrix product a group, rows sorted by group."""
