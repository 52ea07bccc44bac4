"""Ground floor: the vocabulary that every floor speaks, and the store that keeps measurements.

Imports nothing of ours above it. The store (pandas, pyarrow) is only imported when a dataset is read.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
