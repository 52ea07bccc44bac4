"""Tune autotuned kernels and functions: shortlist, measure, remember, and agree across ranks."""
