"""Facts about launches of any Triton kernel, from its source: neither a GPU nor a compilation is needed."""
