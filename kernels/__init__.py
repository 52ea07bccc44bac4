"""The tunable kernels, each a Family, and their registry."""
