"""The tunable kernels, each a `Family`; the registry that finds them; the public functions that take one by name."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
