"""Mode `refine`: find the fastest config by timing the calls of a running program; see `refinement.py`."""
