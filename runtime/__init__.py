"""Shortlists at run time: prune callbacks, choosing and launching for an op, timing, and partitions of a GPU.

Importing this imports neither torch nor triton, and each module of runtime/ only when one of its names is used, because
first calls wait for imports.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
