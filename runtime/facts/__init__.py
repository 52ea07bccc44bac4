"""Count the work of a Triton kernel's launch (bytes, operations, loops), and predict fast configs from it.

The kernel's source is enough: neither a GPU nor a compilation is needed.
"""
