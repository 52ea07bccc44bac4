"""Keep times and choices across processes: store them, carry them to other machines, and freeze them as code."""
