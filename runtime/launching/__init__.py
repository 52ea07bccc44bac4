"""Launch Triton kernels with little host time, compile them ahead, check their results, and hash their sources.

`stub_driver` stands in for a GPU: with it, kernels compile but are not launched.
"""
