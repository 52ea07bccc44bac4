"""Tune kernels under an autotuner and Python functions: shortlist, measure, and remember the fastest config.

The ranks of a job agree on one config.
"""
