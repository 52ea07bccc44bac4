"""Refine choices with the calls of a running program; see `refinement.py`."""
