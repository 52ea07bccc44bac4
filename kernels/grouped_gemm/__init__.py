"""Grouped GEMM: one matrix product a group, rows sorted by group; forward, dX and dW."""

from .family import GroupedGemmDW, GroupedGemmDX, GroupedGemmForward

__all__ = ["GroupedGemmDW", "GroupedGemmDX", "GroupedGemmForward"]
