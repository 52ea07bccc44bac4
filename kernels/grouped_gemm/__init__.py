"""Grouped GEMM: one matrix product a group, rows sorted by group."""

from .family import GroupedGemmForward

__all__ = ["GroupedGemmForward"]
